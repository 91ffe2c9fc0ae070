from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.nvml import perform


def create(gpu: nodes.Gpu, name: str, start: int) -> plans.CreateGpuInstance:
    offer = gpu.offer(profiles.parse(name))
    assert offer is not None
    return plans.CreateGpuInstance(offer.profile, offer.id, nodes.Placement(start, offer.size))


def remove_compute(one: nodes.GpuInstance) -> plans.DestroyComputeInstance:
    return plans.DestroyComputeInstance(one.id, one.compute[0].id, one.compute[0].profile, one.placement)


def remove(one: nodes.GpuInstance) -> plans.DestroyGpuInstance:
    return plans.DestroyGpuInstance(one.id, one.profile, one.placement)


async def ready(bench: Callable[..., Any], name: str = "h100.80gb:1", **options: Any) -> tuple[Any, nodes.Gpu]:
    made = await bench(name, **options)
    await made.mig_on()
    return made, await made.gpus.observe_gpu(made.uuids[0])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("h100.80gb:1", nodes.ModeState(True, True), id="Hopper switches at once"),
        pytest.param("a100.40gb:1", nodes.ModeState(False, True), id="Ampere waits for a reset"),
    ],
)
async def test_mig_mode_is_read_back(bench: Callable[..., Any], name: str, changes: nodes.ModeState) -> None:
    made = await bench(name)
    await made.gpus.perform(made.uuids[0], plans.SetMigMode(True))
    assert (await made.gpus.observe_gpu(made.uuids[0])).mode == changes


async def test_a_mode_change_that_answers_ok_and_does_nothing_is_an_error(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    made.node.start_process(0)
    with pytest.raises(errors.InUse, match=r"cannot turn MIG on on GPU GPU-.*another client is using it"):
        await made.gpus.perform(made.uuids[0], plans.SetMigMode(True))
    assert (await made.gpus.observe_gpu(made.uuids[0])).mode == nodes.ModeState(False, False)


async def test_steps_cost_at_most_ten_calls(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    uuid = gpu.uuid
    for start in range(6):
        await made.split(0, ("1g.10gb", start))
    place = nodes.Placement(6, 1)
    await made.gpus.observe()
    spent = {}
    for step in (create(gpu, "1g.10gb", 6), plans.CreateComputeInstance(place, profiles.parse("1g.10gb"))):
        before = made.counted()
        await made.gpus.perform(uuid, step)
        spent[step.kind] = sum((made.counted() - before).values())
    last = next(i for i in (await made.gpus.observe_gpu(uuid)).instances if i.placement == place)
    for removal in (remove_compute(last), remove(last)):
        before = made.counted()
        await made.gpus.perform(uuid, removal)
        spent[removal.kind] = sum((made.counted() - before).values())
    before = made.counted()
    other = await made.again()
    await other.observe()
    before = made.counted()
    await other.perform(uuid, create(gpu, "1g.10gb", 6))
    await other.perform(uuid, plans.CreateComputeInstance(place, profiles.parse("1g.10gb")))
    spent["by another process"] = sum((made.counted() - before).values()) // 2
    assert all(count <= 10 for count in spent.values()), spent


async def test_the_default_compute_instance_has_all_multiprocessors(bench: Callable[..., Any]) -> None:
    made, _ = await ready(bench)
    (instance,) = (await made.split(0, ("1g.20gb", 0))).instances
    (compute,) = instance.compute
    assert (str(compute.profile), compute.multiprocessors) == ("1g.20gb", 26)


async def test_the_smaller_compute_instance_is_made_when_it_is_asked_for(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    await made.gpus.perform(gpu.uuid, create(gpu, "1g.20gb", 0))
    await made.gpus.perform(gpu.uuid, plans.CreateComputeInstance(nodes.Placement(0, 2), profiles.parse("1c.1g.20gb")))
    (instance,) = (await made.gpus.observe_gpu(gpu.uuid)).instances
    assert [(str(c.profile), c.multiprocessors) for c in instance.compute] == [("1c.1g.20gb", 16)]


async def test_compute_instances_without_placement_function_are_left_to_the_driver(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench, missing_functions=("nvmlGpuInstanceCreateComputeInstanceWithPlacement",))
    place = nodes.Placement(0, 4)
    await made.gpus.perform(gpu.uuid, create(gpu, "3g.40gb", 0))
    await made.gpus.perform(gpu.uuid, plans.CreateComputeInstance(place, profiles.parse("1c.3g.40gb"), start=2))
    (instance,) = (await made.gpus.observe_gpu(gpu.uuid)).instances
    assert [str(c.profile) for c in instance.compute] == ["1c.3g.40gb"]


async def test_what_does_not_fit_is_refused_and_leaves_all_as_it_was(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    before = await made.split(0, ("3g.40gb", 0))
    with pytest.raises(errors.NoRoom, match=r"cannot create the GPU instance on GPU GPU-"):
        await made.gpus.perform(gpu.uuid, create(gpu, "2g.20gb", 2))
    assert await made.gpus.observe_gpu(gpu.uuid) == before


async def test_a_compute_instance_for_a_gpu_instance_that_is_not_there(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    with pytest.raises(errors.NotFound, match=r"cannot find GPU instance 1g.10gb at 3:1 on GPU"):
        await made.gpus.perform(gpu.uuid, plans.CreateComputeInstance(nodes.Placement(3, 1), profiles.parse("1g.10gb")))
    with pytest.raises(errors.CallError, match="no such profile"):
        await made.gpus.perform(gpu.uuid, plans.CreateComputeInstance(nodes.Placement(3, 1), profiles.parse("5g.60gb")))


async def test_an_instance_in_use_is_not_destroyed(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    (instance,) = (await made.split(0, ("3g.40gb", 0))).instances
    made.node.start_process(0, gpu_instance=instance.id)
    with pytest.raises(errors.InUse) as caught:
        await made.gpus.perform(gpu.uuid, remove_compute(instance))
    assert caught.value.exit_code == 4
    assert made.counted()["nvmlComputeInstanceDestroy"] == perform._BUSY_TRIES
    made.node.stop_process()
    await made.gpus.perform(gpu.uuid, remove_compute(instance))


async def test_a_destroy_that_is_busy_for_a_moment_goes_on(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    (instance,) = (await made.split(0, ("3g.40gb", 0))).instances
    made.node.fail("nvmlComputeInstanceDestroy", 19, times=2)
    await made.gpus.perform(gpu.uuid, remove_compute(instance))
    assert (await made.gpus.observe_gpu(gpu.uuid)).instances[0].compute == ()


@pytest.mark.parametrize("kind", ["compute", "instance"])
async def test_remains_after_a_destroy_that_answered_ok_are_an_error(bench: Callable[..., Any], kind: str) -> None:
    made, gpu = await ready(bench)
    (instance,) = (await made.split(0, ("3g.40gb", 0))).instances
    if kind == "instance":
        await made.gpus.perform(gpu.uuid, remove_compute(instance))
    name = "nvmlComputeInstanceDestroy" if kind == "compute" else "nvmlGpuInstanceDestroy"
    made.node.library.__dict__[name] = lambda *_: 0  # a driver that says yes and does nothing
    with pytest.raises(errors.CallError, match="the driver said yes and it is still there"):
        await made.gpus.perform(gpu.uuid, remove_compute(instance) if kind == "compute" else remove(instance))


async def test_an_instance_that_the_driver_made_elsewhere_is_an_error(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    library = made.node.library
    real = library.nvmlDeviceCreateGpuInstanceWithPlacement

    def elsewhere(device: Any, profile: Any, place: Any, into: Any) -> int:
        place._obj.start = 5
        return int(real(device, profile, place, into))

    library.__dict__["nvmlDeviceCreateGpuInstanceWithPlacement"] = elsewhere
    with pytest.raises(errors.CallError, match="the driver made it at 5:1"):
        await made.gpus.perform(gpu.uuid, create(gpu, "1g.10gb", 0))


async def test_the_next_compute_profile_is_tried_when_the_first_is_refused(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    await made.gpus.perform(gpu.uuid, create(gpu, "1g.20gb", 0))
    made.node.fail("nvmlGpuInstanceCreateComputeInstance", 3)
    await made.gpus.perform(gpu.uuid, plans.CreateComputeInstance(nodes.Placement(0, 2), profiles.parse("1g.20gb")))
    (instance,) = (await made.gpus.observe_gpu(gpu.uuid)).instances
    assert [(c.slices, c.multiprocessors) for c in instance.compute] == [(1, 16)]


async def test_a_reset_is_not_done_in_a_lane(bench: Callable[..., Any]) -> None:
    made, gpu = await ready(bench)
    with pytest.raises(errors.GpunodeError, match="reset"):
        await made.gpus.perform(gpu.uuid, plans.ResetGpu())


STEPS = {
    "nvmlDeviceSetMigMode": "mode",
    "nvmlDeviceGetMigMode": "mode",
    "nvmlDeviceCreateGpuInstanceWithPlacement": "gi",
    "nvmlGpuInstanceGetInfo": "gi",
    "nvmlGpuInstanceCreateComputeInstance": "ci",
    "nvmlComputeInstanceGetInfo_v2": "ci",
    "nvmlComputeInstanceDestroy": "remove-ci",
    "nvmlGpuInstanceGetComputeInstanceById": "remove-ci",
    "nvmlGpuInstanceDestroy": "remove-gi",
    "nvmlDeviceGetGpuInstanceById": "remove-gi",
}


@pytest.mark.parametrize("call", STEPS)
async def test_every_code_at_every_call_of_a_step_is_our_error_or_success(bench: Callable[..., Any], call: str) -> None:
    made, gpu = await ready(bench)
    uuid, place = gpu.uuid, nodes.Placement(0, 4)
    for code in (*range(1, 31), 999):
        await made.split(0, ("1g.10gb", 6), ("3g.40gb", 0))
        there = {i.placement: i for i in (await made.gpus.observe_gpu(uuid)).instances}
        if STEPS[call] in ("gi", "ci", "remove-gi"):
            await made.gpus.perform(uuid, remove_compute(there[place]))
        if STEPS[call] == "gi":
            await made.gpus.perform(uuid, remove(there[place]))
        steps: dict[str, plans.Step] = {
            "mode": plans.SetMigMode(True),
            "gi": create(gpu, "3g.40gb", 0),
            "ci": plans.CreateComputeInstance(place, profiles.parse("3g.40gb")),
            "remove-ci": remove_compute(there[place]),
            "remove-gi": remove(there[place]),
        }
        step = steps[STEPS[call]]
        order = made.node.fail(call, code)
        refusal = ""
        try:
            await made.gpus.perform(uuid, step)
        except errors.CallError as cause:
            refusal = str(cause)
        assert not refusal or refusal.startswith("cannot ")
        made.node.release(order)
        for one in (await made.gpus.observe_gpu(uuid)).instances:
            if one.compute:
                await made.gpus.perform(uuid, remove_compute(one))
            await made.gpus.perform(uuid, remove(one))


async def test_a_change_that_hangs_is_never_done_twice_and_goes_no_further(
    bench: Callable[..., Any], until: Callable[..., Any]
) -> None:
    made, gpu = await ready(bench, "h100.80gb:2", change_deadline=0.15)
    order = made.node.hang("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=0)
    returned: list[str] = []
    made.gpus.on_returned = returned.append
    with pytest.raises(errors.Hung):
        await made.gpus.perform(gpu.uuid, create(gpu, "3g.40gb", 0))
    await made.split(1, ("1g.10gb", 0))
    before = made.counted()
    made.node.release(order)
    await until(lambda: returned == [gpu.uuid])
    after = made.counted() - before
    assert after["nvmlGpuInstanceGetInfo"] == 0, "an abandoned step makes no further call"
    (late,) = (await made.gpus.observe_gpu(gpu.uuid)).instances
    assert str(late.profile) == "3g.40gb", "the late effect is seen when it is observed afresh"
    assert made.counted()["nvmlDeviceCreateGpuInstanceWithPlacement"] == 2
