"""Samples as the real sampler takes them of a simulated node, at times that a test sets.

Everything on the way is what runs on a node: the simulator's C functions, the lanes, the meter, the
sampler. Only the clocks stand.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pynvml

from agent import measures
from agent.mig import layout as layouts
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.nvml import gpm
from agent.nvml import gpus as doors
from agent.reconcile import snapshot as snapshots
from agent.sample import loop
from agent.sim import node as nodes
from agent.sim import spec as specs
from tests.nvml import conftest as benches

START = 1_700_000_000.0
INTERVAL = 5.0

Instances = Sequence[tuple[str, int]]
"""GPU instances of a GPU: (profile, start)."""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(slots=True)
class Sampled:
    """A simulated node, its sampler, and what that published last."""

    node: nodes.SimulatedNode
    gpus: doors.NvmlGpus
    sampler: loop.Sampler
    clock: Clock
    bench: benches.Bench

    async def cycle(self) -> measures.Sample:
        """Let an interval pass and sample."""
        self.clock.now += INTERVAL
        return await self.sampler.cycle()

    async def snapshot(self, *, wanted: dict[int, Instances] | None = None) -> snapshots.Snapshot:
        """Return the snapshot of a node that is as wanted: the GPUs `wanted`, by index, with these instances."""
        state = await self.gpus.observe()
        layout = layouts.Layout(
            tuple(
                layouts.GpuLayout(
                    state.gpus[index].uuid,
                    mig=True,
                    instances=tuple(layouts.InstanceSpec(profiles.parse(name)) for name, _ in instances),
                )
                for index, instances in (wanted or {}).items()
            )
        )
        return snapshots.Snapshot(
            phase=snapshots.Phase.CONVERGED,
            cycle=1,
            generation=1,
            started=self.clock.now - 20,
            duration=0.25,
            settings=snapshots.SettingsView(
                sources=("/etc/gpunode/config.toml",), digest="abc123", declared=bool(wanted)
            ),
            layout=layout,
            node=state,
            plan=plans.Plan(
                tuple(plans.GpuPlan(gpu.uuid, gpu.index, managed=gpu.index in (wanted or {})) for gpu in state.gpus)
            ),
            gpus_expected=len(state.gpus),
            simulated=self.node.name,
            last_success=self.clock.now - 20,
        )


@contextlib.asynccontextmanager
async def sampled(
    spec: str, wanted: dict[int, Instances] | None = None, *, read_deadline: float = 30.0, head_start: float = 5.0
) -> AsyncIterator[Sampled]:
    """Open a node, split the GPUs `wanted`, and put a sampler in front of it.

    pynvml is left as it was found. A window of activity may be as short as the test makes it.
    """
    before, shortest = pynvml.nvmlLib, gpm.SHORTEST
    gpm.SHORTEST = 0.0
    clock = Clock()
    node = nodes.open_spec(dataclasses.replace(specs.read(spec), latency=()), clock=clock)
    options = {"clock": clock, "wait": lambda _: None, "read_deadline": read_deadline}
    bench = benches.Bench(node, benches.door(node, **options), options=options)
    try:
        state = await bench.gpus.observe()
        bench.uuids = tuple(gpu.uuid for gpu in state.gpus)
        if wanted:
            await bench.mig_on(*wanted)
            for index, instances in wanted.items():
                await bench.split(index, *instances)
        published: list[measures.Sample] = []
        sampler = loop.Sampler(
            bench.gpus,
            clock=clock,
            monotonic=clock,
            interval=INTERVAL,
            publish=published.append,
            initializations=lambda: bench.gpus.initializations,
            events_up=lambda: bench.gpus.event_watch_up,
            head_start=head_start,
        )
        try:
            yield Sampled(node, bench.gpus, sampler, clock, bench)
        finally:
            await sampler.pause()
    finally:
        node.release()
        await bench.gpus.close()
        node.close()
        gpm.SHORTEST = shortest
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


def golden(name: str, form: str) -> Path:
    """Return where the expected exposition of a case lies."""
    return Path(__file__).parent / "golden" / f"{name}.{form}"
