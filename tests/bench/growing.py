"""How cost grows with GPUs and with instances: exponents, with the fixed cost taken out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import child, node
from tests.bench.report import Row, exponent

GPUS = (1, 2, 4, 8, 16, 72)
INSTANCES = (1, 2, 3, 4, 5, 6, 7)
INTERVAL = 0.25
SAMPLES = 20
LIMIT = 1.15
"""An exponent that still counts as linear: the fit sees noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One size of node: what a sample costs, what a scrape holds, what the process keeps."""

    size: int
    series: int
    calls: float
    cpu: float
    memory: float


def rows(where: Path) -> Iterator[Row]:
    """Measure nodes of 1 to 72 GPUs, and 8 GPUs with 1 to 7 instances each."""
    by_gpus = [_point(where / f"gpus-{n}", n, gpus=n, instances=7) for n in GPUS]
    by_instances = [_point(where / f"instances-{n}", n, gpus=8, instances=n) for n in INSTANCES]
    for points, what in ((by_gpus, "GPUs 1 to 72"), (by_instances, "instances 1 to 7")):
        for field, unit in (("series", ""), ("calls", "a sample"), ("cpu", "ms a sample"), ("memory", "MiB")):
            yield _row(points, field, f"{field}, {what}", unit)


def _row(points: Sequence[Point], field: str, name: str, unit: str) -> Row:
    values = [(float(p.size), float(getattr(p, field))) for p in points]
    noisy = field in ("cpu", "memory")
    return Row(
        f"growth of {name}",
        exponent(values),
        "exponent",
        reach=LIMIT if not noisy else LIMIT + 0.15,
        slack=1.25,
        noise=0.25 if noisy else 0.02,
        note=" ".join(f"{value:.0f}" for _, value in values) + f" {unit}".rstrip(),
    )


def _point(where: Path, size: int, *, gpus: int, instances: int) -> Point:
    of = node.busy(where, gpus=gpus, instances=f'{{ "1g.10gb" = {instances} }}', extra=f"sample-interval = {INTERVAL}")
    with node.daemon(of, traced=True) as gpunode:
        time.sleep(4 * INTERVAL)  # the first samples also ask what never changes
        before = after = node.ask_counts(of, gpunode.pid)
        until = time.monotonic() + 120
        while (taken := after.samples - before.samples) < SAMPLES:
            if time.monotonic() > until:
                raise RuntimeError(f"{gpus} GPUs: only {taken} samples in 120 s")
            time.sleep(INTERVAL / 2)
            after = node.ask_counts(of, gpunode.pid)
        text = gpunode.get("/metrics").decode()
        return Point(
            size=size,
            series=sum(1 for line in text.splitlines() if line and not line.startswith("#")),
            calls=(after.total - before.total) / taken,
            cpu=(after.own_seconds - before.own_seconds) / taken * 1e3,
            memory=child.rss_mib(gpunode.pid),
        )
