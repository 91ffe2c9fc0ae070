"""What one enforcement cycle knew, did and left: frozen, read by everything that serves or tells."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from agent import errors, records
from agent.host import facts as hosts
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans


class Phase(enum.Enum):
    """Where the node stands, in one word."""

    STARTING = "starting"
    WAITING = "waiting-for-driver"
    CONVERGED = "converged"
    DRIFTED = "drifted"
    APPLYING = "applying"
    BLOCKED = "blocked"
    REBOOT_PENDING = "reboot-pending"
    FAILED = "failed"


@records.dataclass(frozen=True, slots=True)
class Reason:
    """Why health or phase is not perfect: a stable code, a sentence, and the GPU it concerns."""

    code: str
    message: str
    gpu: str | None = None


@records.dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed on a GPU, and what became of that GPU: rolled back to what it was, or left
    as `remains` says."""

    uuid: str
    step: plans.Step | None
    message: str
    rolled_back: bool
    remains: str | None = None


@records.dataclass(frozen=True, slots=True)
class Outcome:
    """What was done: the steps that took effect per GPU (in order), and what failed."""

    done: tuple[tuple[str, tuple[plans.Step, ...]], ...] = ()
    failures: tuple[Failure, ...] = ()
    rolled_back: tuple[str, ...] = ()
    stopped: bool = False
    late: bool = False
    """Whether the cycle's time was over before all steps had begun."""

    @property
    def changed(self) -> bool:
        """Whether anything on the node changed."""
        return any(steps for _, steps in self.done)


@records.dataclass(frozen=True, slots=True)
class SettingsView:
    """The settings a cycle worked with, as far as readers need them: where they came from, their
    digest, and whether the newest documents were good. `values` tells for each key its value and where
    that came from (`agent.settings.shown`)."""

    sources: tuple[str, ...] = ()
    digest: str = ""
    valid: bool = True
    declared: bool = False
    problems: tuple[errors.Problem, ...] = ()
    values: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)


HISTORY_LENGTH = 50
"""How many cycles are remembered."""


@records.dataclass(frozen=True, slots=True)
class Past:
    """A cycle of the past in short: how it ended, what was done. `times` such cycles ran from `at` to
    `last_at` (Unix seconds)."""

    at: float
    last_at: float
    boot_id: str
    trigger: str
    phase: str
    steps: int
    reasons: tuple[str, ...] = ()
    times: int = 1

    def same(self, other: Past) -> bool:
        """Whether the other tells nothing new: same boot, phase and reasons, and nothing was done."""
        return other.steps == 0 and (self.boot_id, self.phase, self.reasons) == (
            other.boot_id,
            other.phase,
            other.reasons,
        )


def past(result: Snapshot, *, boot_id: str) -> Past:
    """Return a cycle's entry for the history."""
    done = result.outcome.done if result.outcome is not None else ()
    return Past(
        at=result.started,
        last_at=result.started,
        boot_id=boot_id,
        trigger=result.trigger,
        phase=result.phase.value,
        steps=sum(len(steps) for _, steps in done),
        reasons=tuple(f"{r.code}: {r.message}" for r in result.reasons[:10]),
    )


def write_history(history: tuple[Past, ...]) -> dict[str, object]:
    """Return the history as a document."""
    return {"version": 1, "cycles": [dataclasses.asdict(entry) for entry in history]}


def read_history(document: object) -> tuple[Past, ...]:
    """Read a history; what is not one counts as none, as nothing is decided by it."""
    try:
        cycles = document["cycles"]  # type: ignore[index]
        return tuple(Past(**{**entry, "reasons": tuple(entry["reasons"])}) for entry in cycles)[-HISTORY_LENGTH:]
    except (KeyError, TypeError):
        return ()


@records.dataclass(frozen=True, slots=True)
class Snapshot:
    """The node after a cycle. `node` is None while there is no driver; `driver_problem` says why.

    `generation` rises with every change of GPUs or instances. Times are Unix seconds;
    `duration` seconds. `trigger` is the word that woke the cycle. `facts` is what the host said of its
    GPUs' surroundings in this cycle, None where nobody looked.
    """

    phase: Phase
    cycle: int = 0
    generation: int = 0
    trigger: str = "start"
    started: float = 0.0
    duration: float = 0.0
    settings: SettingsView = SettingsView()
    layout: layouts.Layout = layouts.Layout()
    node: nodes.NodeState | None = None
    plan: plans.Plan = plans.Plan()
    outcome: Outcome | None = None
    reasons: tuple[Reason, ...] = ()
    driver_problem: str | None = None
    owner: str = "gpunode"
    gpus_expected: int | None = None
    simulated: str | None = None
    writes: bool = True
    last_success: float | None = None
    facts: hosts.HostFacts | None = None
    history: tuple[Past, ...] = ()
