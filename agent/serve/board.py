"""Where the newest snapshot and sample hang for everybody who serves them.

The daemon writes, readers read; both on the event loop's thread, so there is nothing to lock.
"""

from __future__ import annotations

from collections.abc import Callable

from agent import findings, measures
from agent.host import holders
from agent.mig import advertise
from agent.reconcile import snapshot as snapshots
from agent.serve import health
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
        self.advertised: advertise.Advertised | None = None
        self.given: holders.Given | None = None
        self._lasting: tuple[findings.Finding, ...] = ()
        self._subscribers: list[Callable[[], None]] = []

    def publish_snapshot(self, snapshot: snapshots.Snapshot) -> None:
        """Hang up a new snapshot."""
        self.snapshot = snapshot
        self.advertised, lasting = looked_at(snapshot)
        if snapshot.facts is not None or snapshot.node is None:
            self._lasting = lasting  # else nobody looked at the host, as while steps are carried out
        self.tally.note(snapshot)
        self._changed()

    def publish_sample(self, sample: measures.Sample) -> None:
        """Hang up a new sample."""
        self.sample = sample
        self._changed()

    def publish_given(self, given: holders.Given | None) -> None:
        """Hang up what a scheduler has given away. Nobody is told: it is shown with the next sample."""
        self.given = given

    @property
    def findings(self) -> tuple[findings.Finding, ...]:
        """What around the GPUs will hurt somebody, by the latest snapshot and sample."""
        return self._lasting + findings.measured(self.sample)

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


def looked_at(
    snapshot: snapshots.Snapshot | None,
) -> tuple[advertise.Advertised | None, tuple[findings.Finding, ...]]:
    """Return what schedulers will see of a snapshot's node, and what was found around it: made once a
    snapshot, as both cost a millisecond on a node full of instances."""
    if snapshot is None or snapshot.node is None:
        return None, ()
    seen = advertise.advertise(snapshot.node)
    if snapshot.facts is None:
        return seen, ()
    return seen, findings.find(snapshot.node, snapshot.facts, layout=snapshot.layout, seen=seen)


def verdict(snapshot: snapshots.Snapshot | None, sample: measures.Sample | None = None, *, now: float) -> health.Health:
    """Return the health of one look at a node, its findings included, where no loop has to turn."""
    _, noticed = looked_at(snapshot)
    return health.judge(snapshot, sample, now=now, loop_turned=now, noticed=noticed + findings.measured(sample))
