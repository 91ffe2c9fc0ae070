"""What the daemon costs while it does its work: CPU, memory over time, and memory under slow clients."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import child, client, node
from tests.bench.report import Row

HOUR_SAMPLES, HOUR_SCRAPES = 720, 240
"""What an hour holds at a sample each 5 s and a scrape each 15 s."""
INTERVAL = 0.1
WATCHED = 60.0
GPUS, INSTANCES = 8, 7
SLOW, PIPELINED = 200, 20


def rows(where: Path) -> Iterator[Row]:
    """Measure CPU at the usual pace, memory after an hour's work, and what slow clients add."""
    yield from _minute(where)
    yield from _hour(where)
    yield _slow(where)


def _minute(where: Path) -> Iterator[Row]:
    of = node.busy(where / "cpu")
    with node.daemon(of, traced=True) as gpunode:
        connection = client.Connection(gpunode.port)
        client.one(connection, 1)
        before, started = node.ask_counts(of, gpunode.pid), time.monotonic()
        for number in range(1, int(WATCHED / 15) + 1):
            time.sleep(max(0.0, started + 15 * number - time.monotonic()))
            client.one(connection, 1)
        after, ended = node.ask_counts(of, gpunode.pid), time.monotonic()
        connection.close()
    took = ended - started
    share = 100 * (after.own_seconds - before.own_seconds) / took
    simulator = 100 * (after.simulator_seconds - before.simulator_seconds) / took
    yield Row(
        "CPU, a sample each 5 s and a scrape each 15 s",
        share,
        "% of a core",
        reach=1.0,
        note=f"and {simulator:.2f} % in the simulator, {(after.total - before.total) / took:.0f} calls/s",
    )
    # The thread that waits for events asks again and again by itself, samples or none.
    made = sum(
        n - before.calls.get(name, 0) for name, n in after.calls.items() if not name.startswith("nvmlEventSetWait")
    )
    samples = after.samples - before.samples
    yield Row(
        "NVML calls of a sample, mean over a minute",
        made / samples,
        "calls",
        reach=GPUS * (20 + INSTANCES * (5 + 2)),
        slack=1.1,
        note=f"{samples} samples of {GPUS} GPUs × {INSTANCES} instances; 20 a GPU, 5 a GPU instance, 2 a compute instance",
    )


def _hour(where: Path) -> Iterator[Row]:
    """Give the daemon an hour's samples and scrapes in 72 s. It is not traced: counting its calls takes memory too."""
    of = node.busy(where / "hour", extra=f"sample-interval = {INTERVAL}")
    with node.daemon(of) as gpunode:
        connection = client.Connection(gpunode.port)
        marks: list[float] = []
        began = time.monotonic()
        for number in range(1, HOUR_SCRAPES + 1):
            time.sleep(max(0.0, began + number * INTERVAL * HOUR_SAMPLES / HOUR_SCRAPES - time.monotonic()))
            client.one(connection, 1)
            marks.append(child.rss_mib(gpunode.pid))
        took = time.monotonic() - began
        connection.close()
        # Each mark is taken as an answer has just been sent, while a sample is taken or rendered, so one alone is chance.
        tenth = len(marks) // 10
        late = statistics.median(marks[-tenth:])
        early = statistics.median(marks[len(marks) // 4 :][:tenth])
        yield Row(
            "memory after an hour's work",
            late,
            "MiB",
            reach=60,
            slack=1.08,
            note=f"{took:.0f} s, a sample each {INTERVAL} s, {len(marks)} scrapes, simulator included; "
            f"at most {max(marks):.1f} MiB just after a scrape",
        )
        yield Row("its growth over the last three quarters", late - early, "MiB", reach=0.5, noise=0.5)


def _slow(where: Path) -> Row:
    of = node.busy(where / "slow")
    with node.daemon(of) as gpunode, contextlib.ExitStack() as stack:
        connection = client.Connection(gpunode.port)
        client.one(connection, 100)
        before = child.rss_mib(gpunode.pid)
        slow = []
        for _ in range(SLOW):
            plug = stack.enter_context(socket.create_connection(("127.0.0.1", gpunode.port), timeout=10))
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.append(plug)
        for plug in slow:
            plug.sendall(client.REQUEST * PIPELINED)
        highest = before
        for _ in range(50):
            time.sleep(0.1)
            highest = max(highest, child.rss_mib(gpunode.pid))
            for plug in slow:
                plug.recv(1)
        connection.close()
        answered = [one for one in (_quick(gpunode.port) for _ in range(20)) if one is not None]
    return Row(
        f"memory that {SLOW} slow clients add, {PIPELINED} requests each",
        highest - before,
        "MiB",
        reach=16,
        slack=1.5,
        noise=2,
        note=f"of 20 quick scrapes meanwhile {len(answered)} are answered"
        + (f", the slowest in {max(answered) * 1e3:.1f} ms" if answered else "")
        + ", the others turned away",
    )


def _quick(port: int) -> float | None:
    """Return the seconds that a scrape on a connection of its own took; None when it was turned away."""
    connection = client.Connection(port)
    try:
        return client.one(connection, 1)[0]
    except client.Refused:
        return None
    finally:
        connection.close()
