"""A scrape, against a server that has nothing to do but send the same bytes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import child, client, node
from tests.bench.report import Row, percentile

ROUNDS = 12
CLIENTS = 16


def rows(where: Path) -> Iterator[Row]:
    """Measure one client and sixteen, while the sampler runs at its usual pace."""
    of = node.busy(where / "scrape")
    with node.daemon(of) as gpunode, _static(where, gpunode) as static:
        ours, theirs = client.Connection(gpunode.port), client.Connection(static.port)
        for connection in (ours, theirs):
            client.one(connection, 50)  # warm
        medians: list[tuple[float, float]] = []
        all_ours: list[float] = []
        for _ in range(ROUNDS):  # in turn: both meet the same machine
            mine, other = client.one(ours, 150), client.one(theirs, 150)
            medians.append((statistics.median(mine), statistics.median(other)))
            all_ours += mine
            time.sleep(0.5)  # over 6 s in all, so that at least one sample falls between
        size = ours.body_bytes
        p50, plain = (statistics.median(m[i] for m in medians) for i in (0, 1))
        yield Row(
            "scrape, against a static body of its size",
            p50 / plain,
            "x",
            reach=1.3,
            note=f"{size / 1024:.0f} KiB, {p50 * 1e6:.0f} µs against {plain * 1e6:.0f} µs",
        )
        yield Row("scrape, p50", p50 * 1e3, "ms", reach=2.0, note=f"p99 {percentile(all_ours, 0.99) * 1e3:.2f} ms")
        for connection in (ours, theirs):
            connection.close()

        rates: list[float] = []
        tails: list[float] = []
        seen = ""
        for _ in range(5):
            (rate, took), (plain_rate, plain_took) = (_many(server.port) for server in (gpunode, static))
            rates.append(rate / plain_rate)
            tails.append(percentile(took, 0.99) / percentile(plain_took, 0.99))
            seen = f"{rate:.0f}/s against {plain_rate:.0f}/s"
        yield Row(
            f"scrapes a second, {CLIENTS} clients, against static",
            statistics.median(rates),
            "x",
            reach=0.8,
            least=True,
            note=seen,
        )
        yield Row(f"scrape p99, {CLIENTS} clients, against static", statistics.median(tails), "x", reach=2.0, slack=1.6)
    yield from _calls(where)


def _many(port: int) -> tuple[float, list[float]]:
    connections = [client.Connection(port) for _ in range(CLIENTS)]
    try:
        client.many(connections, 0.3)
        return client.many(connections, 2.0)
    finally:
        for connection in connections:
            connection.close()


def _calls(where: Path) -> Iterator[Row]:
    """Count NVML calls while scraped. The thread that waits for events asks again and again by itself."""
    of = node.busy(where / "calls", extra="sample-interval = 3600")
    with node.daemon(of, traced=True) as gpunode:
        before = node.ask_counts(of, gpunode.pid)
        connection = client.Connection(gpunode.port)
        client.one(connection, 500)
        connection.close()
        after = node.ask_counts(of, gpunode.pid)
    made = {name: count - before.calls.get(name, 0) for name, count in after.calls.items()}
    made = {name: count for name, count in made.items() if count and not name.startswith("nvmlEventSetWait")}
    yield Row("NVML calls of 500 scrapes", sum(made.values()), "calls", reach=0, note=" ".join(made))


@contextlib.contextmanager
def _static(where: Path, gpunode: child.Daemon) -> Iterator[child.Daemon]:
    body = where / "body"
    body.write_bytes(gpunode.get("/metrics"))
    port = child.free_port()
    argv: list[str | Path] = [child.PYTHON, "-m", "tests.bench.static", str(port), body]
    with child.server(argv, port=port, log=where / "static.log", path="/metrics") as running:
        yield running
