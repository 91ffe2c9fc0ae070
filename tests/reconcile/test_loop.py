"""What wakes the loop and how long it waits, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent import errors
from agent.reconcile import loop, snapshot

HALVES = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
MIXED = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
Make = Callable[..., Any]


class Turning:
    """A loop under way: its cycles come into `results` one after another, its clock is `now`."""

    def __init__(self, rig: Any, **changes: Any) -> None:
        self.now = 0.0
        self.stamp = "one"
        self.results: asyncio.Queue[snapshot.Snapshot] = asyncio.Queue()
        self.loop = loop.Loop(
            rig.around,
            on_cycle=self._note,
            fingerprint=self._fingerprint,
            jitter=lambda: 0.5,
            poll=0.001,
            monotonic=lambda: self.now,
            **changes,
        )

    async def _note(self, result: snapshot.Snapshot) -> None:
        self.results.put_nowait(result)

    def _fingerprint(self) -> str:
        return self.stamp

    async def next(self) -> snapshot.Snapshot:
        async with asyncio.timeout(20):
            return await self.results.get()

    async def quiet(self) -> None:
        """Give the loop many turns; no cycle may come of them."""
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert self.results.empty()


@contextlib.asynccontextmanager
async def turning(rig: Any) -> AsyncIterator[Turning]:
    made = Turning(rig)
    task = asyncio.create_task(made.loop.run())
    try:
        yield made
    finally:
        made.loop.stop()
        async with asyncio.timeout(20):
            await task


async def test_the_first_cycle_comes_at_once_then_the_period(make: Make) -> None:
    async with turning(make("h100.80gb:1", HALVES)) as turns:
        first = await turns.next()
        assert (first.trigger, first.phase) == ("start", snapshot.Phase.CONVERGED)
        turns.now += 59.0
        await turns.quiet()
        turns.now += 1.5
        assert (await turns.next()).trigger == "period"


async def test_changed_settings_wake_it_once_they_hold_still(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    async with turning(rig) as turns:
        await turns.next()
        rig.set(MIXED)
        turns.stamp = "two"
        await turns.quiet()
        turns.now += 0.5
        result = await turns.next()
        assert (result.trigger, result.phase) == ("settings", snapshot.Phase.CONVERGED)


async def test_events_of_one_swarm_make_one_cycle(make: Make) -> None:
    async with turning(make("h100.80gb:1", HALVES)) as turns:
        await turns.next()
        for _ in range(50):
            turns.loop.wake("xid")
            turns.loop.wake("mig-config-change")
        await turns.quiet()
        turns.now += loop.GAP
        assert (await turns.next()).trigger == "xid+mig-config-change"
        await turns.quiet()


@pytest.mark.parametrize("reason", ["reload", "call-returned"])
async def test_what_somebody_waits_for_does_not_wait(make: Make, reason: str) -> None:
    async with turning(make("h100.80gb:1", HALVES)) as turns:
        await turns.next()
        turns.loop.wake(reason)
        assert (await turns.next()).trigger == reason


async def test_failures_are_tried_again_ever_later_and_events_do_not_hurry_them(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.sim.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999, times=0)
    async with turning(rig) as turns:
        assert (await turns.next()).phase is snapshot.Phase.FAILED
        for delay in (5.0, 10.0, 20.0, 40.0):
            turns.loop.wake("mig-config-change")  # what the failed step and its rollback set off
            turns.now += delay - 0.5
            await turns.quiet()
            turns.now += 1.0
            again = await turns.next()
            assert (again.trigger, again.phase) == ("mig-config-change", snapshot.Phase.FAILED)
        rig.sim.release()
        turns.loop.wake("reload")
        assert (await turns.next()).phase is snapshot.Phase.CONVERGED
        turns.now += 59.0
        await turns.quiet()


async def test_without_a_driver_it_looks_again_soon(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.sim.fail("nvmlInit*", 9, times=0)
    async with turning(rig) as turns:
        assert (await turns.next()).phase is snapshot.Phase.WAITING
        rig.sim.release()
        turns.now += 5.5
        result = await turns.next()
        assert (result.trigger, result.phase) == ("retry", snapshot.Phase.CONVERGED)


async def test_a_cycle_that_fails_itself_does_not_end_the_loop(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    broken = True

    def clock() -> float:
        if broken:
            raise errors.GpunodeError("no time")
        return 1.0

    rig.around = dataclasses.replace(rig.around, clock=clock)
    async with turning(rig) as turns:
        first = await turns.next()
        assert (first.phase, [r.code for r in first.reasons]) == (snapshot.Phase.FAILED, ["cycle-failed"])
        broken = False
        turns.now += 6.0
        assert (await turns.next()).trigger == "retry"


async def test_a_stop_ends_it_between_steps(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    order = rig.sim.hang("nvmlGpuInstanceCreateComputeInstance")
    turns = Turning(rig)
    task = asyncio.create_task(turns.loop.run())
    await rig.reached(order)
    turns.loop.stop()
    rig.sim.release(order)
    async with asyncio.timeout(20):
        await task
    assert rig.sim.mutations == 3  # the mode, one GPU instance, its compute instance: the step at hand ended
    assert turns.results.qsize() == 1


async def test_waking_before_and_after_its_life_is_harmless(make: Make) -> None:
    turns = Turning(make("h100.80gb:1", HALVES))
    turns.loop.wake("xid")
    turns.loop.stop()
    await turns.loop.run()
    turns.loop.wake("xid")
    await asyncio.sleep(0)
