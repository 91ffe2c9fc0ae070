"""Where the state of a simulated node is kept: in memory, or in a file that processes share.

A state file S has a lock file S.lock beside it. Changes are made under flock on the lock file, on the
newest content, and written to a temporary file that replaces S after fsync: a process killed at any
moment leaves the old content or the new. The lock file's first eight bytes are a counter, mapped by
every process: odd while a writer is at work, another value after each change, so that looking whether
something changed costs no system call. A writer that died leaves it odd; then S itself is looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, MutableSequence
from pathlib import Path
from typing import Protocol

from agent.sim import spec, state


class Store(Protocol):
    """Holds the newest known state in `node`."""

    node: state.Node

    def refresh(self) -> None:
        """Take over what other processes have changed; costs nothing when they have not."""

    def change(self, *, durable: bool = True) -> contextlib.AbstractContextManager[state.Node]:
        """Hand out the newest state to be changed, alone; it is kept when the block ends without an
        exception. Decide before you change: an exception must leave the state as it was."""

    def close(self) -> None:
        """Let go of files."""


class MemoryStore:
    """State of one process, gone with it."""

    def __init__(self, node: state.Node) -> None:
        self.node = node
        self._mutex = threading.RLock()

    def refresh(self) -> None:
        """Nobody else can have changed it."""

    @contextlib.contextmanager
    def change(self, *, durable: bool = True) -> Iterator[state.Node]:  # noqa: ARG002  # as the file's
        """Hand out the state under the lock."""
        with self._mutex:
            yield self.node

    def close(self) -> None:
        """There is nothing to close."""


def _refuse_what_is_no_state(path: Path) -> None:
    """Raise SimulationError for what is no state file, before a lock file is made beside it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            what = "it is a directory" if path.is_dir() else "it is not a regular file"
        else:
            with path.open("rb") as file:
                if b'"gpunode-simulated-node"' in file.read(256):
                    return
            what = "it holds something else"
    except FileNotFoundError:
        return
    except OSError as error:
        what = error.strerror or str(error)
    raise spec.SimulationError(f"cannot keep a simulated node in {path}: {what}; name another file")


class FileStore:
    """State in a file. `fresh` makes the state of a node that nothing has happened on; `name` and
    `digest` are what the file must be of. Raises `spec.SimulationError` when it is of another."""

    def __init__(self, path: Path, *, name: str, digest: str, fresh: Callable[[], state.Node]) -> None:
        self._path = path
        self._name = name
        self._digest = digest
        self._mutex = threading.RLock()
        self._depth = 0
        _refuse_what_is_no_state(path)
        lock_path = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise spec.SimulationError(f"cannot keep a simulated node in {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # One counter of eight bytes, and its block: to write to a map that a full disk has no room for
            # ends a process by SIGBUS.
            os.posix_fallocate(self._lock, 0, 8)
            self._map = mmap.mmap(self._lock, 8)
            self._counter: MutableSequence[int] | memoryview[int] = memoryview(self._map).cast("Q")
            if path.exists():
                self.node = self._read()
            else:
                self.node = fresh()
                self._write(durable=True)
            self._seen = self._counter[0]
            self._stamp = self._stat()
        except OSError as error:
            os.close(self._lock)
            raise spec.SimulationError(f"cannot keep a simulated node in {path}: {error.strerror}") from error
        except BaseException:
            os.close(self._lock)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _read(self) -> state.Node:
        try:
            document = json.loads(self._path.read_bytes())
            node = state.from_json(document)
        except OSError as error:
            raise spec.SimulationError(f"cannot read the simulated node in {self._path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise spec.SimulationError(
                f"cannot read the simulated node in {self._path}: it is damaged ({error}); remove it or name another file"
            ) from error
        if node.digest != self._digest:
            what = f"of {node.name}" if node.name != self._name else f"of another {node.name} (its options differ)"
            raise spec.SimulationError(
                f"cannot use {self._path} for {self._name}: it holds the state {what}; name another file or remove it"
            )
        return node

    def _write(self, *, durable: bool) -> None:
        data = json.dumps(state.to_json(self.node), separators=(",", ":")).encode()
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        seen = self._counter[0]
        self._counter[0] = seen + 2 if seen & 1 else seen + 1  # odd: whoever looks now must look at the file
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(self._path)
        if durable:
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        self._counter[0] += 1
        self._seen = self._counter[0]
        self._stamp = self._stat()

    def _is_stale(self) -> bool:
        seen = self._counter[0]
        if seen & 1:  # a writer is at work, or has died at it
            return self._stat() != self._stamp
        return seen != self._seen

    def refresh(self) -> None:
        """Read the file again if another process has changed it."""
        seen = self._counter[0]
        if seen == self._seen and not seen & 1:
            return
        # A change of our own under way holds the mutex: what we have is newest enough until it ends.
        if not self._mutex.acquire(blocking=False):
            return
        try:
            if self._depth == 0 and self._is_stale():
                self._take_over()
        finally:
            self._mutex.release()

    def _take_over(self) -> None:
        # The counter and the stamp are read first: a change in between is then seen next time.
        seen, stamp = self._counter[0], self._stat()
        self.node = self._read()
        self._seen, self._stamp = seen, stamp

    @contextlib.contextmanager
    def change(self, *, durable: bool = True) -> Iterator[state.Node]:
        """Hand out the newest state under the locks of process and file, then write it."""
        with self._mutex:
            if self._depth:
                yield self.node  # the outer block writes
                return
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._depth += 1
            try:
                if self._is_stale():
                    self._take_over()
                yield self.node
                try:
                    self._write(durable=durable)
                except OSError as error:
                    self.node = self._read()  # what was not written has not happened
                    raise spec.SimulationError(
                        f"cannot keep the simulated node in {self._path}: {error.strerror}"
                    ) from error
            finally:
                self._depth -= 1
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the lock file and its map."""
        with self._mutex:
            if self._lock >= 0:
                counter, self._counter = self._counter, [self._seen]  # a thread left behind may still look
                if isinstance(counter, memoryview):
                    counter.release()
                self._map.close()
                os.close(self._lock)
                self._lock = -1
