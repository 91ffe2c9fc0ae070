"""ECC, remapped rows, retired pages, and the field values, which answer each entry by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent.sim import codes, library, machine, state, workload
from agent.sim import prototypes as p

On = p.On
Gi = state.GpuInstance
Ci = state.ComputeInstance
_SEVERITIES = ("corrected", "uncorrected")
_LIFETIMES = ("volatile", "aggregate")
_MEMORIES = {2: "dram", 7: "sram"}
_UINT, _ULONGLONG = 1, 3
_GENERATIONS_WITH_REMAPPER = ("Ampere", "Hopper", "Blackwell")


def has_ecc(gpu: machine.Gpu) -> bool:
    """Return whether the GPU tells ECC counts: a virtual one does not."""
    return not gpu.model.virtual


def has_remapper(gpu: machine.Gpu) -> bool:
    """Return whether bad rows are remapped rather than pages retired."""
    return gpu.model.mig_capable and gpu.model.architecture.startswith(_GENERATIONS_WITH_REMAPPER)


def _count(gpu: machine.Gpu, severity: int, memory: str, lifetime: int) -> int:
    return gpu.state.ecc.get(f"{_SEVERITIES[severity]}/{memory}/{_LIFETIMES[lifetime]}", 0)


def _check(gpu: machine.Gpu, severity: int, lifetime: int) -> None:
    if severity not in (0, 1) or lifetime not in (0, 1):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if not has_ecc(gpu):
        raise codes.Refused(codes.NOT_SUPPORTED)


@p.call("nvmlDeviceGetEccMode", On.GPU, p.UINT_OUT, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def ecc_mode(lib: library.Library, gpu: machine.Gpu, current: Any, pending: Any) -> None:  # noqa: ARG001
    """Tell whether ECC is on, now and after the next reset."""
    if not has_ecc(gpu):
        raise codes.Refused(codes.NOT_SUPPORTED)
    current.value = pending.value = 1


@p.call("nvmlDeviceGetTotalEccErrors", On.EITHER, p.uint, p.uint, p.ULONGLONG_OUT)
def ecc_total(
    lib: library.Library,  # noqa: ARG001
    gpu: machine.Gpu,
    gi: Gi | None,
    ci: Ci | None,  # noqa: ARG001
    severity: int,
    lifetime: int,
    into: Any,
) -> None:
    """Count ECC errors of the GPU; a MIG device tells only its volatile uncorrected ones outside DRAM."""
    _check(gpu, severity, lifetime)
    if gi is not None:
        if severity != 1 or lifetime != 0:
            raise codes.Refused(codes.NOT_SUPPORTED)
        into.value = _count(gpu, 1, "sram", 0)
    else:
        into.value = sum(_count(gpu, severity, memory, lifetime) for memory in _MEMORIES.values())


@p.call("nvmlDeviceGetMemoryErrorCounter", On.EITHER, p.uint, p.uint, p.uint, p.ULONGLONG_OUT)
def ecc_by_memory(
    lib: library.Library,  # noqa: ARG001
    gpu: machine.Gpu,
    gi: Gi | None,
    ci: Ci | None,  # noqa: ARG001
    severity: int,
    lifetime: int,
    place: int,
    into: Any,
) -> None:
    """Count ECC errors of DRAM (2) or SRAM (7); other places are not told apart on these parts."""
    _check(gpu, severity, lifetime)
    memory = _MEMORIES.get(place)
    if memory is None or (gi is not None and (severity != 1 or lifetime != 0 or memory == "dram")):
        raise codes.Refused(codes.NOT_SUPPORTED)
    into.value = _count(gpu, severity, memory, lifetime)


def _need_remapper(gpu: machine.Gpu) -> None:
    if not has_remapper(gpu):
        raise codes.Refused(codes.NOT_SUPPORTED)


def _need_no_instances(gpu: machine.Gpu) -> None:
    _need_remapper(gpu)
    if gpu.state.instances:  # the histogram still answers then
        raise codes.Refused(codes.NOT_SUPPORTED)


@p.call(
    "nvmlDeviceGetRemappedRows",
    On.GPU,
    p.UINT_OUT,
    p.UINT_OUT,
    p.UINT_OUT,
    p.UINT_OUT,
    on_mig=codes.NOT_SUPPORTED,
)
def remapped_rows(
    lib: library.Library,  # noqa: ARG001
    gpu: machine.Gpu,
    correctable: Any,
    uncorrectable: Any,
    pending: Any,
    failed: Any,
) -> None:
    """Tell how many rows were remapped; not while instances exist."""
    _need_no_instances(gpu)
    now = gpu.state
    correctable.value, uncorrectable.value = now.remapped_correctable, now.remapped_uncorrectable
    pending.value, failed.value = int(now.remap_pending), int(now.remap_failed)


@p.call(
    "nvmlDeviceGetRowRemapperHistogram",
    On.GPU,
    p.out(p.NVML.c_nvmlRowRemapperHistogramValues),
    on_mig=codes.NOT_SUPPORTED,
)
def remap_histogram(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell how many banks have how many spare rows left."""
    _need_remapper(gpu)
    now = gpu.state
    banks = 640 if gpu.model.architecture == "Ampere" else 2560
    touched = min(banks, now.remapped_correctable + now.remapped_uncorrectable)
    into.none = min(touched, int(now.remap_failed))
    into.high = touched - into.none
    into.partial = into.low = 0
    into.max = banks - touched


@p.call("nvmlDeviceGetRetiredPages", On.GPU, p.uint, p.UINT_OUT, p.pointed, on_mig=codes.NOT_SUPPORTED)
def retired_pages(lib: library.Library, gpu: machine.Gpu, cause: int, count: Any, into: Any) -> None:  # noqa: ARG001
    """List retired pages: only parts from before row remapping have any, and these have none."""
    if has_remapper(gpu) or gpu.model.virtual:
        raise codes.Refused(codes.NOT_SUPPORTED)
    count.value = 0


# --- field values

_Field = Callable[[library.Library, machine.Gpu, int], tuple[int, int]]


def _policy_ns(lib: library.Library, gpu: machine.Gpu, share: float) -> int:
    return int(1e9 * share * lib.figures.busy_seconds(gpu, lib.now()))


def _remap(part: str) -> _Field:
    def field(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
        _need_remapper(gpu)
        return _UINT, int(getattr(gpu.state, part))

    return field


def _capability(value: Callable[[library.Library, machine.Gpu], bool]) -> _Field:
    def field(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
        return _UINT, int(value(lib, gpu))

    return field


def _power(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:
    if gpu.model.virtual or scope not in (0, 1):
        raise codes.Refused(codes.NOT_SUPPORTED)
    return _UINT, lib.figures.power_mw(gpu, lib.now())


def _memory_temperature(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    value = lib.figures.memory_temperature(gpu, lib.now())
    if value is None:
        raise codes.Refused(codes.NOT_SUPPORTED)
    return _UINT, value


def _energy(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    if gpu.model.virtual:
        raise codes.Refused(codes.NOT_SUPPORTED)
    return _ULONGLONG, lib.figures.energy_mj(gpu, lib.now())


def _policy(share: float) -> _Field:
    return lambda lib, gpu, _scope: (_ULONGLONG, _policy_ns(lib, gpu, share))


def _pcie_bytes(counter: int) -> _Field:
    return lambda lib, gpu, _scope: (_ULONGLONG, lib.figures.pcie_bytes(gpu, counter, lib.now()))


def _nvlink(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:
    links = workload.board(gpu).nvlinks
    if not links:
        raise codes.Refused(codes.NOT_SUPPORTED)
    per_link = lib.figures.nvlink_kib(gpu, lib.now())
    if scope == 0xFFFFFFFF:  # all links together
        return _ULONGLONG, links * per_link
    if scope >= links:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    return _ULONGLONG, per_link


def _nvlink_count(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    return _UINT, workload.board(gpu).nvlinks


def _limit_margin(degrees: int) -> _Field:
    def field(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
        if gpu.model.architecture in ("Volta", "Turing", "Ampere") or gpu.model.virtual:
            raise codes.Refused(codes.NOT_SUPPORTED)  # margins came with Ada and Hopper
        return _UINT, degrees

    return field


def _retired_pending(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    if has_remapper(gpu) or gpu.model.virtual:
        raise codes.Refused(codes.NOT_SUPPORTED)
    return _UINT, 0


def _recovery(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    if lib.machine.spec.driver_major < 570:
        raise codes.Refused(codes.NOT_SUPPORTED)
    now = gpu.state
    return _UINT, 1 if now.remap_pending or now.reset_required else 0  # 0 none, 1 GPU reset


def _ecc_field(severity: int, lifetime: int) -> _Field:
    def field(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
        _check(gpu, severity, lifetime)
        return _ULONGLONG, sum(_count(gpu, severity, memory, lifetime) for memory in _MEMORIES.values())

    return field


def _replays(lib: library.Library, gpu: machine.Gpu, scope: int) -> tuple[int, int]:  # noqa: ARG001
    return _UINT, gpu.state.replays


_FIELDS: dict[int, _Field] = {
    1: _capability(lambda _lib, gpu: has_ecc(gpu)),
    3: _ecc_field(0, 0),
    4: _ecc_field(1, 0),
    5: _ecc_field(0, 1),
    6: _ecc_field(1, 1),
    29: _retired_pending,
    30: _retired_pending,
    31: _retired_pending,
    74: _policy(0.02),
    75: _policy(0.0),
    76: _policy(0.0),
    77: _policy(0.0),
    78: _policy(0.0),
    79: _policy(0.0),
    82: _memory_temperature,
    83: _energy,
    91: _nvlink_count,
    94: _replays,
    138: _nvlink,
    139: _nvlink,
    140: _nvlink,
    141: _nvlink,
    142: _remap("remapped_correctable"),
    143: _remap("remapped_uncorrectable"),
    144: _remap("remap_pending"),
    145: _remap("remap_failed"),
    184: _capability(lambda _lib, gpu: gpu.model.mig_capable and gpu.model.resetless),
    185: _power,
    186: _power,
    190: lambda _lib, gpu, _scope: (_UINT, int(1000 * workload.board(gpu).limit_watts)),
    193: _limit_margin(-7),
    194: _limit_margin(-2),
    195: _limit_margin(0),
    196: _limit_margin(0),
    197: _pcie_bytes(0),
    198: _pcie_bytes(1),
    199: _capability(lambda lib, gpu: gpu.model.mig_capable and not lib.machine.spec.profiles_need_mig),
    230: _recovery,
    269: _policy(0.0),
    270: _policy(0.0),
    271: _policy(0.0),
}
_SIGNED = frozenset({193, 194, 195, 196})


@p.call("nvmlDeviceGetFieldValues", On.GPU, p.uint, p.array(p.NVML.c_nvmlFieldValue_t), on_mig=codes.NOT_SUPPORTED)
def field_values(lib: library.Library, gpu: machine.Gpu, count: int, into: Any) -> None:
    """Answer several fields at once; the call succeeds while single entries fail."""
    if into is None or count <= 0:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if len(into) < count:
        raise p.Misuse(f"the array has {len(into)} elements and {count} were announced: memory overwritten")
    stamp = int(1e6 * lib.now())
    for number in range(count):
        entry = into[number]
        entry.timestamp, entry.latencyUsec = stamp, 0
        field = _FIELDS.get(entry.fieldId)
        if field is None:
            entry.nvmlReturn = codes.NOT_SUPPORTED
            continue
        try:
            entry.valueType, value = field(lib, gpu, entry.scopeId)
        except codes.Refused as refused:
            entry.nvmlReturn = refused.code
            continue
        entry.nvmlReturn = codes.SUCCESS
        if entry.fieldId in _SIGNED:
            entry.valueType, entry.value.siVal = 5, value
        elif entry.valueType == _UINT:
            entry.value.uiVal = value
        else:
            entry.value.ullVal = value
