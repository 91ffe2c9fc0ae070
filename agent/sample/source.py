"""Where the sampler gets its figures; `agent.nvml.gpus` is the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from agent.sample import values


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """Versions of driver, library and CUDA; "" where not told."""

    driver: str
    nvml: str
    cuda: str


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An NVML event. `kind` is "xid" or "mig-config-change"; ids are None for the whole GPU."""

    kind: str
    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    xid: int | None = None


class Source(Protocol):
    """GPUs to be measured. `measure` runs in the GPU's own lane and never raises for one GPU: a lost
    or hung one comes back with `up` False."""

    def known(self) -> tuple[str, ...]:
        """UUIDs of the GPUs of this node, by index, without touching hardware."""

    def versions(self) -> Versions | None:
        """Versions read when the session opened; None while there is no driver."""

    async def measure(self, uuid: str, *, slow: bool) -> values.GpuSample:
        """Visit one GPU once. `slow` asks for the slow groups too (ECC, limits, links, rows)."""

    def watch(self, deliver: Callable[[Event], None]) -> Callable[[], None]:
        """Call `deliver` (from the events lane's thread) for every event; returns a stop function."""
