from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pynvml
import pytest

from agent import errors
from agent.nvml import calls, lanes


class Stuck:
    """A driver call that does not come back before it is told to."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.made = 0

    def __call__(self, *_: object) -> str:
        self.made += 1
        self.inside.set()
        self.go.wait(30)
        return "late"


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    made = Stuck()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", made)
    return made


@pytest.fixture
async def made(stuck: Stuck) -> AsyncIterator[Callable[..., lanes.Lanes]]:
    opened: list[lanes.Lanes] = []

    def make(**options: Any) -> lanes.Lanes:
        opened.append(lanes.Lanes(**options))
        return opened[-1]

    yield make
    stuck.go.set()
    for one in opened:
        one.close()


def name() -> object:
    return calls.call("nvmlDeviceGetName", None)


async def test_a_lane_is_one_thread_and_lanes_are_several(made: Callable[..., lanes.Lanes]) -> None:
    some = made()
    threads = [await some.run(key, threading.get_ident) for key in ("a", "a", "b")]
    assert threads[0] == threads[1] != threads[2]
    assert threading.get_ident() not in threads


async def test_jobs_of_a_lane_run_in_order(made: Callable[..., lanes.Lanes]) -> None:
    some = made()
    order: list[int] = []
    await asyncio.gather(*(some.run("a", lambda n=n: order.append(n)) for n in range(20)))  # type: ignore[misc]
    assert order == list(range(20))


async def test_what_a_job_raises_is_raised_to_whoever_waits(made: Callable[..., lanes.Lanes]) -> None:
    def job() -> None:
        raise errors.NoRoom("no room", call="x", code=23)

    some = made()
    with pytest.raises(errors.NoRoom):
        await some.run("a", job)
    assert await some.run("a", lambda: 1) == 1


async def test_a_call_that_hangs_isolates_its_lane_and_no_other(
    made: Callable[..., lanes.Lanes], stuck: Stuck, until: Callable[..., Any]
) -> None:
    returned: list[str] = []
    some = made(read_deadline=0.1, on_returned=returned.append)
    went_on = []

    def job() -> None:
        try:
            name()
        except Exception:  # noqa: BLE001  # what a careless handler would do
            pass
        went_on.append(True)

    hanging = asyncio.create_task(some.run("a", job, gpu="GPU-a"))
    await until(stuck.inside.is_set)
    waiting = asyncio.create_task(some.run("a", lambda: 1))
    assert await some.run("b", lambda: 2) == 2
    with pytest.raises(errors.Hung, match="cannot read the name on GPU GPU-a"):
        await hanging
    with pytest.raises(errors.Hung):
        await waiting
    began = time.monotonic()
    with pytest.raises(errors.Hung):
        await some.run("a", lambda: 3)
    assert time.monotonic() - began < 1.0, "a hung lane refuses at once"
    assert some.hung() == ("a",)
    assert await some.run("b", lambda: 4) == 4
    stuck.go.set()
    await until(lambda: returned == ["a"])
    assert some.hung() == ()
    assert went_on == [], "the job of a lane that was given up must not go on"
    assert await some.run("a", lambda: 5) == 5


async def test_a_call_that_changes_may_take_longer_than_one_that_reads(
    made: Callable[..., lanes.Lanes], stuck: Stuck, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Stuck()
    monkeypatch.setattr(pynvml, "nvmlGpuInstanceDestroy", other)
    some = made(read_deadline=0.1, change_deadline=30.0)
    changing = asyncio.create_task(some.run("b", lambda: calls.call("nvmlGpuInstanceDestroy", None)))
    await until(other.inside.is_set)
    with pytest.raises(errors.Hung):
        await some.run("a", name)
    assert some.hung() == ("a",)
    other.go.set()
    assert await changing == "late"


async def test_a_job_nobody_waits_for_any_more_is_not_begun(
    made: Callable[..., lanes.Lanes], stuck: Stuck, until: Callable[..., Any]
) -> None:
    some = made()
    begun = []
    first = asyncio.create_task(some.run("a", name))
    await until(stuck.inside.is_set)
    second = asyncio.create_task(some.run("a", lambda: begun.append(True)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    stuck.go.set()
    assert await first == "late"
    assert await some.run("a", lambda: 1) == 1
    assert begun == []


async def test_closing_waits_for_nobody_and_names_who_is_left(
    made: Callable[..., lanes.Lanes], stuck: Stuck, until: Callable[..., Any]
) -> None:
    some = made()
    task = asyncio.create_task(some.run("a", name))
    await until(stuck.inside.is_set)
    await some.run("b", lambda: 1)
    began = time.monotonic()
    some.close()
    assert time.monotonic() - began < 1.0
    assert some.hung() == ("a",)
    task.cancel()


async def test_threads_are_daemons_and_end_when_closed(
    made: Callable[..., lanes.Lanes], until: Callable[..., Any]
) -> None:
    some = made()
    found: list[threading.Thread] = []
    await some.run("a", lambda: found.append(threading.current_thread()))
    (thread,) = found
    assert thread.daemon
    some.close()
    await until(lambda: not thread.is_alive())
