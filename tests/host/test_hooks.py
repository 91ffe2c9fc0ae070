from __future__ import annotations

import json
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
    assert [f.command for f in failed] == ["/bin/sh (number 2)", "/bin/sh (number 3)"]
    assert "sleep 60" not in said, "arguments may hold secrets"


def test_where_systemd_is_a_unit_does_it_and_is_not_waited_for(host: hosts.Host, tmp_path: Path) -> None:
    host.tool("systemctl", 'echo "$@" >> $CALLS')
    command = hooks.Command(("/bin/touch", str(tmp_path / "ran")), 5)
    assert hooks.after_change(host.machine, [command], environ={}, systemctl=str(host.bin / "systemctl")) == ()
    assert host.called() == ["start --no-block -- gpunode-after-change.service"]
    assert not (tmp_path / "ran").exists()
    assert hooks.main(host.path(hooks.NOTE)) == 0  # what the unit runs
    assert (tmp_path / "ran").exists()
    assert not host.path(hooks.NOTE).exists()


def test_a_change_while_the_unit_runs_is_not_lost(host: hosts.Host, tmp_path: Path) -> None:
    host.tool("systemctl", "true")
    note, noted = host.path(hooks.NOTE), tmp_path / "noted"
    again = json.dumps([{"argv": ["/bin/sh", "-c", f"echo second >> {noted}; exit 1"], "deadline": 5}])
    script = f"echo first >> {noted}; echo '{again}' > {note}"
    hooks.start_unit(host.machine, [hooks.Command(("/bin/sh", "-c", script), 5)], str(host.bin / "systemctl"))
    assert hooks.main(note, environ={}) == 1
    assert noted.read_text() == "first\nsecond\n"


@pytest.mark.parametrize("text", ["", "[1]", '[{"argv": ["x"]}]', "scrap"])
def test_a_note_that_cannot_be_read_is_a_failure(host: hosts.Host, text: str) -> None:
    host.write(hooks.NOTE, text)
    assert hooks.main(host.path(hooks.NOTE)) == 1


def test_a_unit_that_cannot_be_started_is_told(host: hosts.Host) -> None:
    host.tool("systemctl", "echo Unit not found.; exit 5")
    (failed,) = hooks.start_unit(host.machine, [], str(host.bin / "systemctl"))
    assert failed == hooks.Failed("systemctl start gpunode-after-change.service", "exit status 5: Unit not found.")
    host.path(hooks.NOTE).unlink()
    host.path("/run/gpunode").rmdir()
    host.write("/run/gpunode", "not a directory")
    (failed,) = hooks.start_unit(host.machine, [], str(host.bin / "systemctl"))
    assert failed.command == "write /run/gpunode/after-change.json"


def test_the_unit_is_used_where_systemd_started_us_and_has_it(host: hosts.Host) -> None:
    host.tool("systemctl", "true")
    under, search = {"INVOCATION_ID": "x"}, str(host.bin)
    assert hooks.by_unit(host.machine, under, search=search) is None
    host.systemd()
    assert hooks.by_unit(host.machine, under, search=search) is None
    host.write("/usr/lib/systemd/system/gpunode-after-change.service", "[Service]\n")
    assert hooks.by_unit(host.machine, under, search=search) == str(host.bin / "systemctl")
    assert hooks.by_unit(host.machine, {}, search=search) is None


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
