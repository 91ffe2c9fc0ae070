from __future__ import annotations

from agent.sample import xid

GPU = "GPU-0"


def counted(ledger: xid.Ledger) -> dict[xid.Key, int]:
    return {key: count for key, count in ledger.errors(()).items() if count}


def test_fatal_codes_start_at_zero_for_every_gpu() -> None:
    ledger = xid.Ledger()
    assert ledger.errors(["GPU-0", "GPU-1"]) == {
        (gpu, "", "", code): 0 for gpu in ("GPU-0", "GPU-1") for code in xid.FATAL
    }
    assert ledger.last() == {}


def test_those_of_instances_start_at_zero_for_every_compute_instance() -> None:
    ledger = xid.Ledger()
    ledger.event(GPU, 94, when=10.0, gpu_instance_id=3, compute_instance_id=1)
    found = ledger.errors((), [(GPU, 3, 0), (GPU, 3, 1)])
    assert found == {(GPU, "3", ci, code): int((ci, code) == ("1", 94)) for ci in "01" for code in (48, 94, 95)}


def test_what_an_instance_had_goes_with_it() -> None:
    ledger = xid.Ledger()
    for instance in (3, 4, None):
        ledger.event(GPU, 94, when=10.0, gpu_instance_id=instance, compute_instance_id=0)
    ledger.forget(GPU, 3)
    ledger.forget("GPU-1", 4)
    assert counted(ledger) == {(GPU, "4", "0", 94): 1, (GPU, "", "0", 94): 1}
    assert ledger.last().keys() == counted(ledger).keys()


def test_events_are_counted_by_instance_at_once() -> None:
    ledger = xid.Ledger()
    ledger.event(GPU, 94, when=10.0, gpu_instance_id=3, compute_instance_id=0)
    ledger.event(GPU, 94, when=11.0, gpu_instance_id=3, compute_instance_id=0)
    ledger.event(GPU, 94, when=9.0, gpu_instance_id=4)
    ledger.event(GPU, 31, when=12.0)
    assert counted(ledger) == {(GPU, "3", "0", 94): 2, (GPU, "4", "", 94): 1, (GPU, "", "", 31): 1}
    assert ledger.last() == {(GPU, "3", "0", 94): 11.0, (GPU, "4", "", 94): 9.0, (GPU, "", "", 31): 12.0}


def test_what_only_the_kernel_log_tells_counts_after_a_moment() -> None:
    ledger = xid.Ledger()
    ledger.kernel(GPU, 79, when=10.0)
    ledger.settle(11.0)
    assert counted(ledger) == {}
    ledger.settle(12.0)
    assert counted(ledger) == {(GPU, "", "", 79): 1}
    assert ledger.last() == {(GPU, "", "", 79): 10.0}


def test_a_line_read_late_waits_for_its_event_from_then_on() -> None:
    ledger = xid.Ledger()
    ledger.kernel(GPU, 94, when=10.0, heard=14.9)
    ledger.settle(15.0)
    assert counted(ledger) == {}
    ledger.event(GPU, 94, when=15.0, gpu_instance_id=3)
    ledger.settle(100.0)
    assert counted(ledger) == {(GPU, "3", "", 94): 1}


def test_a_line_of_which_the_time_is_in_doubt_is_matched_with_an_event_as_far_off() -> None:
    ledger = xid.Ledger()
    ledger.event(GPU, 94, when=10.0)
    ledger.kernel(GPU, 94, when=40.0, heard=40.0, doubt=20.0)
    ledger.kernel(GPU, 94, when=30.0, heard=40.0, doubt=20.0)
    ledger.event(GPU, 95, when=10.0)
    ledger.kernel(GPU, 95, when=40.0, heard=40.0, doubt=25.0)
    ledger.settle(100.0)
    assert counted(ledger) == {(GPU, "", "", 94): 2, (GPU, "", "", 95): 1}


def test_one_error_told_twice_is_one_whoever_comes_first() -> None:
    for order in ("event first", "log first"):
        ledger = xid.Ledger()
        if order == "event first":
            ledger.event(GPU, 94, when=10.0, gpu_instance_id=3)
            ledger.kernel(GPU, 94, when=10.5)
        else:
            ledger.kernel(GPU, 94, when=10.0)
            ledger.event(GPU, 94, when=10.5, gpu_instance_id=3)
        ledger.settle(100.0)
        assert counted(ledger) == {(GPU, "3", "", 94): 1}, order


def test_two_errors_told_twice_are_two() -> None:
    ledger = xid.Ledger()
    for when in (10.0, 10.2):
        ledger.event(GPU, 94, when=when)
        ledger.kernel(GPU, 94, when=when)
    ledger.settle(100.0)
    assert counted(ledger) == {(GPU, "", "", 94): 2}


def test_the_same_code_of_another_gpu_or_another_time_is_another_error() -> None:
    ledger = xid.Ledger()
    ledger.event(GPU, 94, when=10.0)
    ledger.kernel("GPU-1", 94, when=10.0)
    ledger.kernel(GPU, 95, when=10.0)
    ledger.kernel(GPU, 94, when=10.0 + xid.SAME_WITHIN + 0.1, gpu_instance_id=5, compute_instance_id=1)
    ledger.settle(100.0)
    assert counted(ledger) == {
        (GPU, "", "", 94): 1,
        ("GPU-1", "", "", 94): 1,
        (GPU, "", "", 95): 1,
        (GPU, "5", "1", 94): 1,
    }
    assert ledger._events == []
