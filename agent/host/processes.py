"""What /proc tells about a process without telling what it does: name, container, pod, open GPU files.

Argument vectors and environments never leave this file: of both only the one word that was asked
for is looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from agent import records
from agent.host import files
from agent.host import machine as machines

_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
_CONTAINER = re.compile(r"(?:^|[-/:])([0-9a-f]{64})(?:\.scope)?$")
_TASK = re.compile(r"(?:/ecstasks-|/ecs/(?:ecs-)?)([0-9a-f]{32}|[0-9a-f-]{36})(?:\.slice)?/")


@records.dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a control group says: full container id, pod UID (with dashes), ECS task id; None where not in one."""

    container: str | None = None
    pod_uid: str | None = None
    task: str | None = None


def parse_cgroup(text: str) -> Whereabouts:
    """Read the content of /proc/PID/cgroup, versions 1 and 2, of every runtime and cgroup driver known
    (containerd, CRI-O, Docker; systemd and cgroupfs; ECS)."""
    container = pod = task = None
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if container is None and (found := _CONTAINER.search(path)):
            container = found[1]
        if pod is None and (found := _POD.search(path)):
            pod = found[1].replace("_", "-")
        if task is None and (found := _TASK.search(path)):
            task = found[1]
    return Whereabouts(container, pod, task)


@records.dataclass(frozen=True, slots=True)
class OpenFiles:
    """The GPU files a process has open: minors of /dev/nvidia<minor> and of /dev/nvidia-caps/nvidia-cap<minor>."""

    pid: int
    gpus: frozenset[int]
    capabilities: frozenset[int]


_DEVICE = re.compile(r"/dev/nvidia(\d+)(?: \(deleted\))?$")
_CAPABILITY = re.compile(r"/nvidia-cap(\d+)(?: \(deleted\))?$")


def pids(machine: machines.Machine) -> list[int]:
    """Return the processes that /proc lists, in order."""
    try:
        names = os.listdir(machine.path("/proc"))  # noqa: PTH208  # thousands of entries, names are enough
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def open_gpu_files(machine: machines.Machine) -> Iterator[OpenFiles]:
    """Yield every process that has a GPU's device or capability file open. Needs root to see others'."""
    proc = machine.path("/proc")
    for pid in pids(machine):
        folder = proc / str(pid) / "fd"
        gpus: set[int] = set()
        capabilities: set[int] = set()
        try:
            descriptors = os.listdir(folder)  # noqa: PTH208  # as above
        except OSError:
            continue  # ended meanwhile, or not ours to look at
        for descriptor in descriptors:
            try:
                target = os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115  # a Path a descriptor costs too much
            except OSError:
                continue
            if "nvidia" not in target:
                continue
            if found := _DEVICE.search(target):
                gpus.add(int(found[1]))
            elif found := _CAPABILITY.search(target):
                capabilities.add(int(found[1]))
        if gpus or capabilities:
            yield OpenFiles(pid, frozenset(gpus), frozenset(capabilities))


def command(machine: machines.Machine, pid: int) -> str | None:
    """Return the command name (at most 15 characters, never an argument), or None when it is gone.

    A process may call itself anything: what would move a terminal's cursor or begin a line is "?".
    """
    name = files.read_text(machine.path(f"/proc/{pid}/comm"))
    return None if name is None else "".join(letter if letter.isprintable() else "?" for letter in name)


def whereabouts(machine: machines.Machine, pid: int) -> Whereabouts:
    """Return where a process runs."""
    return parse_cgroup(files.read_text(machine.path(f"/proc/{pid}/cgroup")) or "")


def arguments_mention(machine: machines.Machine, pid: int, word: str) -> bool:
    """Whether a process was started with `word` in its arguments or environment (a flag may be given
    either way)."""
    return any(word.encode() in _read(machine.path(f"/proc/{pid}/{name}")) for name in ("cmdline", "environ"))


def environment_value(machine: machines.Machine, pid: int, name: str) -> str | None:
    """Return one variable of a process's environment, None when it is unset or not readable."""
    prefix = f"{name}=".encode()
    for entry in _read(machine.path(f"/proc/{pid}/environ")).split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return None


def _read(path: Path) -> bytes:
    try:
        return files.read_bounded(path)
    except OSError:
        return b""
