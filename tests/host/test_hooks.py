from __future__ import annotations

from pathlib import Path

import pytest

from agent.host import hooks
from tests.host import hosts


def test_each_runs_in_order_and_one_that_fails_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = tmp_path / "noted"
    failed = hooks.run(
        [
            hooks.Command(("/bin/sh", "-c", f"echo one >> {noted}; echo hello"), 10),
            hooks.Command(("/bin/sh", "-c", f"echo two >> {noted}; echo no >&2; exit 7"), 10),
            hooks.Command(("/bin/sh", "-c", "sleep 60"), 0.2),
            hooks.Command(("/bin/sh", "-c", f"echo $WORD >> {noted}"), 10),
        ],
        environ={"WORD": "three"},
    )
    assert noted.read_text() == "one\ntwo\nthree\n"
    assert [f.why for f in failed] == ["exit status 7: no", "no end after 0.2 s"]
    said = capsys.readouterr().err
    assert "line=hello" in said
    assert 'cause="exit status 7"' in said


def test_where_systemd_is_a_unit_does_it_and_is_not_waited_for(host: hosts.Host) -> None:
    host.tool("systemctl", 'echo "$@" >> $CALLS')
    command = hooks.Command(("/bin/false",), 5)
    assert hooks.after_change(host.machine, [command], environ={}, systemctl=str(host.bin / "systemctl")) == ()
    assert host.called() == ["start --no-block -- gpunode-after-change.service"]


def test_a_unit_that_cannot_be_started_is_told(host: hosts.Host) -> None:
    host.tool("systemctl", "echo Unit not found.; exit 5")
    (failed,) = hooks.start_unit(str(host.bin / "systemctl"))
    assert failed == hooks.Failed("systemctl start gpunode-after-change.service", "exit status 5: Unit not found.")


def test_nothing_to_do_starts_nothing(host: hosts.Host) -> None:
    assert hooks.after_change(host.machine, [], environ={}, systemctl="/no/such/systemctl") == ()


def test_without_systemd_they_are_our_children(host: hosts.Host, tmp_path: Path) -> None:
    command = hooks.Command(("/bin/sh", "-c", f"touch {tmp_path}/ran"), 5)
    assert hooks.after_change(host.machine, [command], environ={}) == ()
    assert (tmp_path / "ran").exists()


def test_a_simulated_machine_runs_nothing_here(host: hosts.Host, tmp_path: Path) -> None:
    host.machine.simulated = "p4d.24xlarge"
    command = hooks.Command(("/bin/sh", "-c", f"touch {tmp_path}/ran"), 5)
    assert hooks.after_change(host.machine, [command], environ={}) == ()
    assert not (tmp_path / "ran").exists()
