"""Who keeps a GPU or an instance: processes, open capability files, pods, ECS tasks.

NVML gives process ids; /proc tells their command, container and pod. A capability file that is held
open keeps an instance although NVML lists nobody. What the scheduler gave away counts before any
process runs. Open files of a whole GPU do not make it used, but make a reset fail: they are told
apart, as `Gpu.openers`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from agent import errors, log, records
from agent.host import ecs, files, pods, processes
from agent.host import machine as machines
from agent.mig import node as nodes

_RESET = "stop it before a GPU reset"

KNOWN: dict[str, tuple[str, str]] = {
    "nvidia-persiste": ("nvidia-persistenced", "add nvidia-persistenced.service to release-before-reset"),
    "nv-hostengine": ("nv-hostengine (DCGM)", "add nvidia-dcgm.service to release-before-reset, or stop the DCGM pod"),
    "dcgm-exporter": ("dcgm-exporter", "stop the dcgm-exporter pod or dcgm-exporter.service before a GPU reset"),
    "nv-fabricmanage": ("nvidia-fabricmanager", "add nvidia-fabricmanager.service to release-before-reset"),
    "nvidia-device-p": ("nvidia-device-plugin", "hold the device plugin back until the node is partitioned"),
    "gpu-kubelet-plu": ("gpu-kubelet-plugin (DRA)", "hold the DRA driver back until the node is partitioned"),
    "gpu-feature-dis": ("gpu-feature-discovery", _RESET),
    "nvidia-cuda-mps": ("nvidia-cuda-mps", "stop nvidia-mps.service; MPS and MIG changes do not go together"),
    "Xorg": ("Xorg", "a display server holds the GPU; " + _RESET),
    "gpunode": ("gpunode", "another gpunode looks at the GPUs; stop gpunode.service for the time of the change"),
}
"""Command names (15 characters, as the kernel keeps them) of system programs: what to call each, and what to do."""


class _Names:
    """Finds a pod's name by its UID, from the folders of /var/log/pods (`namespace_name_uid`)."""

    def __init__(self, machine: machines.Machine) -> None:
        self._pods: dict[str, tuple[str, str]] = {}
        try:
            for folder in machine.path("/var/log/pods").iterdir():
                parts = folder.name.split("_")
                if len(parts) == 3:
                    self._pods[parts[2]] = (parts[0], parts[1])
        except OSError:
            pass  # no kubelet here

    def pod(self, uid: str) -> tuple[str | None, str]:
        """Return (namespace, name); (None, uid) when the name is not known."""
        return self._pods.get(uid, (None, uid))


class _Describer:
    def __init__(self, machine: machines.Machine) -> None:
        self._machine = machine
        self._names: _Names | None = None

    def __call__(self, pid: int, kind: str) -> nodes.Holder | None:
        """Return the holder that process `pid` is, None when it has ended."""
        comm = processes.command(self._machine, pid)
        if comm is None:
            return None
        where = processes.whereabouts(self._machine, pid)
        name, hint = KNOWN.get(comm, (comm, None))
        namespace = pod = None
        if where.pod_uid is not None:
            if self._names is None:
                self._names = _Names(self._machine)
            namespace, pod = self._names.pod(where.pod_uid)
        return nodes.Holder(
            kind="service" if comm in KNOWN else kind,
            name=name,
            pid=pid,
            container=where.container[:12] if where.container else None,
            pod=pod,
            namespace=namespace,
            hint=hint,
        )


def capability_files(machine: machines.Machine) -> dict[int, tuple[int, int, int | None]]:
    """Return minor of a capability file → (GPU minor, GPU instance id, compute instance id or None).

    From /proc/driver/nvidia-caps/mig-minors, whose lines read `gpu0/gi1/access 12` and
    `gpu0/gi1/ci0/access 13`; the files for configuring and monitoring belong to no instance.
    """
    found: dict[int, tuple[int, int, int | None]] = {}
    text = files.read_text(machine.path("/proc/driver/nvidia-caps/mig-minors")) or ""
    for gpu, gi, ci, minor in re.findall(r"^gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)$", text, re.MULTILINE):
        found[int(minor)] = (int(gpu), int(gi), int(ci) if ci else None)
    return found


class _Found:
    """Collects holders per GPU, GPU instance and compute instance, each named once."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, int | None, int | None], list[nodes.Holder]] = {}

    def add(self, uuid: str, gi: int | None, ci: int | None, holder: nodes.Holder) -> None:
        known = self._at.setdefault((uuid, gi, ci), [])
        if holder not in known:
            known.append(holder)

    def at(self, uuid: str, gi: int | None = None, ci: int | None = None) -> tuple[nodes.Holder, ...]:
        return tuple(self._at.get((uuid, gi, ci), ()))

    def all(self) -> dict[tuple[str, int | None, int | None], tuple[nodes.Holder, ...]]:
        return {place: tuple(holders) for place, holders in self._at.items()}


def merge(
    node: nodes.NodeState,
    machine: machines.Machine,
    *,
    own_pid: int,
    introspection: str | None = ecs.INTROSPECTION,
    deadline: float = 5.0,
) -> nodes.NodeState:
    """Return `node` with its holders complete, `serving` and `allocations_known` told. Blocks (run it
    in a thread), for at most `deadline` seconds a source.

    The process `own_pid` holds nothing in this sense. On a simulated machine the ECS agent is not
    asked, only that machine's files are read.
    """
    describe = _Describer(machine)
    found = _Found()
    openers: dict[str, list[nodes.Holder]] = {}
    _open_files(node, machine, own_pid, describe, found, openers)
    serving, known = _allocations(node, machine, found, introspection, deadline)
    return dataclasses.replace(
        node,
        gpus=tuple(_complete(gpu, describe, found, tuple(openers.get(gpu.uuid, ())), own_pid) for gpu in node.gpus),
        serving=serving,
        allocations_known=known,
    )


def _open_files(
    node: nodes.NodeState,
    machine: machines.Machine,
    own_pid: int,
    describe: Callable[[int, str], nodes.Holder | None],
    found: _Found,
    openers: dict[str, list[nodes.Holder]],
) -> None:
    by_minor = {gpu.minor: gpu for gpu in node.gpus if gpu.minor is not None}
    capabilities: dict[int, tuple[int, int, int | None]] | None = None
    for opened in processes.open_gpu_files(machine):
        if opened.pid == own_pid:
            continue
        holder = describe(opened.pid, "open-file")
        if holder is None:
            continue
        within: set[int] = set()
        if opened.capabilities and capabilities is None:
            capabilities = capability_files(machine)  # thousands of lines, and mostly nobody has any of them open
        known = capabilities or {}
        targets = [known[minor] for minor in sorted(opened.capabilities) if minor in known]
        for gpu_minor, gi, ci in targets:
            gpu = by_minor.get(gpu_minor)
            if gpu is None:
                continue
            within.add(gpu_minor)
            # Whoever has a compute instance open has its GPU instance open too: told once, at the compute instance.
            if ci is not None or not any(g == gpu_minor and i == gi and c is not None for g, i, c in targets):
                found.add(gpu.uuid, gi, ci, holder)
        for minor in sorted(opened.gpus - within):
            if minor in by_minor:
                openers.setdefault(by_minor[minor].uuid, []).append(holder)


def _complete(
    gpu: nodes.Gpu,
    describe: Callable[[int, str], nodes.Holder | None],
    found: _Found,
    openers: tuple[nodes.Holder, ...],
    own_pid: int,
) -> nodes.Gpu:
    def joined(observed: Sequence[nodes.Holder], more: Iterable[nodes.Holder]) -> tuple[nodes.Holder, ...]:
        out: list[nodes.Holder] = []
        pids = set()
        for holder in observed:
            if holder.pid is not None:
                if holder.pid == own_pid:
                    continue
                pids.add(holder.pid)
                out.append(describe(holder.pid, holder.kind) or holder)
            else:
                out.append(holder)
        out += [holder for holder in more if holder.pid is None or holder.pid not in pids]
        return tuple(out)

    instances = tuple(
        dataclasses.replace(
            gi,
            holders=joined(gi.holders, found.at(gpu.uuid, gi.id)),
            compute=tuple(
                dataclasses.replace(ci, holders=joined(ci.holders, found.at(gpu.uuid, gi.id, ci.id)))
                for ci in gi.compute
            ),
        )
        for gi in gpu.instances
    )
    holders = joined(gpu.holders, found.at(gpu.uuid))
    busy = {holder.pid for holder in holders}
    return dataclasses.replace(
        gpu,
        instances=instances,
        holders=holders,
        openers=tuple(holder for holder in openers if holder.pid not in busy),
    )


# --- what schedulers gave away -------------------------------------------------------------------

_UNITS = (("kubelet.service", "kubelet"), ("ecs.service", "ecs"))


def serving(machine: machines.Machine) -> str | None:
    """Return "kubelet" or "ecs" once that agent is active on this machine, else None."""
    for unit, name in _UNITS:
        if machine.unit_active(unit):
            return name
    return None


@records.dataclass(frozen=True, slots=True)
class Given:
    """What a scheduler has given away at one moment. `who` is "kubelet" or "ecs"; `answered` whether it
    could be asked. `holders` are pods or tasks by (GPU, GPU instance id, compute instance id), ids None for
    the whole GPU or the whole instance."""

    who: str
    answered: bool
    holders: Mapping[tuple[str, int | None, int | None], tuple[nodes.Holder, ...]] = dataclasses.field(
        default_factory=dict
    )

    def at(self, uuid: str, gi: int | None = None, ci: int | None = None) -> tuple[nodes.Holder, ...]:
        """Return who has been given this."""
        return self.holders.get((uuid, gi, ci), ())


def given(
    node: nodes.NodeState,
    machine: machines.Machine,
    *,
    introspection: str | None = ecs.INTROSPECTION,
    deadline: float = 5.0,
) -> Given | None:
    """Return what the scheduler that was active when `node` was read has given away now; None where none
    was. Blocks (run it in a thread) for at most `deadline` seconds. Cheap: no process is looked at."""
    if node.serving is None:
        return None
    found = _Found()
    try:
        _ask(node, machine, node.serving, found, introspection, deadline)
    except (errors.GpunodeError, OSError) as error:
        log.debug("allocations cannot be read", cause=str(error))
        return Given(node.serving, answered=False)
    return Given(node.serving, answered=True, holders=found.all())


def _allocations(
    node: nodes.NodeState, machine: machines.Machine, found: _Found, introspection: str | None, deadline: float
) -> tuple[str | None, bool]:
    who = serving(machine)
    try:
        return who, _ask(node, machine, who, found, introspection, deadline)
    except (pods.Unreadable, ecs.Unreadable) as error:
        log.warning("allocations unknown, every instance counts as in use", cause=str(error))
        return who, False


def _ask(
    node: nodes.NodeState,
    machine: machines.Machine,
    who: str | None,
    found: _Found,
    introspection: str | None,
    deadline: float,
) -> bool:
    """Note what `who` has given away; False when some device's name is of no known form. Raises Unreadable."""
    known = True
    if who == "kubelet":
        for pod in pods.read(machine.path(pods.SOCKET), deadline=deadline):
            known = _place_pod(node, pod, found) and known
    elif who == "ecs":
        address = None if machine.simulated is not None else introspection
        for container in ecs.containers(machine, introspection=address, deadline=deadline):
            known = _place_task(node, container, found) and known
    return known


def _place_pod(node: nodes.NodeState, pod: pods.Pod, found: _Found) -> bool:
    """Note what a pod was given. False when it has an NVIDIA device whose name is of no known form.

    Who renames resources keeps the devices' names: a GPU's or MIG device's UUID is one under any resource.
    """
    known = True
    for container in pod.containers:
        holder = nodes.Holder(
            kind="pod",
            name=f"{pod.namespace}/{pod.name}",
            container=container.name or None,
            pod=pod.name,
            namespace=pod.namespace or None,
        )
        for devices in container.devices:
            nvidia = devices.resource.startswith("nvidia.com/")
            for identity in devices.ids:
                device = None if nvidia else parse_device(identity)
                if nvidia or (device is not None and (device.gpu or device.mig)):
                    known = _place(node, identity, holder, found) and known
        for claimed in container.claimed:
            if claimed.driver == "gpu.nvidia.com":
                known = _place(node, claimed.device, holder, found) and known
    return known


def _place_task(node: nodes.NodeState, container: ecs.Container, found: _Found) -> bool:
    holder = nodes.Holder(
        kind="task",
        name=container.family or container.task,
        container=container.name or container.id[:12],
        task=container.task,
    )
    known = True
    for identity in container.gpus:
        if identity == "all":
            for gpu in node.gpus:
                found.add(gpu.uuid, None, None, holder)
        else:
            known = _place(node, identity, holder, found) and known
    return known


@records.dataclass(frozen=True, slots=True)
class Device:
    """What a scheduler's device name means. Exactly one of `gpu` (a UUID) and `minor`, or `mig` (a MIG
    UUID) is set; `gi`/`ci` are instance ids, `profile_id`/`start` tell an instance by what it is."""

    gpu: str | None = None
    minor: int | None = None
    mig: str | None = None
    gi: int | None = None
    ci: int | None = None
    profile_id: int | None = None
    start: int | None = None


_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<mig>MIG-{_UUID})",  # device plugin
        rf"(?P<gpu>GPU-{_UUID})",
        rf"MIG-(?P<gpu>GPU-{_UUID})/(?P<gi>\d+)/(?P<ci>\d+)",  # drivers before 470
        r"nvidia(?P<minor>\d+)/gi(?P<gi>\d+)",  # GKE's plugin
        r"nvidia(?P<minor>\d+)",
        r"gpu-(?P<minor>\d+)-mig-.+-(?P<profile_id>\d+)-(?P<start>\d+)",  # DRA driver
        r"gpu-(?P<minor>\d+)",
    )
)


def parse_device(identity: str) -> Device | None:
    """Read a device name of the device plugin, GKE's plugin or the DRA driver; None for any other.

    A time-slicing or MPS replica (`::3`, GKE's `/vgpu3`) means the device it shares.
    """
    bare = re.sub(r"(::\d+|/vgpu\d+)$", "", identity)
    for form in _FORMS:
        if match := form.fullmatch(bare):
            words = match.groupdict()
            numbers = {
                key: int(value) for key, value in words.items() if key not in ("gpu", "mig") and value is not None
            }
            return Device(gpu=words.get("gpu"), mig=words.get("mig"), **numbers)
    return None


def _place(node: nodes.NodeState, identity: str, holder: nodes.Holder, found: _Found) -> bool:
    """Note `holder` at what `identity` names. A device that is not there any more holds nothing."""
    device = parse_device(identity)
    if device is None:
        log.warning("device name of unknown form, every instance counts as in use", device=identity, pod=holder.pod)
        return False
    for gpu in node.gpus:
        if device.mig is not None:
            for gi in gpu.instances:
                for ci in gi.compute:
                    if ci.uuid is not None and ci.uuid.lower() == device.mig.lower():
                        found.add(gpu.uuid, gi.id, ci.id, holder)
        elif device.gpu == gpu.uuid or (device.minor is not None and device.minor == gpu.minor):
            if device.gi is not None:
                found.add(gpu.uuid, device.gi, device.ci, holder)
            elif device.start is not None:
                for gi in gpu.instances:
                    if gi.placement.start == device.start and gi.profile_id == device.profile_id:
                        found.add(gpu.uuid, gi.id, None, holder)
            else:
                found.add(gpu.uuid, None, None, holder)
    return True


# --- why a reset is refused ----------------------------------------------------------------------


def obstacles(machine: machines.Machine, pci_bus_ids: Sequence[str], *, own_pid: int) -> tuple[nodes.Holder, ...]:
    """Return who has the GPUs at these addresses open, and nvidia_drm where the kernel itself does: what
    makes a reset fail. All openers are told when an address cannot be matched to a device file."""
    minors = _minors(machine, pci_bus_ids)
    describe = _Describer(machine)
    found = []
    for opened in processes.open_gpu_files(machine):
        if opened.pid == own_pid or (minors is not None and opened.gpus and not opened.gpus & minors):
            continue
        holder = describe(opened.pid, "open-file")
        if holder is not None:
            found.append(holder)
    if (files.read_text(machine.path("/sys/module/nvidia_drm/parameters/modeset")) or "N") == "Y":
        found.append(
            nodes.Holder(
                kind="service",
                name="nvidia_drm (kernel module)",
                hint="unload it, or load it with modeset=0: with mode setting on it keeps every GPU open",
            )
        )
    return tuple(found)


def _minors(machine: machines.Machine, pci_bus_ids: Sequence[str]) -> set[int] | None:
    wanted = {_short(address) for address in pci_bus_ids}
    found = set()
    for information in machine.path("/proc/driver/nvidia/gpus").glob("*/information"):
        if _short(information.parent.name) in wanted:
            match = re.search(r"^Device Minor:\s*(\d+)", files.read_text(information) or "", re.MULTILINE)
            if match:
                found.add(int(match[1]))
    return found if len(found) == len(wanted) else None


def _short(address: str) -> str:
    """NVML writes a domain of eight digits, the kernel one of four."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]+", domain) else address.lower()
