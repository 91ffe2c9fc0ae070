from __future__ import annotations

import threading
from collections.abc import Iterator

import pynvml
import pytest

from agent import errors
from agent.nvml import calls


@pytest.fixture
def record() -> Iterator[calls.Record]:
    made = calls.Record("GPU-1")
    calls.attend(made)
    yield made
    calls.attend(None)


def refuse(code: int) -> object:
    def function(*_: object) -> None:
        raise pynvml.NVMLError(code)

    return function


def test_a_call_is_noted_while_it_lasts(record: calls.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def tell(handle: object) -> str:
        seen.append((record.call, handle))
        return "name"

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", tell)
    assert calls.call("nvmlDeviceGetName", "h") == "name"
    ((noted, handle),) = seen
    assert noted is not None
    assert noted[0] == "nvmlDeviceGetName"
    assert handle == "h"
    assert record.call is None
    assert not record.changed


def test_a_refused_call_becomes_our_error(record: calls.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", refuse(15))
    with pytest.raises(errors.Lost, match="on GPU GPU-1: the GPU has fallen off the bus"):
        calls.call("nvmlDeviceGetName", None)
    assert record.call is None


def test_a_function_that_pynvml_lacks_is_not_supported(record: calls.Record) -> None:
    with pytest.raises(errors.NotSupported) as caught:
        calls.call("nvmlDeviceGetWhatComesNextYear", None)
    assert caught.value.code == 13


def test_a_mistake_of_ours_is_not_taken_for_an_old_pynvml(
    record: calls.Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(handle: object) -> None:
        handle.nothing  # type: ignore[attr-defined]  # noqa: B018

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", slip)
    with pytest.raises(AttributeError):
        calls.call("nvmlDeviceGetName", None)


def test_bytes_that_are_no_text_are_an_error_of_the_call(record: calls.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"\xff".decode())
    with pytest.raises(errors.CallError):
        calls.call("nvmlDeviceGetName", None)


def test_changing_calls_are_noted_as_such(record: calls.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlGpuInstanceDestroy", lambda _: None)
    calls.call("nvmlGpuInstanceDestroy", None)
    assert record.changed


def test_an_abandoned_job_gets_no_further(record: calls.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def first(_: object) -> None:
        made.append("first")
        record.abandoned = True  # somebody gives the lane up while the call is out

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", first)
    monkeypatch.setattr(pynvml, "nvmlGpuInstanceDestroy", lambda _: made.append("second"))

    def job() -> None:
        try:
            calls.call("nvmlDeviceGetName", None)
        except Exception:  # noqa: BLE001  # what a careless handler would do
            pass
        calls.call("nvmlGpuInstanceDestroy", None)

    with pytest.raises(calls.Abandoned):
        job()
    with pytest.raises(calls.Abandoned):
        calls.call("nvmlGpuInstanceDestroy", None)
    assert made == ["first"]


def test_counts_are_exact_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetIndex", lambda _: 0)
    before = calls.counts["nvmlDeviceGetIndex"]
    workers = [
        threading.Thread(target=lambda: [calls.call("nvmlDeviceGetIndex", None) for _ in range(500)]) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert calls.counts["nvmlDeviceGetIndex"] - before == 2000
