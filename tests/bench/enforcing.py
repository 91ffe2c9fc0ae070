"""How long it takes to bring eight GPUs to a layout, on a driver that takes its time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import child, node
from tests.bench.report import Row

LATENCY = "read = 0.0002\nchange = 0.02\ncreate-gi = 0.15\ndestroy-gi = 0.1\n"
"""Seconds a call takes, as measured beside the figures of other tools."""
_SECONDS = {
    "create-gpu-instance": 0.15,
    "destroy-gpu-instance": 0.1,
    "create-compute-instance": 0.02,
    "destroy-compute-instance": 0.02,
    "set-mig-mode": 0.02,
}
MIXED = '{ "1g.10gb" = 2, "2g.20gb" = 1, "3g.40gb" = 1 }'


def rows(where: Path) -> Iterator[Row]:
    """Measure both rows with latency, and the calls of an apply that has nothing to do."""
    of = node.case(where / "enforce", latency=LATENCY)
    yield _cycle(of, "empty to 8 × 7 × 1g.10gb, against one GPU's own chain")
    node.write_settings(of.settings, MIXED)
    yield _cycle(of, "7 × 1g.10gb to {1g:2, 2g:1, 3g:1} on each, against its chain")

    gpus = 8
    of = node.busy(where / "noop", gpus=gpus)
    done = child.command(node.traced_command(of, "apply", "--yes"))
    if done.code != 0:
        raise RuntimeError(done.stderr)
    counts = node.read_counts(of)
    allowed = 30 * gpus + 6 * 7 * gpus
    note = f"{gpus} GPUs × 7 instances, {done.wall:.2f} s"
    yield Row("NVML calls of an apply with nothing to do", counts.total, "calls", reach=allowed, slack=1.1, note=note)
    yield Row("of these mutating", counts.mutating, "calls", reach=0)


def _cycle(of: node.Case, name: str) -> Row:
    """Plan for the length of the longest chain, let the daemon start, and compare its first cycle with it."""
    planned = child.command([child.GPUNODE, "plan", "--output", "json", *of.flags])
    if not planned.stdout:
        raise RuntimeError(planned.stderr)
    chain = max(sum(_SECONDS[step["kind"]] for step in gpu["steps"]) for gpu in json.loads(planned.stdout)["gpus"])
    began = time.monotonic()
    port = child.free_port()
    argv: list[str | Path] = [child.GPUNODE, "run", "--listen", f"127.0.0.1:{port}", *of.flags]
    with child.server(argv, port=port, log=of.where / "log", path="/readyz") as running:
        wall = time.monotonic() - began
        lines = running.get("/metrics").decode().splitlines()
    (cycle,) = (float(line.split()[1]) for line in lines if line.startswith("gpunode_mig_reconcile_duration_seconds "))
    note = f"{cycle:.2f} s against {chain:.2f} s; ready {wall:.2f} s after process start"
    return Row(name, cycle / chain, "x", reach=1.2, note=note)
