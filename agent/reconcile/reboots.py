"""The reboot guard: never a loop.

A reboot is asked for at most once for a target and at most twice in 24 hours over all targets, and
only after the request itself has been written durably and read back. What was asked is bound to
the machine, so that a record baked into an image does not count on its copies.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from agent import records
from agent.host import files

WINDOW = 24 * 3600.0
IN_WINDOW = 2


@records.dataclass(frozen=True, slots=True)
class Request:
    """A reboot that was asked for: for what (a layout's digest), in which boot, on which machine, when."""

    target: str
    boot_id: str
    machine_id: str
    at: float


@records.dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a reboot may be asked for. `pending`: it was already, in this very boot."""

    allowed: bool
    pending: bool = False
    why: str = ""


def decide(requests: tuple[Request, ...], *, target: str, boot_id: str, machine_id: str, now: float) -> Verdict:
    """Judge a wish to reboot by what was asked before. Pure."""
    mine = [r for r in requests if r.machine_id == machine_id]
    for request in mine:
        if request.target == target and request.boot_id == boot_id:
            return Verdict(allowed=False, pending=True, why="a reboot was requested and has not happened yet")
    if any(r.boot_id == boot_id for r in mine):
        return Verdict(
            allowed=False, pending=True, why="a reboot for another layout was requested and has not happened yet"
        )
    if any(r.target == target for r in mine):
        return Verdict(allowed=False, why="the node was already rebooted once for this layout, and that did not help")
    # A clock set back must not open the window again: a request from the future counts as recent.
    recent = [r for r in mine if r.at > now - WINDOW]
    if len(recent) >= IN_WINDOW:
        return Verdict(allowed=False, why=f"{len(recent)} reboots were requested within 24 hours, which is the limit")
    return Verdict(allowed=True)


def parse(text: str) -> tuple[Request, ...]:
    """Read the record; raises ValueError when it is not one (the guard then fails closed)."""
    try:
        document = json.loads(text)
        return tuple(
            Request(
                target=str(r["target"]), boot_id=str(r["boot_id"]), machine_id=str(r["machine_id"]), at=float(r["at"])
            )
            for r in document["requests"]
        )
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(f"not a record of reboots: {cause}") from cause


def render(requests: tuple[Request, ...]) -> str:
    """Write the record."""
    return json.dumps({"version": 1, "requests": [dataclasses.asdict(r) for r in requests]}, indent=1) + "\n"


@records.dataclass(frozen=True, slots=True)
class Guard:
    """The record on disk. `path` must lie on storage that outlives a reboot: `volatile` names the kind of
    file system where it does not, and then no reboot is allowed, as nothing would end a series of them."""

    path: Path
    boot_id: str
    machine_id: str
    volatile: str | None = None

    def ask(self, target: str, now: float) -> Verdict:
        """Decide, and when a reboot is allowed record it durably before saying so.

        Anything that cannot be read, written or read back is a refusal.
        """
        if self.volatile is not None:
            words = f"{self.path} lies on a {self.volatile}, and what was requested would be forgotten with the reboot"
            return Verdict(allowed=False, why=words)
        try:
            requests = self._read()
        except (OSError, ValueError) as cause:
            return Verdict(allowed=False, why=f"cannot read what reboots were requested before ({self.path}): {cause}")
        verdict = decide(requests, target=target, boot_id=self.boot_id, machine_id=self.machine_id, now=now)
        if not verdict.allowed:
            return verdict
        request = Request(target=target, boot_id=self.boot_id, machine_id=self.machine_id, at=now)
        try:
            files.write_atomic(self.path, render((*requests, request)).encode())
            if request not in self._read():
                raise OSError("the record read back lacks the request")
        except (OSError, ValueError) as cause:
            return Verdict(allowed=False, why=f"cannot record the reboot durably ({self.path}): {cause}")
        return verdict

    def _read(self) -> tuple[Request, ...]:
        try:
            text = files.read_bounded(self.path).decode()
        except FileNotFoundError:
            return ()
        return parse(text)
