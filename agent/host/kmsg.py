"""XIDs from the kernel log: those that happened before we listened, and those NVML does not tell.

The driver writes `NVRM: Xid (PCI:0000:10:1c): 79, …`, and with MIG on
`NVRM: Xid (PCI:0000:10:1c GPU-I:05 GPU-CI:00): 31, …`. Of what follows the number nothing is kept: it
names processes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from agent import records

PATH = "/dev/kmsg"
_CHUNK = 16 * 1024
_XID = re.compile(
    r"NVRM: (?:GPU at .*?: )?Xid \(PCI:(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-9a-f])?"
    r"(?: GPU-I:(?P<gi>\d+))?(?: GPU-CI:(?P<ci>\d+))?\): (?P<xid>\d+)",
    re.IGNORECASE,
)


@records.dataclass(frozen=True, slots=True)
class Xid:
    """One XID line. `sequence` is its number in the kernel log, `at` seconds since boot; `pci` the
    address as the kernel writes it, with function (`0000:10:1c.0`); `gi`, `ci` instance ids or None."""

    sequence: int
    at: float
    pci: str
    xid: int
    gi: int | None = None
    ci: int | None = None


class Reader:
    """Reads the kernel log from where it stopped last time.

    `after` is the sequence number of the last record already seen (-1: none); keep `reader.sequence`
    to go on after a restart of the daemon in the same boot. The kernel's own log is kept open, so that
    a look costs what is new and not the whole log; a plain file in its place is opened each time.
    """

    def __init__(self, path: Path, *, after: int = -1) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.sequence = after

    def close(self) -> None:
        """Let go of the log; the next `read` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def read(self) -> tuple[Xid, ...]:
        """Return the XIDs written since the last call. Never waits for new ones.

        Raises OSError where the log cannot be opened (no root, or a container without it).
        """
        found = []
        for record in self._records():
            head, separator, text = record.partition(";")
            words = head.split(",")
            try:
                sequence, micros = int(words[1]), int(words[2])
            except (IndexError, ValueError):
                continue
            if not separator or sequence <= self.sequence:
                continue
            self.sequence = sequence
            match = _XID.search(text)
            if match is not None:
                found.append(_xid(sequence, micros, match))
        return tuple(found)

    def _records(self) -> Iterator[str]:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        descriptor = self._descriptor
        rest = b""
        keep = False
        try:
            while True:
                try:
                    piece = os.read(descriptor, _CHUNK)
                except BlockingIOError:
                    break  # nothing newer
                except BrokenPipeError:
                    continue  # the kernel dropped records before we came to them; the next read goes on behind
                if not piece:
                    break
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line and not line.startswith(b" "):  # lines with a blank first are a record's properties
                        yield line.decode("utf-8", "replace")
            keep = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        finally:
            if not keep:
                self.close()


def _xid(sequence: int, micros: int, match: re.Match[str]) -> Xid:
    domain, _, rest = match["pci"].lower().partition(":")
    return Xid(
        sequence=sequence,
        at=micros / 1e6,
        pci=f"{int(domain, 16):04x}:{rest}.0",
        xid=int(match["xid"]),
        gi=int(match["gi"]) if match["gi"] else None,
        ci=int(match["ci"]) if match["ci"] else None,
    )
