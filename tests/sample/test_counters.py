from __future__ import annotations

import pytest

from agent.sample import counters
from tests.sample import fakes

TOP = 2**32


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ([5, 10, 10, 900], [5, 10, 10, 900]),
        ([TOP - 10, 20], [TOP - 10, TOP + 20]),
        ([TOP - 10, 20, TOP - 5, 3], [TOP - 10, TOP + 20, 2 * TOP - 5, 2 * TOP + 3]),
        ([TOP // 4, 20], [TOP // 4, 20]),
        ([TOP - 10, 20, 3], [TOP - 10, TOP + 20, 3]),
        ([2 * TOP, 20], [2 * TOP, 20]),
        ([TOP - 1, TOP // 2], [TOP - 1, TOP // 2]),
    ],
    ids=[
        "a counter that rises is left alone",
        "a wrap is folded",
        "each wrap adds",
        "a fall from the lower half is a counter started anew",
        "a reset after a wrap starts at the driver's own figure",
        "a counter beyond the range is a wide one, and its fall a reset",
        "a small fall at the top is no wrap",
    ],
)
def test_folding(raw: list[int], told: list[int]) -> None:
    folded = counters.Folded()
    assert [folded.fold(("GPU-0", "transmit"), value) for value in raw] == told


def test_counters_are_folded_apart_and_absent_stays_absent() -> None:
    folded = counters.Folded()
    folded.pcie(fakes.gpu(0, pcie_transmit_bytes=TOP - 1, pcie_receive_bytes=TOP - 1))
    folded.pcie(fakes.gpu(1, pcie_transmit_bytes=7))
    gpu = folded.pcie(fakes.gpu(0, pcie_transmit_bytes=5, pcie_receive_bytes=TOP - 1))
    assert (gpu.pcie_transmit_bytes, gpu.pcie_receive_bytes) == (TOP + 5, TOP - 1)
    other = folded.pcie(fakes.gpu(1, pcie_transmit_bytes=8))
    assert (other.pcie_transmit_bytes, other.pcie_receive_bytes) == (8, None)
    assert folded.pcie(fakes.gpu(2)) == fakes.gpu(2)


def test_first_seen_tells_a_new_instance_under_an_old_id() -> None:
    clock = fakes.Clock(10.0)
    seen = counters.FirstSeen(clock)

    def times(*instances: object) -> list[float]:
        return [one.first_seen for one in seen.date(fakes.gpu(0, instances=instances)).instances]

    assert times(fakes.instance(1)) == [10.0]
    clock.now = 20.0
    assert times(fakes.instance(1)) == [10.0]
    assert times(fakes.instance(1, profile="2g.20gb")) == [20.0]
    clock.now = 30.0
    assert times(fakes.instance(1, profile="2g.20gb", start=2)) == [30.0]
    assert times() == []
    clock.now = 40.0
    assert times(fakes.instance(1, profile="2g.20gb", start=2)) == [40.0]
    clock.now = 50.0
    seen.forget("GPU-0", 1)
    assert times(fakes.instance(1, profile="2g.20gb", start=2)) == [50.0]
    clock.now = 60.0
    seen.forget("GPU-0")
    assert times(fakes.instance(1, profile="2g.20gb", start=2)) == [60.0]


def test_a_gpu_that_is_silent_for_a_while_forgets_nothing() -> None:
    clock = fakes.Clock(10.0)
    seen = counters.FirstSeen(clock)
    seen.date(fakes.gpu(0, instances=(fakes.instance(1),)))
    clock.now = 20.0
    silent = fakes.gpu(0, up=False)
    assert seen.date(silent) is silent
    assert seen.date(fakes.gpu(0, instances=(fakes.instance(1),))).instances[0].first_seen == 10.0
