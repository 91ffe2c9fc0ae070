from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent import errors
from agent.nvml import calls, gpm
from agent.nvml import session as sessions
from agent.sim import node as simulated


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> Iterator[simulated.SimulatedNode]:
    made = simulated.open_node("h100.80gb:1", clock=clock)
    session = sessions.Session(made.library)
    session.open()
    yield made
    session.close()
    made.close()


@pytest.fixture
def handle(node: simulated.SimulatedNode) -> Any:
    return calls.call("nvmlDeviceGetHandleByIndex", 0)


def test_the_first_visit_has_no_figures_and_the_second_has(
    node: simulated.SimulatedNode, handle: Any, clock: Clock
) -> None:
    node.start_process(0, activity=0.8)
    windows = gpm.Windows(handle, clock=clock)
    assert windows.activity(None) is None
    clock.now += 5
    found = windows.activity(None)
    assert found is not None
    figures = (
        found.graphics,
        found.sm,
        found.sm_occupancy,
        found.tensor,
        found.dram,
        found.fp64,
        found.fp32,
        found.fp16,
        found.integer,
    )
    assert all(value is not None and 0 <= value <= 1 for value in figures)
    assert (found.sm or 0) > 0


def test_a_visit_too_soon_repeats_the_last_figures_without_a_call(
    node: simulated.SimulatedNode, handle: Any, clock: Clock
) -> None:
    windows = gpm.Windows(handle, clock=clock)
    windows.activity(None)
    clock.now += 5
    found = windows.activity(None)
    before = node.library_calls()
    clock.now += gpm.SHORTEST / 2
    assert windows.activity(None) is found
    assert node.library_calls() == before


def test_a_sample_from_long_ago_says_nothing_about_now(
    node: simulated.SimulatedNode, handle: Any, clock: Clock
) -> None:
    windows = gpm.Windows(handle, clock=clock)
    windows.activity(None)
    clock.now += gpm.LONGEST + 1
    assert windows.activity(None) is None
    clock.now += 5
    assert windows.activity(None) is not None


def test_two_samples_a_window_and_all_are_freed(node: simulated.SimulatedNode, handle: Any, clock: Clock) -> None:
    windows = gpm.Windows(handle, clock=clock)
    for _ in range(5):
        windows.activity(None)
        clock.now += 5
    assert len(node.library.samples) == 2
    windows.free()
    assert not node.library.samples


def test_a_refused_sample_is_raised_and_its_window_dropped(
    node: simulated.SimulatedNode, handle: Any, clock: Clock
) -> None:
    windows = gpm.Windows(handle, clock=clock)
    windows.activity(None)
    clock.now += 5
    node.fail("nvmlGpmSampleGet", 15)
    with pytest.raises(errors.Lost):
        windows.activity(None)
    assert not node.library.samples
    assert windows.activity(None) is None, "it begins anew"
    windows.free()


def test_support_is_told_or_not() -> None:
    for name, has in (("h100.80gb:1", True), ("a100.40gb:1", False)):
        node = simulated.open_node(name)
        session = sessions.Session(node.library)
        session.open()
        assert gpm.supported(calls.call("nvmlDeviceGetHandleByIndex", 0)) is has
        session.close()
        node.close()
