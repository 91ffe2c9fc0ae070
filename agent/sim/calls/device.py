"""Who a GPU or MIG device is: name, UUID, numbers, PCI address, architecture, modes."""

from __future__ import annotations

import zlib
from typing import Any

from agent.sim import codes, library, machine, state
from agent.sim import prototypes as p

On = p.On
_ARCHITECTURES = {"Kepler": 2, "Maxwell": 3, "Pascal": 4, "Volta": 5, "Turing": 6, "Ampere": 7, "Ada": 8, "Hopper": 9,
                  "Blackwell": 10}  # fmt: skip
_BRAND_TESLA, _BRAND_NVIDIA, _BRAND_NVIDIA_RTX, _BRAND_VIRTUAL = 2, 14, 12, 8
_VENDOR = 0x10DE
_PASSTHROUGH, _VGPU_GUEST = 1, 2

Gi = state.GpuInstance
Ci = state.ComputeInstance


def mig_name(gpu: machine.Gpu, gi: Gi, ci: Ci) -> str:
    """Return the profile name of a compute instance: its GPU instance's own when it spans it."""
    profile = gpu.profile(gi.profile).compute_profile(ci.profile)
    return gpu.profile(gi.profile).name if profile is None else profile.name


@p.call("nvmlDeviceGetName", On.EITHER, p.buffer, p.uint)
def name(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any, length: int) -> None:  # noqa: ARG001
    """Tell the product name, with the profile behind it for a MIG device."""
    text = gpu.model.name
    if gi is not None and ci is not None:
        text += f" MIG {mig_name(gpu, gi, ci)}"
    p.put_text(into, length, text)


@p.call("nvmlDeviceGetUUID", On.EITHER, p.buffer, p.uint)
def uuid(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any, length: int) -> None:  # noqa: ARG001
    """Tell the UUID."""
    p.put_text(into, length, gpu.spec.uuid if gi is None or ci is None else gpu.mig_uuid(gi.id, ci.id))


@p.call("nvmlDeviceGetIndex", On.EITHER, p.UINT_OUT)
def index(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell the index: of the GPU on the node, of the MIG device on its GPU."""
    into.value = gpu.index if ci is None else ci.mig_index


@p.call("nvmlDeviceGetMinorNumber", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def minor_number(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell N of /dev/nvidiaN."""
    into.value = gpu.index


@p.call("nvmlDeviceGetSerial", On.GPU, p.buffer, p.uint, on_mig=codes.NOT_SUPPORTED)
def serial(lib: library.Library, gpu: machine.Gpu, into: Any, length: int) -> None:  # noqa: ARG001
    """Tell the board's serial; a virtual GPU has none."""
    if gpu.model.virtual:
        raise codes.Refused(codes.NOT_SUPPORTED)
    p.put_text(into, length, gpu.spec.serial)


@p.call("nvmlDeviceGetBoardId", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def board_id(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell a number of the board."""
    into.value = zlib.crc32(gpu.spec.pci_bus_id.encode()) & 0xFFFFFF


@p.call("nvmlDeviceGetBrand", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def brand(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell the brand."""
    if gpu.model.virtual:
        into.value = _BRAND_VIRTUAL
    elif gpu.model.name.startswith("Tesla"):
        into.value = _BRAND_TESLA
    else:
        into.value = _BRAND_NVIDIA_RTX if "RTX" in gpu.model.name else _BRAND_NVIDIA


@p.call("nvmlDeviceGetArchitecture", On.EITHER, p.UINT_OUT)
def architecture(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell the generation by NVML's number."""
    into.value = _ARCHITECTURES.get(gpu.model.architecture.split(maxsplit=1)[0], 0xFFFFFFFF)


@p.call("nvmlDeviceGetCudaComputeCapability", On.EITHER, p.INT_OUT, p.INT_OUT)
def compute_capability(
    lib: library.Library,  # noqa: ARG001
    gpu: machine.Gpu,
    gi: Gi | None,  # noqa: ARG001
    ci: Ci | None,  # noqa: ARG001
    major: Any,
    minor: Any,
) -> None:
    """Tell the CUDA compute capability."""
    if gpu.model.compute_capability == (0, 0):
        raise codes.Refused(codes.UNKNOWN)
    major.value, minor.value = gpu.model.compute_capability


@p.call("nvmlDeviceGetVbiosVersion", On.GPU, p.buffer, p.uint, on_mig=codes.NOT_SUPPORTED)
def vbios_version(lib: library.Library, gpu: machine.Gpu, into: Any, length: int) -> None:  # noqa: ARG001
    """Tell the VBIOS version: invented, but in the usual form."""
    number = gpu.model.device_id >> 8
    p.put_text(into, length, f"{number:02X}.00.{gpu.model.device_id & 0xFF:02X}.00.{1 + gpu.model.device_id % 15:02X}")


@p.call("nvmlDeviceGetVirtualizationMode", On.GPU, p.ULONGLONG_OUT, on_mig=codes.NOT_SUPPORTED)
def virtualization_mode(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell whether the GPU is passed through to a VM (as on EC2), a vGPU, or bare metal."""
    if gpu.model.virtual:
        into.value = _VGPU_GUEST
    else:
        into.value = 0 if (lib.machine.spec.instance_type or ".metal").endswith(".metal") else _PASSTHROUGH


def _pci(gpu: machine.Gpu, into: Any) -> None:
    domain, bus, rest = gpu.spec.pci_bus_id.split(":")
    into.domain, into.bus, into.device = int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)
    into.pciDeviceId = gpu.model.device_id << 16 | _VENDOR
    into.pciSubSystemId = 0x1000 << 16 | _VENDOR
    into.busId = gpu.spec.pci_bus_id.encode()


@p.call("nvmlDeviceGetPciInfo_v3", On.GPU, p.out(p.NVML.nvmlPciInfo_t), on_mig=codes.NOT_SUPPORTED)
def pci_info(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell the PCI address and ids."""
    _pci(gpu, into)
    into.busIdLegacy = gpu.spec.pci_bus_id[4:].encode()


@p.call("nvmlDeviceGetPciInfoExt", On.GPU, p.versioned((0x1000040, p.NVML.nvmlPciInfoExt_v1_t)), since=535,
        on_mig=codes.NOT_SUPPORTED)  # fmt: skip
def pci_info_ext(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell the PCI address, ids and class."""
    _pci(gpu, into)
    into.baseClass, into.subClass = 3, 2


@p.call("nvmlDeviceGetComputeMode", On.EITHER, p.UINT_OUT)
def compute_mode(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell the compute mode; in MIG mode it is asked of MIG devices."""
    into.value = gpu.state.compute_mode


@p.call("nvmlDeviceSetComputeMode", On.EITHER, p.uint, latency="change", mutates=True)
def set_compute_mode(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, mode: int) -> None:  # noqa: ARG001
    """Set the compute mode."""
    lib.machine.need_root()
    if mode not in (0, 2, 3):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if gpu.state.mig and gi is None:
        raise codes.Refused(codes.NOT_SUPPORTED)
    with lib.machine.change(gpu) as now:
        now.compute_mode = mode
        lib.machine.count_mutation()


@p.call("nvmlDeviceGetPersistenceMode", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def persistence_mode(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell whether the driver stays initialised without clients: nvidia-persistenced turns it on."""
    into.value = int(gpu.state.persistence or lib.machine.store.node.units.get(machine.PERSISTENCED, False))


@p.call("nvmlDeviceSetPersistenceMode", On.GPU, p.uint, latency="change", mutates=True, on_mig=codes.NOT_SUPPORTED)
def set_persistence_mode(lib: library.Library, gpu: machine.Gpu, mode: int) -> None:
    """Set persistence mode."""
    lib.machine.need_root()
    if mode not in (0, 1):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    with lib.machine.change(gpu) as now:
        now.persistence = bool(mode)
        lib.machine.count_mutation()


@p.call("nvmlDeviceGetNumGpuCores", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def gpu_cores(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell the CUDA cores; not answered in MIG mode."""
    if gpu.state.mig or not gpu.model.multiprocessors:
        raise codes.Refused(codes.NOT_SUPPORTED)
    per_sm = 64 if gpu.model.compute_capability in ((7, 0), (7, 5), (8, 0)) else 128
    into.value = gpu.model.multiprocessors * per_sm
