"""Two gpunodes on one node, and gpunode beside somebody who makes and destroys instances at will."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import errors
from agent.host import files
from agent.mig import node as nodes
from agent.reconcile import cycle, snapshot
from agent.sim import codes

LAYOUT = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
CONTINUOUS = '[gpunode]\nenforcement = "continuous"\n' + LAYOUT
Make = Callable[..., Any]


class Vandal(threading.Thread):
    """Destroys and creates instances at random, below NVML, until told to stop; counts what it did."""

    def __init__(self, driver: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.driver = driver
        self.chance = random.Random(seed)
        self.done = 0
        self.quit = threading.Event()

    def run(self) -> None:
        while not self.quit.wait(self.chance.uniform(0.001, 0.03)):
            gpu = self.chance.choice(self.driver.gpus)
            try:
                with gpu.lock:
                    self._act(gpu)
            except codes.Refused:
                continue
            self.done += 1

    def _act(self, gpu: Any) -> None:
        instances = list(gpu.state.instances.values())
        if instances and self.chance.random() < 0.6:
            victim = self.chance.choice(instances)
            for compute in list(victim.compute.values()):
                self.driver.destroy_compute_instance(gpu, victim, compute)
            if self.chance.random() < 0.7:
                self.driver.destroy_gpu_instance(gpu, victim)
        else:
            self.driver.create_gpu_instance(gpu, self.chance.choice([19, 14, 9]))


async def _beside(rig: Any, seconds: float, intent: cycle.Intent) -> tuple[int, list[snapshot.Snapshot]]:
    vandal = Vandal(rig.sim.driver, seed=7)
    vandal.start()
    results = []
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            results.append(await rig.cycle(intent))
            await asyncio.sleep(0.01)
    finally:
        vandal.quit.set()
        vandal.join(10)
    return vandal.done, results


def _said_what_is(rig: Any, result: snapshot.Snapshot) -> bool:
    assert result.node is not None
    shown = [
        sorted((str(i.profile), i.placement.start, len(i.compute)) for i in gpu.instances) for gpu in result.node.gpus
    ]
    return shown == [instances for _, instances in rig.truth()]


async def _converges_beside_a_vandal(rig: Any, seconds: float) -> None:
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    generations = [rig.around.memory.generation]
    done, results = await _beside(rig, seconds, cycle.Intent.DAEMON)
    generations += [result.generation for result in results]
    assert generations == sorted(generations)
    repaired = sum(len(steps) for r in results if r.outcome for _, steps in r.outcome.done)
    last = results[-1]
    for _ in range(3):  # left alone it is as wanted, within a cycle or two
        last = await rig.cycle(cycle.Intent.DAEMON)
    assert last.phase is snapshot.Phase.CONVERGED, last.reasons
    assert _said_what_is(rig, last)
    assert done > 10
    assert repaired > 0
    assert last.generation >= generations[0] + sum(1 for r in results if r.outcome and r.outcome.changed)
    print(
        f"figure: rival changes: {done}, cycles: {len(results)}, steps of repair: {repaired}, generations: {last.generation}"
    )


async def _no_fight_under_boot(rig: Any, seconds: float) -> None:
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    first = rig.around.memory.generation
    done, results = await _beside(rig, seconds, cycle.Intent.DAEMON)
    assert all(not (r.outcome and r.outcome.changed) for r in results)
    assert {r.phase for r in results} <= {snapshot.Phase.CONVERGED, snapshot.Phase.DRIFTED, snapshot.Phase.BLOCKED}
    assert done > 10
    last = await rig.cycle(cycle.Intent.DAEMON)
    assert _said_what_is(rig, last)
    assert last.generation > first
    print(f"figure: rival changes: {done}, cycles: {len(results)}, generations: {last.generation}")


async def test_continuous_converges_beside_a_rival(make: Make) -> None:
    await _converges_beside_a_vandal(make("h100.80gb:2", CONTINUOUS), 2.0)


async def test_boot_does_not_fight_a_rival(make: Make) -> None:
    await _no_fight_under_boot(make("h100.80gb:2", LAYOUT), 2.0)


@pytest.mark.full
async def test_continuous_converges_beside_a_rival_of_a_minute(make: Make) -> None:
    await _converges_beside_a_vandal(make("h100.80gb:4", CONTINUOUS), 60.0)


@pytest.mark.full
async def test_boot_does_not_fight_a_rival_of_a_minute(make: Make) -> None:
    await _no_fight_under_boot(make("h100.80gb:4", LAYOUT), 60.0)


async def test_every_change_of_somebody_else_is_counted(make: Make) -> None:
    """One change between two cycles, one generation each; a cycle without a change counts none."""
    rig = make("h100.80gb:1", LAYOUT)
    await rig.cycle(cycle.Intent.DAEMON)
    generation = rig.around.memory.generation
    gpu = rig.sim.driver.gpus[0]
    for turn in range(6):
        with gpu.lock:
            if turn % 2 == 0:
                victim = next(iter(gpu.state.instances.values()))
                for compute in list(victim.compute.values()):
                    rig.sim.driver.destroy_compute_instance(gpu, victim, compute)
                rig.sim.driver.destroy_gpu_instance(gpu, victim)
            else:
                rig.sim.driver.create_gpu_instance(gpu, 19)
        await rig.cycle(cycle.Intent.DAEMON)
        result = await rig.cycle(cycle.Intent.DAEMON)
        assert result.generation == generation + turn + 1
        assert result.phase is snapshot.Phase.DRIFTED


async def test_the_second_gpunode_does_not_write(make: Make, tmp_path: Path) -> None:
    place = tmp_path / "lock"
    with files.Lock.take(place), pytest.raises(errors.BlockedError, match="another gpunode"):
        files.Lock.take(place)
    files.Lock.take(place).release()


def test_nodes_are_told_apart_by_what_is_on_them() -> None:
    """The fingerprint that counts changes moves with instances and not with their users."""
    gpu = nodes.Gpu(index=0, uuid="GPU-1", pci_bus_id="0000:00:1e.0", name="x", model="x")
    one = nodes.NodeState(gpus=(gpu,))
    held = nodes.Gpu(
        index=0, uuid="GPU-1", pci_bus_id="0000:00:1e.0", name="x", model="x", holders=(nodes.Holder("process", "p"),)
    )
    assert cycle.fingerprint(one) == cycle.fingerprint(nodes.NodeState(gpus=(held,)))
    moved = nodes.Gpu(
        index=0, uuid="GPU-1", pci_bus_id="0000:00:1e.0", name="x", model="x", mode=nodes.ModeState(True, True)
    )
    assert cycle.fingerprint(one) != cycle.fingerprint(nodes.NodeState(gpus=(moved,)))
