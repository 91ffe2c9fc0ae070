"""Opening and closing, versions, and finding GPUs."""

from __future__ import annotations

from typing import Any

from agent.sim import codes, library, machine, state
from agent.sim import prototypes as p

On = p.On
_WORDS = {
    0: "Success",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    5: "Already Initialized",
    6: "Not Found",
    7: "Insufficient Size",
    8: "Insufficient External Power",
    9: "Driver Not Loaded",
    10: "Timeout",
    11: "Interrupt Request Issue",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    14: "Corrupted infoROM",
    15: "GPU is lost",
    16: "GPU requires restart",
    17: "The operating system has blocked the request",
    18: "RM has detected an NVML/RM version mismatch",
    19: "In use by another client",
    20: "Insufficient Memory",
    21: "No data",
    22: "The requested vgpu operation is not available because ECC is enabled",
    23: "Insufficient Resources",
    24: "Frequency Not Supported",
    25: "Argument version mismatch",
    26: "Deprecated",
    27: "System is not in ready state",
    28: "No GPUs were found",
    29: "Invalid state",
    30: "The requested reset type is not supported",
}


@p.call("nvmlInit_v2", On.NOTHING, uninitialised=True)
def init(lib: library.Library) -> None:
    """Open the driver, once more."""
    lib.open()


@p.call("nvmlInitWithFlags", On.NOTHING, p.uint, uninitialised=True)
def init_with_flags(lib: library.Library, flags: int) -> None:  # noqa: ARG001  # no flag changes anything here
    """Open the driver, once more."""
    lib.open()


@p.call("nvmlShutdown", On.NOTHING, uninitialised=True)
def shutdown(lib: library.Library) -> None:
    """Close it, once."""
    lib.shut()


@p.call("nvmlErrorString", On.NOTHING, p.uint, uninitialised=True)
def error_string(lib: library.Library, code: int) -> Any:  # noqa: ARG001  # every function gets the library
    """Say a return code in words, as the C string that ctypes would give."""
    return _WORDS.get(code, "Unknown Error").encode()


@p.call("nvmlSystemGetDriverVersion", On.NOTHING, p.buffer, p.uint)
def driver_version(lib: library.Library, into: Any, length: int) -> None:
    """Tell the driver's version."""
    p.put_text(into, length, lib.machine.spec.driver_version)


@p.call("nvmlSystemGetNVMLVersion", On.NOTHING, p.buffer, p.uint, uninitialised=True)
def nvml_version(lib: library.Library, into: Any, length: int) -> None:
    """Tell the library's version; works before nvmlInit."""
    p.put_text(into, length, lib.machine.spec.nvml_version)


def _cuda(lib: library.Library, version: Any) -> None:
    version.value = lib.machine.spec.cuda_version


p.call("nvmlSystemGetCudaDriverVersion", On.NOTHING, p.INT_OUT, uninitialised=True)(_cuda)
p.call("nvmlSystemGetCudaDriverVersion_v2", On.NOTHING, p.INT_OUT, uninitialised=True)(_cuda)


@p.call("nvmlSystemGetProcessName", On.NOTHING, p.uint, p.buffer, p.uint)
def process_name(lib: library.Library, pid: int, into: Any, length: int) -> None:
    """Tell the name of a process on a GPU."""
    for gpu in lib.machine.gpus:
        for process in state.users(gpu.state):
            if process.pid == pid:
                p.put_text(into, length, process.name)
                return
    raise codes.Refused(codes.NOT_FOUND)


@p.call("nvmlDeviceGetCount_v2", On.NOTHING, p.UINT_OUT)
def count(lib: library.Library, into: Any) -> None:
    """Count the GPUs on the bus, lost ones included."""
    into.value = len(lib.machine.there())


def _hand_out(lib: library.Library, name: str, gpu: machine.Gpu, into: Any) -> int | None:
    code = lib.meet_faults_of(gpu, name)
    if code:
        return code
    if gpu.state.lost:
        return codes.GPU_IS_LOST
    p.put_handle(into, lib.gpu_address(gpu))
    return None


@p.call("nvmlDeviceGetHandleByIndex_v2", On.NOTHING, p.uint, p.DEVICE_OUT)
def by_index(lib: library.Library, index: int, into: Any) -> int | None:
    """Give the handle of the GPU of this index."""
    there = lib.machine.there()
    if not 0 <= index < len(there):
        return codes.INVALID_ARGUMENT
    return _hand_out(lib, "nvmlDeviceGetHandleByIndex_v2", there[index], into)


@p.call("nvmlDeviceGetHandleByUUID", On.NOTHING, p.text, p.DEVICE_OUT)
def by_uuid(lib: library.Library, uuid: bytes, into: Any) -> int | None:
    """Give the handle of a GPU (GPU-…) or MIG device (MIG-…, MIG-GPU-…/gi/ci)."""
    wanted = uuid.decode("utf-8", "replace")
    for gpu in lib.machine.there():
        if gpu.spec.uuid == wanted:
            return _hand_out(lib, "nvmlDeviceGetHandleByUUID", gpu, into)
        if not wanted.startswith("MIG-"):
            continue
        with gpu.lock:
            for gi in gpu.state.instances.values():
                for ci in gi.compute.values():
                    if wanted in (gpu.mig_uuid(gi.id, ci.id), f"MIG-{gpu.spec.uuid}/{gi.id}/{ci.id}"):
                        if gpu.state.lost:
                            return codes.GPU_IS_LOST
                        p.put_handle(into, lib.mig_address(gpu, ci.mig_index))
                        return None
    return codes.NOT_FOUND


@p.call("nvmlDeviceGetHandleBySerial", On.NOTHING, p.text, p.DEVICE_OUT)
def by_serial(lib: library.Library, serial: bytes, into: Any) -> int | None:
    """Give the handle of the GPU with this board serial."""
    for gpu in lib.machine.there():
        if gpu.spec.serial == serial.decode("utf-8", "replace"):
            return _hand_out(lib, "nvmlDeviceGetHandleBySerial", gpu, into)
    return codes.NOT_FOUND


@p.call("nvmlDeviceGetHandleByPciBusId_v2", On.NOTHING, p.text, p.DEVICE_OUT)
def by_pci_bus_id(lib: library.Library, bus_id: bytes, into: Any) -> int | None:
    """Give the handle of the GPU at a PCI address, with or without its domain, in either case."""
    wanted = _address(bus_id.decode("utf-8", "replace"))
    if wanted is None:
        return codes.INVALID_ARGUMENT
    for gpu in lib.machine.there():
        if _address(gpu.spec.pci_bus_id) == wanted:
            return _hand_out(lib, "nvmlDeviceGetHandleByPciBusId_v2", gpu, into)
    return codes.NOT_FOUND


def _address(text: str) -> tuple[int, int, int] | None:
    parts = text.partition(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts]
    except ValueError:
        return None
    if len(numbers) == 2:  # bus:device
        numbers.insert(0, 0)
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None
