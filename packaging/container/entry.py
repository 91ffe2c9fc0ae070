#!/usr/bin/python3.11 -I
"""What the image starts: the right verb for the container it finds itself in.

With arguments it is `gpunode` with those arguments. Without, it looks where Bottlerocket put it: a
bootstrap container partitions and ends within its deadline, so that a node always boots on; a host
container (superpowered) watches and serves. Elsewhere it runs the daemon.

A Bottlerocket container has a /dev of its own without the GPUs, and NVML opens fixed paths there: the
host's device files are linked into it first.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

DEADLINE = 240.0
"""Seconds a bootstrap container may hold the boot up."""
BLOCKED = 4
BOTTLEROCKET = Path("/.bottlerocket")


def link_devices(host: Path, own: Path) -> None:
    """Make the host's NVIDIA device files reachable under `own`."""
    for source in sorted(host.glob("nvidia*")):
        target = own / source.name
        if not target.exists():
            target.unlink(missing_ok=True)
            target.symlink_to(source)


def migmanager_is_busy(rootfs: Path) -> bool:
    """Whether Bottlerocket's own MIG manager is at work, or the host about to reboot for it."""
    if (rootfs / "run/nvidia-migmanager/reboot-required").exists():
        return True
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().startswith("nvidia-migmanag"):
                return True
        except OSError:
            continue  # it ended
    return False


def bootstrap(command: list[str], rootfs: Path) -> int:
    """Apply once nvidia-migmanager has ended (no order between the two is promised); return how it went."""
    end = time.monotonic() + DEADLINE
    while True:
        while migmanager_is_busy(rootfs) and time.monotonic() < end:
            time.sleep(1.0)
        left = max(end - time.monotonic(), 1.0)
        try:
            code = subprocess.run([*command, "apply", "--yes"], timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"gpunode: not done after {DEADLINE:g} s; the node boots on as it is", file=sys.stderr, flush=True)
            return 1
        if code != BLOCKED or not migmanager_is_busy(rootfs) or time.monotonic() >= end:
            return code


def main() -> int:
    """Start gpunode as this container wants it; returns only from a bootstrap container."""
    command = ["/usr/bin/gpunode"]
    if (BOTTLEROCKET / "rootfs/dev").is_dir():
        link_devices(BOTTLEROCKET / "rootfs/dev", Path("/dev"))
    words = sys.argv[1:]
    if not words and (BOTTLEROCKET / "bootstrap-containers/current").is_dir():
        return bootstrap(command, BOTTLEROCKET / "rootfs")
    return os.execv(command[0], [*command, *(words or ["run"])])  # noqa: S606  # becomes gpunode, for its signals


if __name__ == "__main__":
    sys.exit(main())
