"""What is counted over the life of the daemon, as a snapshot only tells of its own cycle."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from agent.reconcile import snapshot as snapshots

RESULTS = ("success", "failure", "refused")
"""How a cycle can end: in force; something failed (a step, the settings, the driver); not allowed to act."""

_RESULT = {
    snapshots.Phase.CONVERGED: "success",
    snapshots.Phase.FAILED: "failure",
    snapshots.Phase.WAITING: "failure",
    snapshots.Phase.BLOCKED: "refused",
    snapshots.Phase.DRIFTED: "refused",
    snapshots.Phase.REBOOT_PENDING: "refused",
}


class Tally:
    """Counts cycles by their end and steps by kind and result, from the snapshots it is shown."""

    def __init__(self) -> None:
        self._cycles: collections.Counter[str] = collections.Counter(dict.fromkeys(RESULTS, 0))
        self._steps: collections.Counter[tuple[str, str]] = collections.Counter()
        self._last: int | None = None

    @property
    def cycles(self) -> Mapping[str, int]:
        """Cycles by result (`RESULTS`), each key present from the start."""
        return dict(self._cycles)

    @property
    def steps(self) -> Mapping[tuple[str, str], int]:
        """Steps by (kind, "success" or "failure")."""
        return dict(self._steps)

    def note(self, snapshot: snapshots.Snapshot) -> None:
        """Count a snapshot's cycle once; snapshots published while a cycle runs are not its end."""
        result = _RESULT.get(snapshot.phase)
        if result is None or snapshot.cycle == self._last:
            return
        self._last = snapshot.cycle
        self._cycles[result] += 1
        if snapshot.outcome is None:
            return
        for _, steps in snapshot.outcome.done:
            for step in steps:
                self._steps[step.kind, "success"] += 1
        for failure in snapshot.outcome.failures:
            if failure.step is not None:
                self._steps[failure.step.kind, "failure"] += 1
