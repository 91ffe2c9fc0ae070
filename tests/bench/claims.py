"""How long it takes to decide a claim for two instances of one GPU, on eight GPUs that are all split differently."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from agent.cli import explain
from agent.mig import node as nodes
from agent.workload import dra, read
from tests.bench.report import Row
from tests.mig import parts

CLAIM = Path(__file__).resolve().parents[1] / "data" / "seeds" / "dra-same-parent.yaml"
LAYOUTS = (
    ["7g.40gb@0"],
    ["4g.20gb@0", "3g.20gb@4"],
    ["3g.20gb@0", "3g.20gb@4"],
    ["2g.10gb@0", "2g.10gb@2", "2g.10gb@4"],
    ["1g.5gb@0", "1g.5gb@1", "1g.5gb@2", "1g.5gb@3", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"],
    ["3g.20gb@4", "1g.5gb@0", "1g.5gb@1", "1g.5gb@2"],
    ["1g.10gb@0", "1g.10gb@2", "1g.10gb@4", "1g.10gb@6"],
    ["4g.20gb@0", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"],
)
"""Eight layouts, none of which has both a 1g.5gb and a 2g.10gb."""
BALANCED = ["3g.20gb@4", "2g.10gb@0", "1g.5gb@2", "1g.5gb@3"]


def devices(*held: list[str]) -> tuple[dra.Device, ...]:
    """Return what the DRA driver publishes of A100s with these instances."""
    gpus = tuple(
        parts.gpu("a100-40gb", *instances, index=i, minor=i, uuid=f"GPU-{i}") for i, instances in enumerate(held)
    )
    return explain.offer(nodes.NodeState(gpus=gpus, driver_version="580.159.03", cuda_version="13.0")).devices


def rows(_: Path) -> Iterator[Row]:
    """Decide the claim where it cannot be and where it can; both must come out right."""
    claim = next(w for w in read.read(CLAIM.read_text(), file=CLAIM.name) if isinstance(w, read.Claim))
    for name, offered, fits in (
        ("refused", devices(*LAYOUTS), False),
        ("allocated", devices(*LAYOUTS[:7], BALANCED), True),
    ):
        best = float("inf")
        for _round in range(5):
            started = time.process_time()
            decision = dra.decide(claim, offered)
            best = min(best, time.process_time() - started)
            if decision.fits is not fits:
                raise RuntimeError(f"the claim was decided wrong: {decision.reason or 'allocated'}")
        yield Row(
            f"same-parent claim over eight GPUs, {name}", best * 1e3, "ms", reach=100, note=f"{len(offered)} devices"
        )
