"""GPM: activity between two samples, of a GPU or of one GPU instance; Hopper and later only."""

from __future__ import annotations

import ctypes
from typing import Any

from agent.sim import codes, library, machine, workload
from agent.sim import prototypes as p

On = p.On
_SINCE = 535
_STEPS = 8
# What part of its activity an instance spends on each; percent metrics by NVML's id.
_SHARES = {
    1: 1.0,
    2: 0.95,
    3: 0.6,
    4: 0.12,
    5: 0.5,
    6: 0.0,
    7: 0.45,
    8: 0.02,
    9: 0.01,
    10: 0.4,
    11: 0.01,
    12: 0.3,
    13: 0.15,
}
_PCIE = {20: 0, 21: 1}
_NVLINK = (60, 61)


@p.call("nvmlGpmQueryDeviceSupport", On.EITHER, p.versioned((1, p.NVML.c_nvmlGpmSupport_t)), since=_SINCE)
def query(lib: library.Library, gpu: machine.Gpu, gi: Any, ci: Any, into: Any) -> None:  # noqa: ARG001
    """Tell whether the GPU has GPM at all."""
    into.isSupportedDevice = int(gpu.model.gpm)


@p.call("nvmlGpmSampleAlloc", On.NOTHING, p.out(p.NVML.c_nvmlGpmSample_t), since=_SINCE)
def allocate(lib: library.Library, into: Any) -> None:
    """Make an empty sample."""
    address = lib.new_address()
    lib.samples[address] = library.GpmSample()
    p.put_handle(into, address)


@p.call("nvmlGpmSampleFree", On.NOTHING, p.GPM_SAMPLE, since=_SINCE)
def free(lib: library.Library, address: int) -> None:
    """Free a sample."""
    if lib.samples.pop(address, None) is None:
        raise codes.Refused(codes.INVALID_ARGUMENT)


def _sample(lib: library.Library, address: int) -> library.GpmSample:
    found = lib.samples.get(address)
    if found is None:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    return found


def _take(lib: library.Library, gpu: machine.Gpu, instance: int | None, address: int) -> None:
    sample = _sample(lib, address)
    if not gpu.model.gpm:
        raise codes.Refused(codes.NOT_SUPPORTED)
    serial = -1
    if instance is not None:
        gi = lib.machine.need_mig(gpu).instances.get(instance)
        if gi is None:
            raise codes.Refused(codes.INVALID_ARGUMENT)
        serial = gi.serial
    sample.gpu, sample.instance, sample.serial, sample.taken = gpu.index, instance, serial, lib.now()


@p.call("nvmlGpmSampleGet", On.EITHER, p.GPM_SAMPLE, since=_SINCE)
def take(lib: library.Library, gpu: machine.Gpu, gi: Any, ci: Any, address: int) -> None:  # noqa: ARG001
    """Take a sample of a GPU, or of a MIG device's GPU instance."""
    _take(lib, gpu, None if gi is None else gi.id, address)


@p.call("nvmlGpmMigSampleGet", On.GPU, p.uint, p.GPM_SAMPLE, since=_SINCE)
def take_of_instance(lib: library.Library, gpu: machine.Gpu, instance: int, address: int) -> None:
    """Take a sample of a GPU instance by its id."""
    _take(lib, gpu, instance, address)


@p.call("nvmlGpmMetricsGet", On.NOTHING, p.out(p.NVML.c_nvmlGpmMetricsGet_t), since=_SINCE)
def metrics(lib: library.Library, into: Any) -> None:
    """Work out metrics between two samples of the same thing; the call succeeds while single ones fail."""
    if into.version != 1:
        raise codes.Refused(codes.ARGUMENT_VERSION_MISMATCH)
    if into.numMetrics > len(into.metrics):
        raise p.Misuse(f"numMetrics is {into.numMetrics}, the structure has {len(into.metrics)}")
    kind = type(into)
    first = _sample(lib, ctypes.c_void_p.from_buffer(into, kind.sample1.offset).value or 0)
    second = _sample(lib, ctypes.c_void_p.from_buffer(into, kind.sample2.offset).value or 0)
    same = (first.gpu, first.instance, first.serial) == (second.gpu, second.instance, second.serial)
    if first.gpu < 0 or not same:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    gpu = lib.machine.gpus[first.gpu]
    with gpu.lock:
        activity = _mean_activity(lib, gpu, first, second)
        for number in range(into.numMetrics):
            metric = into.metrics[number]
            if second.taken <= first.taken:
                metric.nvmlReturn = codes.NO_DATA
                continue
            value = _value(gpu, metric.metricId, activity, whole=first.instance is None)
            metric.nvmlReturn = codes.NOT_SUPPORTED if value is None else codes.SUCCESS
            metric.value = 0.0 if value is None else value


def _mean_activity(
    lib: library.Library, gpu: machine.Gpu, first: library.GpmSample, second: library.GpmSample
) -> float:
    gi = None
    if first.instance is not None:
        gi = gpu.state.instances.get(first.instance)
        if gi is None or gi.serial != first.serial:
            return 0.0
    span = second.taken - first.taken
    total = 0.0
    for step in range(_STEPS):
        at = first.taken + span * (step + 0.5) / _STEPS
        total += lib.figures.activity(gpu, at) if gi is None else lib.figures.instance_activity(gpu, gi, at)
    return total / _STEPS


def _value(gpu: machine.Gpu, metric: int, activity: float, *, whole: bool) -> float | None:
    if metric in _SHARES:
        return 100 * activity * _SHARES[metric]
    if metric in _PCIE and whole:
        return activity * (880.0, 1465.0)[_PCIE[metric]]
    if metric in _NVLINK and whole and workload.board(gpu).nvlinks:
        return activity * 1953.0 * workload.board(gpu).nvlinks
    return None
