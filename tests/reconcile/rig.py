"""A simulated node with everything a cycle works with: what the daemon uses, without its loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from agent import threads
from agent.host import holders
from agent.mig import node as nodes
from agent.nvml import gpus, session
from agent.reconcile import cycle, snapshot
from agent.settings import model, source
from agent.sim import node as simulated
from agent.sim import state as states

T = TypeVar("T")


class Rig:
    """One simulated node and one process of gpunode on it. `settings` is the text of a TOML document."""

    def __init__(
        self,
        directory: Path,
        spec: str,
        settings: str,
        *,
        state: Path | None = None,
        read_deadline: float = 30.0,
        change_deadline: float = 60.0,
    ) -> None:
        self.file = directory / "settings.toml"
        self.file.write_text(settings)
        self.sim = simulated.open_node(spec, state=state)
        self._deadlines = (read_deadline, change_deadline)
        self.gpus = self._open()
        self.now = 1_000_000.0
        self.progress: list[str] = []
        self.around = cycle.Surroundings(
            gpus=self.gpus,
            machine=self.sim.machine,
            load=self.load,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            holders=self._holders,
            machine_id=lambda: "i-rig",
            any_hung=lambda: self.gpus.any_hung,
            progress=self.progress.append,
        )

    def _open(self) -> gpus.NvmlGpus:
        read, change = self._deadlines
        return gpus.NvmlGpus(
            session.Session(self.sim.library, root=self.sim.machine.root),
            machine=self.sim.machine,
            read_deadline=read,
            change_deadline=change,
            wait=lambda _: None,
        )

    async def restart(self) -> None:
        """Go on as another process of gpunode would: nothing remembered but what is on disk."""
        await self.gpus.close()
        with self.sim.driver.store.change() as node:
            node.sessions = []  # what the other one left open has ended with it
        self.gpus = self._open()
        self.around = dataclasses.replace(self.around, gpus=self.gpus, memory=cycle.Memory())

    def mark(self) -> states.Node:
        """Remember the node as it is; see `rewind`."""
        return copy.deepcopy(self.sim.driver.store.node)

    async def rewind(self, mark: states.Node, *, deadlines: tuple[float, float] | None = None) -> None:
        """Put the node back to `mark`, with another process of gpunode on it that knows of nothing."""
        self.sim.release()
        await self.gpus.close()
        store = self.sim.driver.store
        # The files of the host are written anew when this counter moves; it never goes back.
        store.node = dataclasses.replace(
            copy.deepcopy(mark), mutations=store.node.mutations + 1, serial=store.node.serial, sessions=[], faults=[]
        )
        for path in (cycle.IN_FORCE, cycle.INDEXES, cycle.REBOOTS, cycle.HISTORY):
            with contextlib.suppress(FileNotFoundError):
                self.sim.machine.path(path).unlink()
        self._deadlines = deadlines or (30.0, 60.0)
        self.progress.clear()
        self.gpus = self._open()
        self.around = dataclasses.replace(self.around, gpus=self.gpus, memory=cycle.Memory())

    async def reached(self, order: int, *, going: asyncio.Future[object] | None = None) -> None:
        """Wait until a call meets this order (or `going` has ended without one)."""
        async with asyncio.timeout(20):
            while not any(f.id == order and f.seen > f.skip for f in self.sim.faults.listed()):
                if going is not None and going.done():
                    return
                await asyncio.sleep(0.0005)

    async def unhung(self) -> None:
        """Wait until every overdue call has come back."""
        back = asyncio.Event()
        self.gpus.on_returned = lambda _: back.set()
        async with asyncio.timeout(20):
            while self.gpus.any_hung:
                await back.wait()
                back.clear()

    def patient(self) -> None:
        """From now on calls have all the time they need, in this same process."""
        self.gpus._lanes._read, self.gpus._lanes._change = 30.0, 60.0

    async def reboot(self) -> None:
        """Reboot the node, gpunode with it."""
        self.sim.reboot()
        await self.restart()

    def load(self) -> model.Settings:
        return source.load(source.Request(root=self.sim.machine.root, files=(self.file,), environ={}))

    async def _holders(self, node: nodes.NodeState) -> nodes.NodeState:
        return await threads.run(lambda: holders.merge(node, self.sim.machine, own_pid=os.getpid()))

    def set(self, settings: str) -> None:
        self.file.write_text(settings)

    async def cycle(
        self, intent: cycle.Intent = cycle.Intent.APPLY, *, stop: Callable[[], bool] = lambda: False, **changes: object
    ) -> snapshot.Snapshot:
        around = dataclasses.replace(self.around, **changes)  # type: ignore[arg-type]
        return await cycle.run_cycle(around, intent=intent, trigger="test", stop=stop)

    async def close(self) -> None:
        await self.gpus.close()
        self.sim.close()

    def truth(self) -> list[tuple[bool, list[tuple[str, int, int]]]]:
        """What the simulated driver itself holds: (MIG on, [(profile, start, compute instances)]) of each GPU."""
        found = []
        for gpu in self.sim.driver.gpus:
            instances = [(gpu.profile(i.profile).name, i.start, len(i.compute)) for i in gpu.state.instances.values()]
            found.append((gpu.state.mig, sorted(instances)))
        return found


def drive(job: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function to its end."""
    return asyncio.run(_wrap(job))


async def _wrap(job: Callable[[], Awaitable[T]]) -> T:
    return await job()


def names(result: snapshot.Snapshot) -> list[list[str]]:
    """The profiles on each GPU by placement, as the snapshot tells them."""
    assert result.node is not None
    return [[str(i.profile) for i in sorted(g.instances, key=lambda i: i.placement)] for g in result.node.gpus]


def codes(result: snapshot.Snapshot) -> list[str]:
    return [reason.code for reason in result.reasons]
