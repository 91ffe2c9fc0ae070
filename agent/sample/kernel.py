"""XIDs out of the kernel's log, each once in a boot, also over restarts of gpunode.

Where the log stands is kept under /run with the boot's id: after a restart what stands before the last
record seen is told as known, and counts no more; after a reboot everything is new. Records tell seconds since boot; they
become Unix times by the boot time in /proc/stat. The log's clock is not the one that NTP keeps right
and is seconds off after days, so a record is also held to be no older than the look before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agent import errors, log, records
from agent.host import files, kmsg

KEPT = "/run/gpunode/kernel-log.json"


class Host(Protocol):
    """What is asked of the machine."""

    def path(self, absolute: str) -> Path:
        """Return where a file of the host is to be opened."""

    def boot_id(self) -> str:
        """The kernel's id of this boot."""


@records.dataclass(frozen=True, slots=True)
class Line:
    """An XID in the log. `address` is the GPU's on the bus (`0000:10:1c.0`), `when` in Unix seconds, which
    may be `doubt` seconds off; ids are None where the whole GPU is meant. `known`: read before, by a
    gpunode that ran earlier in this boot."""

    address: str
    xid: int
    when: float
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    doubt: float = 0.0
    known: bool = False


class KernelLog:
    """Reads the log of a machine from where it was left. Blocks a little: call it in a thread."""

    def __init__(self, machine: Host, *, clock: Callable[[], float]) -> None:
        self._machine = machine
        self._clock = clock
        self._reader: kmsg.Reader | None = None
        self._boot_id = ""
        self._looked: float | None = None
        self._left = -1

    def read(self) -> tuple[Line, ...] | None:
        """Return what was written since last time; None where this process cannot read such a log at all.

        Raises OSError when a log that is there cannot be read now.
        """
        if self._reader is None:
            self._boot_id = self._machine.boot_id()
            self._reader = kmsg.Reader(self._machine.path(kmsg.PATH))
            self._left = self._left_at()
        before = max(self._reader.sequence, self._left)
        try:
            found = self._reader.read()
        except (FileNotFoundError, PermissionError):
            return None
        earliest, self._looked = self._looked, self._clock()
        if self._reader.sequence > before:
            self._keep(self._reader.sequence)
        if not found:
            return ()
        booted = self._booted()
        return tuple(
            Line(
                one.pci,
                one.xid,
                min(max(booted + one.at, earliest or 0.0), self._looked),
                one.gi,
                one.ci,
                doubt=0.0 if earliest is None else max(0.0, self._looked - earliest),
                known=one.sequence <= self._left,
            )
            for one in found
        )

    def _left_at(self) -> int:
        try:
            kept = json.loads(files.read_text(self._machine.path(KEPT)) or "")
            return int(kept["sequence"]) if kept["boot_id"] == self._boot_id else -1
        except (OSError, ValueError, KeyError, TypeError, errors.GpunodeError):
            return -1  # nothing kept, or nothing that can be used: every record of this boot is new

    def _keep(self, sequence: int) -> None:
        document = json.dumps({"boot_id": self._boot_id, "sequence": sequence}) + "\n"
        try:
            files.write_atomic(self._machine.path(KEPT), document.encode())
        except OSError as cause:
            log.debug("cannot keep where the kernel log stands; a restart counts its XIDs again", cause=cause)

    def _booted(self) -> float:
        """Return when this boot began, in Unix seconds."""
        for line in (files.read_text(self._machine.path("/proc/stat")) or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "btime" and value.strip().isdigit():
                return float(value)
        uptime = (files.read_text(self._machine.path("/proc/uptime")) or "").split()
        try:
            return self._clock() - float(uptime[0])
        except (IndexError, ValueError):
            return self._clock()
