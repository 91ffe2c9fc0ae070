"""Files as the daemon needs them: written whole or not at all, read bounded, locked till death."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import Self

from agent import errors

LIMIT = 1024 * 1024

# How often, and how far apart in seconds, a holder's threads are looked at before one is called stuck.
_LOOKS = 3
_BETWEEN_LOOKS = 0.1
_VOLATILE = frozenset({"tmpfs", "ramfs"})


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Put `data` at `path` so that a reader sees the old content or the new, also after a crash.

    The directory is made (0o755) if it is missing. Raises OSError; the old file then still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        try:
            os.fchmod(descriptor, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    _sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove `path` durably; nothing happens when it is not there. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, *, limit: int = LIMIT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises OSError with a cause a person can read; never waits on a FIFO or reads a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "not a regular file"
            raise OSError(None, f"{what}", str(path))
        pieces = []
        left = limit + 1
        while left:
            piece = os.read(descriptor, left)
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        data = b"".join(pieces)
        if len(data) > limit:
            raise OSError(None, f"larger than {limit} bytes", str(path))
        return data
    finally:
        os.close(descriptor)


def read_text(path: Path, *, limit: int = LIMIT) -> str | None:
    """Return a small file's text without its trailing white space, or None where it cannot be read.

    For facts that may be missing (DMI, /proc): a cause is not told. Undecodable bytes are replaced.
    """
    try:
        return read_bounded(path, limit=limit).decode("utf-8", "replace").rstrip()
    except OSError:
        return None


def volatile(path: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the kind of file system ("tmpfs") under `path` when it keeps nothing over a reboot, else None,
    as where that cannot be told. `path` need not exist."""
    place = os.path.realpath(path)
    best, kind = "", None
    for line in (read_text(mounts) or "").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])  # a blank is \040
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one place the later lies on top
            best, kind = point, after.split(" ")[0]
    return kind if kind in _VOLATILE else None


class Lock:
    """An exclusive lock held by this process until `release()` or its death.

    `flock` is the kernel's: it works across containers that see the same file, and no crash leaves
    it behind. The file says who took it, for the one who finds it held.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, *, proc: Path = Path("/proc")) -> Lock:
        """Take the lock at once. Raises `errors.BlockedError` naming the holder when somebody has it,
        and `errors.GpunodeError` when the file cannot be made (no lock, no write).

        `proc` is where the holder is looked up. A holder with a thread that stays in state D is said
        to be stuck in the kernel rather than called a rival; finding that out takes 0.2 s.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise errors.GpunodeError(f"cannot open the lock file {path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise errors.BlockedError(_held_by(path, descriptor, proc)) from None
            pid = os.getpid()
            note = json.dumps({"pid": pid, "started": _start_time(proc, pid)}).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, note, 0)
        except OSError as error:
            os.close(descriptor)
            raise errors.GpunodeError(f"cannot lock {path}: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Let the next one have it; the file stays, as removing it would split the lock in two."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _stat_fields(proc: Path, pid: int) -> tuple[str, list[str]] | None:
    """Return (command name, fields from the state on) of /proc/PID/stat."""
    text = read_text(proc / str(pid) / "stat")
    if text is None or ")" not in text:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return (head.partition("(")[2], fields) if len(fields) > 19 else None


def _start_time(proc: Path, pid: int) -> int | None:
    found = _stat_fields(proc, pid)
    return int(found[1][19]) if found is not None else None


def _held_by(path: Path, descriptor: int, proc: Path) -> str:
    what = f"cannot take the lock {path}: another gpunode holds it"
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
        pid, started = int(note["pid"]), note["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return what
    found = _stat_fields(proc, pid)
    if found is None or int(found[1][19]) != started:
        return f"{what} (pid {pid} of another pid namespace, or a thread of it still stuck in the kernel)"
    name, fields = found
    stuck = fields[0] in "ZX" or _stays_in_the_kernel(proc, pid)
    if stuck:
        return (
            f"cannot take the lock {path}: pid {pid} ({name}) is an earlier gpunode stuck in a driver call (a thread in"
            " state D); the lock is free when that call returns, or after a reboot"
        )
    return f"{what} (pid {pid}, {name})"


def _stays_in_the_kernel(proc: Path, pid: int) -> bool:
    """Tell whether one thread waits in state D and nothing moves it.

    Every write to a disk passes through that state, so one look would call a working rival stuck. A
    thread that was scheduled between two looks has another count of context switches.
    """
    waiting = _waiting_threads(proc, pid)
    for _ in range(_LOOKS - 1):
        if not waiting:
            return False
        time.sleep(_BETWEEN_LOOKS)
        waiting &= _waiting_threads(proc, pid)
    return bool(waiting)


def _waiting_threads(proc: Path, pid: int) -> set[tuple[str, str]]:
    """Return (thread, its count of waits so far) of each thread of `pid` in state D."""
    try:
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return set()
    waiting = set()
    for thread in threads:
        lines = (read_text(thread / "status") or "").splitlines()
        told = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if told.get("State", "").startswith("D"):
            waiting.add((thread.name, told.get("voluntary_ctxt_switches", "")))
    return waiting
