"""Carrying out a plan when the door to the GPUs, or the host, does not do what it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.mig import profile as profiles
from agent.reconcile import apply, snapshot

A100 = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 2 }\n'
HALVES = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
MIXED = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
Make = Callable[..., Any]


class Door:
    """The real door, of which single methods are replaced."""

    def __init__(self, gpus: Any, **instead: Any) -> None:
        self._gpus = gpus
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name) or getattr(self._gpus, name)


class Host:
    """The simulated host, whose units do not start again."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def start_units(self, units: Sequence[str]) -> None:
        raise errors.GpunodeError(f"cannot start {', '.join(units)}")


def told(result: snapshot.Snapshot) -> str:
    return " ".join(reason.message for reason in result.reasons)


async def test_units_that_do_not_start_again_do_not_undo_the_reset(make: Make) -> None:
    rig = make("p4d.24xlarge", A100)
    result = await rig.cycle(machine=Host(rig.sim.machine))
    assert result.phase is snapshot.Phase.CONVERGED


async def test_who_looks_at_the_gpus_for_a_moment_does_not_end_the_reset(make: Make) -> None:
    """As nvidia-smi or a monitor does: its session is gone when the reset is tried again."""
    rig = make("a100.40gb:2", A100)
    pid = rig.sim.hold(1, name="nvidia-smi")
    tries = 0

    async def reset(uuids: Sequence[str]) -> None:
        nonlocal tries
        tries += 1
        if tries == apply.RESETS:
            rig.sim.stop_process(pid)
        await rig.gpus.reset(uuids)

    result = await rig.cycle(gpus=Door(rig.gpus, reset=reset))
    assert result.phase is snapshot.Phase.CONVERGED
    assert tries == apply.RESETS
    assert rig.sim.driver.store.node.resets == 1


@pytest.mark.parametrize(("possible", "tries"), [(True, apply.RESETS), (False, 1)], ids=["held", "impossible"])
async def test_a_reset_is_tried_a_bounded_number_of_times(make: Make, possible: bool, tries: int) -> None:
    rig = make("a100.40gb:2", A100)
    rig.sim.hold(1, name="nv-hostengine")
    rig.sim.allow_reset(possible)
    tried = 0

    async def reset(uuids: Sequence[str]) -> None:
        nonlocal tried
        tried += 1
        await rig.gpus.reset(uuids)

    result = await rig.cycle(gpus=Door(rig.gpus, reset=reset))
    assert result.phase is snapshot.Phase.BLOCKED
    assert tried == tries
    assert (await rig.gpus.observe()).gpus  # our session is back


async def test_a_reset_that_was_done_and_changed_nothing_is_told(make: Make) -> None:
    rig = make("a100.40gb:2", A100)

    async def reset(uuids: Sequence[str]) -> None:
        assert len(uuids) == 2

    result = await rig.cycle(gpus=Door(rig.gpus, reset=reset))
    assert result.phase is snapshot.Phase.BLOCKED
    assert "still pending" in told(result)
    assert all(not gpu.instances for gpu in result.node.gpus)


async def test_a_driver_that_does_not_come_back_after_a_reset_is_told(make: Make) -> None:
    rig = make("a100.40gb:1", A100)

    async def retake() -> None:
        raise errors.DriverError("the driver does not come back")

    result = await rig.cycle(gpus=Door(rig.gpus, retake=retake))
    assert "does not come back" in told(result) or result.phase is snapshot.Phase.WAITING
    assert result.phase is not snapshot.Phase.CONVERGED
    await rig.restart()
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_a_gpu_that_cannot_be_read_after_a_reset_is_told(make: Make) -> None:
    rig = make("a100.40gb:2", A100)
    after_reset = False

    async def reset(uuids: Sequence[str]) -> None:
        nonlocal after_reset
        await rig.gpus.reset(uuids)
        after_reset = True

    async def observe_gpu(uuid: str) -> nodes.Gpu:
        if after_reset:
            raise errors.Lost("cannot read GPU: it is lost", call="x", code=15, gpu=uuid)
        found = await rig.gpus.observe_gpu(uuid)
        assert isinstance(found, nodes.Gpu)
        return found

    result = await rig.cycle(gpus=Door(rig.gpus, reset=reset, observe_gpu=observe_gpu))
    assert "it is lost" in told(result)
    assert result.phase is not snapshot.Phase.CONVERGED


async def test_a_gpu_that_cannot_be_read_before_its_reset_is_not_reset(make: Make) -> None:
    rig = make("a100.40gb:1", A100)

    async def observe_gpu(uuid: str) -> nodes.Gpu:
        raise errors.Lost("cannot read GPU: it is lost", call="x", code=15, gpu=uuid)

    result = await rig.cycle(gpus=Door(rig.gpus, observe_gpu=observe_gpu))
    assert "it is lost" in told(result)
    assert rig.sim.driver.store.node.resets == 0


async def test_a_mode_that_took_effect_meanwhile_needs_no_reset(make: Make) -> None:
    rig = make("a100.40gb:1", A100)

    async def perform(uuid: str, step: Any) -> None:
        await rig.gpus.perform(uuid, step)
        if step.kind == "set-mig-mode":
            with rig.sim.driver.store.change() as node:  # somebody else reset it
                node.gpus[0].mig = True

    result = await rig.cycle(gpus=Door(rig.gpus, perform=perform))
    assert result.phase is snapshot.Phase.CONVERGED
    assert rig.sim.driver.store.node.resets == 0


async def test_when_rolling_back_fails_too_what_is_there_now_is_said(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    rig.sim.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999, times=0)
    rig.set(MIXED)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.FAILED
    (failure,) = result.outcome.failures
    assert not failure.rolled_back
    assert "rolling back failed" in failure.remains
    assert "3g.40gb at" in failure.remains
    assert failure.remains in told(result)
    rig.sim.release()
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_what_cannot_be_made_again_as_it_was_is_said_beside_what_it_is_now(make: Make) -> None:
    """A GPU instance without compute instance gets one when it is made again."""
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    gpu = rig.sim.driver.gpus[0]
    with gpu.lock:
        bare = next(i for i in gpu.state.instances.values() if i.start == 4)
        rig.sim.driver.destroy_compute_instance(gpu, bare, next(iter(bare.compute.values())))
    rig.sim.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999)
    rig.set('[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n')
    result = await rig.cycle()
    (failure,) = result.outcome.failures
    assert not failure.rolled_back
    assert rig.truth() == [(True, [("3g.40gb", 0, 1), ("3g.40gb", 4, 1)])]
    now, before = failure.remains.split("; before, ")
    assert "without compute instance" not in now
    assert "3g.40gb at 4:4 without compute instance" in before
    assert failure.remains in told(result)


async def test_when_nothing_can_be_read_after_a_failure_that_is_said(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    failed = False

    async def perform(uuid: str, step: Any) -> None:
        nonlocal failed
        failed = True
        raise errors.CallError("cannot do it", call="x", code=999, gpu=uuid)

    async def observe_gpu(uuid: str) -> nodes.Gpu:
        if failed:
            raise errors.CallError("cannot read it", call="x", code=999, gpu=uuid)
        found = await rig.gpus.observe_gpu(uuid)
        assert isinstance(found, nodes.Gpu)
        return found

    rig.set(MIXED)
    result = await rig.cycle(gpus=Door(rig.gpus, perform=perform, observe_gpu=observe_gpu))
    assert "cannot be read" in told(result)


async def test_a_user_who_comes_before_the_rollback_keeps_what_he_has(make: Make) -> None:
    """The step fails after new instances were made, and somebody uses one of them already."""
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    rig.set(MIXED)

    async def perform(uuid: str, step: Any) -> None:
        if step.kind == "create-gpu-instance" and str(step.profile) == "1g.10gb":
            new = [i for i in rig.sim.driver.gpus[0].state.instances.values() if i.size == 2]
            rig.sim.start_process(0, gpu_instance=new[0].id, name="early.py")
            raise errors.CallError("cannot do it", call="x", code=999, gpu=uuid)
        await rig.gpus.perform(uuid, step)

    result = await rig.cycle(gpus=Door(rig.gpus, perform=perform))
    (failure,) = result.outcome.failures
    assert not failure.rolled_back
    assert "early.py" in failure.remains
    assert any(profile == "2g.20gb" for profile, _, _ in rig.truth()[0][1])


def _gpu(**fields: Any) -> nodes.Gpu:
    return nodes.Gpu(index=3, uuid="GPU-3", pci_bus_id="0000:00:1e.0", name="x", model="x", **fields)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (_gpu(state=nodes.GpuState.LOST, problem="off the bus"), "GPU 3 is lost: off the bus"),
        (_gpu(state=nodes.GpuState.HUNG), "GPU 3 is hung"),
        (_gpu(), "GPU 3 is whole (it has no MIG)"),
        (_gpu(mode=nodes.ModeState(False, False)), "GPU 3 has MIG off"),
        (_gpu(mode=nodes.ModeState(False, True)), "GPU 3 has MIG off, on after the next reset"),
        (_gpu(mode=nodes.ModeState(True, True)), "GPU 3 has MIG on, no instances"),
        (
            _gpu(
                mode=nodes.ModeState(True, True),
                instances=(
                    nodes.GpuInstance(
                        id=1,
                        profile=profiles.parse("3g.40gb"),
                        profile_id=nodes.ProfileId(9),
                        placement=nodes.Placement(4, 4),
                        memory_bytes=1,
                    ),
                ),
            ),
            "GPU 3 has MIG on, 3g.40gb at 4:4 without compute instance",
        ),
    ],
)
def test_what_is_on_a_gpu_is_told_in_words(gpu: nodes.Gpu, words: str) -> None:
    assert apply.describe_gpu(gpu) == words
