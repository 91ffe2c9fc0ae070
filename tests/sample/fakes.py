"""A source of figures that does what it is told: answers, takes its time, hangs, fails."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from agent import errors, measures


def gpu(index: int = 0, **more: object) -> measures.GpuSample:
    base = measures.GpuSample(
        index=index,
        uuid=f"GPU-{index}",
        pci_bus_id=f"0000:{index:02x}:00.0",
        name="H100",
        up=True,
        taken=0.0,
        minor=index,
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def instance(number: int, **more: object) -> measures.InstanceSample:
    base = measures.InstanceSample(id=number, profile="1g.10gb", start=number, size=1, first_seen=0.0)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


class FakeSource:
    """Stands where NVML's GPUs stand. `visits` lists (uuid, slow) in the order they were begun.

    `hold(uuid)` makes that GPU's visits wait until `let_go(uuid)`.
    """

    def __init__(self, count: int = 2) -> None:
        self.gpus = {f"GPU-{index}": gpu(index) for index in range(count)}
        self.driver: measures.Versions | None = measures.Versions("550.90.07", "12.550.90.07", "12.4")
        self.visits: list[tuple[str, bool]] = []
        self.under_way = 0
        self.begun = asyncio.Event()
        self.most_at_once = 0
        self.errors: dict[str, Exception] = {}
        self.watch_error: errors.GpunodeError | None = None
        self.watchers: list[Callable[[measures.Event], None]] = []
        self._held: dict[str, asyncio.Event] = {}

    def known(self) -> tuple[str, ...]:
        return tuple(self.gpus)

    def versions(self) -> measures.Versions | None:
        return self.driver

    def hold(self, uuid: str) -> None:
        self._held[uuid] = asyncio.Event()

    def let_go(self, uuid: str) -> None:
        self._held.pop(uuid).set()

    async def measure(self, uuid: str, *, slow: bool) -> measures.GpuSample:
        self.visits.append((uuid, slow))
        self.under_way += 1
        self.begun.set()
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            held = self._held.get(uuid)
            if held is not None:
                await held.wait()
            else:
                await asyncio.sleep(0)
            if uuid in self.errors:
                raise self.errors[uuid]
            return self.gpus[uuid]
        finally:
            self.under_way -= 1

    def watch(self, deliver: Callable[[measures.Event], None]) -> Callable[[], None]:
        if self.watch_error is not None:
            raise self.watch_error
        self.watchers.append(deliver)
        return lambda: self.watchers.remove(deliver)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
