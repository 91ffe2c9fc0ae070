"""How long a person or a unit waits: version, help, and from process start to READY."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import child, node
from tests.bench.report import Row

BARE = "import argparse, json"
IMPORTS = "import asyncio, pynvml, pydantic, tomli, aiohttp.web"
ROUNDS = 15


def rows(where: Path) -> Iterator[Row]:
    """Measure the short commands and the daemon's start."""
    ours: dict[str, list[child.Ended]] = {"version": [], "--help": []}
    bare: list[child.Ended] = []
    for verb in ours:  # once before, for their .pyc
        child.command([child.GPUNODE, verb])
    for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine hits all of them
        bare.append(child.command([child.PYTHON, "-c", BARE]))
        for verb, ended in ours.items():
            ended.append(child.command([child.GPUNODE, verb]))
    for verb, ended in ours.items():
        if any(e.code for e in ended):
            raise RuntimeError(f"gpunode {verb} failed: {ended[0].stderr}")
        ratio = _median_cpu(ended) / _median_cpu(bare)
        note = f"{_median_wall(ended) * 1e3:.0f} ms against {_median_wall(bare) * 1e3:.0f} ms of wall time"
        yield Row(f"gpunode {verb}, CPU against {BARE!r}", ratio, "x", reach=1.5, note=note)

    of = node.busy(where / "ready")
    pairs = []
    for _ in range(ROUNDS):  # in turn, as above
        imports = child.command([child.PYTHON, "-c", IMPORTS])
        if imports.code:
            raise RuntimeError(imports.stderr)
        pairs.append((imports.cpu, *_start(of)))
    base, own, simulator, wall = (statistics.median(pair[i] for pair in pairs) for i in range(4))
    yield Row(
        "start to READY less the simulator, CPU against imports",
        statistics.median(pair[1] / pair[0] for pair in pairs),
        "x",
        reach=1.5,
        note=f"{own:.2f} s against {base:.2f} s; the simulator takes {simulator:.2f} s more, READY is after {wall:.2f} s",
    )


def _start(of: node.Case) -> tuple[float, float, float]:
    """Return CPU seconds of gpunode's own and of the simulator, and wall seconds, from start to READY=1."""
    address = of.where / "notify"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))
        notify.settimeout(60)
        started = time.perf_counter()
        process = subprocess.Popen(
            node.traced_command(of, "run", "--listen", f"127.0.0.1:{child.free_port()}"),
            env=child.environ({"NOTIFY_SOCKET": str(address)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=child.ROOT,
        )
        try:
            while b"READY=1" not in notify.recv(65536):
                pass
            wall = time.perf_counter() - started
            counts = node.ask_counts(of, process.pid)
            return counts.own_seconds, counts.simulator_seconds, wall
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _median_cpu(ended: list[child.Ended]) -> float:
    return statistics.median(e.cpu for e in ended)


def _median_wall(ended: list[child.Ended]) -> float:
    return statistics.median(e.wall for e in ended)
