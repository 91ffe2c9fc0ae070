"""gpunode killed and stopped before, during and after every step of a repartition, as a real process.

The next start finds what was left and ends as wanted, and what matched already when the process ended is
the very same instance afterwards.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agent.reconcile import cycle, snapshot
from tests.e2e import daemons
from tests.reconcile import rig as rigs

BEFORE = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
AFTER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "1g.10gb" = 2, "1g.20gb" = 1 }\n'
CALLS = (
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
)
SPEC = "h100.80gb:2"
FIRST_BOOT = ("a100.40gb:2", "", '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 1, "2g.10gb" = 1 }\n')


class Node:
    """A simulated node in a file that can be put back to the state before the repartition."""

    def __init__(self, where: Path, spec: str = SPEC, before: str = BEFORE, after: str = AFTER) -> None:
        self.state = where / "state"
        self.spec = spec
        self.rig = rigs.Rig(where, spec, before, state=self.state)
        assert self.cycle().phase is snapshot.Phase.CONVERGED
        self.mark = copy.deepcopy(self.rig.sim.driver.store.node)
        self.rig.set(after)
        assert self.cycle().phase is snapshot.Phase.CONVERGED
        self.after = self.rig.truth()

    def cycle(self, intent: cycle.Intent = cycle.Intent.APPLY) -> Any:
        async def job() -> Any:
            await self.rig.restart()
            result = await self.rig.cycle(intent)
            await self.rig.gpus.close()
            return result

        return asyncio.run(job())

    def rewind(self) -> None:
        with self.rig.sim.driver.store.change() as node:
            for field in dataclasses.fields(node):
                if field.name not in ("mutations", "serial"):
                    setattr(node, field.name, copy.deepcopy(getattr(self.mark, field.name)))
            node.mutations += 1
            node.sessions, node.faults = [], []
        for path in (cycle.IN_FORCE, cycle.INDEXES, cycle.HISTORY):
            self.rig.sim.machine.path(path).unlink(missing_ok=True)

    def matching(self) -> set[int]:
        """The serials of instances that the target wants just there, complete with their compute instance."""
        self.rig.sim.driver.store.refresh()
        found = set()
        for gpu in self.rig.sim.driver.gpus:
            wanted = self.after[gpu.index][1]
            for instance in gpu.state.instances.values():
                if (gpu.profile(instance.profile).name, instance.start, len(instance.compute)) in wanted:
                    found |= {instance.serial, *(c.serial for c in instance.compute.values())}
        return found

    def start(self, verb: str = "apply", *argv: str) -> subprocess.Popen[bytes]:
        options = ["--simulate", self.spec, "--sim-state", str(self.state), "--settings", str(self.rig.file)]
        return subprocess.Popen(
            [sys.executable, "-m", "agent", verb, *options, *argv],
            cwd=daemons.ROOT,
            env=daemons.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def wait_for(self, order: int, child: subprocess.Popen[bytes]) -> bool:
        """Wait until a call meets the order; False when the process ended without."""
        until = time.monotonic() + daemons.PATIENCE
        while True:
            if any(f.id == order and f.seen > f.skip for f in self.rig.sim.faults.listed()):
                return True
            if child.poll() is not None:
                return False
            assert time.monotonic() < until
            time.sleep(0.005)

    def close(self) -> None:
        self.rig.sim.close()


def _case(node: Node, call: str, skip: int, action: str, number: signal.Signals) -> bool:
    """End the process at one call in one way, then start again. False: there is no such call."""
    name = f"{number.name} when {call} number {skip} {'has not begun' if action == 'hang' else 'is done'}"
    node.rewind()
    order = node.rig.sim.hang(call, skip=skip) if action == "hang" else node.rig.sim.stall(call, skip=skip)
    child = node.start("apply", "--yes")
    try:
        if not node.wait_for(order, child):
            return False
        child.send_signal(number)
        if number is signal.SIGTERM:
            time.sleep(0.02)  # the signal first, then the step at hand ends
            node.rig.sim.release(order)
        code = child.wait(daemons.PATIENCE)
    finally:
        child.kill()
        _, said = child.communicate()
    node.rig.sim.driver.store.refresh()
    # The step at hand may have been the last one: then it is done, and says so.
    ended = 0 if node.rig.truth() == node.after else 1
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else ended), f"{name}: {said.decode()}"
    assert b"Traceback" not in said, said
    node.rig.sim.release()
    kept = node.matching()
    again = node.cycle()
    assert again.phase is snapshot.Phase.CONVERGED, f"{name}: {again.reasons}"
    assert node.rig.truth() == node.after, name
    assert kept <= node.matching(), f"{name}: what matched was destroyed"
    return True


def _cases(
    where: Path,
    spots: Iterable[tuple[str, int]],
    numbers: tuple[signal.Signals, ...],
    what: tuple[str, str, str] = (SPEC, BEFORE, AFTER),
) -> int:
    node = Node(where, *what)
    try:
        made = 0
        for call, skip in spots:
            for action in ("hang", "stall"):
                for number in numbers:
                    made += _case(node, call, skip, action, number)
        print(f"figure: killed and stopped: {made} cases")
        return made
    finally:
        node.close()


def test_killed_at_the_first_call_of_each_kind(tmp_path: Path) -> None:
    assert _cases(tmp_path, [(CALLS[1], 0), (CALLS[3], 1)], (signal.SIGKILL, signal.SIGTERM)) == 8


@pytest.mark.full
def test_killed_and_stopped_at_every_step(tmp_path: Path) -> None:
    spots = [(call, skip) for call in CALLS for skip in range(6)]
    assert _cases(tmp_path, spots, (signal.SIGKILL, signal.SIGTERM)) >= 40


@pytest.mark.full
def test_killed_and_stopped_around_the_reset_of_a_first_boot(tmp_path: Path) -> None:
    """The mode set and not in force yet, our session closed for the reset, and opened again after it."""
    spots = [("nvmlDeviceSetMigMode", 0), ("nvmlDeviceSetMigMode", 1), ("nvmlShutdown", 0), ("nvmlInitWithFlags", 1)]
    # Closing and opening have no effect on a GPU between which and the return one could be killed.
    made = _cases(tmp_path, [*spots, (CALLS[2], 0)], (signal.SIGKILL, signal.SIGTERM), FIRST_BOOT)
    assert made == 2 * 2 * 3 + 2 * 2


def test_stopped_while_a_call_hangs_it_ends_within_three_seconds(tmp_path: Path) -> None:
    node = Node(tmp_path)
    try:
        node.rewind()
        order = node.rig.sim.hang(CALLS[2])
        child = node.start("apply", "--yes")
        assert node.wait_for(order, child)
        asked = time.monotonic()
        child.terminate()
        _, said = child.communicate(timeout=daemons.PATIENCE)
        assert time.monotonic() - asked < 3.0
        assert child.returncode == 1
        assert b"step at hand" in said
    finally:
        node.close()


def test_killed_after_ready_and_drifted_the_next_start_changes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    flags = ("--simulate", SPEC, "--sim-state", node.state, "--settings", node.rig.file)
    try:
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            gpunode.process.kill()
            gpunode.process.wait(daemons.PATIENCE)
        gpu = node.rig.sim.driver.gpus[0]
        node.rig.sim.driver.store.refresh()
        victim = next(iter(gpu.state.instances.values()))
        with gpu.lock:
            for compute in list(victim.compute.values()):
                node.rig.sim.driver.destroy_compute_instance(gpu, victim, compute)
        before = node.rig.sim.mutations
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            status = gpunode.get("/status").json()
            assert status["phase"] == "drifted", status["reasons"]
            assert gpunode.get("/readyz").status == 503
            assert gpunode.stop() == 0
        assert node.rig.sim.mutations == before
    finally:
        node.close()
