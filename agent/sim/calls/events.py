"""Event sets: XID errors and changes of the MIG configuration."""

from __future__ import annotations

from typing import Any

from agent.sim import codes, library, machine
from agent.sim import prototypes as p

On = p.On
_SINGLE_BIT, _DOUBLE_BIT, _PSTATE, _CLOCK = 0x1, 0x2, 0x4, 0x10


def supported(gpu: machine.Gpu) -> int:
    """Return the event bits that a GPU can be watched for."""
    types = machine.XID | _CLOCK | _PSTATE
    if not gpu.model.virtual:
        types |= _SINGLE_BIT | _DOUBLE_BIT
    return types | (machine.MIG_CONFIG_CHANGE if gpu.model.mig_capable else 0)


@p.call("nvmlDeviceGetSupportedEventTypes", On.GPU, p.ULONGLONG_OUT, on_mig=codes.NOT_SUPPORTED)
def supported_types(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell what a GPU can be watched for."""
    into.value = supported(gpu)


@p.call("nvmlEventSetCreate", On.NOTHING, p.out(p.NVML.c_nvmlEventSet_t))
def create(lib: library.Library, into: Any) -> None:
    """Make an empty event set."""
    address = lib.new_address()
    lib.event_sets[address] = library.EventSet()
    p.put_handle(into, address)


@p.call("nvmlDeviceRegisterEvents", On.GPU, p.uint, p.EVENT_SET, on_mig=codes.INVALID_ARGUMENT)
def register(lib: library.Library, gpu: machine.Gpu, types: int, address: int) -> None:
    """Watch a GPU from now on."""
    events = _set(lib, address)
    if types & ~supported(gpu):
        raise codes.Refused(codes.NOT_SUPPORTED)
    if not events.masks:
        events.after = lib.machine.store.node.event_number
    events.masks[gpu.index] = events.masks.get(gpu.index, 0) | types


def _set(lib: library.Library, address: int) -> library.EventSet:
    found = lib.event_sets.get(address)
    if found is None:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    return found


def _wait(lib: library.Library, address: int, into: Any, milliseconds: int) -> None:
    events = _set(lib, address)
    session = lib.session

    def ended() -> bool:
        return lib.session != session or address not in lib.event_sets

    event = lib.machine.wait_event(events.after, events.masks, milliseconds / 1000, ended=ended)
    if event is None:
        raise codes.Refused(codes.UNINITIALIZED if lib.session != session else codes.TIMEOUT)
    events.after = event.number
    gpu = lib.machine.gpus[event.gpu]
    p.put_handle_field(into, "device", lib.gpu_address(gpu))
    into.eventType, into.eventData = event.kind, event.data
    # Without privilege a reader learns of the whole GPU only.
    privileged = lib.machine.spec.root
    into.gpuInstanceId = event.gpu_instance if privileged else codes.NO_ID
    into.computeInstanceId = event.compute_instance if privileged else codes.NO_ID


for _name in ("nvmlEventSetWait", "nvmlEventSetWait_v2"):
    p.call(_name, On.NOTHING, p.EVENT_SET, p.out(p.NVML.c_nvmlEventData_t), p.uint, unlocked=True)(_wait)


@p.call("nvmlEventSetFree", On.NOTHING, p.EVENT_SET)
def free(lib: library.Library, address: int) -> None:
    """Free an event set; whoever waits on it comes back."""
    if lib.event_sets.pop(address, None) is None:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    with lib.machine.happened:
        lib.machine.happened.notify_all()
