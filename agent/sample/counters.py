"""What must outlive a sample: counters folded over the driver's wraps, and when instances were first seen.

A counter that wraps looks to Prometheus like one that was reset, and loses what it counted before
the wrap; a GPU instance made again under its old ids looks like the old one. Both need memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from agent import measures

_WORD = 2**32
"""Where the byte counters of the PCIe link may wrap."""


class Folded:
    """Adds up counters that may wrap. A fall from the upper half of the range to the lower is a wrap;
    any other fall is a counter that started anew (reset, driver reload), and is passed on as it is."""

    def __init__(self, *, wrap: int = _WORD) -> None:
        self._wrap = wrap
        self._raw: dict[tuple[str, str], int] = {}
        self._offset: dict[tuple[str, str], int] = {}

    def fold(self, key: tuple[str, str], raw: int) -> int:
        """Return the value of the counter `key`, all its wraps added."""
        last = self._raw.get(key)
        self._raw[key] = raw
        if last is not None and raw < last:
            if last < self._wrap and last >= self._wrap // 2 > raw:
                self._offset[key] = self._offset.get(key, 0) + self._wrap
            else:
                self._offset.pop(key, None)
        return raw + self._offset.get(key, 0)

    def pcie(self, gpu: measures.GpuSample) -> measures.GpuSample:
        """Return the sample with its PCIe byte counters folded."""
        sent, received = gpu.pcie_transmit_bytes, gpu.pcie_receive_bytes
        if sent is None and received is None:
            return gpu
        return dataclasses.replace(
            gpu,
            pcie_transmit_bytes=None if sent is None else self.fold((gpu.uuid, "transmit"), sent),
            pcie_receive_bytes=None if received is None else self.fold((gpu.uuid, "receive"), received),
        )


class FirstSeen:
    """When each GPU instance was first seen, by (GPU, id) and what it is.

    An instance that was away in one visit, or that has another profile or place, is a new one. `gone` is
    told of each one (GPU UUID, id) that has ended, also where a new one has its id already.
    """

    def __init__(self, clock: Callable[[], float], gone: Callable[[str, int], None] = lambda _, __: None) -> None:
        self._clock = clock
        self._gone = gone
        self._seen: dict[str, dict[int, tuple[tuple[str, int, int], float]]] = {}

    def forget(self, uuid: str, gpu_instance_id: int | None = None) -> None:
        """Take one instance (or all of a GPU) for new at its next visit, as it may have been made again."""
        seen = self._seen.get(uuid, {})
        for number in [n for n in seen if gpu_instance_id in (None, n)]:
            del seen[number]
            self._gone(uuid, number)

    def renew(self, uuid: str, start: int, since: float) -> None:
        """Take the instance at a place for new if it was first seen before `since` (Unix seconds): then it
        was made again, and may look the same."""
        seen = self._seen.get(uuid, {})
        for number in [n for n, (shape, first) in seen.items() if shape[1] == start and first < since]:
            self.forget(uuid, number)

    def date(self, gpu: measures.GpuSample) -> measures.GpuSample:
        """Return the sample of a GPU that answered with its instances' `first_seen` filled in."""
        if not gpu.up:
            return gpu
        before = self._seen.get(gpu.uuid, {})
        now: dict[int, tuple[tuple[str, int, int], float]] = {}
        for instance in gpu.instances:
            shape = (instance.profile, instance.start, instance.size)
            known = before.get(instance.id)
            now[instance.id] = known if known is not None and known[0] == shape else (shape, self._clock())
        for number in [n for n, entry in before.items() if now.get(n) is not entry]:
            self._gone(gpu.uuid, number)
        self._seen[gpu.uuid] = now
        if not gpu.instances:
            return gpu
        instances = tuple(dataclasses.replace(i, first_seen=now[i.id][1]) for i in gpu.instances)
        return dataclasses.replace(gpu, instances=instances)
