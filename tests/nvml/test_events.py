from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from agent import measures
from agent.mig import plan as plans
from agent.nvml import events


async def watched(
    bench: Callable[..., Any], until: Callable[..., Any], name: str = "h100.80gb:2", **options: Any
) -> Any:
    made = await bench(name, **options)
    heard: list[measures.Event] = []
    stop = made.gpus.watch(heard.append)
    await until(lambda: made.gpus.event_watch_up)
    return made, heard, stop


async def test_an_xid_is_delivered_with_its_instance(bench: Callable[..., Any], until: Callable[..., Any]) -> None:
    made, heard, _ = await watched(bench, until)
    made.node.xid(1, 94, gpu_instance=3, compute_instance=0)
    made.node.xid(0, 79)
    await until(lambda: len(heard) == 2)
    assert heard == [
        measures.Event(kind="xid", uuid=made.uuids[1], gpu_instance_id=3, compute_instance_id=0, xid=94),
        measures.Event(kind="xid", uuid=made.uuids[0], xid=79),
    ]


async def test_a_change_of_instances_is_delivered_and_read_anew(
    bench: Callable[..., Any], until: Callable[..., Any]
) -> None:
    made, heard, _ = await watched(bench, until)
    await made.gpus.perform(made.uuids[0], plans.SetMigMode(True))
    await until(lambda: any(e.kind == "mig-config-change" and e.uuid == made.uuids[0] for e in heard))


async def test_a_gpu_that_cannot_be_watched_is_left_out(bench: Callable[..., Any], until: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    made.node.fail("nvmlDeviceRegisterEvents", 3, gpu=0, times=0)
    heard: list[measures.Event] = []
    made.gpus.watch(heard.append)
    await until(lambda: made.gpus.event_watch_up)
    made.node.xid(0, 48)
    made.node.xid(1, 48)
    await until(lambda: bool(heard))
    assert [event.uuid for event in heard] == [made.uuids[1]]


async def test_watching_begins_with_the_first_look_and_only_then(
    bench: Callable[..., Any], until: Callable[..., Any]
) -> None:
    made = await bench("h100.80gb:1", look=False)
    heard: list[measures.Event] = []
    made.gpus.watch(heard.append)
    assert not made.gpus.event_watch_up
    await made.gpus.observe()
    await until(lambda: made.gpus.event_watch_up)


async def test_nobody_hears_anything_behind_the_stop(bench: Callable[..., Any], until: Callable[..., Any]) -> None:
    made, heard, stop = await watched(bench, until)
    other: list[measures.Event] = []
    made.gpus.watch(other.append)
    stop()
    made.node.xid(0, 48)
    await until(lambda: bool(other))
    assert heard == []


async def test_a_listener_that_fails_does_not_end_the_watch(
    bench: Callable[..., Any], until: Callable[..., Any]
) -> None:
    made, heard, _ = await watched(bench, until)

    heard_broken: list[measures.Event] = []

    def once(event: measures.Event) -> None:
        if not heard_broken:
            heard_broken.append(event)
            raise RuntimeError("a mistake")

    made.gpus.watch(once)
    made.node.xid(0, 48)
    await until(lambda: bool(heard_broken))
    made.node.xid(0, 63)
    await until(lambda: any(event.xid == 63 for event in heard))


@pytest.mark.parametrize("code", [*range(2, 10), *range(11, 31), 999])
async def test_watching_recovers_from_any_refusal(
    bench: Callable[..., Any], until: Callable[..., Any], code: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(events, "_AGAIN", 0.01)
    monkeypatch.setattr(events, "_TURN_MS", 10)
    made, heard, _ = await watched(bench, until)
    made.node.fail("nvmlEventSetWait_v2", code)
    await until(lambda: not made.gpus.event_watch_up or made.counted()["nvmlEventSetCreate"] > 1)
    first = made.gpus._events
    if code in (1, 2, 9, 12, 18):
        await until(lambda: first.ended)
    await made.gpus.observe()  # a watch whose handles were called dead begins again with the next look
    await until(lambda: made.gpus.event_watch_up and made.counted()["nvmlEventSetCreate"] > 1)
    made.node.xid(0, 48)
    await until(lambda: bool(heard))


async def test_the_watch_is_over_before_the_session_is(bench: Callable[..., Any], until: Callable[..., Any]) -> None:
    made, _, _ = await watched(bench, until)
    began = time.monotonic()
    await made.gpus.release()
    assert time.monotonic() - began < 2.0
    assert not made.gpus.event_watch_up
    assert not made.node.library.event_sets
    await made.gpus.retake()
    await until(lambda: made.gpus.event_watch_up)
