"""Run a child process with a deadline that holds whatever the child does.

`subprocess.run` waits for a killed child without end, and for everybody who inherited its pipe; a
tool stuck in the driver (state D) or a command that leaves a daemon behind would hold us for good.
Here output goes to a file, and a child that outlives its kill is left to a reaper thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence

from agent import records

OUTPUT_LIMIT = 8192
_GRACE_SECONDS = 1.0


@records.dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. `code` is its exit status (negative: the signal that ended it), None when
    it ran past the deadline or could not be started; `output` is the end of stdout and stderr."""

    code: int | None
    output: str
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran to its end and said success."""
        return self.code == 0

    def words(self) -> str:
        """Return what went wrong in one line: the problem or exit status, then its last words."""
        code = self.code or 0
        cause = self.problem or (f"exit status {code}" if code >= 0 else f"ended by signal {-code}")
        said = "; ".join(line.strip() for line in self.output.splitlines() if line.strip())
        return f"{cause}: {said}" if said else cause


def run(
    argv: Sequence[str], *, deadline: float, environ: Mapping[str, str] | None = None, keep: int = OUTPUT_LIMIT
) -> Ended:
    """Run `argv` (no shell, no stdin) for at most `deadline` seconds and say how it ended. Of its output the
    last `keep` bytes are kept.

    Blocks for up to `deadline` plus a second; never raises for what the child does. A child past
    its deadline is killed with all of its process group.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # the caller's words, no shell
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return Ended(None, "", f"cannot start {argv[0]}: {why}")
        problem = None
        code: int | None
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            code, problem = None, f"no end after {deadline:g} s"
            _end(process)
        return Ended(code, _tail(output.fileno(), keep), problem)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may end between the deadline and the kill
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="gpunode-reaper", daemon=True).start()


def _tail(descriptor: int, keep: int) -> str:
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, keep, max(0, size - keep))
    return data.decode("utf-8", "replace").replace("\0", "")
