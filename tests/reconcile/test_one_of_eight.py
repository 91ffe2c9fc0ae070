"""Eight GPUs, of which one is lost, one hangs, one errs and one is held: the others are worked as if alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent.host import pci
from agent.reconcile import cycle, snapshot
from agent.serve import health

LAYOUT = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
FIVE = '[[gpunode.layout]]\ngpus = [0, 2, 4, 6, 7]\ninstances = { "3g.40gb" = 2 }\n'
BY_INDEX = "".join(
    f'[[gpunode.layout]]\ngpus = [{index}]\ninstances = {{ "{profile}" = 1 }}\n'
    for index, profile in enumerate(
        ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb", "2g.20gb"]
    )
)
LOST, HUNG, ERR, HELD = 1, 3, 5, 6
Make = Callable[..., Any]


def _judged(result: snapshot.Snapshot) -> health.Health:
    return health.judge(result, None, now=result.started, loop_turned=result.started)


async def _broken(rig: Any) -> int:
    """Break four of the eight; return the order on which the hung one hangs."""
    whole = rig.sim.driver.gpus[HELD]
    await rig.cycle()
    with rig.sim.driver.store.change() as node:
        for gpu in node.gpus:
            if gpu is not node.gpus[whole.index]:
                gpu.instances.clear()
    held = next(iter(whole.state.instances))
    rig.sim.start_process(HELD, gpu_instance=held, name="train.py")
    rig.sim.lose(LOST)
    rig.sim.fail("nvmlDeviceGetMigMode", 999, gpu=ERR, times=0)
    return int(rig.sim.hang("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=HUNG))


@pytest.mark.parametrize("layout", [LAYOUT, FIVE], ids=["all needed", "the held needed"])
async def test_the_others_are_in_force(make: Make, layout: str) -> None:
    rig = make("p5.48xlarge", '[[gpunode.layout]]\ngpus = "all"\ninstances = { "2g.20gb" = 3 }\n', change_deadline=1.0)
    order = await _broken(rig)
    rig.set(layout)
    result = await asyncio.wait_for(rig.cycle(), 20)
    states = {gpu.index: gpu.state.value for gpu in result.node.gpus if gpu.state.value != "ok"}
    assert (states[LOST], states[ERR]) == ("lost", "error")
    wanted = (True, [("3g.40gb", 0, 1), ("3g.40gb", 4, 1)])
    truth = rig.truth()
    others = [index for index in range(8) if index not in (LOST, HUNG, ERR, HELD)]
    assert [truth[index] for index in others] == [wanted] * len(others)
    assert truth[HELD] != wanted
    told = " ".join(r.message for r in result.reasons)
    assert "train.py" in told
    verdict = _judged(result)
    assert not verdict.ready
    assert {gpu for reason in verdict.reasons if (gpu := reason.gpu)} >= {result.node.gpus[LOST].uuid}
    if layout == LAYOUT:
        assert states[HUNG] == "hung"
        assert {"lost", "hung", "in-use"} <= set(verdict.codes)
    rig.sim.release(order)


async def test_what_no_layout_needs_degrades_and_does_not_stop(make: Make) -> None:
    needed = '[[gpunode.layout]]\ngpus = [0, 2, 4, 7]\ninstances = { "3g.40gb" = 2 }\n'
    rig = make("p5.48xlarge", '[[gpunode.layout]]\ngpus = "all"\ninstances = { "2g.20gb" = 3 }\n', read_deadline=1.0)
    await _broken(rig)
    order = rig.sim.hang("nvmlDeviceGetUUID", gpu=HUNG)
    rig.set(needed)
    await rig.restart()
    result = await asyncio.wait_for(rig.cycle(), 20)
    verdict = _judged(result)
    assert verdict.ready, verdict.reasons
    assert verdict.degraded
    assert {"lost", "hung", "error"} <= set(verdict.codes)
    rig.sim.release(order)


async def test_others_are_measured_and_the_hung_one_is_said_to_be_down(make: Make) -> None:
    rig = make("p5.48xlarge", LAYOUT, read_deadline=1.0)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.CONVERGED
    order = rig.sim.hang("nvmlDeviceGetTemperature*", gpu=HUNG, times=0)
    uuids = [gpu.uuid for gpu in result.node.gpus]
    began = time.monotonic()
    samples = await asyncio.gather(*(rig.gpus.measure(uuid, slow=False) for uuid in uuids))
    assert time.monotonic() - began < 3.0
    assert [sample.up for sample in samples] == [index != HUNG for index in range(8)]
    rig.sim.release(order)


async def test_a_card_that_has_left_the_bus_leaves_the_others_their_indexes(make: Make) -> None:
    rig = make("p5.48xlarge", BY_INDEX)
    rig.around = dataclasses.replace(rig.around, expected=lambda: 8)
    first = await rig.cycle(cycle.Intent.DAEMON)
    assert first.phase is snapshot.Phase.CONVERGED
    before = rig.truth()
    rig.sim.unplug(2)
    await rig.reboot()
    assert len(pci.gpus(rig.sim.machine)) == 7
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    truth = rig.truth()
    assert [t for i, t in enumerate(truth) if i != 2] == [t for i, t in enumerate(before) if i != 2]
    told = " ".join(r.message for r in result.reasons)
    assert rig.sim.driver.gpus[2].spec.pci_bus_id[-10:].lower() in told.lower(), told
    verdict = _judged(result)
    assert not verdict.ready
    assert "gpu-missing" in verdict.codes


async def test_a_card_that_leaves_while_running_is_lost_and_the_others_keep_their_layouts(make: Make) -> None:
    rig = make("p5.48xlarge", BY_INDEX)
    rig.around = dataclasses.replace(rig.around, expected=lambda: 8)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    before, mutations = rig.truth(), rig.sim.mutations
    rig.sim.unplug(2)
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert [gpu.state.value for gpu in result.node.gpus] == ["ok", "ok", "lost", *["ok"] * 5]
    assert rig.truth() == before
    assert rig.sim.mutations == mutations


async def test_without_memory_no_layout_moves_to_another_card(make: Make) -> None:
    rig = make("p5.48xlarge", BY_INDEX)
    rig.around = dataclasses.replace(rig.around, expected=lambda: 8)
    rig.sim.unplug(2)
    await rig.reboot()
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    assert rig.sim.mutations == 0
