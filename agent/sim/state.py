"""What has happened on a simulated node: plain mutable records, and their JSON form.

Only `agent.sim.machine` changes them, under the lock of the GPU they belong to and within
`store.change()`, so that a state file is never half of a change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VERSION = 1
_KEPT_EVENTS = 256


@dataclasses.dataclass(slots=True)
class ComputeInstance:
    """A compute instance; `serial` tells it from a later one with the same ids, `mig_index` is the
    index of its MIG device."""

    id: int
    profile: int
    start: int
    size: int
    mig_index: int
    serial: int


@dataclasses.dataclass(slots=True)
class GpuInstance:
    """A GPU instance with its compute instances by id."""

    id: int
    profile: int
    start: int
    size: int
    serial: int
    compute: dict[int, ComputeInstance] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Process:
    """A process on a GPU. `memory_mib` and `activity` (0..1) are what it moves around; ids are None on
    a GPU without MIG. `owner` is (pid, start time) of the real process whose end ends this one."""

    pid: int
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    memory_mib: int
    activity: float
    started: float
    kind: str = "compute"
    owner: tuple[int, int] | None = None


@dataclasses.dataclass(slots=True)
class Holder:
    """Somebody who keeps a device or capability file open, without being a CUDA process."""

    pid: int
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    owner: tuple[int, int] | None = None


@dataclasses.dataclass(slots=True)
class Gpu:
    """One GPU. `gone`: it has left the bus, as if it had been pulled out. `energy_mj` and `activity_seconds`
    are what ended processes have added up."""

    mig: bool = False
    pending: bool = False
    lost: bool = False
    gone: bool = False
    instances: dict[int, GpuInstance] = dataclasses.field(default_factory=dict)
    processes: list[Process] = dataclasses.field(default_factory=list)
    holders: list[Holder] = dataclasses.field(default_factory=list)
    compute_mode: int = 0
    persistence: bool = False
    energy_mj: int = 0
    activity_seconds: float = 0.0
    ecc: dict[str, int] = dataclasses.field(default_factory=dict)
    remapped_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    replays: int = 0
    reset_required: bool = False


def users(gpu: Gpu, /) -> list[Process | Holder]:
    """Return everybody who is on a GPU: processes, then holders."""
    return [*gpu.processes, *gpu.holders]


@dataclasses.dataclass(slots=True)
class Session:
    """A process that has the driver open: (pid, start time) and one token an opened library."""

    pid: int
    start: int
    token: str


@dataclasses.dataclass(slots=True)
class Fault:
    """A failure on order. `call` is a C name or a pattern with `*`; `skip` calls pass, then `times`
    are hit (0: for ever). `seen` counts matching calls. A hang ends when `released`."""

    id: int
    call: str
    action: str
    code: int = 999
    seconds: float = 0.0
    gpu: int | None = None
    skip: int = 0
    times: int = 1
    seen: int = 0
    released: bool = False


@dataclasses.dataclass(slots=True)
class Event:
    """Something the driver tells event sets: `kind` is NVML's event bit, `data` the XID."""

    number: int
    gpu: int
    kind: int
    data: int
    gpu_instance: int
    compute_instance: int


@dataclasses.dataclass(slots=True)
class Node:
    """The node. `booted` and the times of processes are on the node's clock (Unix seconds)."""

    name: str
    digest: str
    boot_id: str
    booted: float
    gpus: list[Gpu]
    boots: int = 1
    serial: int = 0
    mutations: int = 0
    units: dict[str, bool] = dataclasses.field(default_factory=dict)
    sessions: list[Session] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    event_number: int = 0
    reset_possible: bool = True
    reboot_requested: str | None = None
    resets: int = 0
    kernel_log: list[str] = dataclasses.field(default_factory=list)

    def next_serial(self) -> int:
        """Return a number never given before on this node."""
        self.serial += 1
        return self.serial

    def emit(self, gpu: int, kind: int, data: int, *, instance: int, compute: int) -> None:
        """Add an event; only the last few hundred are kept."""
        self.event_number += 1
        self.events.append(Event(self.event_number, gpu, kind, data, instance, compute))
        del self.events[:-_KEPT_EVENTS]


def to_json(node: Node, /) -> dict[str, Any]:
    """Return `node` as JSON values; integer keys become text."""
    return {"format": "gpunode-simulated-node", "version": VERSION, **dataclasses.asdict(node)}


def from_json(document: dict[str, Any], /) -> Node:
    """Return the node of `to_json`. Raises KeyError, TypeError or ValueError when it is none."""
    fields = dict(document)
    if fields.pop("format", None) != "gpunode-simulated-node":
        raise ValueError("it is no state of a simulated node")
    if (version := fields.pop("version", None)) != VERSION:
        raise ValueError(f"its version is {version}, this gpunode writes {VERSION}")
    fields["gpus"] = [_gpu(row) for row in fields["gpus"]]
    fields["sessions"] = [Session(**row) for row in fields["sessions"]]
    fields["faults"] = [Fault(**row) for row in fields["faults"]]
    fields["events"] = [Event(**row) for row in fields["events"]]
    return Node(**fields)


def _gpu(row: dict[str, Any]) -> Gpu:
    fields = dict(row)
    fields["instances"] = {int(number): _instance(gi) for number, gi in fields["instances"].items()}
    fields["processes"] = [Process(**_owned(p)) for p in fields["processes"]]
    fields["holders"] = [Holder(**_owned(h)) for h in fields["holders"]]
    return Gpu(**fields)


def _owned(row: dict[str, Any]) -> dict[str, Any]:
    owner = row.get("owner")
    return {**row, "owner": None if owner is None else (owner[0], owner[1])}


def _instance(row: dict[str, Any]) -> GpuInstance:
    fields = dict(row)
    fields["compute"] = {int(number): ComputeInstance(**ci) for number, ci in fields["compute"].items()}
    return GpuInstance(**fields)
