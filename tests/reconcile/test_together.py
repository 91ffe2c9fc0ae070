"""GPUs that are looked at again at once share a look at the machine, and never one that began before they asked."""

from __future__ import annotations

import asyncio
import types
from typing import cast

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.reconcile import cycle
from tests.mig import parts


class Machine:
    """Takes looks, each of which lasts until it is let go."""

    def __init__(self, *, broken: bool = False) -> None:
        self.looks: list[list[str]] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.broken = broken

    async def holders(self, node: nodes.NodeState) -> nodes.NodeState:
        self.looks.append([gpu.uuid for gpu in node.gpus])
        self.begun.set()
        await self.go.wait()
        if self.broken:
            raise errors.GpunodeError("no /proc here")
        return node


GPUS = [parts.gpu("a100-40gb", uuid=f"GPU-{number}", index=number, minor=number) for number in range(8)]
NODE = nodes.NodeState(gpus=tuple(GPUS), driver_version="580.1", cuda_version="13.0")


def together(machine: Machine) -> cycle._Together:
    return cycle._Together(cast("cycle.Surroundings", types.SimpleNamespace(holders=machine.holders)), NODE)


async def test_who_asks_while_a_look_is_under_way_gets_the_next_one() -> None:
    machine = Machine()
    look = together(machine)
    first = asyncio.create_task(look(GPUS[0]))
    await machine.begun.wait()
    others = [asyncio.create_task(look(gpu)) for gpu in GPUS[1:]]
    await asyncio.sleep(0)
    machine.go.set()
    assert [gpu.uuid for gpu in (await first).gpus] == ["GPU-0"]
    for number, other in enumerate(others, 1):
        assert (await other).gpu(f"GPU-{number}") == GPUS[number]
    assert machine.looks == [["GPU-0"], [f"GPU-{number}" for number in range(1, 8)]]
    await look(GPUS[3])  # long after, it is a look of its own
    assert machine.looks[2:] == [["GPU-3"]]


async def test_those_who_ask_at_once_share_one_look_and_what_goes_wrong_with_it() -> None:
    machine = Machine(broken=True)
    machine.go.set()
    look = together(machine)
    found = await asyncio.gather(*(look(gpu) for gpu in GPUS), return_exceptions=True)
    assert [str(one) for one in found] == ["no /proc here"] * 8
    assert len(machine.looks) == 1
    with pytest.raises(errors.GpunodeError):
        await look(GPUS[0])


async def test_one_who_no_longer_waits_is_in_nobodys_way() -> None:
    machine = Machine()
    look = together(machine)
    gone, stays = asyncio.create_task(look(GPUS[0])), asyncio.create_task(look(GPUS[1]))
    await machine.begun.wait()
    gone.cancel()
    machine.go.set()
    assert (await stays).gpu("GPU-1") == GPUS[1]
    assert gone.cancelled() or gone.cancelling()
