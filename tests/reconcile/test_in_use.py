"""Instances in use: by a process, an open capability file, a pod or an ECS task; kept, not kept, all.

What the target keeps is no hindrance. What it does not keep is never destroyed, and the plan of that GPU
is refused as a whole with who holds it. `--force` lifts what a scheduler gave away, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpclib
import grpclib.exceptions
import pytest

from agent.host import pods
from agent.reconcile import cycle, snapshot
from tests.host import kubelet as kubelets

BEFORE = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
AFTER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "1g.10gb" = 3 }\n'
WHOLE = '[[gpunode.layout]]\ngpus = [0]\ninstances = { "7g.80gb" = 1 }\n'
KEPT, OTHER = "3g.40gb", "2g.20gb"
Make = Callable[..., Any]


class Holding:
    """Somebody on the node, of one kind, who can take instances by their profile."""

    def __init__(self, rig: Any, kubelet: Any) -> None:
        self.rig = rig
        self.kubelet = kubelet

    def instance(self, profile: str) -> Any:
        gpu = self.rig.sim.driver.gpus[0]
        return next(i for i in gpu.state.instances.values() if gpu.profile(i.profile).name == profile)

    async def uuid(self, profile: str) -> str:
        """The MIG device of the instance, as a scheduler names it."""
        node = await self.rig.gpus.observe()
        (uuid,) = (i.compute[0].uuid for i in node.gpus[0].instances if str(i.profile) == profile)
        return str(uuid)

    async def take(self, kind: str, profile: str, *, uuid: str | None = None) -> str:
        """Let somebody of `kind` use the instance; return the word that must be told of it."""
        instance = self.instance(profile)
        sim = self.rig.sim
        if kind == "process":
            sim.start_process(0, gpu_instance=instance.id, name="train.py")
            return "train.py"
        if kind == "open file":
            sim.hold(0, gpu_instance=instance.id, name="keeper")
            return "keeper"
        uuid = uuid or await self.uuid(profile)
        if kind == "pod":
            sim.set_unit("kubelet.service", True)
            self.kubelet.pods.append(kubelets.pod("idle-0", namespace="ml", devices={"nvidia.com/gpu": [uuid]}))
            return "ml/idle-0"
        sim.set_unit("ecs.service", True)
        pid = sim.hold(0, name="pause")  # a process that has the GPU's file open, which uses no instance
        task, container = f"{pid:032x}", f"{pid:064x}"
        group = f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{task}.slice/docker-{container}.scope/cgroup.procs"
        files = {group: f"{pid}\n", f"/proc/{pid}/environ": f"NVIDIA_VISIBLE_DEVICES={uuid}\0"}
        for name, text in files.items():
            place = sim.machine.path(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return task


KINDS = ("process", "open file", "pod", "task")


@pytest.fixture
def kubelet(make: Make) -> Iterator[tuple[Any, Any]]:
    rig = make("h100.80gb:2", BEFORE)
    with kubelets.serving(rig.sim.machine.path(pods.SOCKET)) as served:
        yield rig, served


@pytest.fixture
async def node(kubelet: tuple[Any, Any]) -> Holding:
    rig, served = kubelet
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
    rig.set(AFTER)
    return Holding(rig, served)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_uses_what_the_target_keeps_hinders_nothing(node: Holding, kind: str) -> None:
    await node.take(kind, KEPT)
    serial = node.instance(KEPT).serial
    result = await node.rig.cycle()
    assert result.phase is snapshot.Phase.CONVERGED, result.reasons
    assert node.instance(KEPT).serial == serial
    assert sorted(p for p, _, _ in node.rig.truth()[0][1]) == ["1g.10gb"] * 3 + [KEPT]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profiles", [(OTHER,), (KEPT, OTHER, "1g.10gb")], ids=["not kept", "all"])
async def test_who_uses_what_the_target_does_not_keep_is_named_and_left_alone(
    node: Holding, kind: str, profiles: tuple[str, ...]
) -> None:
    words = [await node.take(kind, profile) for profile in profiles]
    before = node.rig.truth()
    result = await node.rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert node.rig.truth()[0] == before[0]
    assert node.rig.truth()[1] != before[1]  # the other GPU is worked nevertheless
    told = " ".join(r.message for r in result.reasons if r.code == "in-use")
    assert any(word in told for word in words), told


@pytest.mark.parametrize("kind", KINDS)
async def test_force_lifts_what_a_scheduler_gave_away_and_nothing_else(node: Holding, kind: str) -> None:
    word = await node.take(kind, OTHER)
    before = node.rig.truth()
    result = await node.rig.cycle(force=True)
    if kind in ("pod", "task"):
        assert result.phase is snapshot.Phase.CONVERGED, result.reasons
    else:
        assert result.phase is snapshot.Phase.BLOCKED
        assert node.rig.truth()[0] == before[0]
        assert word in " ".join(r.message for r in result.reasons)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_comes_between_plan_and_step_is_named_and_left_alone(node: Holding, kind: str) -> None:
    seen = await cycle.look(node.rig.around, node.rig.load())
    word = await node.take(kind, OTHER)
    before = node.rig.truth()
    result = await cycle.run_cycle(node.rig.around, intent=cycle.Intent.APPLY, trigger="test", seen=seen)
    assert node.rig.truth()[0] == before[0]
    assert result.phase in (snapshot.Phase.FAILED, snapshot.Phase.BLOCKED)
    assert word in " ".join(r.message for r in result.reasons)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_comes_between_two_steps_keeps_the_instance(node: Holding, kind: str) -> None:
    """The first destroy has been checked and done; somebody takes another instance then."""
    node.rig.set(WHOLE)
    serial = node.instance(KEPT).serial
    uuid = await node.uuid(KEPT)
    order = node.rig.sim.hang("nvmlGpuInstanceDestroy", gpu=0)

    def progress(_: str) -> None:
        node.rig.now += 1.0  # each step takes its time, so that the look before the first has grown old

    going = asyncio.ensure_future(node.rig.cycle(progress=progress))
    await node.rig.reached(order)
    assert not going.done()
    word = await node.take(kind, KEPT, uuid=uuid)
    node.rig.sim.release(order)
    result = await going
    assert node.instance(KEPT).serial == serial
    assert result.phase in (snapshot.Phase.FAILED, snapshot.Phase.BLOCKED)
    assert word in " ".join(r.message for r in result.reasons)


async def test_allocations_that_cannot_be_read_count_as_use_of_everything(node: Holding) -> None:
    node.rig.sim.set_unit("kubelet.service", True)
    node.kubelet.error = _refusal()
    before = node.rig.truth()
    result = await node.rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert node.rig.truth() == before
    assert (await node.rig.cycle(force=True)).phase is snapshot.Phase.CONVERGED


async def test_allocations_that_become_unreadable_after_the_plan_stop_the_destroying(node: Holding) -> None:
    node.rig.sim.set_unit("kubelet.service", True)
    seen = await cycle.look(node.rig.around, node.rig.load())
    assert seen.plan.steps
    node.kubelet.error = _refusal()
    before = node.rig.truth()
    result = await cycle.run_cycle(node.rig.around, intent=cycle.Intent.APPLY, trigger="test", seen=seen)
    assert node.rig.truth() == before
    assert "cannot be read" in " ".join(r.message for r in result.reasons)


def _refusal() -> Any:
    return grpclib.exceptions.GRPCError(grpclib.Status.UNAVAILABLE, "not now")
