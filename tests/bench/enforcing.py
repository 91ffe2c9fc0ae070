"""How long it takes to bring eight GPUs to a layout, on a driver that takes its time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
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
    yield from _cycles(where)
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


def _cycles(where: Path) -> Iterator[Row]:
    """Let the daemon make a layout and then another, and compare its cycles with what one GPU must take.

    The node lives in the daemon alone: a state file is written durably at each mutation, which no
    driver does. What has to be done is planned beforehand on a twin with a state file. The CPU in
    which the simulator writes device nodes and /proc, most of it while lanes wait, is told beside it.
    """
    of = node.case(where / "twin", latency=LATENCY)
    chains = [_chain(of)]
    node.apply(of)
    node.write_settings(of.settings, MIXED)
    chains.append(_chain(of))

    of = node.case(where / "enforce", latency=LATENCY, stateful=False)
    began = time.monotonic()
    port = child.free_port()
    argv = node.traced_command(of, "run", "--listen", f"127.0.0.1:{port}")
    with _memory() as env, child.server(argv, port=port, log=of.where / "log", path="/readyz", env=env) as running:
        note = f"; ready {time.monotonic() - began:.2f} s after process start"
        names = ("empty to 8 × 7 × 1g.10gb", "7 × 1g.10gb to {1g:2, 2g:1, 3g:1} on each")
        spent = 0.0
        for number, (name, chain) in enumerate(zip(names, chains, strict=True), 1):
            cycle, shown = _cycle(running, number), node.ask_counts(of, running.pid).beside_seconds
            share, spent = shown - spent, shown
            yield Row(
                f"{name}, against one GPU's own chain",
                cycle / chain,
                "x",
                reach=1.2,
                note=f"{cycle:.2f} s against {chain:.2f} s; {share:.2f} s of CPU in the simulator's host{note}",
            )
            note = ""
            node.write_settings(of.settings, MIXED)


@contextlib.contextmanager
def _memory() -> Iterator[dict[str, str]]:
    """Give the environment in which the simulated host's files lie in memory, as those in /dev and /proc do."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        yield {"TMPDIR": place}


def _chain(of: node.Case) -> float:
    """Return the seconds that the mutations of the GPU with most to do take by themselves."""
    planned = child.command([child.GPUNODE, "plan", "--output", "json", *of.flags])
    if not planned.stdout:
        raise RuntimeError(planned.stderr)
    return max(sum(_SECONDS[step["kind"]] for step in gpu["steps"]) for gpu in json.loads(planned.stdout)["gpus"])


def _cycle(running: child.Daemon, number: int) -> float:
    """Return the seconds of the daemon's n-th cycle that did something, once it has ended."""
    until = time.monotonic() + 60
    while True:
        text = running.log.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"msg=cycle phase=converged .*?seconds=([0-9.]+) steps=[1-9]", text)
        if len(found) >= number:
            return float(found[number - 1])
        if time.monotonic() > until:
            raise RuntimeError("the daemon does not bring in the layout:\n" + text[-2000:])
        time.sleep(0.05)
