"""What schedulers will see of a node: the Kubernetes device plugin, the DRA driver, and ECS.

They read the node once when they start, each by rules of its own; here the same rules say before
what they will find, or why they will refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from agent import records
from agent.mig import node as nodes

GPU_RESOURCE = "nvidia.com/gpu"
NAME_LIMIT = 63
# Fractions that ECS documents, by instance type. Gr6f has slices too, but whether ECS takes them is not known.
_ECS_FRACTIONS = {"g6f.large": "0.125", "g6f.xlarge": "0.125", "g6f.2xlarge": "0.25", "g6f.4xlarge": "0.5"}
_FRACTIONAL_FAMILIES = ("g6f", "gr6f")


@records.dataclass(frozen=True, slots=True)
class DevicePlugin:
    """Resource name to count for each MIG strategy, None where the plugin refuses; `refused` says why."""

    none: Mapping[str, int]
    single: Mapping[str, int] | None
    mixed: Mapping[str, int] | None
    refused: Mapping[str, str]


@records.dataclass(frozen=True, slots=True)
class DraDevice:
    """A device of the DRA driver (static MIG). Attribute values are strings; capacities are counts,
    memory in bytes. `gpu_index` and `uuid` say which device of the node it is."""

    name: str
    attributes: Mapping[str, str]
    capacity: Mapping[str, int]
    gpu_index: int
    uuid: str | None = None


@records.dataclass(frozen=True, slots=True)
class Ecs:
    """What a task definition may ask for: `gpus` on the instance, `values` of a GPU requirement; or
    `refused` with the reason."""

    gpus: int
    values: tuple[str, ...] = ()
    refused: str | None = None


@records.dataclass(frozen=True, slots=True)
class Advertised:
    """All three. `notes` are sentences about what a scheduler will stumble over."""

    device_plugin: DevicePlugin
    dra: tuple[DraDevice, ...]
    ecs: Ecs
    notes: tuple[str, ...] = ()


@records.dataclass(frozen=True, slots=True)
class _Device:
    """A MIG device: a compute instance with its GPU instance and GPU."""

    gpu: nodes.Gpu
    instance: nodes.GpuInstance
    compute: nodes.ComputeInstance

    @property
    def engines(self) -> nodes.Engines:
        offer = self.gpu.offer(self.instance.profile)
        return nodes.Engines() if offer is None else offer.engines

    @property
    def name(self) -> str:
        """Its profile, see `device_name`."""
        return device_name(self.compute)

    @property
    def attributes(self) -> object:
        """What the device plugin compares to tell types apart: figures and not names, so `+gfx`
        alone makes no difference to it. Engine counts that are not known are told by the name."""
        engines = self.engines
        counts = (engines.copy, engines.decoder, engines.encoder, engines.jpeg, engines.ofa)
        named = None
        if None in counts:
            profile = self.instance.profile
            named = (tuple(a for a in profile.attributes if a != "gfx"), profile.without)
        slices = (self.instance.profile.gpu_slices, self.compute.slices)
        return (self.compute.multiprocessors, slices, self.instance.memory_bytes >> 20, counts, named)


def advertise(node: nodes.NodeState) -> Advertised:
    """Return what each scheduler will see of `node`. GPUs that do not answer are not counted."""
    gpus = [gpu for gpu in node.gpus if gpu.state is nodes.GpuState.OK]
    split = [gpu for gpu in gpus if gpu.mode is not None and gpu.mode.current]
    whole = [gpu for gpu in gpus if gpu not in split]
    devices = [
        _Device(gpu, instance, compute)
        for gpu in split
        for instance in sorted(gpu.instances, key=lambda i: i.placement)
        for compute in sorted(instance.compute, key=lambda c: c.id)
    ]
    dra = tuple(_dra(node, whole, devices))
    return Advertised(
        device_plugin=_device_plugin(gpus, split, whole, devices),
        dra=dra,
        ecs=_ecs(node, gpus, split),
        notes=tuple(_notes(split, devices, dra)),
    )


def device_name(compute: nodes.ComputeInstance) -> str:
    """Return a MIG device's profile as the field's tools print it: they leave out `Cc.` where C equals G."""
    profile = compute.profile
    return str(profile.gpu_instance if profile.compute_slices == profile.gpu_slices else profile)


def per_parent(node: nodes.NodeState) -> dict[str, dict[str, int]]:
    """Return for each GPU that answers (by UUID) how many MIG devices of each profile it carries: what a
    claim for several devices of one parent has to live with. Whole GPUs have {}."""
    found: dict[str, dict[str, int]] = {}
    for gpu in node.gpus:
        if gpu.state is nodes.GpuState.OK:
            counts = found.setdefault(gpu.uuid, {})
            for instance in gpu.instances:
                for compute in instance.compute:
                    name = device_name(compute)
                    counts[name] = counts.get(name, 0) + 1
    return found


def resource_name(profile: str) -> str:
    """Return the resource under which the plugin's mixed strategy advertises a profile.

    Raises ValueError when it is longer than Kubernetes takes.
    """
    name = f"mig-{profile.replace('+', '.')}"
    if len(name) > NAME_LIMIT:
        raise ValueError(f"the resource name {name} has {len(name)} characters, and Kubernetes takes {NAME_LIMIT}")
    return f"nvidia.com/{name}"


def _device_plugin(
    gpus: list[nodes.Gpu], split: list[nodes.Gpu], whole: list[nodes.Gpu], devices: list[_Device]
) -> DevicePlugin:
    refused: dict[str, str] = {}
    single: dict[str, int] | None = {GPU_RESOURCE: len(devices) if split else len(whole)}
    why = _no_single(split, whole, devices)
    if why is not None:
        single = None
        refused["single"] = why
    mixed: dict[str, int] | None = {GPU_RESOURCE: len(whole)} if whole else {}
    try:
        for device in devices:
            name = resource_name(device.name)
            assert mixed is not None
            mixed[name] = mixed.get(name, 0) + 1
    except ValueError as cause:
        mixed = None
        refused["mixed"] = str(cause)
    return DevicePlugin(none={GPU_RESOURCE: len(gpus)}, single=single, mixed=mixed, refused=refused)


def _no_single(split: list[nodes.Gpu], whole: list[nodes.Gpu], devices: list[_Device]) -> str | None:
    """Return why the plugin refuses the single strategy, None when it does not."""
    if not split:
        return None
    if whole:
        modes = f"it is on for GPU {_indexes(split)} and off for GPU {_indexes(whole)}"
        return f"all GPUs must have the same MIG mode: {modes}"
    empty = [gpu for gpu in split if not any(instance.compute for instance in gpu.instances)]
    if empty:
        return f"GPU {_indexes(empty)} has MIG on and no MIG device"
    if len({device.attributes for device in devices}) > 1:
        names = ", ".join(sorted({device.name for device in devices}))
        return f"more than one type of MIG device is on the node ({names})"
    return None


def _dra(node: nodes.NodeState, whole: list[nodes.Gpu], devices: list[_Device]) -> Iterable[DraDevice]:
    for gpu in whole:
        attributes = {"type": "gpu", "uuid": gpu.uuid, **_common(node, gpu)}
        yield DraDevice(f"gpu-{_minor(gpu)}", attributes, {"memory": gpu.memory_bytes}, gpu.index, gpu.uuid)
    for device in devices:
        gpu, instance = device.gpu, device.instance
        attributes = {"type": "mig", "profile": device.name, "parentUUID": gpu.uuid, **_common(node, gpu)}
        if device.compute.uuid is not None:
            attributes["uuid"] = device.compute.uuid
        engines = device.engines
        capacity = {"memory": instance.memory_bytes, "multiprocessors": device.compute.multiprocessors}
        counts = {
            "copyEngines": engines.copy,
            "decoders": engines.decoder,
            "encoders": engines.encoder,
            "jpegEngines": engines.jpeg,
            "ofaEngines": engines.ofa,
        }
        capacity |= {word: count for word, count in counts.items() if count is not None}
        capacity |= {f"memorySlice{slot}": 1 for slot in range(instance.placement.start, instance.placement.end)}
        yield DraDevice(_dra_name(device), attributes, capacity, gpu.index, device.compute.uuid)


def _dra_name(device: _Device) -> str:
    profile = re.sub(r"[^a-z0-9-]", "-", device.name.replace(".", ""))
    instance = device.instance
    return f"gpu-{_minor(device.gpu)}-mig-{profile}-{instance.profile_id}-{instance.placement.start}"


def _common(node: nodes.NodeState, gpu: nodes.Gpu) -> dict[str, str]:
    told = {
        "productName": gpu.name,
        "architecture": gpu.architecture,
        "driverVersion": _semantic(node.driver_version),
        "cudaDriverVersion": _semantic(node.cuda_version),
        "resource.kubernetes.io/pciBusID": _pci_address(gpu.pci_bus_id),
    }
    return {key: value for key, value in told.items() if value}


def _semantic(version: str) -> str:
    """Return a version as Kubernetes takes one: three numbers without leading zeros (580.159.3)."""
    parts = version.split(".")
    if not version or not all(part.isdigit() for part in parts) or len(parts) > 3:
        return version
    return ".".join(str(int(part)) for part in (*parts, "0", "0")[:3])


def _pci_address(address: str) -> str:
    """Return a PCI address as Kubernetes writes it (0000:10:1c.0), from NVML's (00000000:10:1C.0)."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else address


def _minor(gpu: nodes.Gpu) -> int:
    return gpu.index if gpu.minor is None else gpu.minor


def _ecs(node: nodes.NodeState, gpus: list[nodes.Gpu], split: list[nodes.Gpu]) -> Ecs:
    if split:
        return Ecs(len(gpus), refused=f"ECS does not support MIG, and MIG is on for GPU {_indexes(split)} of this node")
    kind = node.instance_type or ""
    if kind.partition(".")[0] in _FRACTIONAL_FAMILIES:
        value = _ECS_FRACTIONS.get(kind)
        if value is None:
            return Ecs(len(gpus), refused=f"{kind} has a part of a GPU, and no value for it in ECS is known")
        return Ecs(len(gpus), (value,))
    counts = tuple(str(count) for count in range(1, len(gpus) + 1))
    return Ecs(len(gpus), (*counts, "ALL") if counts else ())


def _notes(split: list[nodes.Gpu], devices: list[_Device], dra: tuple[DraDevice, ...]) -> Iterable[str]:
    empty = [gpu for gpu in split if not any(instance.compute for instance in gpu.instances)]
    if empty:
        yield f"GPU {_indexes(empty)} has MIG on and no MIG device: only the strategy none advertises it"
    names = [device.name for device in dra]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        yield f"compute instances of one GPU instance share the DRA device name {', '.join(double)}"
    parts = sorted({str(device.compute.profile) for device in devices if str(device.compute.profile) != device.name})
    if parts:
        yield f"{', '.join(parts)} is advertised under the name of the whole instance, with fewer SMs"


def _indexes(gpus: list[nodes.Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)
