"""Where the sampler gets its figures; `agent.nvml.gpus` is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agent import measures


class Source(Protocol):
    """GPUs to be measured. `measure` runs in the GPU's own lane and never raises for one GPU: a lost
    or hung one comes back with `up` False."""

    def known(self) -> tuple[str, ...]:
        """UUIDs of the GPUs of this node, by index, without touching hardware."""

    def versions(self) -> measures.Versions | None:
        """Versions read when the session opened; None while there is no driver."""

    async def measure(self, uuid: str, *, slow: bool) -> measures.GpuSample:
        """Visit one GPU once. `slow` asks for the slow groups too (ECC, limits, links, rows)."""

    def watch(self, deliver: Callable[[measures.Event], None]) -> Callable[[], None]:
        """Call `deliver` (from the events lane's thread) for every event; returns a stop function."""
