"""What one visit of the sampler brings: plain figures in base units, None where unsupported.

Memory and activity belong to the GPU instance; processes and SM counts to the compute instance.
Ratios are 0..1, temperatures Celsius, power watts, energy joules, clocks hertz, times Unix seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agent import records


@records.dataclass(frozen=True, slots=True)
class Memory:
    """Framebuffer in bytes. `reserved` is None where the driver does not list it apart."""

    total: int
    used: int
    free: int
    reserved: int | None = None


@records.dataclass(frozen=True, slots=True)
class Activity:
    """What GPM measured over the last window, each 0..1 or None where not measured."""

    graphics: float | None = None
    sm: float | None = None
    sm_occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    fp64: float | None = None
    fp32: float | None = None
    fp16: float | None = None
    integer: float | None = None


@records.dataclass(frozen=True, slots=True)
class ComputeSample:
    """A compute instance: identity and what belongs to it alone."""

    id: int
    uuid: str | None
    profile: str
    multiprocessors: int
    slices: int
    processes: int | None = None


@records.dataclass(frozen=True, slots=True)
class InstanceSample:
    """A GPU instance: identity, memory (once, however many compute instances share it), activity."""

    id: int
    profile: str
    start: int
    size: int
    first_seen: float
    memory: Memory | None = None
    bar1_total: int | None = None
    bar1_used: int | None = None
    activity: Activity | None = None
    memory_slices: int | None = None
    engines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ecc_sram_uncorrected: int | None = None
    compute: tuple[ComputeSample, ...] = ()


@records.dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU at one visit. `up` False: it did not answer (lost, hung); then only identity is filled.

    Keyed mappings: `temperatures` by sensor, `clocks`/`clocks_max` by domain (graphics, sm, memory,
    video), `clock_events` by reason, `clock_event_seconds` likewise, `ecc` by (severity, memory,
    lifetime), `remap_banks` by availability, `creatable` by profile name, `temperature_limits` by
    threshold.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    up: bool
    taken: float
    minor: int | None = None
    architecture: str | None = None
    vbios_version: str | None = None
    problem: str | None = None
    memory: Memory | None = None
    bar1_total: int | None = None
    bar1_used: int | None = None
    utilization: Mapping[str, float] = dataclasses.field(default_factory=dict)
    activity: Activity | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperatures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    temperature_limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    clocks_max: Mapping[str, float] = dataclasses.field(default_factory=dict)
    performance_state: int | None = None
    clock_events: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    clock_event_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pcie_replays: int | None = None
    pcie_transmit_bytes: int | None = None
    pcie_receive_bytes: int | None = None
    pcie_link_generation: int | None = None
    pcie_link_width: int | None = None
    nvlink_transmit_bytes: int | None = None
    nvlink_receive_bytes: int | None = None
    nvlinks_active: int | None = None
    ecc: Mapping[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
    remapped_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remap_banks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    recovery_action: str | None = None
    fabric_state: str | None = None
    persistence: bool | None = None
    processes: int | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None
    mig_instances_max: int | None = None
    creatable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    instances: tuple[InstanceSample, ...] = ()


@records.dataclass(frozen=True, slots=True)
class Collector:
    """How one collector's last visit went."""

    success: bool
    duration: float
    last_success: float | None


@records.dataclass(frozen=True, slots=True)
class Sample:
    """All GPUs, at about one moment. `generation` is the topology the figures belong to. `xid_errors` and
    `xid_last` (Unix seconds) are by GPU UUID, GPU instance id, compute instance id ("" = the whole GPU), XID."""

    taken: float
    generation: int
    nvml_up: bool
    gpus: tuple[GpuSample, ...] = ()
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    nvml_initializations: int = 0
    collectors: Mapping[str, Collector] = dataclasses.field(default_factory=dict)
    event_watch_up: bool | None = None
    xid_errors: Mapping[tuple[str, str, str, int], int] = dataclasses.field(default_factory=dict)
    xid_last: Mapping[tuple[str, str, str, int], float] = dataclasses.field(default_factory=dict)


@records.dataclass(frozen=True, slots=True)
class Versions:
    """Versions of driver, library and CUDA; "" where not told."""

    driver: str
    nvml: str
    cuda: str


@records.dataclass(frozen=True, slots=True)
class Event:
    """An NVML event. `kind` is "xid" or "mig-config-change"; ids are None for the whole GPU."""

    kind: str
    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    xid: int | None = None
