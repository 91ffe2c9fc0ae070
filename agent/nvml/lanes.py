"""One daemon thread a GPU, so that a GPU whose driver call hangs keeps nobody else waiting.

A whole job (a GPU's sample, a step) is handed to a lane, not a call: a hop between threads costs
fifty times what a call does. Before each call the thread notes its name and start (`calls.Record`),
and one timer on the event loop judges deadlines by that. An overdue lane is hung: waiting jobs fail
at once and new ones are refused; when the call does come back its answer is dropped, its job ends
there (`calls.Abandoned`), the lane is usable again and `on_returned` is told. Threads are daemons and
never joined: a thread inside the driver would keep the process.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from agent import log
from agent.nvml import calls
from agent.nvml import errors as codes

T = TypeVar("T")

TICK = 0.1
"""Seconds between two looks of the timer at lanes that have work."""


class _Job:
    __slots__ = ("future", "generation", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any], generation: int) -> None:
        self.work = work
        self.future = future
        self.generation = generation


class _Lane:
    """One thread and its queue. All attributes are guarded by `condition`, save `record.call`."""

    def __init__(self, key: str, gpu: str | None, owner: Lanes) -> None:
        self.key = key
        self.owner = owner
        self.record = calls.Record(gpu)
        self.condition = threading.Condition()
        self.queue: collections.deque[_Job] = collections.deque()
        self.current: _Job | None = None
        self.generation = 0
        self.hung: tuple[str, float] | None = None
        self.closed = False
        self.thread = threading.Thread(target=self._loop, name=f"gpunode-{key}", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        calls.attend(self.record)
        while True:
            with self.condition:
                while not self.queue and not self.closed:
                    self.condition.wait()
                if self.closed:
                    return
                job = self.queue.popleft()
                if job.future.cancelled():
                    continue  # nobody waits for it any more, and it has not begun
                self.current = job
                self.record.changed = False
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.work()
            except BaseException as caught:  # noqa: BLE001  # handed to whoever awaits
                error = caught
            with self.condition:
                self.current = None
                late = job.generation != self.generation
                was_hung = self.hung
                self.hung = None
                self.record.abandoned = False
            if late or was_hung is not None:
                self.owner.returned(self.key)
            else:
                self.owner.settle(job.future, result, error)


class Lanes:
    """Lanes by key, made when first used. All methods are for the event loop's thread.

    `read_deadline` and `change_deadline` bound one call that reads or changes, in seconds.
    """

    def __init__(
        self,
        *,
        read_deadline: float = 30.0,
        change_deadline: float = 60.0,
        on_returned: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._read = read_deadline
        self._change = change_deadline
        self._tick = min(TICK, read_deadline / 2, change_deadline / 2)
        self._on_returned = on_returned
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, key: str, work: Callable[[], T], *, gpu: str | None = None) -> T:
        """Run `work` in the lane `key` and return what it does. `gpu` names the GPU in errors.

        Raises errors.Hung when one of its calls runs past its deadline, or at once when the lane is
        hung already.
        """
        self._loop = asyncio.get_running_loop()
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key, gpu, self)
        future: asyncio.Future[T] = self._loop.create_future()
        with lane.condition:
            if lane.hung is not None:
                raise codes.hung(lane.hung[0], time.monotonic() - lane.hung[1], lane.record.gpu)
            if gpu is not None:
                lane.record.gpu = gpu
            lane.queue.append(_Job(work, future, lane.generation))
            lane.condition.notify()
        self._arm(self._tick)
        return await future

    def hung(self) -> tuple[str, ...]:
        """Return the keys of the lanes whose call has not come back."""
        return tuple(key for key, lane in self._lanes.items() if lane.hung is not None)

    def hung_call(self, key: str) -> tuple[str, float] | None:
        """Return (function name, seconds so far) of a hung lane's call, None when it is not hung."""
        lane = self._lanes.get(key)
        if lane is None or lane.hung is None:
            return None
        return lane.hung[0], time.monotonic() - lane.hung[1]

    def busy(self) -> tuple[str, ...]:
        """Return the keys of the lanes that have work, hung ones included."""
        return tuple(key for key, lane in self._lanes.items() if lane.current is not None or lane.queue)

    def close(self) -> None:
        """Let all threads end that can; those inside the driver are left, and count as hung from now on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in self._lanes.values():
            with lane.condition:
                lane.closed = True
                noted = lane.record.call
                if lane.hung is None and lane.current is not None and noted is not None:
                    lane.hung = noted
                    lane.generation += 1
                    lane.record.abandoned = True
                waiting = list(lane.queue)
                lane.queue.clear()
                lane.condition.notify()
            for job in waiting:
                if not job.future.done():
                    job.future.cancel()
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.hung is not None}

    def settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Hand a job's end to the event loop. Called by a lane's thread."""
        loop = self._loop
        assert loop is not None

        def do() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            loop.call_soon_threadsafe(do)
        except RuntimeError:
            pass  # the event loop has ended; nobody waits any more

    def returned(self, key: str) -> None:
        """Note that a hung lane's call has come back. Called by the lane's thread."""
        log.info("a driver call that was overdue has come back", lane=key)
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._on_returned, key)
            except RuntimeError:
                pass  # the event loop has ended

    def _arm(self, delay: float) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(delay, self._look)

    def _look(self) -> None:
        """Judge every lane that has work by the call it is in."""
        self._timer = None
        busy = False
        now = time.monotonic()
        for lane in self._lanes.values():
            with lane.condition:
                if lane.hung is not None or (lane.current is None and not lane.queue):
                    continue
                busy = True
                noted = lane.record.call
                if noted is None or now - noted[1] < self._deadline(noted[0]):
                    continue
                lane.hung = noted
                lane.record.abandoned = True
                lane.generation += 1
                failed = [job for job in (lane.current, *lane.queue) if job is not None]
                lane.queue.clear()
            log.error(
                "a driver call is overdue; its GPU takes no work until it comes back",
                gpu=lane.record.gpu,
                call=noted[0],
            )
            for job in failed:
                if not job.future.done():
                    job.future.set_exception(codes.hung(noted[0], now - noted[1], lane.record.gpu))
        if busy:
            self._arm(self._tick)

    def _deadline(self, call: str) -> float:
        return self._change if call in calls.MUTATING else self._read
