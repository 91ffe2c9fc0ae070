"""Two hundred random repartitions with faults in one process: nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.reconcile import cycle, snapshot

LAYOUTS = (
    {"3g.40gb": 2},
    {"1g.10gb": 7},
    {"7g.80gb": 1},
    {"4g.40gb": 1, "3g.40gb": 1},
    {"2g.20gb": 3, "1g.10gb": 1},
    {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2},
    {"1g.20gb": 3},
)
CALLS = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetMigMode",
    "nvmlGpuInstanceGetInfo",
)
CODES = (1, 2, 3, 6, 15, 19, 23, 999)
Make = Callable[..., Any]


def resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """How many descriptors this process has open (the one for looking included)."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def document(chance: random.Random) -> str:
    words = ""
    for gpu in range(2):
        inner = ", ".join(f'"{p}" = {n}' for p, n in chance.choice(LAYOUTS).items())
        words += f"[[gpunode.layout]]\ngpus = [{gpu}]\ninstances = {{ {inner} }}\n"
    return words


async def turn(rig: Any, chance: random.Random) -> snapshot.Phase:
    """One repartition, with a fault of one kind or none; the next one finds whatever it left."""
    rig.set(document(chance))
    kind = chance.choice(["none", "fail", "fail", "hang", "process", "restart", "reset"])
    order = process = None
    call, skip = chance.choice(CALLS), chance.randrange(4)
    if kind == "fail":
        rig.sim.fail(call, chance.choice(CODES), skip=skip)
    elif kind == "hang":
        order = rig.sim.hang(call, skip=skip)
    elif kind == "process":
        gpu = rig.sim.driver.gpus[0].state
        usable = [i.id for i in gpu.instances.values() if i.compute]
        if gpu.mig and usable:
            process = rig.sim.start_process(0, gpu_instance=chance.choice(usable))
    elif kind == "restart":
        await rig.restart()
    elif kind == "reset":
        rig.sim.reboot()
    result: snapshot.Snapshot = await asyncio.wait_for(rig.cycle(cycle.Intent.DAEMON), 30)
    if order is not None:
        rig.sim.release(order)
        await rig.unhung()
    rig.sim.release()
    if process is not None:
        rig.sim.stop_process(process)
    rig.now += 60.0
    return result.phase


async def _soak(rig: Any, turns: int) -> None:
    chance = random.Random(20)
    memory: list[int] = []
    descriptors: list[int] = []
    threads: list[int] = []
    phases: dict[str, int] = {}
    for _ in range(turns):
        phase = await turn(rig, chance)
        phases[phase.value] = phases.get(phase.value, 0) + 1
        gc.collect()
        memory.append(resident())
        descriptors.append(open_files())
        threads.append(threading.active_count())
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    quarter = turns // 4
    second, last = max(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    print(
        f"figure: {turns} repartitions ending {phases}: memory {second / 2**20:.1f} MiB in the second quarter, "
        f"{last / 2**20:.1f} in the last; descriptors {descriptors[quarter]} and {descriptors[-1]}; <= {max(threads)} threads"
    )
    assert last - second <= 2 * 2**20
    assert descriptors[-1] == descriptors[quarter]
    assert max(threads[-quarter:]) <= max(threads[:quarter]) + 1
    assert max(threads) < 20


async def test_twenty_repartitions_with_faults_leave_no_descriptor_and_no_thread(make: Make) -> None:
    rig = make("h100.80gb:2", "", read_deadline=0.2, change_deadline=0.2)
    chance = random.Random(3)
    for _ in range(4):
        await turn(rig, chance)
    descriptors = open_files()
    for _ in range(16):
        await turn(rig, chance)
    assert open_files() == descriptors
    assert threading.active_count() < 20
    rig.patient()
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


@pytest.mark.full
async def test_two_hundred_repartitions_with_faults(make: Make) -> None:
    await _soak(make("h100.80gb:2", "", read_deadline=0.2, change_deadline=0.2), 200)
