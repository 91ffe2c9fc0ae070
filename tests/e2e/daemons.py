"""gpunode as a child process: started as a user or systemd would, and heard through its notify socket."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "bottlerocket" / "examples" / "p4d-uniform.toml"
PATIENCE = 60.0
"""Seconds after which a test gives up on a child; not what is promised, that is asked for apart."""


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environ(**more: str) -> dict[str, str]:
    """The environment of a child: ours without what would steer gpunode."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUNODE_") and k != "NOTIFY_SOCKET"}
    return kept | more


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        """The body as a JSON object."""
        document = json.loads(self.body)
        assert isinstance(document, dict)
        return document


@dataclasses.dataclass(slots=True)
class Running:
    """A daemon that was started."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    notify: socket.socket
    started: float
    messages: list[str] = dataclasses.field(default_factory=list)

    def get(self, path: str, *, accept: str = "*/*") -> Answer:
        """Ask for `path`; any status is an answer. Raises OSError while nobody listens."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers={"Accept": accept})
        try:
            with urllib.request.urlopen(request, timeout=10) as got:
                return Answer(got.status, dict(got.headers), got.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, dict(refused.headers), refused.read())

    def wait_serving(self) -> float:
        """Wait until it answers; return the seconds since it was started."""
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                self.get("/livez")
                return time.monotonic() - self.started
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.02)

    def wait_ready(self) -> float:
        """Wait for READY=1; return the seconds since it was started."""
        until = time.monotonic() + PATIENCE
        while not any("READY=1" in message.split("\n") for message in self.messages):
            assert time.monotonic() < until, self.said()
            assert self.process.poll() is None, self.said()
            with contextlib.suppress(TimeoutError):
                self.messages.append(self.notify.recv(65536).decode())
        return time.monotonic() - self.started

    def wait_metric(self, line: str) -> str:
        """Wait until a line of /metrics starts so, and return it."""
        until = time.monotonic() + PATIENCE
        while True:
            text = self.get("/metrics").body.decode()
            for found in text.splitlines():
                if found.startswith(line):
                    return found
            assert time.monotonic() < until, f"no {line} in:\n{text[:2000]}\n{self.said()}"
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def said(self) -> str:
        """Return what it wrote."""
        return self.log.read_text(errors="replace")


def command(*argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "agent", *map(str, argv)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ(),
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def run(
    where: Path, *argv: str | Path, module: Sequence[str | Path] = ("agent",), more: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run `gpunode run` with `argv` until the block ends. `where` is a directory of the test's own; `more`
    are variables of its environment."""
    port = free_port()
    address = where / f"notify-{port}"
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(address))
    notify.settimeout(1.0)
    log = where / f"log-{port}"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, module), "run", "--listen", f"127.0.0.1:{port}", *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environ(NOTIFY_SOCKET=str(address), **(more or {})),
        )
    try:
        yield Running(process, port, log, notify, started)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        notify.close()
