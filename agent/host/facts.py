"""What this host says about its GPUs besides the driver: files, sockets and processes of their neighbours.

Only looked at, never changed. The answers are plain facts; what is wrong with them is decided by
`agent.findings`, which does no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent import log, records
from agent.host import ec2, ecs, files, owner, pods, processes
from agent.host import holders as gpu_holders
from agent.host import machine as machines
from agent.mig import node as nodes

ECS_GPU_INFO = "/var/lib/ecs/gpu/nvidia-gpu-info.json"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi", "/run/cdi")
PLUGIN_FOLDER = "/var/lib/kubelet/device-plugins"
DRA_SOCKET = "/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock"
GFD_LABELS = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
BOTTLEROCKET_PLUGIN = "/etc/nvidia-k8s-device-plugin/settings.yaml"
OVERCOMMIT = "/proc/sys/vm/overcommit_memory"

_PLUGIN_PROCESS = "nvidia-device-p"  # nvidia-device-plugin, as far as the kernel keeps a name
_KUBELET = "kubelet"
_DRA_PROCESS = "gpu-kubelet-plu"
_MPS_PROCESS = "nvidia-cuda-mps"
_DEVICE = re.compile(r"""(?<![A-Za-z])["']?name["']?\s*:\s*["']?([^"',\s}]+)""")
_KIND = re.compile(r"""["']?kind["']?\s*:\s*["']?nvidia\.com/gpu["'\s,}]""")


@records.dataclass(frozen=True, slots=True)
class CdiSpec:
    """A CDI specification of kind nvidia.com/gpu: its path on the host, when it was written (Unix
    seconds) and the devices it names."""

    path: str
    written: float
    devices: frozenset[str]


@records.dataclass(frozen=True, slots=True)
class EcsGpuInfo:
    """What the ECS agent was told of the GPUs: UUIDs in the order given. `problem` where it cannot be
    read: then the agent registers no GPU."""

    gpu_ids: tuple[str, ...] = ()
    driver_version: str = ""
    problem: str | None = None


@records.dataclass(frozen=True, slots=True)
class Seen:
    """What a container may see: `gpus` are UUIDs or ("all",). `name` is for people."""

    name: str
    gpus: tuple[str, ...]


@records.dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One look at the host. None is "cannot be told"; the defaults are a host with nothing on it.

    `instances_since` is when the newest instance of this node got its capability file, `plugin_since`
    and `dra_since` when the device plugin and the DRA driver registered with the kubelet (Unix seconds).
    `files_missing` are (GPU's UUID, path) of capability files that this host lacks for instances there are.
    `plugins` counts device plugin processes. `allocatable` is what the kubelet has of nvidia.com/*, by
    resource; `allocatable_problem` why it did not tell. `strategy` is the device plugin's MIG strategy
    where this host tells it, `strategy_source` the file that does. `ecs` says why this is an ECS node.
    """

    instance_type: ec2.InstanceType | None = None
    bottlerocket: str | None = None
    ecs: str | None = None
    ecs_gpu_info: EcsGpuInfo | None = None
    containers: tuple[Seen, ...] = ()
    mps: bool = False
    gridd: bool | None = None
    overcommit: int | None = None
    cdi: tuple[CdiSpec, ...] = ()
    instances_since: float | None = None
    files_missing: tuple[tuple[str, str], ...] = ()
    plugins: int = 0
    plugin_sockets: tuple[str, ...] = ()
    plugin_since: float | None = None
    dra: bool = False
    dra_since: float | None = None
    strategy: str | None = None
    strategy_source: str | None = None
    time_slicing: str | None = None
    allocatable: Mapping[str, int] | None = None
    allocatable_problem: str | None = None


def gather(machine: machines.Machine, node: nodes.NodeState, *, deadline: float = 2.0) -> HostFacts:
    """Look at the host around `node`. Blocks for files, a walk over /proc and, where the kubelet has its
    socket, one question to it of at most `deadline` seconds: call it in a thread. Raises nothing: what
    cannot be looked at is logged, and nothing is known."""
    try:
        return _gather(machine, node, deadline)
    except OSError as cause:
        log.warning("the surroundings of the GPUs cannot be looked at", cause=str(cause))
        return HostFacts(instance_type=ec2.instance_type(node.instance_type))


def _gather(machine: machines.Machine, node: nodes.NodeState, deadline: float) -> HostFacts:
    running = _running(machine)
    # A socket outlives a process that was killed; where processes of the host can be seen they decide.
    sees = _KUBELET in running
    plugin_gone = sees and _PLUGIN_PROCESS not in running
    dra_gone = sees and _DRA_PROCESS not in running
    kind = ec2.instance_type(node.instance_type or machine.instance_type())
    release = owner.os_release(machine)
    on_ecs = owner.ecs_node(machine, release)
    strategy, source, slicing = plugin_settings(machine)
    sockets = [] if plugin_gone else _plugin_sockets(machine)
    allocatable, problem = _allocatable(machine, deadline)
    dra_since = None if dra_gone else _modified(machine.path(DRA_SOCKET))
    made = _instance_files(machine, node)
    return HostFacts(
        instance_type=kind,
        bottlerocket=release.get("VERSION_ID", "") if release.get("ID") == "bottlerocket" else None,
        ecs=on_ecs,
        ecs_gpu_info=_ecs_gpu_info(machine) if on_ecs is not None else None,
        containers=_containers(machine) if on_ecs is not None else (),
        mps=_MPS_PROCESS in running,
        gridd=_active(machine, running, "nvidia-gridd", "nvidia-gridd.service")
        if kind is not None and kind.fraction < 1
        else None,
        overcommit=_number(files.read_text(machine.path(OVERCOMMIT))),
        cdi=_cdi(machine),
        instances_since=max((t for t in made.values() if t is not None), default=None),
        files_missing=_files_missing(machine, made),
        plugins=running.get(_PLUGIN_PROCESS, 0),
        plugin_sockets=tuple(path.name for path in sockets),
        plugin_since=max((t for path in sockets if (t := _modified(path)) is not None), default=None),
        dra=_DRA_PROCESS in running or dra_since is not None,
        dra_since=dra_since,
        strategy=strategy,
        strategy_source=source,
        time_slicing=slicing,
        allocatable=allocatable,
        allocatable_problem=problem,
    )


def plugin_settings(machine: machines.Machine) -> tuple[str | None, str | None, str | None]:
    """Return the device plugin's MIG strategy, the file that tells it, and the file that asks for
    time-slicing: from Bottlerocket's settings of its plugin, else from GPU feature discovery's labels."""
    strategy = source = slicing = None
    text = files.read_text(machine.path(BOTTLEROCKET_PLUGIN))
    if text:
        found = re.search(r"""^\s*["']?migStrategy["']?\s*:\s*["']?(none|single|mixed)\b""", text, re.MULTILINE)
        if found:
            strategy, source = found[1], BOTTLEROCKET_PLUGIN
        if re.search(r"""^\s*["']?timeSlicing["']?\s*:""", text, re.MULTILINE):
            slicing = BOTTLEROCKET_PLUGIN
    labels = dict(
        line.strip().split("=", 1)
        for line in (files.read_text(machine.path(GFD_LABELS)) or "").splitlines()
        if "=" in line
    )
    told = labels.get("nvidia.com/mig.strategy")
    if strategy is None and told in ("none", "single", "mixed"):
        strategy, source = told, GFD_LABELS
    if slicing is None and any(
        key.endswith(".sharing-strategy") and value == "time-slicing" for key, value in labels.items()
    ):
        slicing = GFD_LABELS
    return strategy, source, slicing


def _running(machine: machines.Machine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pid in processes.pids(machine):
        name = processes.command(machine, pid)
        if name is not None:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _active(machine: machines.Machine, running: Mapping[str, int], process: str, unit: str) -> bool:
    return process in running or machine.unit_active(unit)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _plugin_sockets(machine: machines.Machine) -> list[Path]:
    return [p for p in _listed(machine.path(PLUGIN_FOLDER)) if re.fullmatch(r"nvidia[-.].*\.sock", p.name)]


def _ecs_gpu_info(machine: machines.Machine) -> EcsGpuInfo:
    try:
        document = json.loads(files.read_bounded(machine.path(ECS_GPU_INFO)))
        return EcsGpuInfo(tuple(str(uuid) for uuid in document["GPUIDs"]), str(document.get("DriverVersion", "")))
    except FileNotFoundError:
        return EcsGpuInfo(problem="it is not there")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        return EcsGpuInfo(problem=f"it cannot be read: {' '.join(str(cause).split()) or type(cause).__name__}")


def _containers(machine: machines.Machine) -> tuple[Seen, ...]:
    found = ecs.containers(machine, introspection=None)
    return tuple(Seen(f"{c.name or c.id[:12]} of task {c.family or c.task[:12]}", c.gpus) for c in found if c.gpus)


def _cdi(machine: machines.Machine) -> tuple[CdiSpec, ...]:
    found: dict[Path, CdiSpec] = {}
    for folder in CDI_FOLDERS:
        for path in _listed(machine.path(folder)):
            text = files.read_text(path) if path.suffix in (".yaml", ".yml", ".json") else None
            written = _modified(path)
            if text is None or written is None or not _KIND.search(text + "\n"):
                continue
            # /var/run is a link to /run on every host of today: the same file is told once.
            found.setdefault(
                path.resolve(), CdiSpec(f"{folder}/{path.name}", written, frozenset(_DEVICE.findall(text)))
            )
    return tuple(found.values())


def _instance_files(machine: machines.Machine, node: nodes.NodeState) -> dict[tuple[str, str], float | None]:
    """Return (GPU's UUID, path) of each capability file that the instances there are need → when it was made,
    None where it is not there. It comes with the instance, or a little later."""
    wanted: dict[tuple[int | None, int, int | None], str] = {}
    for gpu in node.gpus:
        for instance in gpu.instances:
            for compute in (None, *(c.id for c in instance.compute)):
                wanted[gpu.minor, instance.id, compute] = gpu.uuid
    if not wanted:
        return {}
    found = {}
    for minor, place in sorted(gpu_holders.capability_files(machine).items()):
        if place in wanted:
            path = f"/dev/nvidia-caps/nvidia-cap{minor}"
            found[wanted[place], path] = _modified(machine.path(path))
    return found


def _files_missing(
    machine: machines.Machine, made: Mapping[tuple[str, str], float | None]
) -> tuple[tuple[str, str], ...]:
    """Return which of the files are not there, none where this view of the host does not show its devices."""
    if not machine.path("/dev/nvidiactl").exists():
        return ()
    return tuple(place for place, time in made.items() if time is None)


def _allocatable(machine: machines.Machine, deadline: float) -> tuple[Mapping[str, int] | None, str | None]:
    socket = machine.path(pods.SOCKET)
    if not socket.exists():
        return None, None
    try:
        told = pods.read_allocatable(socket, deadline=deadline)
    except pods.Unreadable as cause:
        return None, str(cause)
    return _counts(told), None


def _counts(told: Iterable[pods.Devices]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for devices in told:
        if devices.resource.startswith("nvidia.com/"):
            # The kubelet tells a device at a time, grouped as it likes.
            counts[devices.resource] = counts.get(devices.resource, 0) + len(devices.ids)
    return counts
