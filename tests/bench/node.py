"""The nodes and settings that are measured on, and gpunode started on them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from agent.sim import node as nodes
from agent.sim import prototypes
from tests.bench import child

SEVEN = '{ "1g.10gb" = 7 }'
"""Seven of the smallest instances: the most that a GPU holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A simulated node with its settings, in a directory of its own."""

    where: Path
    node: str
    settings: Path
    stateful: bool = True

    @property
    def flags(self) -> list[str]:
        """What the command line needs to work on it."""
        kept = ["--sim-state", str(self.where / "state")] if self.stateful else []
        return ["--simulate", self.node, *kept, "--settings", str(self.settings)]


def case(
    where: Path, *, gpus: int = 8, instances: str = SEVEN, latency: str = "", extra: str = "", stateful: bool = True
) -> Case:
    """Make a node of `gpus` H100 that wants `instances` on each. `latency` and `extra` are TOML lines of
    the node file's [latency] and of the settings' [gpunode]. Not `stateful`: it lives in one process."""
    where.mkdir(parents=True, exist_ok=True)
    node, settings = where / "node.toml", where / "settings.toml"
    node.write_text(
        f'name = "bench-{gpus}"\n[latency]\npcie-throughput = 0.0\n{latency}\n'
        f'[[gpu]]\nmodel = "h100.80gb"\ncount = {gpus}\n',
        encoding="utf-8",
    )
    write_settings(settings, instances, extra=extra)
    return Case(where, str(node), settings, stateful)


def busy(where: Path, *, gpus: int = 8, instances: str = SEVEN, extra: str = "") -> Case:
    """Make a node as `case` does, in its layout already, with a process on every instance."""
    of = case(where, gpus=gpus, instances=instances, extra=extra)
    apply(of)
    node = nodes.open_node(of.node, state=where / "state")
    try:
        for gpu, found in enumerate(node.driver.gpus):
            for instance in sorted(found.state.instances):
                node.start_process(gpu, gpu_instance=instance)
    finally:
        node.close()
    return of


def write_settings(path: Path, instances: str, *, extra: str = "") -> None:
    """Write settings that want `instances` on every GPU."""
    path.write_text(
        f'[gpunode]\n{extra}\n[[gpunode.layout]]\ngpus = "all"\ninstances = {instances}\n', encoding="utf-8"
    )


def apply(of: Case) -> None:
    """Bring the node to its layout. Raises RuntimeError with what gpunode said when it does not."""
    done = child.command([child.GPUNODE, "apply", "--yes", *of.flags])
    if done.code != 0:
        raise RuntimeError(f"apply ended with {done.code}: {done.stderr}")


def traced_command(of: Case, *words: str) -> list[str | Path]:
    """Return the command that runs a verb on the node and counts its calls."""
    return [child.PYTHON, "-m", "tests.bench.traced", of.where / "counts", *words, *of.flags]


@contextlib.contextmanager
def daemon(of: Case, *, traced: bool = False) -> Iterator[child.Daemon]:
    """Run the daemon on the node; yields once it has measured every GPU."""
    port = child.free_port()
    words = ("run", "--listen", f"127.0.0.1:{port}")
    argv: list[str | Path] = traced_command(of, *words) if traced else [child.GPUNODE, *words, *of.flags]
    with child.server(argv, port=port, log=of.where / f"log-{port}", path="/readyz") as running:
        until = time.monotonic() + 60
        while b"\ngpunode_gpu_memory_total_bytes{" not in running.get("/metrics"):
            if time.monotonic() > until:
                raise RuntimeError(
                    "the daemon has measured nothing:\n" + running.log.read_text(errors="replace")[-2000:]
                )
            time.sleep(0.05)
        yield running


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What a traced gpunode has done so far."""

    samples: int
    beside_seconds: float
    calls: dict[str, int]
    simulator_seconds: float
    cpu_seconds: float

    @property
    def total(self) -> int:
        """Calls of all functions."""
        return sum(self.calls.values())

    @property
    def mutating(self) -> int:
        """Calls that change a GPU."""
        changes = {name for name, prototype in prototypes.PROTOTYPES.items() if prototype.mutates}
        return sum(n for name, n in self.calls.items() if name in changes)

    @property
    def own_seconds(self) -> float:
        """CPU that a real driver would have cost too."""
        return self.cpu_seconds - self.simulator_seconds


def read_counts(of: Case) -> Counts:
    """Return what a traced gpunode wrote at its end."""
    return Counts(**json.loads((of.where / "counts").read_text(encoding="utf-8")))


def ask_counts(of: Case, pid: int) -> Counts:
    """Return what a traced daemon has done until now."""
    counts = of.where / "counts"
    counts.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + 10
    while not counts.exists():
        if time.monotonic() > until:
            raise RuntimeError("the traced daemon does not answer")
        time.sleep(0.01)
    return read_counts(of)
