"""The reboot guard: at most one a target, two a day, and none when anything about the record is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.reconcile import reboots

DAY = 24 * 3600.0


def request(target: str = "t1", boot: str = "b1", machine: str = "i-1", at: float = 1000.0) -> reboots.Request:
    return reboots.Request(target=target, boot_id=boot, machine_id=machine, at=at)


@pytest.mark.parametrize(
    ("before", "target", "boot", "now", "allowed", "pending"),
    [
        pytest.param((), "t1", "b1", 1000.0, True, False, id="the first wish is granted"),
        pytest.param((request(),), "t1", "b1", 1001.0, False, True, id="asked in this boot: still pending"),
        pytest.param(
            (request(),), "t2", "b1", 1001.0, False, True, id="another target in this boot waits for the same reboot"
        ),
        pytest.param(
            (request(),), "t1", "b2", 2000.0, False, False, id="rebooted once for this target and it did not help"
        ),
        pytest.param((request(),), "t1", "b2", 1000.0 + 90 * DAY, False, False, id="not even months later"),
        pytest.param((request(),), "t2", "b2", 2000.0, True, False, id="another target may reboot once"),
        pytest.param(
            (request(), request("t2", "b2", at=1500.0)),
            "t3",
            "b3",
            2000.0,
            False,
            False,
            id="two in 24 hours are the limit",
        ),
        pytest.param(
            (request(), request("t2", "b2", at=1500.0)),
            "t3",
            "b3",
            1600.0 + DAY,
            True,
            False,
            id="a day later there is room",
        ),
        pytest.param(
            (request(machine="i-2"),), "t1", "b2", 2000.0, True, False, id="a record of another machine does not count"
        ),
        pytest.param(
            (request(at=9e9), request("t2", "b2", at=9e9)),
            "t3",
            "b3",
            2000.0,
            False,
            False,
            id="a clock set back opens nothing",
        ),
    ],
)
def test_decide(
    before: tuple[reboots.Request, ...], target: str, boot: str, now: float, allowed: bool, pending: bool
) -> None:
    verdict = reboots.decide(before, target=target, boot_id=boot, machine_id="i-1", now=now)
    assert (verdict.allowed, verdict.pending) == (allowed, pending)
    assert verdict.allowed or verdict.why


def guard(path: Path, boot: str = "b1") -> reboots.Guard:
    return reboots.Guard(path=path, boot_id=boot, machine_id="i-1")


def test_two_targets_that_flap_get_two_reboots_in_a_day(tmp_path: Path) -> None:
    path = tmp_path / "lib" / "reboots.json"
    granted = 0
    for boot in range(40):
        for target in ("t1", "t2", f"t{boot + 3}"):
            granted += guard(path, f"b{boot}").ask(target, 1000.0 + boot).allowed
    assert granted == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"requests": [{}]}', '{"requests": 3}', "\x00"])
def test_a_record_that_cannot_be_read_refuses(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reboots.json"
    path.write_text(text)
    verdict = guard(path).ask("t1", 1000.0)
    assert not verdict.allowed
    assert str(path) in verdict.why
    assert path.read_text() == text


def test_a_record_that_cannot_be_written_refuses(tmp_path: Path) -> None:
    blocker = tmp_path / "lib"
    blocker.write_text("a file where the directory belongs")
    verdict = guard(blocker / "reboots.json").ask("t1", 1000.0)
    assert not verdict.allowed
    assert not verdict.pending


def test_a_directory_in_its_place_refuses(tmp_path: Path) -> None:
    (tmp_path / "reboots.json").mkdir()
    assert not guard(tmp_path / "reboots.json").ask("t1", 1000.0).allowed


def test_a_record_that_a_reboot_takes_away_refuses(tmp_path: Path) -> None:
    path = tmp_path / "reboots.json"
    verdict = reboots.Guard(path=path, boot_id="b1", machine_id="i-1", volatile="tmpfs").ask("t1", 1000.0)
    assert not verdict.allowed
    assert not verdict.pending
    assert "tmpfs" in verdict.why
    assert not path.exists()


def test_what_is_written_is_read_back_the_same() -> None:
    requests = (request(), request("t2", "b2", "i-2", 5.5))
    assert reboots.parse(reboots.render(requests)) == requests
