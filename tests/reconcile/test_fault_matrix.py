"""A repartition of two GPUs, and the first boot of two A100s with their reset, with every NVML call of it
failing once in every plausible way.

The truth is read from the simulated driver, not from what gpunode says; then what gpunode said is
held against it. Whatever happened, a second run without the fault must end as wanted. One prepared
node serves all cases: it is put back to the same state before each.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from agent.cli import apply as verbs
from agent.reconcile import snapshot
from tests.reconcile import rig as rigs

BEFORE = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
AFTER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "4g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
REPARTITION = ("h100.80gb:2", BEFORE, AFTER)
FIRST_BOOT = ("a100.40gb:2", "", '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 1, "2g.10gb" = 1 }\n')
"""MIG is turned on, which waits for a reset, for which our own session is closed and opened again."""
CODES = (1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 16, 17, 18, 19, 23, 28, 999, 1234)
"""Every code that is handled in its own way, several that are not, and one that no driver is known to give."""
MUTATING = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
)
NO_ERROR = ("nvmlErrorString",)
"""Calls that tell what a code means; that they fail is no fault of the node."""
PATIENCE = 20.0
"""Seconds in which a case must have ended, all deadlines that it may meet included."""
SHORT = 0.06
"""A deadline of a call in the cases in which one hangs."""


@dataclasses.dataclass(slots=True)
class Case:
    """The prepared node: how it is before, how it shall be, and the calls made on the way."""

    rig: Any
    mark: Any
    before: list[Any]
    after: list[Any]
    calls: collections.Counter[str]

    def each(self, spots: str) -> Iterable[tuple[str, int]]:
        """Every (call, number of it), or the first and last of each call only, or a few."""
        for call, count in sorted(self.calls.items()):
            if call not in NO_ERROR:
                some = {0, count - 1} if spots == "ends" else {0, min(1, count - 1), count // 2, count - 1}
                for skip in range(count) if spots == "all" else sorted(some):
                    yield call, skip


@contextlib.asynccontextmanager
async def prepared(directory: Path, what: tuple[str, str, str] = REPARTITION) -> AsyncIterator[Case]:
    spec, old, new = what
    rig = rigs.Rig(directory, spec, old)
    try:
        assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
        rig.set(new)
        mark, before = rig.mark(), rig.truth()
        await rig.rewind(mark)
        counted = collections.Counter(rig.sim.library_calls())
        assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
        made = collections.Counter(rig.sim.library_calls()) - counted
        after = rig.truth()
        assert before != after
        yield Case(rig, mark, before, after, made)
    finally:
        await rig.close()


def said(result: snapshot.Snapshot, uuid: str) -> str:
    return " ".join(reason.message for reason in result.reasons if reason.gpu in (uuid, None, ""))


def judge(case: Case, result: snapshot.Snapshot, name: str) -> None:
    """Hold what was said, and the exit code it leads to, against the truth."""
    truth = case.rig.truth()
    if result.phase is snapshot.Phase.CONVERGED:
        assert truth == case.after, f"{name}: said to be as wanted and is not"
    assert (verbs._code(result) == 0) <= (truth == case.after), f"{name}: exit 0"
    indexes = {gpu.spec.uuid: index for index, gpu in enumerate(case.rig.sim.driver.gpus)}
    for failure in result.outcome.failures if result.outcome is not None else ():
        if failure.rolled_back:
            index = indexes[failure.uuid]
            assert truth[index] == case.before[index], f"{name}: said to be rolled back and is not"
    if result.node is None:
        assert result.reasons, name
        return
    for index, gpu in enumerate(case.rig.sim.driver.gpus):
        if truth[index] in (case.before[index], case.after[index]):
            continue
        told = said(result, gpu.spec.uuid)
        assert told, f"{name}: GPU {index} is neither as before nor as wanted, and nothing is said"
        seen = result.node.gpu(gpu.spec.uuid)
        if seen is not None and seen.state.value == "ok":
            shown = sorted((str(i.profile), i.placement.start, len(i.compute)) for i in seen.instances)
            assert shown == truth[index][1], f"{name}: GPU {index} is told to be something else than it is"
        else:
            assert "cannot be read" in told or (seen is not None and seen.problem), f"{name}: {told}"


async def again(case: Case, name: str) -> None:
    """A second run, by another process and without the fault, converges."""
    result = await case.rig.cycle()
    assert result.phase is snapshot.Phase.CONVERGED, f"{name}: the second run ends {result.phase}: {result.reasons}"
    assert case.rig.truth() == case.after, name


async def _failing(
    directory: Path, spots: str, codes: tuple[int, ...], what: tuple[str, str, str] = REPARTITION
) -> collections.Counter[str]:
    ends: collections.Counter[str] = collections.Counter()
    async with prepared(directory, what) as case:
        for call, skip in case.each(spots):
            for code in codes:
                name = f"{call} number {skip} answers {code}"
                await case.rig.rewind(case.mark)
                case.rig.sim.fail(call, code, skip=skip)
                result = await asyncio.wait_for(case.rig.cycle(), PATIENCE)
                judge(case, result, name)
                ends[result.phase.value] += 1
                case.rig.sim.release()
                if case.rig.truth() != case.after or result.phase is not snapshot.Phase.CONVERGED:
                    await case.rig.restart()
                    await again(case, name)
    print(f"figure: fault cases: {sum(ends.values())}, ending {dict(ends)}")
    assert set(ends) <= {"converged", "failed", "blocked", "waiting-for-driver", "drifted"}
    return ends


async def test_every_kind_of_call_failing_at_its_first_and_last(tmp_path: Path) -> None:
    assert sum((await _failing(tmp_path, "ends", (15, 19, 999))).values()) > 60


@pytest.mark.full
async def test_every_call_with_every_code(tmp_path: Path) -> None:
    assert sum((await _failing(tmp_path, "all", CODES)).values()) > 5000


@pytest.mark.full
async def test_every_kind_of_call_of_a_first_boot_with_every_code(tmp_path: Path) -> None:
    assert sum((await _failing(tmp_path, "few", CODES, FIRST_BOOT)).values()) > 1000


async def _hanging(
    directory: Path, calls: Iterable[str] | None, spots: str = "all", what: tuple[str, str, str] = REPARTITION
) -> int:
    """Let calls hang past their deadline and complete late; a hung GPU is said, and ends as wanted."""
    cases = 0
    async with prepared(directory, what) as case:
        for call, skip in case.each(spots):
            if calls is not None and call not in calls:
                continue
            name = f"{call} number {skip} hangs"
            await case.rig.rewind(case.mark, deadlines=(SHORT, SHORT))
            order = case.rig.sim.hang(call, skip=skip)
            began = time.monotonic()
            result = await asyncio.wait_for(case.rig.cycle(), PATIENCE)
            assert time.monotonic() - began < 40 * SHORT, f"{name}: it took longer than the deadlines"
            judge(case, result, name)
            if case.rig.gpus.any_hung:
                assert result.phase is not snapshot.Phase.CONVERGED, name
                assert "come back" in " ".join(r.message for r in result.reasons), f"{name}: {result.reasons}"
            case.rig.sim.release(order)  # the call completes now, and has its effect
            await case.rig.unhung()
            case.rig.patient()
            await again(case, name)
            cases += 1
    print(f"figure: hang cases: {cases}")
    return cases


async def test_every_mutation_hanging_and_completing_late(tmp_path: Path) -> None:
    assert await _hanging(tmp_path, MUTATING) >= 8


@pytest.mark.full
async def test_every_call_hanging_and_completing_late(tmp_path: Path) -> None:
    assert await _hanging(tmp_path, None) > 200


async def test_opening_and_closing_the_driver_around_a_reset_hangs_and_completes_late(tmp_path: Path) -> None:
    """What opened late is closed again: else our own session would be in the way of every reset."""
    calls = ("nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceSetMigMode", "nvmlSystemGetDriverVersion")
    assert await _hanging(tmp_path, calls, "all", FIRST_BOOT) >= 7


@pytest.mark.full
async def test_every_kind_of_call_of_a_first_boot_hanging_and_completing_late(tmp_path: Path) -> None:
    assert await _hanging(tmp_path, None, "few", FIRST_BOOT) > 100


async def _lost(directory: Path, spots: str) -> int:
    """GPU 0 falls off the bus at a call: every later call to it says so. The other one ends as wanted."""
    cases = 0
    async with prepared(directory) as case:
        for call, skip in case.each(spots):
            name = f"GPU 0 is lost at {call} number {skip}"
            await case.rig.rewind(case.mark)
            order = case.rig.sim.hang(call, skip=skip)
            cycle = asyncio.ensure_future(case.rig.cycle())
            # The call waits in its thread until the GPU is lost under it.
            await case.rig.reached(order, going=cycle)
            case.rig.sim.lose(0)
            case.rig.sim.release(order)
            result = await asyncio.wait_for(cycle, PATIENCE)
            cases += 1
            judge(case, result, name)
            if result.node is None:
                assert result.reasons
                continue
            if case.rig.truth()[0] != case.after[0]:
                assert result.phase is not snapshot.Phase.CONVERGED, name
            assert case.rig.truth()[1] == case.after[1], f"{name}: GPU 1 is not as wanted: {result.reasons}"
            await case.rig.restart()
            later = await case.rig.cycle()
            assert later.node.gpus[0].state.value == "lost", name
            assert later.phase is snapshot.Phase.BLOCKED, name
            assert case.rig.truth()[1] == case.after[1], name
    print(f"figure: loss cases: {cases}")
    return cases


async def test_a_gpu_lost_at_the_first_and_last_of_each_call(tmp_path: Path) -> None:
    assert await _lost(tmp_path, "ends") > 40


@pytest.mark.full
async def test_a_gpu_lost_at_every_call(tmp_path: Path) -> None:
    assert await _lost(tmp_path, "all") > 200


def serials(case: Case) -> dict[int, tuple[int, str, int]]:
    """Which instances there are: what tells one from a later one in its place → (GPU, profile, start)."""
    return {
        i.serial: (gpu.index, gpu.profile(i.profile).name, i.start)
        for gpu in case.rig.sim.driver.gpus
        for i in gpu.state.instances.values()
    }


async def test_stopped_after_every_step_the_next_start_finishes_and_keeps_what_matched(tmp_path: Path) -> None:
    async with prepared(tmp_path) as case:
        wanted = {(index, profile, start) for index, (_, found) in enumerate(case.after) for profile, start, _ in found}
        steps = 0
        while True:
            await case.rig.rewind(case.mark)
            stopped = await case.rig.cycle(stop=lambda at=steps: len(case.rig.progress) >= at)
            matched = {serial for serial, place in serials(case).items() if place in wanted}
            await case.rig.restart()
            await again(case, f"stopped after {steps} steps")
            assert matched <= set(serials(case))
            if not stopped.outcome.stopped:
                break
            steps += 1
        assert steps >= 8
