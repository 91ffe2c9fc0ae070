"""Eight GPUs are worked side by side, each at the pace of its own driver calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.reconcile import snapshot

BEFORE = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "1g.10gb" = 7 }\n'
AFTER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
LATENCY = "\n[latency]\nchange = 0.02\ncreate-gi = 0.15\ndestroy-gi = 0.1\n"
Make = Callable[..., Any]


class Counting:
    """A door that notes when steps begin and end, and how many are under way."""

    def __init__(self, gpus: Any) -> None:
        self._gpus = gpus
        self.now: dict[str, float] = {}
        self.most = 0
        self.chains: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpus, name)

    async def perform(self, uuid: str, step: Any) -> None:
        assert uuid not in self.now, "two steps at one time on one GPU"
        self.now[uuid] = time.monotonic()
        self.most = max(self.most, len(self.now))
        try:
            await self._gpus.perform(uuid, step)
        finally:
            self.chains[uuid] = self.chains.get(uuid, 0.0) + time.monotonic() - self.now.pop(uuid)


async def test_steps_of_eight_gpus_overlap(make: Make, tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    node.write_text('[[gpu]]\nmodel = "h100.80gb"\ncount = 8\n' + LATENCY)
    rig = make(str(node), AFTER)
    counting = Counting(rig.gpus)
    began = time.monotonic()
    result = await rig.cycle(gpus=counting)
    took = time.monotonic() - began
    assert result.phase is snapshot.Phase.CONVERGED
    assert counting.most == 8
    assert len(counting.chains) == 8
    # One after another they would take the sum; the bound is wide, the bench holds the tight one.
    assert took < sum(counting.chains.values()) / 2


async def test_a_slow_gpu_keeps_nobody_else(make: Make) -> None:
    rig = make("h100.80gb:4", AFTER)
    counting = Counting(rig.gpus)
    order = rig.sim.hang("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=2)
    going = asyncio.ensure_future(rig.cycle(gpus=counting))
    wanted = (True, [("3g.40gb", 0, 1), ("3g.40gb", 4, 1)])
    until = time.monotonic() + 20
    while [t for i, t in enumerate(rig.truth()) if i != 2] != [wanted] * 3:
        assert time.monotonic() < until
        await asyncio.sleep(0.002)
    assert not going.done()
    rig.sim.release(order)
    assert (await going).phase is snapshot.Phase.CONVERGED
