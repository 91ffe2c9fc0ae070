"""Power, energy, temperatures, clocks and what holds the clocks back: of whole GPUs only.

The hardware measures none of these per instance, so an instance never has them: repeated on each
they would be summed into nonsense.
"""

from __future__ import annotations

from agent.serve.families.family import Family, per_gpu, per_gpu_keyed

FAMILIES: tuple[Family, ...] = (
    per_gpu(
        "gpu_power_watts",
        "Power drawn by the board, averaged over a second where the driver does that.",
        lambda gpu: gpu.power_watts,
        source="NVML_FI_DEV_POWER_AVERAGE or nvmlDeviceGetPowerUsage",
        unit="watts",
    ),
    per_gpu(
        "gpu_power_limit_watts",
        "Power limit in force.",
        lambda gpu: gpu.power_limit_watts,
        source="nvmlDeviceGetEnforcedPowerLimit",
        unit="watts",
    ),
    per_gpu(
        "gpu_energy_joules_total",
        "Energy used since the driver was loaded.",
        lambda gpu: gpu.energy_joules,
        source="nvmlDeviceGetTotalEnergyConsumption",
        where="Volta and later",
        unit="joules",
        kind="counter",
    ),
    per_gpu_keyed(
        "gpu_temperature_celsius",
        "Temperature by sensor.",
        lambda gpu: gpu.temperatures,
        label="sensor",
        source="nvmlDeviceGetTemperature, NVML_FI_DEV_MEMORY_TEMP",
        unit="celsius",
    ),
    per_gpu_keyed(
        "gpu_temperature_limit_celsius",
        "Temperature at which the GPU slows down or shuts down.",
        lambda gpu: gpu.temperature_limits,
        label="threshold",
        source="nvmlDeviceGetTemperatureThreshold",
        unit="celsius",
    ),
    per_gpu_keyed(
        "gpu_clock_hertz",
        "Clock by domain.",
        lambda gpu: gpu.clocks,
        label="domain",
        source="nvmlDeviceGetClockInfo",
        unit="hertz",
    ),
    per_gpu_keyed(
        "gpu_clock_max_hertz",
        "Highest clock by domain.",
        lambda gpu: gpu.clocks_max,
        label="domain",
        source="nvmlDeviceGetMaxClockInfo",
        unit="hertz",
    ),
    per_gpu_keyed(
        "gpu_clock_event_active",
        "Whether the clocks are held back now, by reason.",
        lambda gpu: gpu.clock_events,
        label="reason",
        source="nvmlDeviceGetCurrentClocksEventReasons",
    ),
    per_gpu_keyed(
        "gpu_clock_event_seconds_total",
        "Time for which the clocks were held back, by reason.",
        lambda gpu: gpu.clock_event_seconds,
        label="reason",
        source="NVML_FI_DEV_PERF_POLICY_* and NVML_FI_DEV_CLOCKS_EVENT_REASON_*",
        unit="seconds",
        kind="counter",
    ),
)
