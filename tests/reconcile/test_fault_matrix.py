"""A repartition of two GPUs, with every NVML call of it failing once in every plausible way.

The truth is read from the simulated driver, not from what gpunode says; then what gpunode said is
held against it. Whatever happened, a second run without the fault must end as wanted.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rig as rigs

from agent.reconcile import snapshot

BEFORE = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
AFTER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "4g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
CODES = (1, 2, 3, 4, 6, 15, 16, 17, 19, 23, 999)
MUTATING = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
)
Make = Callable[..., Any]


async def prepared(directory: Path, **options: Any) -> Any:
    rig = rigs.Rig(directory, "h100.80gb:2", BEFORE, **options)
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
    await rig.restart()
    rig.set(AFTER)
    return rig


async def calls_of_the_repartition(directory: Path) -> tuple[collections.Counter[str], list[Any], list[Any]]:
    rig = await prepared(directory)
    before, counted = rig.truth(), collections.Counter(rig.sim.library_calls())
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
    made = collections.Counter(rig.sim.library_calls()) - counted
    after = rig.truth()
    await rig.close()
    assert before != after
    return made, before, after


def said(result: snapshot.Snapshot, uuid: str) -> str:
    return " ".join(reason.message for reason in result.reasons if reason.gpu in (uuid, None))


def judge(rig: Any, result: snapshot.Snapshot, before: list[Any], after: list[Any], case: str) -> None:
    """Hold what was said against the truth."""
    truth = rig.truth()
    reached = truth == after
    assert (result.phase is snapshot.Phase.CONVERGED) <= reached, f"{case}: said to be as wanted and is not"
    if result.node is None:
        assert result.reasons, case
        return
    for index, gpu in enumerate(rig.sim.driver.gpus):
        if truth[index] in (before[index], after[index]):
            continue
        told = said(result, gpu.spec.uuid)
        assert told, f"{case}: GPU {index} is neither as before nor as wanted, and nothing is said"
        seen = result.node.gpu(gpu.spec.uuid)
        if seen is not None and seen.state.value == "ok":
            shown = sorted((str(i.profile), i.placement.start, len(i.compute)) for i in seen.instances)
            assert shown == truth[index][1], f"{case}: GPU {index} is told to be something else than it is"
        for profile, start, _ in truth[index][1]:
            where = f"{profile} at {start}:"
            assert where in told or seen is not None and seen.state.value == "ok", f"{case}: {where} is not told"


async def one(directory: Path, call: str, code: int, skip: int, before: list[Any], after: list[Any]) -> str:
    rig = await prepared(directory)
    try:
        rig.sim.fail(call, code, skip=skip)
        result = await asyncio.wait_for(rig.cycle(), 20)
        case = f"{call} number {skip} answers {code}"
        judge(rig, result, before, after, case)
        rig.sim.release()
        await rig.restart()
        again = await rig.cycle()
        assert again.phase is snapshot.Phase.CONVERGED, f"{case}: the second run ends {again.phase}: {again.reasons}"
        assert rig.truth() == after, case
        return result.phase.value
    finally:
        await rig.close()


def matrix(directory: Path, spots: Callable[[str, int], list[int]], codes: tuple[int, ...]) -> collections.Counter[str]:
    made, before, after = asyncio.run(calls_of_the_repartition(directory))
    ends: collections.Counter[str] = collections.Counter()
    for call, count in sorted(made.items()):
        for skip in spots(call, count):
            for code in codes:
                ends[asyncio.run(one(directory, call, code, skip, before, after))] += 1
    return ends


def test_every_kind_of_call_failing_at_its_first_and_last(tmp_path: Path) -> None:
    ends = matrix(tmp_path, lambda _, count: sorted({0, count - 1}), (15, 19, 999))
    print(f"fault cases: {sum(ends.values())}, ending {dict(ends)}")
    assert sum(ends.values()) > 60
    assert set(ends) <= {"converged", "failed", "blocked", "waiting-for-driver", "drifted"}


@pytest.mark.full
def test_every_call_with_every_code(tmp_path: Path) -> None:
    ends = matrix(tmp_path, lambda _, count: list(range(count)), CODES)
    print(f"fault cases: {sum(ends.values())}, ending {dict(ends)}")
    assert sum(ends.values()) > 1000


async def _hang(directory: Path, call: str, skip: int, before: list[Any], after: list[Any]) -> None:
    rig = await prepared(directory, read_deadline=0.2, change_deadline=0.2)
    try:
        order = rig.sim.hang(call, skip=skip)
        result = await asyncio.wait_for(rig.cycle(), 20)
        assert result.phase is not snapshot.Phase.CONVERGED or rig.truth() == after
        if rig.gpus.any_hung:
            assert result.phase is not snapshot.Phase.CONVERGED
        rig.sim.release(order)  # the call completes now, and has its effect
        while rig.gpus.any_hung:
            await asyncio.sleep(0.002)
        again = await rig.cycle()
        assert again.phase is snapshot.Phase.CONVERGED, f"{call} number {skip} hung: {again.phase} {again.reasons}"
        assert rig.truth() == after
    finally:
        await rig.close()


def test_every_mutation_hanging_and_completing_late(tmp_path: Path) -> None:
    made, before, after = asyncio.run(calls_of_the_repartition(tmp_path))
    cases = [(call, skip) for call in MUTATING for skip in range(made[call])]
    assert len(cases) >= 8
    for call, skip in cases:
        asyncio.run(_hang(tmp_path, call, skip, before, after))
    print(f"hang cases: {len(cases)}")


@pytest.mark.full
def test_every_read_hanging(tmp_path: Path) -> None:
    made, before, after = asyncio.run(calls_of_the_repartition(tmp_path))
    cases = 0
    for call, count in sorted(made.items()):
        if call in MUTATING or call == "nvmlErrorString":
            continue
        for skip in sorted({0, count // 2, count - 1}):
            asyncio.run(_hang(tmp_path, call, skip, before, after))
            cases += 1
    print(f"hang cases: {cases}")


async def _lose(directory: Path, step: int, before: list[Any], after: list[Any]) -> bool:
    rig = await prepared(directory)
    try:
        steps = 0

        def progress(_: str) -> None:
            nonlocal steps
            if steps == step:
                rig.sim.lose(0)
            steps += 1

        result = await rig.cycle(progress=progress)
        assert result.phase is not snapshot.Phase.CONVERGED
        assert rig.truth()[1] == after[1]
        assert result.node.gpus[0].state.value == "lost"
        return steps > step
    finally:
        await rig.close()


def test_a_gpu_lost_at_every_step_leaves_the_other_as_wanted(tmp_path: Path) -> None:
    _, before, after = asyncio.run(calls_of_the_repartition(tmp_path))
    step = 0
    while asyncio.run(_lose(tmp_path, step, before, after)):
        step += 1
        if step >= 10:
            break
    assert step >= 4
    print(f"loss cases: {step}")


async def _stop(directory: Path, step: int, after: list[Any]) -> bool:
    rig = await prepared(directory)
    try:
        await rig.cycle(stop=lambda: len(rig.progress) >= step)
        kept = {i.serial for g in rig.sim.driver.gpus for i in g.state.instances.values()}
        await rig.restart()
        done = len(rig.progress)
        again = await rig.cycle()
        assert again.phase is snapshot.Phase.CONVERGED
        assert rig.truth() == after
        wanted = {(p, s) for p, s, _ in after[0][1]}
        for gpu in rig.sim.driver.gpus:
            for i in gpu.state.instances.values():
                # What matched already when it was stopped is the very same instance now.
                assert i.serial in kept or (gpu.profile(i.profile).name, i.start) in wanted
        return len(rig.progress) > done
    finally:
        await rig.close()


def test_stopped_after_every_step_the_next_start_finishes(tmp_path: Path) -> None:
    _, _, after = asyncio.run(calls_of_the_repartition(tmp_path))
    step = 0
    while asyncio.run(_stop(tmp_path, step, after)):
        step += 1
    assert step >= 8
