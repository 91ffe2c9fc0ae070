"""A scrape of eight GPUs of which one is lost, one hangs, one errs and one is held, against the same without faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from agent.sim import node as nodes
from tests.bench import child, client, node
from tests.bench.report import Row, percentile

LOST, HUNG, ERR, HELD = 1, 3, 5, 6
ROUNDS = 24
HALVES = '{ "3g.40gb" = 2 }'


def rows(where: Path) -> Iterator[Row]:
    """Measure both daemons in turn, so that both meet the same machine, over several samples of each."""
    whole, broken = node.case(where / "whole"), node.case(where / "broken")
    for of in (whole, broken):
        node.apply(of)
    sim = nodes.open_node(broken.node, state=broken.where / "state")
    try:
        with node.daemon(whole) as one, node.daemon(broken) as two:
            sim.start_process(HELD, gpu_instance=min(sim.driver.gpus[HELD].state.instances))
            sim.lose(LOST)
            sim.fail("nvmlDeviceGetMigMode", 999, gpu=ERR, times=0)
            sim.hang("nvmlDeviceGetTemperature*", gpu=HUNG, times=0)
            for of in (whole, broken):
                node.write_settings(of.settings, HALVES)
            _wait(one, 'gpunode_phase{phase="converged"} 1', in_sync=8)
            _wait(two, 'gpunode_phase{phase="blocked"} 1', in_sync=4)
            took: tuple[list[float], list[float]] = ([], [])
            connections = [client.Connection(running.port) for running in (one, two)]
            for connection in connections:
                client.one(connection, 50)  # warm
            for _ in range(ROUNDS):
                for connection, times in zip(connections, took, strict=True):
                    times.extend(client.one(connection, 150))
                time.sleep(0.5)  # over 12 s in all, so that samples fall between
            for connection in connections:
                connection.close()
    finally:
        sim.close()
    plain, faulty = (percentile(times, 0.99) for times in took)
    yield Row(
        "scrape p99 with a lost, a hung, an erring and a held GPU of eight, against none",
        faulty / plain,
        "x",
        reach=1.5,
        slack=1.6,
        note=f"{faulty * 1e3:.2f} ms against {plain * 1e3:.2f} ms",
    )


def _wait(running: child.Daemon, line: str, *, in_sync: int) -> None:
    """Wait until the daemon tells its phase by this line and so many GPUs are as wanted."""
    until = time.monotonic() + 90
    while True:
        text = running.get("/metrics").decode()
        found = sum(
            each.startswith("gpunode_gpu_mig_in_sync{") and float(each.split()[1]) == 1 for each in text.splitlines()
        )
        if line in text and found == in_sync:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"no {line} with {in_sync} GPUs as wanted:\n" + running.log.read_text()[-2000:])
        time.sleep(0.2)
