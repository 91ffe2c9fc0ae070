"""How much CPU a plan takes, in the worst cases there are.

Every model with a geometry is tried with seeded states and targets, those that cannot be included;
each is planned alone and with all memories of the planner emptied. The eight worst of a model make a
node, and that is planned, emptied again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.mig import advance, plan
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.nvml import gpus, session
from agent.sim import node as simulated
from agent.sim import tables
from tests.bench.report import Row

TRIED = 150
"""States and targets tried on each geometry."""
GPUS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A GPU in some state, and what it shall be."""

    gpu: nodes.Gpu
    wanted: layouts.GpuLayout


def rows(_: Path) -> Iterator[Row]:
    """Measure a node of eight GPUs with the worst tasks found, over all models."""
    worst, name = 0.0, ""
    seen: set[tuple[nodes.ProfileOffer, ...]] = set()
    for model in tables.model_ids():
        gpu = _gpu(model)
        if gpu is None or gpu.offers in seen:
            continue
        seen.add(gpu.offers)
        hardest = sorted(_tasks(gpu), key=lambda task: -_seconds([task], rounds=1))[:GPUS]
        seconds = _seconds(hardest, rounds=3)
        if seconds > worst:
            worst, name = seconds, model
    yield Row(
        "planning eight GPUs, worst case found", worst * 1e3, "ms", reach=50, note=f"{name}, of {len(seen)} geometries"
    )


def _gpu(model: str) -> nodes.Gpu | None:
    """Return a GPU of the model with MIG on and nothing on it; None where it has no geometry."""

    async def observe() -> nodes.NodeState:
        node = simulated.open_node(f"{model}:1")
        reader = gpus.NvmlGpus(session.Session(node.library, root=node.machine.root), machine=node.machine)
        try:
            return await reader.observe()
        finally:
            await reader.close()
            node.close()

    (gpu,) = asyncio.run(observe()).gpus
    if not gpu.offers:
        return None
    return dataclasses.replace(gpu, mode=nodes.ModeState(current=True, pending=True))


def _tasks(gpu: nodes.Gpu) -> Iterator[Task]:
    chance = random.Random(2026)  # the same tasks each time
    states = [gpu]
    for _ in range(TRIED):
        before = chance.choice(states)
        wanted = _wanted(gpu, chance)
        yield Task(before, wanted)
        node = nodes.NodeState((before,))
        planned = plan.compute(layouts.Layout((wanted,)), node, plan.Policy()).gpus[0]
        for step in planned.steps:
            node = advance.advance(node, gpu.uuid, step)
            if chance.random() < 0.1:
                break  # half-way states are states too
        if len(node.gpus[0].instances) > 1:
            states.append(node.gpus[0])


def _wanted(gpu: nodes.Gpu, chance: random.Random) -> layouts.GpuLayout:
    specs = []
    for _ in range(chance.randint(1, 7)):
        offer = chance.choice(gpu.offers)
        start = chance.choice(offer.placements).start if chance.random() < 0.1 else None
        specs.append(layouts.InstanceSpec(profile=offer.profile, start=start))
    return layouts.GpuLayout(uuid=gpu.uuid, mig=True, instances=tuple(specs))


def _seconds(tasks: Sequence[Task], *, rounds: int) -> float:
    """Return the CPU seconds of planning all tasks as one node, the planner remembering nothing."""
    node = nodes.NodeState(tuple(dataclasses.replace(t.gpu, uuid=f"GPU-{i}", index=i) for i, t in enumerate(tasks)))
    wanted = layouts.Layout(tuple(dataclasses.replace(t.wanted, uuid=f"GPU-{i}") for i, t in enumerate(tasks)))
    best = float("inf")
    gc.disable()  # a collection of what the bench has made is not the planner's
    try:
        for _ in range(rounds):
            _forget()
            started = time.process_time()
            plan.compute(wanted, node, plan.Policy())
            best = min(best, time.process_time() - started)
    finally:
        gc.enable()
    return best


_CACHES: list[object] = []


def _forget() -> None:
    """Empty every cache of the core."""
    import sys

    if not _CACHES:
        for name, module in tuple(sys.modules.items()):
            if name.startswith("agent.mig."):
                _CACHES.extend(thing for thing in vars(module).values() if hasattr(thing, "cache_clear"))
    for cache in _CACHES:
        cache.cache_clear()  # type: ignore[attr-defined]
