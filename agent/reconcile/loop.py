"""The loop around the cycle: what wakes it, one cycle at a time, and how long it waits after failing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from agent import errors, log, threads
from agent.reconcile import backoff, cycle, snapshot
from agent.settings import watch

GAP = 1.0
"""Seconds between a cycle and the next that a GPU's event may wake: events come in swarms."""
_AT_ONCE = frozenset({"settings", "reload", "call-returned"})
"""Reasons that do not wait, neither for the gap nor for the end of a back-off."""
_SETTLED = (snapshot.Phase.CONVERGED, snapshot.Phase.DRIFTED)


class Loop:
    """Runs cycles until told to stop.

    `wake(reason)` may be called from any thread. `on_cycle` gets every snapshot. `fingerprint()` is
    asked each `poll` seconds, and a change of its answer that holds still wakes the loop with
    "settings". A cycle's own changes come back as events; after a failure they must not cut the
    back-off short, or a step that always fails would be tried for ever at full speed.
    """

    def __init__(
        self,
        around: cycle.Surroundings,
        *,
        on_cycle: Callable[[snapshot.Snapshot], Awaitable[None]],
        fingerprint: Callable[[], str],
        jitter: Callable[[], float],
        poll: float = 0.5,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._around = around
        self._on_cycle = on_cycle
        self._fingerprint = fingerprint
        self._jitter = jitter
        self._poll = poll
        self._monotonic = monotonic
        self._wakes: list[str] = []
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._last: snapshot.Snapshot | None = None
        self.stopping = False

    def wake(self, reason: str) -> None:
        """Ask for a cycle soon; `reason` becomes its trigger. Callable from any thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._note, reason)
        except RuntimeError:
            pass  # the loop has ended

    def _note(self, reason: str) -> None:
        if reason not in self._wakes:
            self._wakes.append(reason)
        self._event.set()

    def stop(self) -> None:
        """End after the step at hand. Call from the loop's thread."""
        self.stopping = True
        self._event.set()

    async def run(self) -> None:
        """Run cycles until `stop()`: the first at once, then as things wake it."""
        self._loop = asyncio.get_running_loop()
        trigger = "start"
        while not self.stopping:
            watched = watch.Watch(await self._read_fingerprint())
            try:
                result = await cycle.run_cycle(
                    self._around, intent=cycle.Intent.DAEMON, trigger=trigger, stop=lambda: self.stopping
                )
            except Exception as cause:  # noqa: BLE001  # see below
                # Nothing in a cycle should get here; a daemon that ends is worse than one that says so.
                log.error("the cycle failed", cause=repr(cause))
                result = self._failed(trigger, cause)
            self._last = result
            self._failures = 0 if result.phase in _SETTLED else self._failures + 1
            await self._on_cycle(result)
            if self.stopping:
                return
            trigger = await self._wait(watched)

    def _failed(self, trigger: str, cause: Exception) -> snapshot.Snapshot:
        """Return what was known before, as the snapshot of a cycle that broke."""
        words = str(cause) if isinstance(cause, errors.GpunodeError) else repr(cause)
        return dataclasses.replace(
            self._last or snapshot.Snapshot(phase=snapshot.Phase.FAILED),
            phase=snapshot.Phase.FAILED,
            cycle=self._around.memory.cycle,
            trigger=trigger,
            outcome=None,
            reasons=(snapshot.Reason("cycle-failed", f"the enforcement cycle itself failed: {words}"),),
        )

    async def _wait(self, watched: watch.Watch) -> str:
        """Wait for the next reason to run a cycle and return it."""
        settings = self._around.memory.settings
        period = settings.period if settings is not None else 60.0
        limit, reason = (
            (period, "period")
            if self._failures == 0
            else (min(period, backoff.delay(self._failures, self._jitter())), "retry")
        )
        began = self._monotonic()
        end = began + limit
        calm = end if self._failures else min(end, began + GAP)
        while True:
            now = self._monotonic()
            if self._wakes and (now >= calm or not _AT_ONCE.isdisjoint(self._wakes)):
                reason = "+".join(self._wakes)
                self._wakes.clear()
                return reason
            if self.stopping or now >= end:
                return reason
            self._event.clear()
            try:
                async with asyncio.timeout(max(0.0, min(self._poll, (calm if self._wakes else end) - now))):
                    await self._event.wait()
            except TimeoutError:
                if watched.saw(await self._read_fingerprint(), self._monotonic()):
                    return "settings"

    async def _read_fingerprint(self) -> str:
        # In a thread of its own: the settings API's socket may take its time to answer.
        return await threads.run(self._fingerprint, name="fingerprint")
