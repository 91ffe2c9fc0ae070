"""XIDs as counters: what NVML's events and the kernel's log reported since gpunode started.

Both tell of most XIDs and each of some alone (62, 79, 119 and 120 are known to reach only the log),
so the two are matched: the driver's event counts at once, as it knows the instance; a line of the
log waits a moment and counts only if no event has told of the same.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

FATAL = (48, 62, 64, 74, 79, 94, 95, 119, 120)
"""XIDs after which a GPU or instance is not to be trusted: their series exist at 0 from the start, so
that `increase()` sees the first one."""
FATAL_OF_INSTANCES = (48, 94, 95)
"""Those of them that the driver tells of an instance: memory errors, contained or not."""
HOLD = 2.0
"""Seconds a line of the kernel's log waits for the driver's event."""
SAME_WITHIN = 5.0
"""Seconds within which an event and a line of the log about one XID of one GPU are the same error."""

Key = tuple[str, str, str, int]
"""GPU UUID, GPU instance id and compute instance id ("" = the whole GPU), XID."""


@dataclasses.dataclass(slots=True)
class _Report:
    """`doubt` seconds may be wrong about `when`; `heard` is when gpunode learned of it."""

    when: float
    key: Key
    doubt: float = 0.0
    heard: float = 0.0


class Ledger:
    """Counts XIDs. Use from one thread; times are Unix seconds."""

    def __init__(self) -> None:
        self._counts: collections.Counter[Key] = collections.Counter()
        self._last: dict[Key, float] = {}
        self._events: list[_Report] = []
        self._held: list[_Report] = []

    def event(
        self,
        uuid: str,
        xid: int,
        *,
        when: float,
        gpu_instance_id: int | None = None,
        compute_instance_id: int | None = None,
    ) -> None:
        """Count what an NVML event reported; a line of the log about the same is then not counted."""
        key = (uuid, _word(gpu_instance_id), _word(compute_instance_id), xid)
        self._count(key, when)
        match = _match(self._held, key, when)
        if match is not None:
            self._held.remove(match)
        else:
            self._events.append(_Report(when, key))

    def kernel(
        self,
        uuid: str,
        xid: int,
        *,
        when: float,
        gpu_instance_id: int | None = None,
        compute_instance_id: int | None = None,
        heard: float | None = None,
        doubt: float = 0.0,
    ) -> None:
        """Note what the kernel's log reported; `HOLD` after it was `heard` (else: after `when`) it counts,
        unless an event tells of the same. `when` may be `doubt` seconds off."""
        key = (uuid, _word(gpu_instance_id), _word(compute_instance_id), xid)
        match = _match(self._events, key, when, doubt)
        if match is not None:
            self._events.remove(match)
        else:
            self._held.append(_Report(when, key, doubt, when if heard is None else heard))

    def known(
        self,
        uuid: str,
        xid: int,
        *,
        when: float,
        gpu_instance_id: int | None = None,
        compute_instance_id: int | None = None,
    ) -> None:
        """Note when an XID was last reported that an earlier gpunode has counted."""
        self._report((uuid, _word(gpu_instance_id), _word(compute_instance_id), xid), when)

    def settle(self, now: float) -> None:
        """Count the lines of the log that waited long enough, and forget events too old to match."""
        due = [report for report in self._held if now - report.heard >= HOLD]
        self._held = [report for report in self._held if now - report.heard < HOLD]
        for report in due:
            self._count(report.key, report.when)
        self._events = [report for report in self._events if now - report.when < SAME_WITHIN]

    def forget(self, uuid: str, gpu_instance_id: int) -> None:
        """Drop what was reported of a GPU instance that is there no more; another one may get its id."""
        gone = uuid, _word(gpu_instance_id)
        for key in [key for key in self._last if key[:2] == gone]:
            del self._last[key]
            self._counts.pop(key, None)

    def errors(self, uuids: Iterable[str], devices: Iterable[tuple[str, int, int]] = ()) -> dict[Key, int]:
        """Return counts by key, with 0 where none was reported: for the fatal XIDs of the GPUs `uuids`, and
        of the compute instances `devices` (GPU UUID, GPU instance id, compute instance id)."""
        counts = {(uuid, "", "", xid): 0 for uuid in uuids for xid in FATAL}
        counts |= {(uuid, str(gi), str(ci), xid): 0 for uuid, gi, ci in devices for xid in FATAL_OF_INSTANCES}
        counts.update(self._counts)
        return counts

    def last(self) -> dict[Key, float]:
        """Return when each XID was last reported of each GPU and instance."""
        return dict(self._last)

    def _count(self, key: Key, when: float) -> None:
        self._counts[key] += 1
        self._report(key, when)

    def _report(self, key: Key, when: float) -> None:
        self._last[key] = max(when, self._last.get(key, when))


def _word(number: int | None) -> str:
    return "" if number is None else str(number)


def _match(reports: Iterable[_Report], key: Key, when: float, doubt: float = 0.0) -> _Report | None:
    """Return a report about the same XID of the same GPU, near enough in time."""
    for report in reports:
        same = report.key[0] == key[0] and report.key[3] == key[3]
        if same and abs(report.when - when) <= SAME_WITHIN + report.doubt + doubt:
            return report
    return None
