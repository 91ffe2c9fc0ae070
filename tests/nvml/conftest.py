"""Simulated nodes with gpunode's door to the GPUs in front of them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pynvml
import pytest

from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.nvml import gpus as doors
from agent.nvml import session as sessions
from agent.sim import node as simulated
from agent.sim import spec as specs

PERSISTENCED = "nvidia-persistenced.service"


@dataclasses.dataclass(slots=True)
class Bench:
    """A simulated node and the door to its GPUs."""

    node: simulated.SimulatedNode
    gpus: doors.NvmlGpus
    uuids: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    async def mig_on(self, *indexes: int) -> None:
        """Turn MIG on, with a reset where it takes one."""
        pending = []
        for index in indexes or range(len(self.uuids)):
            uuid = self.uuids[index]
            await self.gpus.perform(uuid, plans.SetMigMode(True))
            mode = (await self.gpus.observe_gpu(uuid)).mode
            assert mode is not None
            if mode.changing:
                pending.append(uuid)
        if pending:
            await self.gpus.release()
            self.node.machine.stop_units([PERSISTENCED])
            await self.gpus.reset(pending)
            await self.gpus.retake()

    async def split(self, index: int, *wanted: tuple[str, int]) -> nodes.Gpu:
        """Make instances of (profile, start), each with its default compute instance."""
        uuid = self.uuids[index]
        gpu = await self.gpus.observe_gpu(uuid)
        for name, start in wanted:
            offer = gpu.offer(profiles.parse(name))
            assert offer is not None
            place = nodes.Placement(start, offer.size)
            await self.gpus.perform(uuid, plans.CreateGpuInstance(offer.profile, offer.id, place))
            await self.gpus.perform(uuid, plans.CreateComputeInstance(place, offer.profile))
        return await self.gpus.observe_gpu(uuid)

    async def again(self) -> doors.NvmlGpus:
        """Close the door and open another one on the same node, as a second process would."""
        await self.gpus.close()
        self.gpus = door(self.node, **self.options)
        return self.gpus

    def counted(self) -> collections.Counter[str]:
        """Calls that have reached the simulated library so far."""
        return collections.Counter(self.node.library_calls())


def door(node: simulated.SimulatedNode, **options: Any) -> doors.NvmlGpus:
    return doors.NvmlGpus(sessions.Session(node.library, root=node.machine.root), machine=node.machine, **options)


Opener = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_library() -> Iterator[None]:
    """Leave pynvml as it was found."""
    before: Any = pynvml.nvmlLib
    yield
    pynvml.nvmlLib = before
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
async def bench() -> AsyncIterator[Opener]:
    """Give a function that opens a node: bench("h100.80gb:2", root=False, ...)."""
    async with contextlib.AsyncExitStack() as stack:

        async def opener(
            name: str = "h100.80gb:2",
            *,
            read_deadline: float = 30.0,
            change_deadline: float = 60.0,
            look: bool = True,
            **changes: Any,
        ) -> Bench:
            about = dataclasses.replace(specs.read(name), **changes)
            node = simulated.open_spec(about)
            options: dict[str, Any] = {
                "read_deadline": read_deadline,
                "change_deadline": change_deadline,
                "wait": lambda _: None,
            }
            made = Bench(node, door(node, **options), options=options)
            if look:
                state = await made.gpus.observe()
                made.uuids = tuple(gpu.uuid for gpu in state.gpus)

            async def end() -> None:
                node.release()
                await made.gpus.close()
                node.close()

            stack.push_async_callback(end)
            return made

        yield opener


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another thread brings about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in another thread
            await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until
