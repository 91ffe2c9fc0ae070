"""What the operator wants done after a change: commands with a deadline each, their output in the log.

Where systemd runs us they are the work of gpunode-after-change.service, as the daemon's own sandbox
would be theirs too; elsewhere they are our children.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from agent import log
from agent.host import child
from agent.host import machine as machines

UNIT = "gpunode-after-change.service"


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command (no shell) and how many seconds it may take."""

    argv: tuple[str, ...]
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A command that did not end well, and how."""

    command: str
    why: str


def run(commands: Sequence[Command], *, environ: Mapping[str, str]) -> tuple[Failed, ...]:
    """Run the commands in order, each for at most its deadline; one that fails does not stop the next.

    Blocks. Every line of output goes to the log. Returns those that failed.
    """
    failed = []
    for command in commands:
        words = shlex.join(command.argv)
        log.info("after-change command starts", command=words)
        ended = child.run(command.argv, deadline=command.deadline, environ=environ)
        for line in ended.output.splitlines():
            if line.strip():
                log.info("after-change command says", command=command.argv[0], line=line.rstrip())
        if ended.ok:
            log.info("after-change command is done", command=words)
        else:
            log.error("after-change command failed", command=words, cause=ended.problem or f"exit status {ended.code}")
            failed.append(Failed(words, ended.words()))
    return tuple(failed)


def start_unit(systemctl: str, *, deadline: float = 10.0, unit: str = UNIT) -> tuple[Failed, ...]:
    """Have systemd run them in a unit of their own, without waiting for it: before READY nothing may wait
    for a unit. Its output is in its own journal."""
    ended = child.run([systemctl, "start", "--no-block", "--", unit], deadline=deadline)
    return () if ended.ok else (Failed(f"systemctl start {unit}", ended.words()),)


def after_change(
    machine: machines.Machine, commands: Sequence[Command], *, environ: Mapping[str, str], systemctl: str | None = None
) -> tuple[Failed, ...]:
    """Do what is to be done after a change, the one way or the other.

    `systemctl` is given where a unit of ours runs under systemd and has `UNIT` installed. A simulated
    machine runs no command on this host: it is only logged.
    """
    if not commands:
        return ()
    if machine.simulated is not None and systemctl is None:
        for command in commands:
            log.info("after-change command not run: the node is simulated", command=shlex.join(command.argv))
        return ()
    if systemctl is not None:
        return start_unit(systemctl)
    return run(commands, environ=environ)
