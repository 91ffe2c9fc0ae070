"""Child processes that are measured: the daemon, the static server it is held against, short commands.

Figures come from /proc and from what the kernel accounts to a child that has ended, so measuring
costs the measured process nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
GPUNODE = PYTHON.with_name("gpunode")
_TICK = os.sysconf("SC_CLK_TCK")


def environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: as packages run it, from `.pyc`, with nothing that steers gpunode."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUNODE_", "PYTHON")) and k != "NOTIFY_SOCKET"}
    return kept | dict(more or {})


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU a process has used, user and system, in seconds.

    From the scheduler's nanoseconds where the kernel tells them: ticks are 10 ms each.
    """
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    except OSError:
        total = 0
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    by_ticks = (int(ticks[11]) + int(ticks[12])) / _TICK
    # Threads that ended are in the ticks only.
    return max(by_ticks, total / 1e9)


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has no memory: it has ended")


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a short command ended: wall and CPU seconds, exit code, what it wrote."""

    wall: float
    cpu: float
    code: int
    stdout: str
    stderr: str


def command(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end, accounting its own CPU."""
    started = time.perf_counter()
    with subprocess.Popen(
        [str(a) for a in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environ(env),
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(wall, usage.ru_utime + usage.ru_stime, process.returncode, stdout, stderr)


@dataclasses.dataclass(frozen=True, slots=True)
class Daemon:
    """A running server: its process and where it listens."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def get(self, path: str) -> bytes:
        """Return the body at `path`; raises OSError (HTTPError is one) when there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            body: bytes = answer.read()
            return body


@contextlib.contextmanager
def server(
    argv: Sequence[str | Path], *, port: int, log: Path, path: str, env: Mapping[str, str] | None = None
) -> Iterator[Daemon]:
    """Run a server as a child until the block ends; yields once `path` answers 200.

    Raises RuntimeError with the end of its log when it does not come up.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(a) for a in argv],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environ(env),
            cwd=ROOT,
        )
    daemon = Daemon(process, port, log)
    try:
        until = time.monotonic() + 60
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{argv[0]} did not come up:\n" + log.read_text(errors="replace")[-2000:])
            try:
                daemon.get(path)
                break
            except OSError:
                time.sleep(0.05)
        yield daemon
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
