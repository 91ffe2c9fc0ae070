"""What one enforcement cycle knew, did and left: frozen, read by everything that serves or tells."""

from __future__ import annotations

import dataclasses
import enum

from agent import errors
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


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why health or phase is not perfect: a stable code, a sentence, and the GPU it concerns."""

    code: str
    message: str
    gpu: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed on a GPU, and what became of that GPU: rolled back to what it was, or left
    as `remains` says."""

    uuid: str
    step: plans.Step | None
    message: str
    rolled_back: bool
    remains: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What was done: the steps that took effect per GPU (in order), and what failed."""

    done: tuple[tuple[str, tuple[plans.Step, ...]], ...] = ()
    failures: tuple[Failure, ...] = ()
    rolled_back: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def changed(self) -> bool:
        """Whether anything on the node changed."""
        return any(steps for _, steps in self.done)


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsView:
    """The settings a cycle worked with, as far as readers need them: where they came from, their
    digest, and whether the newest documents were good."""

    sources: tuple[str, ...] = ()
    digest: str = ""
    valid: bool = True
    declared: bool = False
    problems: tuple[errors.Problem, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The node after a cycle. `node` is None while there is no driver; `driver_problem` says why.

    `generation` rises with every change of GPUs or instances. Times are Unix seconds;
    `duration` seconds. `trigger` is the word that woke the cycle.
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
