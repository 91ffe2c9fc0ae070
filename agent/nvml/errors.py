"""NVML's return codes as our errors, each with its meaning in words."""

from __future__ import annotations

from agent import errors

_KINDS: dict[int, type[errors.CallError]] = {
    1: errors.Unready,
    2: errors.InvalidArgument,
    3: errors.NotSupported,
    4: errors.NoPermission,
    6: errors.NotFound,
    9: errors.Unready,
    12: errors.Unready,
    13: errors.NotSupported,
    15: errors.Lost,
    16: errors.ResetRequired,
    18: errors.Unready,
    19: errors.InUse,
    23: errors.NoRoom,
    26: errors.NotSupported,
    28: errors.NotFound,
}

_MEANINGS = {
    1: "the library is not initialised",
    2: "the driver does not know the argument (a stale handle, or no such index)",
    3: "this GPU, or the mode it is in, does not support it",
    4: "it needs root",
    6: "there is no such thing",
    7: "the buffer was too small",
    8: "the GPU's power cables are not attached properly",
    9: "the NVIDIA kernel driver is not loaded",
    10: "the driver timed out",
    11: "the kernel has an interrupt problem with the GPU",
    12: "libnvidia-ml.so.1 was not found",
    13: "this driver's library does not have the function",
    14: "the GPU's inforom is corrupted",
    15: "the GPU has fallen off the bus",
    16: "the GPU must be reset first",
    17: "the operating system refused it (a cgroup may block the device)",
    18: "the driver and its library have different versions, as after an update without reboot",
    19: "another client is using it",
    20: "there is not enough memory",
    21: "there is no data",
    23: "there is no room for it (the placement is occupied, or the capacity is used up)",
    24: "ran out of a critical resource",
    25: "the driver does not know this version of the argument",
    26: "the driver no longer offers it",
    27: "the driver is not ready",
    28: "no such GPU was found",
    29: "the GPU is in a state that does not allow it",
    30: "this kind of reset is not supported",
    999: "an unknown error inside the driver",
}


_PURPOSES = {
    "nvmlInit": "open the driver library",
    "nvmlShutdown": "close the driver library",
    "nvmlDeviceGetCount": "count the GPUs",
    "nvmlDeviceGetHandleByPciBusId": "reach the GPU",
    "nvmlDeviceGetHandleByIndex": "reach the GPU",
    "nvmlDeviceGetUUID": "read the UUID",
    "nvmlDeviceGetName": "read the name",
    "nvmlDeviceGetPciInfo": "read the PCI address",
    "nvmlDeviceGetMemoryInfo": "read the memory",
    "nvmlDeviceGetMigMode": "read the MIG mode",
    "nvmlDeviceSetMigMode": "change the MIG mode",
    "nvmlDeviceGetGpuInstanceProfileInfo": "read the profiles",
    "nvmlDeviceGetGpuInstancePossiblePlacements": "read the placements",
    "nvmlDeviceGetGpuInstances": "list the GPU instances",
    "nvmlDeviceGetGpuInstanceById": "find the GPU instance",
    "nvmlGpuInstanceGetInfo": "read the GPU instance",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": "read the compute profiles",
    "nvmlGpuInstanceGetComputeInstances": "list the compute instances",
    "nvmlGpuInstanceGetComputeInstanceById": "find the compute instance",
    "nvmlComputeInstanceGetInfo_v2": "read the compute instance",
    "nvmlDeviceCreateGpuInstanceWithPlacement": "create the GPU instance",
    "nvmlGpuInstanceDestroy": "destroy the GPU instance",
    "nvmlGpuInstanceCreateComputeInstance": "create the compute instance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": "create the compute instance",
    "nvmlComputeInstanceDestroy": "destroy the compute instance",
    "nvmlDeviceGetComputeRunningProcesses_v3": "list the processes",
}


def _purpose(call: str) -> str:
    return _PURPOSES.get(call, f"ask the driver for {call.removeprefix('nvml')}")


def meaning(code: int) -> str:
    """Return what a return code says, for people."""
    return _MEANINGS.get(code, f"the driver answered code {code}, which is not a known one")


def translate(code: int, call: str, gpu: str | None = None) -> errors.CallError:
    """Return our error for NVML code `code` of function `call` (on the GPU with UUID `gpu`)."""
    kind = _KINDS.get(code, errors.CallError)
    on = f" on GPU {gpu}" if gpu else ""
    return kind(f"cannot {_purpose(call)}{on}: {meaning(code)} ({call} answered {code})", call=call, code=code, gpu=gpu)


def hung(call: str, seconds: float, gpu: str | None = None) -> errors.Hung:
    """Return the error of a call that has not come back within `seconds`."""
    on = f" on GPU {gpu}" if gpu else ""
    text = f"cannot {_purpose(call)}{on}: the driver has not come back from {call} for {seconds:.1f} s"
    return errors.Hung(text, call=call, code=10, gpu=gpu)
