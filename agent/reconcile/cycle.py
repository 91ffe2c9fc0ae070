"""One enforcement cycle: read what is wanted, look at what is, plan, act where one may, look again.

Everything it touches is handed in (`Surroundings`), so that the daemon, `apply`, `plan` and the
tests run the same code. What must outlive a cycle within the process is in `Memory`; what must
outlive the process is in files under the machine's /run and /var/lib.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent import errors, log, records, threads
from agent.host import facts as hosts
from agent.host import files, pci
from agent.host import machine as machines
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.reconcile import apply, reboots, snapshot
from agent.reconcile import gpus as doors
from agent.settings import model, resolve, shown

PASSES = 4
"""How often a cycle plans again after acting: mode, then profiles told only with MIG on, then a spare."""
RECHECK = 0.5
"""Seconds for which a look at who uses a GPU is good enough to destroy something on it."""
GLANCE = 0.1
"""Seconds for which it is believed that gpunode may still write."""
DEADLINE = 240.0
"""Seconds that a cycle may act: no step begins after them."""
IN_FORCE = "/run/gpunode/in-force.json"
INDEXES = "/var/lib/gpunode/indexes.json"
REBOOTS = "/var/lib/gpunode/reboots.json"
HISTORY = "/var/lib/gpunode/history.json"


class Intent(enum.Enum):
    """What the caller wants of a cycle."""

    LOOK = "look"
    """Never act: `plan`, `status`."""
    APPLY = "apply"
    """An operator asks for the layout now."""
    DAEMON = "daemon"
    """Act as `enforcement` says."""


@records.dataclass(frozen=True, slots=True)
class Ownership:
    """Whose layout it is. `may_write` False stops every act; `why` and `takeover` are for people."""

    owner: str = "gpunode"
    may_write: bool = True
    code: str = "owner"
    why: str = ""
    takeover: str | None = None


@dataclasses.dataclass(slots=True)
class Memory:
    """What cycles of one process hand on to the next."""

    settings: model.Settings | None = None
    cycle: int = 0
    generation: int = 0
    topology: str = ""
    history: tuple[snapshot.Past, ...] | None = None
    last_success: float | None = None


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Everything a cycle works with.

    `load()` reads the settings (raises SettingsError). `holders(node)` completes a state with who
    uses what. `ownership(settings, node, layout)` decides whose layout it is. `hindrance()` is a sentence
    when nothing may be written at all (kill switch, lock, not root), with its code, asked between steps too. `clock()`
    (Unix seconds) and `monotonic()` come from outside. `changed()` runs after a change (hooks).
    `pause`/`resume` hold the sampler off around a reset. `facts(node)` looks at the host around the GPUs
    (it blocks, and runs in a thread). `settle` and `reset_again` are seconds: before settings that are bad
    are read again, and before a refused reset is tried again.
    """

    gpus: doors.Gpus
    machine: machines.Machine
    load: Callable[[], model.Settings]
    clock: Callable[[], float]
    monotonic: Callable[[], float] = time.monotonic
    holders: Callable[[nodes.NodeState], Awaitable[nodes.NodeState]]
    ownership: Callable[[model.Settings, nodes.NodeState, layouts.Layout], Ownership] = lambda _s, _n, _l: Ownership()
    hindrance: Callable[[], tuple[str, str] | None] = lambda: None
    machine_id: Callable[[], str] = lambda: "unknown"
    any_hung: Callable[[], bool] = lambda: False
    expected: Callable[[], int | None] = lambda: None
    pause: Callable[[], Awaitable[None]] | None = None
    resume: Callable[[], Awaitable[None]] | None = None
    changed: Callable[[model.Settings], Awaitable[tuple[snapshot.Reason, ...]]] | None = None
    facts: Callable[[nodes.NodeState], hosts.HostFacts] | None = None
    progress: Callable[[str], None] = lambda _: None
    announce: Callable[[snapshot.Snapshot], None] = lambda _: None
    memory: Memory = dataclasses.field(default_factory=Memory)
    force: bool = False
    keep_history: bool = False
    settle: float = 0.0
    reset_again: float = 0.0


@records.dataclass(frozen=True, slots=True)
class Look:
    """The node as seen with the settings at hand, and the plan that follows."""

    node: nodes.NodeState
    layout: layouts.Layout
    plan: plans.Plan
    ownership: Ownership
    problems: tuple[errors.Problem, ...]
    gone: tuple[plans.Blocked, ...] = ()
    """Why layouts of cards that have left the bus cannot be brought about."""


def digest(layout: layouts.Layout, *, disable_unlisted: bool = False) -> str:
    """Return a short fingerprint of what is wanted, the same whatever document declared it. What is to
    become of the GPUs that no layout names belongs to it."""
    bare = [dataclasses.replace(gpu, origin="") for gpu in layout.gpus]
    text = repr(sorted(bare, key=lambda g: g.uuid)) + (" and no MIG elsewhere" if disable_unlisted else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _target(settings: model.Settings, layout: layouts.Layout) -> str:
    return digest(layout, disable_unlisted=settings.unlisted_gpus == "disable")


def policy(
    settings: model.Settings, node: nodes.NodeState, *, force: bool, any_hung: bool = False, switched: bool = False
) -> plans.Policy:
    """Return what a plan may do under these settings on a node in this state.

    A reboot ends whatever runs on any GPU; a reset of one GPU is felt by all that NVSwitches (`switched`)
    join with it. Neither is allowed while somebody uses one of those.
    """
    quiet = node.serving is None or settings.live_mode_change
    busy = any(plans.users(gpu.in_use, force=force) for gpu in node.gpus)
    return plans.Policy(
        reset="reset" in settings.mode_change and quiet and not any_hung and not (switched and busy),
        reboot="reboot" in settings.mode_change and quiet and not busy,
        force=force,
        disable_unlisted=settings.unlisted_gpus == "disable",
    )


async def look(around: Surroundings, settings: model.Settings) -> Look:
    """Observe and plan without acting. Raises DriverError, or SettingsError when the layout cannot be."""
    node = await around.holders(await around.gpus.observe())
    remembered = _remembered_indexes(around.machine)
    found = resolve.resolve(settings, node, remembered=remembered, expected=around.expected())
    ownership = around.ownership(settings, node, found.layout)
    plan = plans.compute(
        found.layout,
        node,
        policy(settings, node, force=around.force, any_hung=around.any_hung(), switched=pci.switched(around.machine)),
    )
    if found.blocked:
        plan = dataclasses.replace(
            plan,
            gpus=tuple(
                dataclasses.replace(gpu, steps=(), blocked=found.blocked[gpu.uuid])
                if gpu.uuid in found.blocked
                else gpu
                for gpu in plan.gpus
            ),
        )
    gone = tuple(blocked for key, blocked in found.blocked.items() if node.gpu(key) is None)
    return Look(node=node, layout=found.layout, plan=plan, ownership=ownership, problems=found.problems, gone=gone)


async def run_cycle(
    around: Surroundings,
    *,
    intent: Intent,
    trigger: str,
    stop: Callable[[], bool] = lambda: False,
    seen: Look | None = None,
) -> snapshot.Snapshot:
    """Run one cycle and return what it knew, did and left. Raises nothing the operator can cause:
    bad settings and a missing driver are in the snapshot. `seen` is a look taken just before, which
    then is not taken again."""
    memory = around.memory
    memory.cycle += 1
    started = around.clock()
    base = snapshot.Snapshot(
        phase=snapshot.Phase.STARTING,
        cycle=memory.cycle,
        generation=memory.generation,
        trigger=trigger,
        started=started,
        simulated=around.machine.simulated,
        gpus_expected=around.expected(),
        last_success=memory.last_success,
    )
    settings, view, reasons = await _settings(around)
    if settings is None:
        return await _without_settings(around, base, view, reasons)
    try:
        if seen is None:
            settings, view, more, seen = await _look(around, settings, view)
            reasons += more
        if view.valid:
            memory.settings = settings
    except errors.SettingsError as cause:
        view = dataclasses.replace(view, valid=False, problems=(*view.problems, *cause.problems))
        reasons += tuple(snapshot.Reason("settings-invalid", str(p)) for p in cause.problems if p.is_error)
        return await _without_settings(around, base, view, reasons)
    except errors.DriverError as cause:
        # Without GPUs nobody can tell whether these settings are possible: they replace no good ones yet.
        memory.settings = memory.settings or settings
        reasons += (snapshot.Reason("driver", str(cause)),)
        return _finish(
            around, base, settings=view, phase=snapshot.Phase.WAITING, reasons=reasons, driver_problem=str(cause)
        )
    # Counted before anything is done as well: what somebody changed and we put back is two changes.
    base = dataclasses.replace(base, generation=_count(memory, seen.node))
    view = dataclasses.replace(view, problems=(*view.problems, *seen.problems))
    for problem in seen.problems:
        log.debug("settings warning", problem=problem)
    hindrance = _hindrance(around, settings, seen, intent)
    if hindrance is None and not view.valid:
        hindrance = ("settings-invalid", "the newest settings cannot be used: nothing is changed until they can")
    outcome: snapshot.Outcome | None = None
    if hindrance is None:
        outcome, seen = await _act(around, settings, seen, base, view, _halted(around, stop))
        if outcome.stopped:
            hindrance = around.hindrance()  # somebody threw the kill switch meanwhile
    if outcome is not None and outcome.changed and around.changed is not None:
        reasons += await around.changed(settings)
    phase, more = _judge(around, settings, seen, outcome, hindrance, intent)
    if intent is not Intent.LOOK and phase is snapshot.Phase.CONVERGED:
        _remember(around, settings, seen)
    return _finish(
        around,
        base,
        node=seen.node,
        facts=await _facts(around, seen.node),
        layout=seen.layout,
        plan=seen.plan,
        outcome=outcome,
        settings=view,
        phase=phase,
        reasons=reasons + more,
        owner=seen.ownership.owner,
        writes=hindrance is None,
    )


async def _without_settings(
    around: Surroundings,
    base: snapshot.Snapshot,
    view: snapshot.SettingsView,
    reasons: tuple[snapshot.Reason, ...],
) -> snapshot.Snapshot:
    """End a cycle that no settings can be used for: the node is told as it is, and nothing is written."""
    node = await _node_or_none(around)
    return _finish(
        around,
        base,
        node=node,
        facts=await _facts(around, node),
        settings=view,
        phase=snapshot.Phase.FAILED,
        reasons=reasons,
        writes=False,
    )


async def _load(around: Surroundings) -> model.Settings:
    """Load the settings. What is bad while others are in force may just be half written: look again
    when it had time to become whole. Raises SettingsError."""
    try:
        return await threads.run(around.load, name="settings")
    except errors.SettingsError:
        if around.memory.settings is None or not around.settle:
            raise
        await asyncio.sleep(around.settle)
        return await threads.run(around.load, name="settings")


async def _settings(
    around: Surroundings,
) -> tuple[model.Settings | None, snapshot.SettingsView, tuple[snapshot.Reason, ...]]:
    """Load the settings, or fall back on the last good ones and say so."""
    try:
        settings = await _load(around)
    except errors.SettingsError as cause:
        good = around.memory.settings
        reasons = _complaints(cause, kept=good is not None)
        view = snapshot.SettingsView(
            sources=() if good is None else good.sources,
            digest="" if good is None else good.digest,
            valid=False,
            declared=good is not None and good.declaration is not None,
            problems=cause.problems,
            values={} if good is None else shown.values(good, secret=True),
        )
        return good, view, reasons
    return settings, _view(settings), ()


async def _look(
    around: Surroundings, settings: model.Settings, view: snapshot.SettingsView
) -> tuple[model.Settings, snapshot.SettingsView, tuple[snapshot.Reason, ...], Look]:
    """Look with these settings; where they are impossible on this node, with the last good ones, and say
    so. Returns the settings looked with, their view and what there is to say. Raises like `look`."""
    try:
        return settings, view, (), await look(around, settings)
    except errors.SettingsError as cause:
        good = around.memory.settings
        if good is None or good.digest == settings.digest:
            raise
        try:
            seen = await look(around, good)
        except errors.SettingsError:  # a card has gone since: what is asked for now is what to tell of
            raise cause from None
        problems = (*view.problems, *cause.problems)
        view = dataclasses.replace(_view(good), valid=False, problems=problems)
        return good, view, _complaints(cause, kept=True), seen


def _complaints(cause: errors.SettingsError, *, kept: bool) -> tuple[snapshot.Reason, ...]:
    """Log what is wrong with the newest settings, and return it as reasons."""
    found = [problem for problem in cause.problems if problem.is_error]
    for problem in found:
        log.error("settings invalid, the last good ones stay in force" if kept else "settings invalid", problem=problem)
    return tuple(snapshot.Reason("settings-invalid", str(problem)) for problem in found)


def _view(settings: model.Settings) -> snapshot.SettingsView:
    return snapshot.SettingsView(
        sources=settings.sources,
        digest=settings.digest,
        valid=True,
        declared=settings.declaration is not None,
        problems=settings.problems,
        values=shown.values(settings, secret=True),
    )


async def _facts(around: Surroundings, node: nodes.NodeState | None) -> hosts.HostFacts | None:
    """Return what the host says around the GPUs, None where there are none or nobody is to look."""
    if node is None or around.facts is None:
        return None
    facts = around.facts
    return await threads.run(lambda: facts(node), name="facts")


async def _node_or_none(around: Surroundings) -> nodes.NodeState | None:
    try:
        return await around.holders(await around.gpus.observe())
    except errors.GpunodeError:
        return None


def _hindrance(around: Surroundings, settings: model.Settings, seen: Look, intent: Intent) -> tuple[str, str] | None:
    """Return (code, sentence) of what forbids acting in this cycle, None when it may act."""
    if intent is Intent.LOOK:
        return ("look", "only looking")
    general = around.hindrance()
    if general is not None:
        return general
    if not seen.ownership.may_write:
        return (seen.ownership.code, seen.ownership.why)
    if settings.enforcement == "observe":
        return ("observe", "enforcement is set to observe, so nothing is changed")
    if (
        intent is Intent.DAEMON
        and settings.enforcement == "boot"
        and _was_in_force(around, _target(settings, seen.layout))
    ):
        return (
            "boot-done",
            'the layout was in force once in this boot, and enforcement = "boot" repairs nothing after that',
        )
    return None


def _halted(around: Surroundings, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Return a check whether to stop between two steps, because of `stop` or as nothing may be written any more.

    Eight GPUs ask at each of their steps; what the machine says is at most `GLANCE` seconds old.
    """
    asked, halted = -math.inf, False

    def check() -> bool:
        nonlocal asked, halted
        if stop():
            return True
        now = around.monotonic()
        if not halted and now - asked >= GLANCE:
            asked, halted = now, around.hindrance() is not None
        return halted

    return check


async def _act(
    around: Surroundings,
    settings: model.Settings,
    seen: Look,
    base: snapshot.Snapshot,
    view: snapshot.SettingsView,
    stop: Callable[[], bool],
) -> tuple[snapshot.Outcome, Look]:
    """Carry out plans until nothing is left to do, something fails, or a pass brought nothing."""
    total = snapshot.Outcome()
    end = around.monotonic() + DEADLINE

    def over() -> bool:
        return around.monotonic() >= end

    for _ in range(PASSES):
        if not seen.plan.steps:
            break
        if stop() or over():
            return dataclasses.replace(total, stopped=True, late=over() and not stop()), seen
        around.announce(
            dataclasses.replace(
                base, phase=snapshot.Phase.APPLYING, node=seen.node, layout=seen.layout, plan=seen.plan, settings=view
            )
        )
        order = apply.Order(
            release=settings.release_before_reset,
            rollback=settings.on_failure == "rollback",
            stop=lambda: stop() or over(),
            progress=around.progress,
            recheck=_recheck(around, seen),
            pause=around.pause,
            resume=around.resume,
            again=around.reset_again,
        )
        outcome = await apply.apply(seen.plan, seen.node, around.gpus, around.machine, order)
        total = _add(total, outcome)
        try:
            seen = await look(around, settings)
        except errors.GpunodeError as cause:
            failure = snapshot.Failure(
                uuid="", step=None, message=f"cannot look again after acting: {cause}", rolled_back=False
            )
            return dataclasses.replace(total, failures=(*total.failures, failure)), seen
        if outcome.failures or outcome.stopped or not outcome.changed:
            total = dataclasses.replace(total, late=outcome.stopped and not stop())
            break
    return total, seen


class _Together:
    """Finds the holders of GPUs that ask one by one, for all that wait at once: every look goes through all
    processes of the machine and may ask the scheduler, so eight lanes must not take eight. Who asks while a
    look is under way gets the next one, never what was seen before it asked."""

    def __init__(self, around: Surroundings, node: nodes.NodeState) -> None:
        self._around = around
        self._node = node
        self._waiting: list[tuple[nodes.Gpu, asyncio.Future[nodes.NodeState]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, gpu: nodes.Gpu) -> nodes.NodeState:
        """Return the node with this GPU in it, holders complete. Raises what the look raises."""
        answer: asyncio.Future[nodes.NodeState] = asyncio.get_running_loop().create_future()
        self._waiting.append((gpu, answer))
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="holders")
        return await answer

    async def _look(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, []
            try:
                found = await self._around.holders(dataclasses.replace(self._node, gpus=tuple(gpu for gpu, _ in asked)))
            except Exception as cause:  # noqa: BLE001  # handed to everybody who waits for it
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(cause)
            else:
                for _, answer in asked:
                    if not answer.done():
                        answer.set_result(found)
        self._looking = None


def _recheck(around: Surroundings, seen: Look) -> Callable[[str, plans.Step], Awaitable[tuple[nodes.Holder, ...]]]:
    """Return a check for holders that appeared on a GPU after the plan was made.

    The GPU is read before its first destroy or mode change, and again when what was read is older than
    `RECHECK` seconds. The driver itself refuses what has processes; this catches allocations and open
    files as well. Allocations that cannot be read any more count as somebody's.
    """
    checked: dict[str, tuple[float, nodes.NodeState | None]] = {}
    look_at = _Together(around, seen.node)

    async def recheck(uuid: str, step: plans.Step) -> tuple[nodes.Holder, ...]:
        now = around.monotonic()
        if uuid not in checked or now - checked[uuid][0] >= RECHECK:
            try:
                checked[uuid] = (now, await look_at(await around.gpus.observe_gpu(uuid)))
            except errors.GpunodeError:
                checked[uuid] = (now, None)  # the step itself will say what is wrong
        state = checked[uuid][1]
        gpu = state.gpu(uuid) if state is not None else None
        if state is None or gpu is None:
            return ()
        match step:
            case plans.SetMigMode():
                found = gpu.in_use
            case plans.DestroyGpuInstance():
                found = tuple(h for i in gpu.instances if i.id == step.id for h in (*i.in_use, *gpu.holders))
            case plans.DestroyComputeInstance():
                found = tuple(
                    h
                    for i in gpu.instances
                    if i.id == step.gpu_instance_id
                    for h in (*gpu.holders, *i.holders, *(h for c in i.compute if c.id == step.id for h in c.holders))
                )
            case _:
                found = ()
        found = plans.users(found, force=around.force)
        if around.force:
            return found
        if not found and not state.allocations_known:
            found = (nodes.Holder("scheduler", f"{state.serving}, whose allocations cannot be read"),)
        return found

    return recheck


def _add(one: snapshot.Outcome, two: snapshot.Outcome) -> snapshot.Outcome:
    done: dict[str, tuple[plans.Step, ...]] = dict(one.done)
    for uuid, steps in two.done:
        done[uuid] = (*done.get(uuid, ()), *steps)
    return snapshot.Outcome(
        done=tuple(done.items()),
        failures=(*one.failures, *two.failures),
        rolled_back=(*one.rolled_back, *two.rolled_back),
        stopped=one.stopped or two.stopped,
    )


def _judge(
    around: Surroundings,
    settings: model.Settings,
    seen: Look,
    outcome: snapshot.Outcome | None,
    hindrance: tuple[str, str] | None,
    intent: Intent,
) -> tuple[snapshot.Phase, tuple[snapshot.Reason, ...]]:
    """Return the phase after acting (or not), and the reasons for it."""
    reasons: list[snapshot.Reason] = []
    indexes = {gpu.uuid: gpu.index for gpu in seen.node.gpus}
    for failure in outcome.failures if outcome is not None else ():
        text = failure.message + (f"; {failure.remains}" if failure.remains else "")
        code = "reset-refused" if isinstance(failure.step, plans.ResetGpu) else "step-failed"
        reasons.append(snapshot.Reason(code, text, failure.uuid or None))
    for gpu in seen.plan.blocked:
        assert gpu.blocked is not None
        reasons.append(snapshot.Reason(gpu.blocked.kind.value, gpu.blocked.message, gpu.uuid))
    reasons += [snapshot.Reason(gone.kind.value, gone.message) for gone in seen.gone]
    for gpu in seen.plan.gpus:
        if gpu.drift and gpu.blocked is None:
            words = "; ".join(d.message for d in gpu.drift)
            reasons.append(snapshot.Reason("drift", f"GPU {indexes.get(gpu.uuid, gpu.index)}: {words}", gpu.uuid))
    if seen.plan.in_sync and not any(r.code == "step-failed" for r in reasons):
        blocked_anyway = bool(seen.plan.blocked or seen.gone)
        return (snapshot.Phase.BLOCKED if blocked_anyway else snapshot.Phase.CONVERGED), tuple(reasons)
    if hindrance is not None and hindrance[0] != "look":
        reasons.append(snapshot.Reason(hindrance[0], hindrance[1]))
    if hindrance is None and intent is not Intent.LOOK:
        pending = _pending(seen)
        allowed = policy(settings, seen.node, force=around.force)
        if pending and allowed.reboot:
            phase, reason = _reboot(around, _target(settings, seen.layout))
            return phase, (*reasons, reason)
        if pending and not (outcome is not None and outcome.failures):
            numbers = ", ".join(str(indexes[uuid]) for uuid in pending)
            busy = [
                f"{holder} on GPU {gpu.index}"
                for gpu in seen.node.gpus
                for holder in plans.users(gpu.in_use, force=around.force)
            ]
            if not settings.mode_change:
                how = "a GPU reset or a reboot"
            elif allowed.reset and not busy:
                how = "a GPU reset"  # the cycle was ended before it
            else:
                how = "a reset or reboot that is not allowed now"
            words = f"the MIG mode change of GPU {numbers} waits for {how} (see mode-change)"
            if busy:
                words += f"; while GPUs are in use nothing that they would feel is done: {', '.join(busy[:5])}"
            reasons.append(snapshot.Reason("mode-pending", words, pending[0]))
    if outcome is not None and outcome.late:
        words = f"the cycle was not done after {DEADLINE:.0f} s; no further step was begun, the next cycle goes on"
        reasons.append(snapshot.Reason("cycle-deadline", words))
        return snapshot.Phase.FAILED, tuple(reasons)
    if any(r.code == "step-failed" for r in reasons):
        return snapshot.Phase.FAILED, tuple(reasons)
    if hindrance is not None and hindrance[0] in ("boot-done", "look"):
        all_blocked = all(gpu.blocked is not None for gpu in seen.plan.gpus if gpu.drift)
        return (snapshot.Phase.BLOCKED if all_blocked else snapshot.Phase.DRIFTED), tuple(reasons)
    if outcome is not None and outcome.stopped:
        return snapshot.Phase.DRIFTED, tuple(reasons)
    if hindrance is not None and hindrance[0] == "observe":
        return snapshot.Phase.DRIFTED, tuple(reasons)
    return snapshot.Phase.BLOCKED, tuple(reasons)


def _pending(seen: Look) -> list[str]:
    """Return the GPUs whose wanted mode is set and waits for a reset."""
    found = []
    for gpu in seen.node.gpus:
        wanted = seen.layout.gpu(gpu.uuid)
        if wanted is not None and gpu.mode is not None and gpu.mode.changing and gpu.mode.pending is wanted.mig:
            found.append(gpu.uuid)
    return found


def _reboot(around: Surroundings, target: str) -> tuple[snapshot.Phase, snapshot.Reason]:
    """Ask for the one reboot that may finish the mode change, through the guard."""
    place = around.machine.path(REBOOTS)
    guard = reboots.Guard(
        path=place,
        boot_id=around.machine.boot_id(),
        machine_id=around.machine_id(),
        volatile=None if around.machine.simulated is not None else files.volatile(place),
    )
    verdict = guard.ask(target, around.clock())
    if verdict.allowed:
        log.warning("requesting a reboot so that the MIG mode takes effect", target=target)
        try:
            around.machine.request_reboot("a MIG mode change is pending")
        except errors.GpunodeError as cause:
            return snapshot.Phase.FAILED, snapshot.Reason("reboot-failed", f"cannot request the reboot: {cause}")
        return snapshot.Phase.REBOOT_PENDING, snapshot.Reason(
            "reboot-pending", "a reboot was requested; the MIG mode change takes effect with it"
        )
    if verdict.pending:
        return snapshot.Phase.REBOOT_PENDING, snapshot.Reason("reboot-pending", verdict.why)
    return snapshot.Phase.FAILED, snapshot.Reason("reboot-refused", f"no reboot is requested: {verdict.why}")


def _finish(around: Surroundings, base: snapshot.Snapshot, **fields: object) -> snapshot.Snapshot:
    """Complete the snapshot: generation, times, and the last success."""
    memory = around.memory
    node = fields.get("node")
    if isinstance(node, nodes.NodeState):
        _count(memory, node)
    now = around.clock()
    if fields.get("phase") is snapshot.Phase.CONVERGED:
        memory.last_success = now
    result = dataclasses.replace(
        base,
        generation=memory.generation,
        duration=max(0.0, now - base.started),
        last_success=memory.last_success,
        **fields,  # type: ignore[arg-type]
    )
    return dataclasses.replace(result, history=_history(around, result))


def _count(memory: Memory, node: nodes.NodeState) -> int:
    """Count a change of GPUs or instances since the last look; return the generation."""
    topology = fingerprint(node)
    if topology != memory.topology:
        memory.topology = topology
        memory.generation += 1
    return memory.generation


def _history(around: Surroundings, result: snapshot.Snapshot) -> tuple[snapshot.Past, ...]:
    """Return the last cycles that did or found something, this one last; kept over reboots.

    A cycle like the one before it, in which nothing was done, is not told again: it only moves the
    time of the last.
    """
    place = around.machine.path(HISTORY)
    memory = around.memory
    if memory.history is None:
        memory.history = snapshot.read_history(_read_json(place))
    entry = snapshot.past(result, boot_id=_boot_id(around.machine))
    last = memory.history[-1] if memory.history else None
    if last is not None and last.same(entry):
        memory.history = (*memory.history[:-1], dataclasses.replace(last, last_at=entry.last_at, times=last.times + 1))
        return memory.history
    memory.history = (*memory.history, entry)[-snapshot.HISTORY_LENGTH :]
    if around.keep_history:
        try:
            files.write_atomic(place, json.dumps(snapshot.write_history(memory.history)).encode())
        except OSError as cause:
            log.debug("cannot keep the history of cycles", path=place, cause=cause)
    return memory.history


def _boot_id(machine: machines.Machine) -> str:
    try:
        return machine.boot_id()
    except errors.GpunodeError:
        return ""


def fingerprint(node: nodes.NodeState) -> str:
    """Return a text that changes with any change of GPUs, modes or instances (not of who uses them)."""
    parts = []
    for gpu in node.gpus:
        instances = [
            (i.id, i.profile_id, i.placement.start, tuple((c.id, c.profile_id, c.uuid) for c in i.compute))
            for i in gpu.instances
        ]
        parts.append((gpu.uuid, gpu.state.value, gpu.mode, sorted(instances)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _remember(around: Surroundings, settings: model.Settings, seen: Look) -> None:
    """Note durably that the layout is in force in this boot, and which card has which index."""
    machine = around.machine
    record = {"boot_id": machine.boot_id(), "layout": _target(settings, seen.layout)}
    indexes = {str(gpu.index): gpu.pci_bus_id for gpu in seen.node.gpus}
    known = _remembered_indexes(machine) or {}
    for path, document in ((IN_FORCE, record), (INDEXES, {"indexes": indexes})):
        if not seen.layout.gpus:
            continue
        if path == INDEXES and set(indexes.values()) < set(known.values()):
            continue  # a card has left the bus: the others keep the indexes they had
        place = machine.path(path)
        if _read_json(place) == document:
            continue
        try:
            files.write_atomic(place, json.dumps(document).encode())
        except OSError as cause:
            log.warning("cannot remember the layout in force", path=place, cause=cause)


def _was_in_force(around: Surroundings, target: str) -> bool:
    machine = around.machine
    return _read_json(machine.path(IN_FORCE)) == {"boot_id": machine.boot_id(), "layout": target}


def _remembered_indexes(machine: machines.Machine) -> dict[int, str] | None:
    document = _read_json(machine.path(INDEXES))
    try:
        return {int(k): str(v) for k, v in document["indexes"].items()} if document else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(files.read_bounded(path))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
