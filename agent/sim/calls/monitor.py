"""Utilisation, power, heat and clocks: whole-GPU figures, most of them not answered for MIG devices."""

from __future__ import annotations

from typing import Any

from agent.sim import codes, library, machine, workload
from agent.sim import prototypes as p

On = p.On
_IDLE, _SW_POWER_CAP = 1, 4
_SUPPORTED_REASONS = 0x1FF
_CAP_AT = 0.985
_THRESHOLDS = {0: 92, 1: 89, 2: 95, 3: 85}  # shutdown, slowdown, memory maximum, GPU maximum
_SAMPLING_US = 20_000


def _only_without_mig(gpu: machine.Gpu) -> None:
    if gpu.state.mig:
        raise codes.Refused(codes.NOT_SUPPORTED)


@p.call("nvmlDeviceGetUtilizationRates", On.GPU, p.out(p.NVML.c_nvmlUtilization_t), on_mig=codes.NOT_SUPPORTED)
def utilization(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell how busy GPU and memory were, in percent; not in MIG mode."""
    _only_without_mig(gpu)
    busy = lib.figures.activity(gpu, lib.now())
    into.gpu, into.memory = round(100 * busy), round(40 * busy)


def _engine(name: str, share: float) -> None:
    @p.call(f"nvmlDeviceGet{name}Utilization", On.GPU, p.UINT_OUT, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
    def body(lib: library.Library, gpu: machine.Gpu, percent: Any, period: Any) -> None:
        _only_without_mig(gpu)
        percent.value, period.value = round(100 * share * lib.figures.activity(gpu, lib.now())), _SAMPLING_US


for _name, _share in (("Encoder", 0.0), ("Decoder", 0.05), ("Jpg", 0.0), ("Ofa", 0.0)):
    _engine(_name, _share)


def _need_board(gpu: machine.Gpu) -> None:
    if gpu.model.virtual:  # the board belongs to the host of the vGPU
        raise codes.Refused(codes.NOT_SUPPORTED)


@p.call("nvmlDeviceGetPowerUsage", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def power(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell the power drawn, in milliwatts."""
    _need_board(gpu)
    into.value = lib.figures.power_mw(gpu, lib.now())


@p.call("nvmlDeviceGetTotalEnergyConsumption", On.GPU, p.ULONGLONG_OUT, on_mig=codes.NOT_SUPPORTED)
def energy(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell the energy drawn since the driver was loaded, in millijoules."""
    _need_board(gpu)
    into.value = lib.figures.energy_mj(gpu, lib.now())


def _limit(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    _need_board(gpu)
    into.value = int(1000 * workload.board(gpu).limit_watts)


for _name in (
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
):
    p.call(_name, On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)(_limit)


@p.call("nvmlDeviceGetPowerManagementLimitConstraints", On.GPU, p.UINT_OUT, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def limits(lib: library.Library, gpu: machine.Gpu, low: Any, high: Any) -> None:  # noqa: ARG001
    """Tell the smallest and largest power limit that can be set, in milliwatts."""
    _need_board(gpu)
    top = workload.board(gpu).limit_watts
    low.value, high.value = int(500 * top), int(1000 * top)


@p.call("nvmlDeviceGetTemperature", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def temperature(lib: library.Library, gpu: machine.Gpu, sensor: int, into: Any) -> None:
    """Tell the GPU's temperature (sensor 0) in Celsius."""
    _need_board(gpu)
    if sensor != 0:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.value = lib.figures.temperature(gpu, lib.now())


@p.call(
    "nvmlDeviceGetTemperatureV",
    On.GPU,
    p.versioned((0x0100000C, p.NVML.c_nvmlTemperature_v1_t)),
    since=590,
    on_mig=codes.NOT_SUPPORTED,
)
def temperature_versioned(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell the GPU's temperature the new way."""
    _need_board(gpu)
    if into.sensorType != 0:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.temperature = lib.figures.temperature(gpu, lib.now())


@p.call("nvmlDeviceGetTemperatureThreshold", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def threshold(lib: library.Library, gpu: machine.Gpu, which: int, into: Any) -> None:  # noqa: ARG001
    """Tell a temperature threshold: shutdown 0, slowdown 1, memory maximum 2, GPU maximum 3."""
    _need_board(gpu)
    if which not in _THRESHOLDS or (which == 2 and not workload.board(gpu).hbm):
        raise codes.Refused(codes.NOT_SUPPORTED if 0 <= which < 9 else codes.INVALID_ARGUMENT)
    into.value = _THRESHOLDS[which]


@p.call(
    "nvmlDeviceGetMarginTemperature",
    On.GPU,
    p.versioned((0x1000008, p.NVML.c_nvmlMarginTemperature_v1_t)),
    since=565,
    on_mig=codes.NOT_SUPPORTED,
)
def margin(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell how many degrees are left below the nearest slowdown."""
    _need_board(gpu)
    into.marginTemperature = _THRESHOLDS[3] - lib.figures.temperature(gpu, lib.now())


@p.call("nvmlDeviceGetClockInfo", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def clock(lib: library.Library, gpu: machine.Gpu, domain: int, into: Any) -> None:
    """Tell a clock in MHz: graphics 0, SM 1, memory 2, video 3."""
    if not 0 <= domain <= 3:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.value = lib.figures.clock_mhz(gpu, domain, lib.now())


@p.call("nvmlDeviceGetMaxClockInfo", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def max_clock(lib: library.Library, gpu: machine.Gpu, domain: int, into: Any) -> None:  # noqa: ARG001
    """Tell the highest clock of a domain in MHz."""
    figures = workload.board(gpu)
    tops = (figures.graphics_mhz, figures.graphics_mhz, figures.memory_mhz, figures.graphics_mhz * 9 // 10)
    if not 0 <= domain < len(tops):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.value = tops[domain]


@p.call("nvmlDeviceGetPerformanceState", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def performance_state(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell the P-state: 0 at work; boards with GDDR idle at 8."""
    into.value = 0 if workload.board(gpu).hbm or lib.figures.activity(gpu, lib.now()) > 0 else 8


def reasons(lib: library.Library, gpu: machine.Gpu) -> int:
    """Return the clock event reasons as NVML's bits."""
    now = lib.now()
    if lib.figures.activity(gpu, now) <= 0:
        return _IDLE
    near_limit = lib.figures.power_mw(gpu, now) >= 1000 * _CAP_AT * 0.9 * workload.board(gpu).limit_watts
    return _SW_POWER_CAP if near_limit else 0


def _current_reasons(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    into.value = reasons(lib, gpu)


def _supported_reasons(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    into.value = _SUPPORTED_REASONS


for _name, _since in (("ClocksEventReasons", 535), ("ClocksThrottleReasons", 0)):
    for _kind, _body in (("Current", _current_reasons), ("Supported", _supported_reasons)):
        _enter = p.call(
            f"nvmlDeviceGet{_kind}{_name}", On.GPU, p.ULONGLONG_OUT, since=_since, on_mig=codes.NOT_SUPPORTED
        )
        _enter(_body)


def _application_clock(lib: library.Library, gpu: machine.Gpu, domain: int, into: Any) -> None:  # noqa: ARG001
    # Dropped from driver 590 on: a third way of being absent.
    if lib.machine.spec.driver_major >= 590:
        raise codes.Refused(codes.DEPRECATED)
    into.value = workload.board(gpu).graphics_mhz


p.call("nvmlDeviceGetApplicationsClock", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)(_application_clock)


@p.call("nvmlDeviceGetFanSpeed", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def fan(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """These boards have no fan."""
    raise codes.Refused(codes.NOT_SUPPORTED)
