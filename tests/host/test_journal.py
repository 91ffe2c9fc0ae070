from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import log
from agent.host import journal

Socket = tuple[Path, Callable[[], list[bytes]]]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A descriptor that stands for the journal's stream, and the environment systemd would set."""
    descriptor = os.open(tmp_path / "stream", os.O_CREAT | os.O_RDWR)
    known = os.fstat(descriptor)
    yield descriptor, {"JOURNAL_STREAM": f"{known.st_dev}:{known.st_ino}"}
    os.close(descriptor)


def _without_systemd_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)


def test_fields_reach_the_journal_by_its_own_protocol(
    datagrams: Socket, stream: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_systemd_python(monkeypatch)
    path, received = datagrams
    assert journal.install(stream[1], stderr=stream[0], address=path)
    log.warning("layout blocked", gpu="GPU-1", phase="blocked", code="in-use", nothing=None)
    log.info("two\nlines")
    first, second = received()
    assert first == (
        b"MESSAGE=layout blocked gpu=GPU-1 phase=blocked code=in-use\nPRIORITY=4\nSYSLOG_IDENTIFIER=gpunode\n"
        b"GPU_UUID=GPU-1\nPHASE=blocked\nCODE=in-use\n"
    )
    assert second.startswith(b"MESSAGE\n\x09\0\0\0\0\0\0\0two\nlines\nPRIORITY=6\n")


def test_systemd_python_is_used_where_it_is(
    stream: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, ...]] = []
    package = types.ModuleType("systemd")
    module = types.ModuleType("systemd.journal")
    module.sendv = lambda *fields: sent.append(fields)  # type: ignore[attr-defined]
    package.journal = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "systemd", package)
    monkeypatch.setitem(sys.modules, "systemd.journal", module)
    assert journal.install(stream[1], stderr=stream[0])
    log.error("it broke", gpu="GPU-1")
    assert sent == [("MESSAGE=it broke gpu=GPU-1", "PRIORITY=3", "SYSLOG_IDENTIFIER=gpunode", "GPU_UUID=GPU-1")]


def test_a_stderr_that_is_not_the_journal_stays_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert not journal.install({"JOURNAL_STREAM": "1:2"}, stderr=2)
    assert not journal.install({}, stderr=2)
    assert not journal.install({"JOURNAL_STREAM": "1:2"}, stderr=9999)
    log.info("still here", gpu="GPU-1")
    assert capsys.readouterr().err == 'level=info msg="still here" gpu=GPU-1\n'


def test_a_journal_that_is_gone_does_not_end_us(
    tmp_path: Path, stream: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_systemd_python(monkeypatch)
    assert journal.install(stream[1], stderr=stream[0], address=tmp_path / "gone")
    log.info("into the void")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gpu", "GPU_UUID"),
        ("phase", "PHASE"),
        ("after-change", "AFTER_CHANGE"),
        ("_x", "X"),
        ("message", "DETAIL"),
        ("9", "FIELD"),
    ],
)
def test_keys_become_field_names_the_journal_takes(key: str, name: str) -> None:
    entries: list[dict[str, str]] = []
    journal.sink(lambda entry: entries.append(dict(entry)))("info", "event", {key: "v"})
    assert entries[0][name] == "v"
