"""Facts about the node that will hurt somebody: one function each, over what was seen of GPUs and host.

None of them is about the layout gpunode was asked for (that is drift); they are about neighbours and
surroundings: schedulers that will not see what is there, drivers too old, files that lag behind.
Everything here is pure. A fact that could not be told (None) is never a finding.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from agent import measures, records
from agent.host import facts as hosts
from agent.mig import advertise
from agent.mig import layout as layouts
from agent.mig import node as nodes

CRITICAL, WARNING, HINT = "critical", "warning", "hint"

CODES = {
    "ecs-mig-on": "MIG is on under the ECS agent, which cannot give instances out",
    "ecs-gpu-info-missing": "the file that tells the ECS agent its GPUs is missing or unreadable",
    "ecs-gpu-info-differs": "the file that tells the ECS agent its GPUs names others than there are",
    "container-gpu-unknown": "a container was given a GPU UUID that does not exist here",
    "container-gpu-shared": "two containers were given the same GPU, without MPS",
    "container-sees-all": "a container sees every GPU of an ECS instance although ECS pins GPUs by UUID",
    "driver-too-old": "the driver is older than this instance type needs",
    "driver-excluded": "the driver's branch does not work on this instance type",
    "gpu-count": "not as many GPUs answer as this instance type has",
    "gpu-memory": "a GPU's memory is not what this instance type has",
    "mig-capability": "the driver and the table of instance types disagree whether MIG is possible",
    "vgpu-licence": "the licence daemon of a fractional GPU does not run",
    "overcommit": "vm.overcommit_memory is not 1 on g6f.large under ECS",
    "time-slicing-with-mig": "time-slicing is asked for together with MIG",
    "two-device-plugins": "more than one device plugin runs",
    "plugin-with-dra": "device plugin and DRA driver run on one node",
    "bottlerocket-mixed": "Bottlerocket's device plugin knows only the single strategy, and it refuses this layout",
    "strategy-refused": "the device plugin refuses the strategy it is set to",
    "mig-hidden-by-none": "the device plugin advertises GPUs with MIG on as whole ones",
    "whole-despite-layout": "a GPU that should be split is advertised whole",
    "plugin-behind": "the device plugin has registered before the newest instance was made",
    "dra-behind": "the DRA driver has registered before the newest instance was made",
    "kubelet-differs": "what the kubelet has to give is not what the node has",
    "capability-file-missing": "a device file that containers need for a GPU or compute instance is not there",
    "cdi-behind": "a CDI specification is older than the layout or does not name its devices",
    "no-peer-to-peer": "with MIG on there is no peer-to-peer and no NCCL between GPUs",
    "persistence-off": "the driver tears a GPU down whenever its last client leaves",
    "fabric-incomplete": "a whole GPU on an NVSwitch host has no completed fabric",
}
"""Every code there is, with what it means."""

_TOLERANCE = 0.10
_PERIOD_OF_GRACE = 1.0
"""Seconds by which files may be older than an instance and still belong to it: clocks of file systems."""


@records.dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `severity` is critical (it hurts now), warning or hint; `advice` is what to do; `gpu` a UUID."""

    code: str
    severity: str
    message: str
    advice: str
    gpu: str | None = None


@records.dataclass(frozen=True, slots=True)
class Node:
    """Everything a finding is made from."""

    state: nodes.NodeState
    facts: hosts.HostFacts
    seen: advertise.Advertised
    layout: layouts.Layout = layouts.Layout()

    @property
    def split(self) -> list[nodes.Gpu]:
        """The GPUs with MIG on."""
        return [g for g in self.state.gpus if g.mode is not None and g.mode.current]

    @property
    def whole(self) -> list[nodes.Gpu]:
        """The GPUs that answer and have MIG off, or none."""
        return [g for g in self.state.gpus if g.state is nodes.GpuState.OK and not (g.mode and g.mode.current)]


def find(
    state: nodes.NodeState,
    facts: hosts.HostFacts,
    *,
    layout: layouts.Layout = layouts.Layout(),
    seen: advertise.Advertised | None = None,
) -> tuple[Finding, ...]:
    """Return everything found, worst first. `layout` is what is wanted; `seen` spares a second look at
    what schedulers will see."""
    node = Node(state, facts, advertise.advertise(state) if seen is None else seen, layout)
    found = [finding for look in _LOOKS for finding in look(node)]
    order = (CRITICAL, WARNING, HINT)
    return tuple(sorted(found, key=lambda f: order.index(f.severity)))


def measured(sample: measures.Sample | None) -> tuple[Finding, ...]:
    """Return what only a measurement tells: the fabric of whole GPUs on an NVSwitch host, persistence mode."""
    found = []
    for gpu in () if sample is None else sample.gpus:
        state = None if gpu.fabric_state is None else gpu.fabric_state.replace("_", "-")
        if gpu.up and gpu.mig_enabled is not True and state not in (None, "completed", "not-supported"):
            found.append(
                Finding(
                    "fabric-incomplete",
                    CRITICAL,
                    f"the fabric of GPU {gpu.index} is {state}: CUDA does not start on the whole GPU until it is completed",
                    "start nvidia-fabricmanager.service and look into its log",
                    gpu.uuid,
                )
            )
    off = [gpu.index for gpu in (() if sample is None else sample.gpus) if gpu.up and gpu.persistence is False]
    if off:
        found.append(
            Finding(
                "persistence-off",
                HINT,
                f"persistence mode is off for GPU {', '.join(str(index) for index in off)}: the first process on an idle"
                " GPU waits for seconds",
                "enable nvidia-persistenced.service",
            )
        )
    return tuple(found)


# --- ECS --------------------------------------------------------------------------------------------


def ecs_mig_on(node: Node) -> Iterator[Finding]:
    """ECS has no MIG: the agent hands out the parent, on which nothing can compute."""
    if node.facts.ecs is None and node.state.serving != "ecs":
        return
    for gpu in node.split:
        yield Finding(
            "ecs-mig-on",
            CRITICAL,
            f"GPU {gpu.index} has MIG on, and ECS ({node.facts.ecs or 'its agent is active'}) gives out whole GPUs only:"
            " a task gets a GPU that cannot compute",
            "turn MIG off before ecs.service starts (mig = false in the layout), or run the workload on Kubernetes",
            gpu.uuid,
        )


def ecs_gpu_info(node: Node) -> Iterator[Finding]:
    """The ECS agent knows its GPUs from a file alone, and registers none without it."""
    info = node.facts.ecs_gpu_info
    # The file is written just before the agent starts: before that it may well be missing.
    if info is None or (info.problem is not None and node.state.serving != "ecs"):
        return
    if info.problem is not None:
        if node.state.gpus:
            yield Finding(
                "ecs-gpu-info-missing",
                CRITICAL,
                f"{hosts.ECS_GPU_INFO}: {info.problem}, so the ECS agent registers no GPU",
                "restart ecs.service: its start writes the file once the driver answers",
            )
        return
    there = {gpu.uuid: gpu.index for gpu in node.state.gpus if gpu.state is nodes.GpuState.OK}
    counts = collections.Counter(info.gpu_ids)
    words = []
    missing = [str(index) for uuid, index in there.items() if uuid not in counts]
    silent = [str(gpu.index) for gpu in node.state.gpus if gpu.uuid in counts and gpu.uuid not in there]
    unknown = sorted(uuid for uuid in counts if node.state.gpu(uuid) is None)
    double = sorted(uuid for uuid, count in counts.items() if count > 1)
    if missing:
        words.append(f"GPU {', '.join(missing)} is not in it")
    if silent:
        words.append(f"GPU {', '.join(silent)} is in it and does not answer")
    if unknown:
        words.append(f"{', '.join(unknown)} is in it and not on this node")
    if double:
        words.append(f"{', '.join(double)} is in it twice")
    if info.driver_version and node.state.driver_version and info.driver_version != node.state.driver_version:
        words.append(f"it was written under driver {info.driver_version}, and {node.state.driver_version} runs")
    if words:
        yield Finding(
            "ecs-gpu-info-differs",
            CRITICAL if missing or silent or unknown or double else WARNING,
            f"{hosts.ECS_GPU_INFO} is not about this node as it is: {'; '.join(words)}",
            "restart ecs.service, which writes it anew",
        )


def containers(node: Node) -> Iterator[Finding]:
    """What ECS containers may see must exist, and belong to one of them."""
    there = {gpu.uuid for gpu in node.state.gpus}
    there |= {c.uuid for gpu in node.state.gpus for i in gpu.instances for c in i.compute if c.uuid is not None}
    given: dict[str, list[str]] = {}
    for container in node.facts.containers:
        if "all" in container.gpus:
            yield Finding(
                "container-sees-all",
                WARNING,
                f"container {container.name} sees all GPUs: its image or task sets NVIDIA_VISIBLE_DEVICES=all, and ECS"
                " counts none of them as taken",
                "ask for GPUs in resourceRequirements, and set NVIDIA_VISIBLE_DEVICES=void where none is wanted",
            )
            continue
        for uuid in container.gpus:
            given.setdefault(uuid, []).append(container.name)
            if uuid not in there:
                yield Finding(
                    "container-gpu-unknown",
                    CRITICAL,
                    f"container {container.name} was given {uuid}, which is not on this node",
                    "stop the task; restart ecs.service if its list of GPUs is old",
                )
    for uuid, names in given.items():
        if len(names) > 1 and not node.facts.mps:
            yield Finding(
                "container-gpu-shared",
                WARNING,
                f"{uuid} was given to {' and '.join(names)}, and MPS does not run: they share it without knowing",
                "give each container a GPU of its own, or share by MPS (sharingStrategy of the task definition)",
                uuid,
            )


def overcommit(node: Node) -> Iterator[Finding]:
    """g6f.large has too little memory for the driver's reservations under strict accounting."""
    kind, value = node.facts.instance_type, node.facts.overcommit
    if kind is not None and kind.name == "g6f.large" and node.facts.ecs is not None and value not in (None, 1):
        yield Finding(
            "overcommit",
            WARNING,
            f"vm.overcommit_memory is {value}, and GPU tasks of ECS need 1 on g6f.large",
            "sysctl -w vm.overcommit_memory=1, and keep it in /etc/sysctl.d",
        )


# --- the instance type and its driver ----------------------------------------------------------------


def driver(node: Node) -> Iterator[Finding]:
    """Some types need a newer driver than images carried, and some branches do not work on some types."""
    kind = node.facts.instance_type
    major = node.state.driver_version.partition(".")[0]
    if kind is None or not major.isdigit():
        return
    if kind.driver_min_major is not None and int(major) < kind.driver_min_major:
        yield Finding(
            "driver-too-old",
            CRITICAL,
            f"{kind.name} needs driver {kind.driver_min_major} or newer, and {node.state.driver_version} is loaded",
            f"use an image with driver {kind.driver_min_major} or newer",
        )
    if int(major) in kind.driver_excluded_majors:
        yield Finding(
            "driver-excluded",
            CRITICAL,
            f"driver branch {major} does not work on {kind.family}, and {node.state.driver_version} is loaded",
            "use an image with another driver branch",
        )


def inventory(node: Node) -> Iterator[Finding]:
    """Count, memory and MIG of the GPUs against the table of instance types."""
    kind = node.facts.instance_type
    if kind is None:
        return
    there = [gpu for gpu in node.state.gpus if gpu.state is not nodes.GpuState.LOST]
    if kind.gpus is not None and len(there) != kind.gpus:
        yield Finding(
            "gpu-count",
            CRITICAL if not there else WARNING,
            f"{kind.name} has {_gpus(kind.gpus)} and {len(there)} {'is' if len(there) == 1 else 'are'} here",
            "look for XID 79 in the kernel log; stop and start the instance to move it to another host",
        )
    for gpu in there:
        if gpu.state is not nodes.GpuState.OK:
            continue
        if kind.memory_mib is not None and gpu.memory_bytes:
            wanted = kind.memory_mib << 20
            # A slice's memory is sold in GB and counted in GiB: more than promised hurts nobody there.
            if gpu.memory_bytes < wanted * (1 - _TOLERANCE) or (
                kind.fraction == 1 and gpu.memory_bytes > wanted * (1 + _TOLERANCE)
            ):
                yield Finding(
                    "gpu-memory",
                    WARNING,
                    f"GPU {gpu.index} has {gpu.memory_bytes >> 20} MiB, and {kind.name} is known with {kind.memory_mib} MiB",
                    "check that the instance type is what it seems to be",
                    gpu.uuid,
                )
        if gpu.mig_capable is not kind.mig_capable:
            says = "can do MIG" if gpu.mig_capable else "cannot do MIG"
            yield Finding(
                "mig-capability",
                HINT,
                f"the driver says that GPU {gpu.index} ({gpu.name}) {says}, and {kind.family} is known the other way",
                "trust the driver, and tell gpunode's makers",
                gpu.uuid,
            )


def licence(node: Node) -> Iterator[Finding]:
    """A slice of a GPU runs under a vGPU guest driver, which slows down without a licence."""
    kind = node.facts.instance_type
    if kind is not None and kind.fraction < 1 and node.facts.gridd is False:
        yield Finding(
            "vgpu-licence",
            CRITICAL,
            f"nvidia-gridd does not run: the GPU slice of {kind.name} degrades after about a day without a licence",
            "start nvidia-gridd.service (its configuration is /etc/nvidia/gridd.conf)",
        )


# --- Kubernetes ---------------------------------------------------------------------------------------


def sharing(node: Node) -> Iterator[Finding]:
    """Replicas of a MIG device gain no isolation: the hardware does not slice an instance by time."""
    if node.facts.time_slicing is not None and node.split:
        yield Finding(
            "time-slicing-with-mig",
            WARNING,
            f"{node.facts.time_slicing} asks for time-slicing and MIG is on: replicas are advertised, and nothing in the"
            " hardware isolates them",
            "take time-slicing away; to share one MIG device use MPS",
        )


def plugins(node: Node) -> Iterator[Finding]:
    """One node, one device plugin, and none beside the DRA driver."""
    count = node.facts.plugins
    if count > 1:
        yield Finding(
            "two-device-plugins",
            WARNING,
            f"{count} device plugins run: the one that registers last takes the resources over",
            "keep a separately installed plugin off nodes with the label nvidia.com/mig.config",
        )
    if node.facts.dra and (count or node.facts.plugin_sockets):
        version = node.facts.bottlerocket
        how = "keep the device plugin off nodes of the DRA driver"
        if version is not None:
            how = "set settings.kubelet-device-plugins.nvidia.enabled = false"
            if _older(version, (1, 63, 0)):
                how = f"update Bottlerocket: {version or 'this release'} cannot turn its plugin off, 1.63.0 can"
        yield Finding(
            "plugin-with-dra",
            CRITICAL,
            "the device plugin and the DRA driver are both on this node: each gives out what the other has given out",
            how,
        )


def strategy(node: Node) -> Iterator[Finding]:
    """What the plugin makes of this layout under the strategy it is set to."""
    facts, plugin = node.facts, node.seen.device_plugin
    if facts.strategy is None or not node.split:
        return
    refused = plugin.refused.get(facts.strategy)
    if refused is not None:
        builtin = facts.bottlerocket is not None and facts.strategy_source == hosts.BOTTLEROCKET_PLUGIN
        yield Finding(
            "bottlerocket-mixed" if builtin else "strategy-refused",
            CRITICAL if node.state.serving == "kubelet" else WARNING,
            f"the device plugin is set to {facts.strategy} ({facts.strategy_source}) and refuses that here: {refused}",
            "make the layout uniform, or disable Bottlerocket's plugin (1.63 or newer) and run one with mixed"
            if builtin
            else "make the layout uniform, or set the plugin to mixed",
        )
    elif facts.strategy == "none":
        yield Finding(
            "mig-hidden-by-none",
            CRITICAL if node.state.serving == "kubelet" else WARNING,
            f"the device plugin is set to none ({facts.strategy_source}): it advertises GPU"
            f" {_indexes(node.split)} as whole, and CUDA cannot use a GPU so that has MIG on",
            "set the plugin to single or mixed",
        )


def whole_despite_layout(node: Node) -> Iterator[Finding]:
    """A GPU that a layout wants split and that is not, once the kubelet gives it away."""
    if node.state.serving != "kubelet":
        return
    for gpu in node.whole:
        wanted = node.layout.gpu(gpu.uuid)
        if wanted is not None and wanted.mig:
            yield Finding(
                "whole-despite-layout",
                WARNING,
                f"GPU {gpu.index} should be split and is whole: it is advertised as nvidia.com/gpu meanwhile",
                "see why it is not split (gpunode plan), or keep pods off with a startup taint",
                gpu.uuid,
            )


def behind(node: Node) -> Iterator[Finding]:
    """Plugin and driver look at the GPUs once, when they start."""
    since = node.facts.instances_since
    if since is None:
        return
    at = node.facts.plugin_since
    if at is not None and at < since - _PERIOD_OF_GRACE:
        yield Finding(
            "plugin-behind",
            WARNING,
            f"the device plugin registered {since - at:.0f} s before the newest instance was made, and does not look again",
            "restart the device plugin (an after-change command of gpunode can do it)",
        )
    at = node.facts.dra_since
    if at is not None and at < since - _PERIOD_OF_GRACE:
        yield Finding(
            "dra-behind",
            WARNING,
            f"the DRA driver registered {since - at:.0f} s before the newest instance was made, and does not look again",
            "restart its kubelet plugin pod on this node",
        )


def kubelet(node: Node) -> Iterator[Finding]:
    """What pods can really get, against what the node has."""
    real = node.facts.allocatable
    if real is None or node.facts.time_slicing is not None:
        return  # no kubelet to ask, or replicas of everything
    if not (node.facts.plugin_sockets or node.facts.plugins or any(real.values())):
        return  # no device plugin has told it anything yet
    wanted = expected(node.seen, node.facts.strategy)
    if any(_same(real, counts) for counts in wanted.values()):
        return
    if wanted:
        nearest = min(wanted, key=lambda name: _distance(real, wanted[name]))
        told = f"under {nearest} the device plugin should advertise {_words(wanted[nearest])}"
    else:
        told = "the device plugin refuses every strategy that it could have here"
    yield Finding(
        "kubelet-differs",
        WARNING,
        f"the kubelet has {_words(real)} to give, and {told}",
        "restart the device plugin; the kubelet keeps resources that are gone with a count of 0",
    )


def expected(seen: advertise.Advertised, strategy: str | None) -> dict[str, dict[str, int]]:
    """Return the resources by strategy that the kubelet may have: of one strategy where it is known."""
    plugin = seen.device_plugin
    every = {"none": plugin.none, "single": plugin.single, "mixed": plugin.mixed}
    return {
        name: dict(counts)
        for name, counts in every.items()
        if counts is not None and (strategy is None or name == strategy)
    }


def cdi(node: Node) -> Iterator[Finding]:
    """Runtimes that go by CDI know the devices of the day the specification was written."""
    since = node.facts.instances_since
    wanted = [
        (f"{gpu.index}:{number}", uuid)
        for gpu in node.split
        for number, uuid in enumerate(
            c.uuid for i in sorted(gpu.instances, key=lambda i: i.id) for c in sorted(i.compute, key=lambda c: c.id)
        )
    ]
    for spec in node.facts.cdi:
        lacking = [name for name, uuid in wanted if name not in spec.devices and uuid not in spec.devices]
        old = since is not None and spec.written < since - _PERIOD_OF_GRACE
        if not lacking and not old:
            continue
        why = (
            f"it does not name {len(lacking)} of the {len(wanted)} MIG devices"
            if lacking
            else f"it was written {since - spec.written:.0f} s before the newest instance was made"  # type: ignore[operator]
        )
        yield Finding(
            "cdi-behind",
            WARNING,
            f"{spec.path} is not about this layout: {why}, so containers get other devices, or none",
            "restart nvidia-cdi-refresh.service, or nvidia-ctk cdi generate (an after-change command can)",
        )


def capability_files(node: Node) -> Iterator[Finding]:
    """The driver makes an instance; its device file is made by a program of the driver's, which may not have run."""
    for gpu in node.state.gpus:
        missing = [path for uuid, path in node.facts.files_missing if uuid == gpu.uuid]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield Finding(
                "capability-file-missing",
                WARNING,
                f"GPU {gpu.index} has instances whose device files are not there: {missing[0]}{more}; "
                "a container that is given one of them does not start, or does not see it",
                "run nvidia-smi -L once on the host (an after-change command can): it makes them",
                gpu.uuid,
            )


def peer_to_peer(node: Node) -> Iterator[Finding]:
    """What somebody who trains on several GPUs finds out late."""
    if node.split and len(node.state.gpus) > 1:
        rest = f"; GPU {_indexes(node.whole)} can still do both" if len(node.whole) > 1 else ""
        yield Finding(
            "no-peer-to-peer",
            HINT,
            f"MIG is on for GPU {_indexes(node.split)}: no peer-to-peer and no NCCL between instances{rest}",
            "run training over several GPUs on GPUs with MIG off",
        )


_LOOKS = (
    ecs_mig_on,
    ecs_gpu_info,
    containers,
    overcommit,
    driver,
    inventory,
    licence,
    sharing,
    plugins,
    strategy,
    whole_despite_layout,
    behind,
    kubelet,
    cdi,
    capability_files,
    peer_to_peer,
)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _indexes(gpus: Sequence[nodes.Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _older(version: str, than: tuple[int, ...]) -> bool:
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return numbers < than


def _same(real: Mapping[str, int], wanted: dict[str, int]) -> bool:
    return {k: v for k, v in real.items() if v} == {k: v for k, v in wanted.items() if v}


def _distance(real: Mapping[str, int], wanted: dict[str, int]) -> int:
    return sum(abs(real.get(name, 0) - wanted.get(name, 0)) for name in {*real, *wanted})


def _words(counts: Mapping[str, int]) -> str:
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    return told or "no nvidia.com resource"
