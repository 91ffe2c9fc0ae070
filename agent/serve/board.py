"""Where the newest snapshot and sample hang for everybody who serves them.

The daemon writes, readers read; both on the event loop's thread, so there is nothing to lock.
"""

from __future__ import annotations

from collections.abc import Callable

from agent import measures
from agent.reconcile import snapshot as snapshots
from agent.serve import tally as tallies


class Board:
    """Holds the latest `snapshot` and `sample` (None before the first), and when the loop last turned.

    `version` rises with everything published. `loop_turned` is in Unix seconds: the daemon calls
    `turned(now)` about each second, and health calls it dead when that stops.
    """

    def __init__(self, *, now: float = 0.0) -> None:
        self.snapshot: snapshots.Snapshot | None = None
        self.sample: measures.Sample | None = None
        self.loop_turned = now
        self.started = now
        self.version = 0
        self.tally = tallies.Tally()
        self._subscribers: list[Callable[[], None]] = []

    def publish_snapshot(self, snapshot: snapshots.Snapshot) -> None:
        """Hang up a new snapshot."""
        self.snapshot = snapshot
        self.tally.note(snapshot)
        self._changed()

    def publish_sample(self, sample: measures.Sample) -> None:
        """Hang up a new sample."""
        self.sample = sample
        self._changed()

    def turned(self, now: float) -> None:
        """Note that the event loop still turns."""
        self.loop_turned = now

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after everything published; returns what ends that."""
        self._subscribers.append(callback)

        def end() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return end

    def _changed(self) -> None:
        self.version += 1
        for callback in tuple(self._subscribers):
            callback()
