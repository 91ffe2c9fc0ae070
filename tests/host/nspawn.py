"""A real systemd in a container of its own: a Debian root with gpunode's deb, booted by systemd-nspawn.

The root is made once (debootstrap, about a minute) and kept; each machine writes to an overlay over
it. A reboot of the machine ends systemd-nspawn with status 133, and the harness boots it again, so
reboots can be counted. Nothing here touches the host's own units: the machine has its own systemd,
its own network namespace and its own cgroups.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path("/var/tmp/gpunode-nspawn")
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-systemd", "curl", "procps")
_REBOOTED = 133
_HALT = signal.SIGRTMIN + 4  # PID 1: power off
STATE = "/var/lib/gpunode/simulated.json"

KUBELET = """#!/usr/bin/python3.11
# Stands for the kubelet: notes what it found when it started, and answers that no pod runs.
import asyncio, os, subprocess, sys
sys.path.insert(0, "/usr/lib/gpunode/python")
import grpclib.const, grpclib.server
from grpclib.encoding import base

class Bytes(base.CodecBase):
    __content_subtype__ = "proto"
    def encode(self, message, message_type): return message
    def decode(self, data, message_type): return data

class Lister:
    def __mapping__(self):
        kind = grpclib.const.Cardinality.UNARY_UNARY
        return {"/v1.PodResourcesLister/List": grpclib.const.Handler(self.answer, kind, bytes, bytes)}
    async def answer(self, stream):
        await stream.recv_message()
        await stream.send_message(b"")

async def main():
    place = "/var/lib/kubelet/pod-resources/kubelet.sock"
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.exists(place):
        os.unlink(place)
    server = grpclib.server.Server([Lister()], codec=Bytes())
    await server.start(path=place)
    await server.wait_closed()

with open("/var/lib/kubelet-found.json", "wb") as found:
    subprocess.run(["/usr/bin/gpunode", "status", "--output", "json"], stdout=found)
asyncio.run(main())
"""


def why_not() -> str | None:
    """Return why no machine can be booted here, or None."""
    if os.geteuid() != 0:
        return "booting a machine needs root"
    for tool in ("systemd-nspawn", "debootstrap", "dpkg-deb", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt-get install systemd-container debootstrap)"
    return None


def base() -> Path:
    """Return a Debian root with a booting systemd, made on first use."""
    name = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:12]
    place = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes want one, and the first makes it
        if not (place / "etc/made-for-gpunode").exists():
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", str(place)],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=600,
            )
            (place / "etc/made-for-gpunode").touch()
    return place


def deb() -> Path:
    """Return the deb that DEB_UNDER_TEST names, else build that of this checkout."""
    if "DEB_UNDER_TEST" in os.environ:
        return Path(os.environ["DEB_UNDER_TEST"])
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "packaging/build.py"),
            "deb",
            "--arch",
            os.uname().machine,
            "--out",
            str(CACHE / "dist"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    return Path(done.stdout.strip())


class Overlay:
    """A writable view of `lower` at `place`, unmounted by `close`."""

    def __init__(self, lower: Sequence[Path], place: Path) -> None:
        self.root = place / "root"
        self.upper = place / "upper"
        for folder in (self.root, self.upper, place / "work"):
            folder.mkdir(parents=True)
        options = f"lowerdir={':'.join(map(str, lower))},upperdir={self.upper},workdir={place / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.root)], check=True)


class Machine:
    """One machine. Files are laid before `boot`; `run` runs a command inside."""

    def __init__(self, lower: Sequence[Path], place: Path, name: str) -> None:
        self._overlay = Overlay(lower, place)
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._log = place / "nspawn.log"
        self._parameters: tuple[str, ...] = ()
        self.boots = 0

    @property
    def root(self) -> Path:
        return self._overlay.root

    def write(self, absolute: str, text: str, *, mode: int = 0o644) -> None:
        path = self.root / absolute.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def enable(self, unit: str, text: str, *, target: str = "multi-user.target") -> None:
        """Lay a unit and have `target` want it."""
        self.write(f"/etc/systemd/system/{unit}", text)
        self.want(unit, target=target)

    def want(self, unit: str, *, target: str = "multi-user.target") -> None:
        wants = self.root / f"etc/systemd/system/{target}.wants"
        wants.mkdir(parents=True, exist_ok=True)
        (wants / unit).symlink_to(f"/etc/systemd/system/{unit}")

    def chroot(self, *argv: str) -> str:
        """Run a command in the root without booting it."""
        done = subprocess.run(
            ["chroot", str(self.root), *argv], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def boot(self, *parameters: str) -> None:
        """Start the machine, with `parameters` on its kernel's command line."""
        self._parameters = parameters
        self.boots += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "systemd-nspawn",
                    "--quiet",
                    "--boot",
                    f"--directory={self.root}",
                    f"--machine={self._name}",
                    "--register=no",
                    "--keep-unit",
                    "--private-network",
                    "--link-journal=no",
                    "--console=pipe",
                    *parameters,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        until(self._up, 30, "the machine's systemd")

    def _up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the machine did not boot: {self._log.read_text()[-2000:]}"
        return self._leader() is not None and self.run("systemctl", "show", "--property=Version").returncode == 0

    def boot_again(self, seconds: float) -> None:
        """Wait for the machine to reboot by itself, and boot it again."""
        assert self._process is not None
        assert self._process.wait(seconds) == _REBOOTED, f"it ended instead: {self._log.read_text()[-2000:]}"
        self.boot(*self._parameters)

    def _leader(self) -> int | None:
        assert self._process is not None
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                if fields.get("PPid") == str(self._process.pid) and fields.get("NSpid", "").split()[-1:] == ["1"]:
                    return int(status.parent.name)
        return None

    def run(self, *argv: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        leader = self._leader()
        assert leader is not None, "the machine does not run"
        return subprocess.run(
            [
                "nsenter",
                f"--target={leader}",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--cgroup",
                "--root",
                "--",
                *argv,
            ],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )

    def ok(self, *argv: str, seconds: float = 60) -> str:
        """Run a command inside that must succeed; return its output."""
        done = self.run(*argv, seconds=seconds)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, key: str) -> str:
        """Return one property of a unit."""
        return self.ok("systemctl", "show", "--value", f"--property={key}", unit).strip()

    def wait_active(self, unit: str, seconds: float = 60) -> None:
        def active() -> bool:
            return self.show(unit, "ActiveState") in {"active", "failed"}

        try:
            until(active, seconds, f"{unit} to be active")
            assert self.show(unit, "ActiveState") == "active"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text(unit)}") from None

    def journal(self, *arguments: str) -> list[dict[str, Any]]:
        """Return journal entries of this boot."""
        text = self.ok("journalctl", "--no-pager", "--output=json", "--boot", *arguments)
        return [json.loads(line) for line in text.splitlines()]

    def text(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "--boot", f"--unit={unit}", "--lines=60").stdout

    def close(self) -> None:
        """Power off, by force in the end, and take the overlay away."""
        process = self._process
        if process is not None and process.poll() is None:
            leader = self._leader()
            if leader is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leader, _HALT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._overlay.close()


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something another process will do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


@contextlib.contextmanager
def installed(place: Path) -> Iterator[tuple[Path, Path]]:
    """Give the layers of a root in which gpunode's deb is installed, topmost first."""
    lower = base()
    package = deb()
    overlay = Overlay([lower], place)
    try:
        shutil.copy(package, overlay.root / "root")
        for path in ("dev/null", "proc/self"):  # what dpkg's scripts want of a root that is not booted
            assert (overlay.root / path).parent.is_dir()
        done = subprocess.run(
            ["chroot", str(overlay.root), "dpkg", "--install", f"/root/{package.name}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        overlay_root = overlay.root
        (overlay_root / "etc/systemd/system/systemd-networkd-wait-online.service").unlink(missing_ok=True)
        for unit in ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer"):
            (overlay_root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    finally:
        overlay.close()
    yield overlay.upper, lower
