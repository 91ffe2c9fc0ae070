"""What the operator wants done after a change: commands with a deadline each, their output in the log.

Where systemd runs us they are the work of gpunode-after-change.service, as the daemon's own sandbox
would be theirs too; elsewhere they are our children.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent import log, records
from agent.host import child, files
from agent.host import machine as machines

UNIT = "gpunode-after-change.service"
NOTE = "/run/gpunode/after-change.json"
_UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


@records.dataclass(frozen=True, slots=True)
class Command:
    """A command (no shell) and how many seconds it may take."""

    argv: tuple[str, ...]
    deadline: float


def name(command: Command, number: int) -> str:
    """Return what to call a command in logs and reasons: its arguments may hold secrets."""
    return f"{command.argv[0]} (number {number})"


@records.dataclass(frozen=True, slots=True)
class Failed:
    """A command that did not end well, by its name, and how."""

    command: str
    why: str


def run(commands: Sequence[Command], *, environ: Mapping[str, str]) -> tuple[Failed, ...]:
    """Run the commands in order, each for at most its deadline; one that fails does not stop the next.

    Blocks. Every line of output goes to the log. Returns those that failed.
    """
    failed = []
    for number, command in enumerate(commands, 1):
        words = name(command, number)
        log.info("after-change command starts", command=words)
        ended = child.run(command.argv, deadline=command.deadline, environ=environ)
        for line in ended.output.splitlines():
            if line.strip():
                log.info("after-change command says", command=words, line=line.rstrip())
        if ended.ok:
            log.info("after-change command is done", command=words)
        else:
            log.error("after-change command failed", command=words, cause=ended.problem or f"exit status {ended.code}")
            failed.append(Failed(words, ended.words()))
    return tuple(failed)


def by_unit(machine: machines.Machine, environ: Mapping[str, str], *, search: str = "/usr/bin:/bin") -> str | None:
    """Return systemctl's path where the unit is to be used: systemd started us and has `UNIT` installed."""
    if "INVOCATION_ID" not in environ or not machine.path("/run/systemd/system").is_dir():
        return None
    if not any(machine.path(f"{folder}/{UNIT}").is_file() for folder in _UNIT_FOLDERS):
        return None
    return shutil.which("systemctl", path=search)


def start_unit(
    machine: machines.Machine, commands: Sequence[Command], systemctl: str, *, deadline: float = 10.0
) -> tuple[Failed, ...]:
    """Leave the commands at `NOTE` and have systemd start `UNIT` for them, without waiting for it: before
    READY nothing may wait for a unit. Their output is in that unit's journal."""
    document = [dataclasses.asdict(command) for command in commands]
    try:
        files.write_atomic(machine.path(NOTE), json.dumps(document).encode())
    except OSError as error:
        return (Failed(f"write {NOTE}", error.strerror or str(error)),)
    ended = child.run([systemctl, "start", "--no-block", "--", UNIT], deadline=deadline)
    return () if ended.ok else (Failed(f"systemctl start {UNIT}", ended.words()),)


def after_change(
    machine: machines.Machine,
    commands: Sequence[Command],
    *,
    environ: Mapping[str, str],
    systemctl: str | None = None,
) -> tuple[Failed, ...]:
    """Do what is to be done after a change, the one way or the other; return what failed.

    `systemctl` is what `by_unit` found. A simulated machine with a root of its own runs no command on
    this host: it is only logged.
    """
    if not commands:
        return ()
    if systemctl is not None:
        return start_unit(machine, commands, systemctl)
    if machine.simulated is not None:
        for number, command in enumerate(commands, 1):
            log.info("after-change command not run: the node is simulated", command=name(command, number))
        return ()
    return run(commands, environ=environ)


def main(note: Path = Path(NOTE), *, environ: Mapping[str, str] | None = None) -> int:
    """Run what was left at `note`; the unit's own program. Returns 1 when a command failed.

    The note is taken away first, and looked for again at the end: a change that comes meanwhile finds
    the unit running, so that starting it does nothing.
    """
    failed = False
    taken = note.with_name(note.name + ".running")
    while True:
        try:
            note.rename(taken)
        except FileNotFoundError:
            return 1 if failed else 0
        try:
            document = json.loads(files.read_bounded(taken))
            commands = [Command(tuple(map(str, entry["argv"])), float(entry["deadline"])) for entry in document]
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("cannot read the after-change commands", file=str(taken), cause=str(error))
            failed = True
            continue
        failed = bool(run(commands, environ=dict(os.environ) if environ is None else environ)) or failed
