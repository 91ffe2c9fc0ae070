"""A step is carried out on a state, and refused where a device would refuse it."""

from __future__ import annotations

import dataclasses

import pytest

from agent.mig import advance, node, plan, profile
from tests.mig import parts

P = profile.parse
ID = node.ProfileId


def create(name: str, start: int, size: int, number: int) -> plan.CreateGpuInstance:
    return plan.CreateGpuInstance(P(name), ID(number), node.Placement(start, size))


def after(one: node.Gpu, *steps: plan.Step) -> node.Gpu:
    return parts.walk(parts.node_of(one), steps).gpus[0]


def test_instances_get_the_lowest_free_ids_and_no_uuid() -> None:
    one = parts.gpu("a100-40gb", "1g.5gb@0", "1g.5gb@1", "1g.5gb@2")
    one = after(one, plan.DestroyComputeInstance(1, 0, P("1g.5gb"), node.Placement(1, 1)))
    one = after(one, plan.DestroyGpuInstance(1, P("1g.5gb"), node.Placement(1, 1)), create("2g.10gb", 4, 2, 14))
    assert [(i.id, str(i.profile)) for i in one.instances] == [(0, "1g.5gb"), (2, "1g.5gb"), (1, "2g.10gb")]
    one = after(one, plan.CreateComputeInstance(node.Placement(4, 2), P("1c.2g.10gb"), start=1))
    one = after(one, plan.CreateComputeInstance(node.Placement(4, 2), P("1c.2g.10gb")))
    made = one.instances[-1].compute
    assert [(c.id, c.placement, c.multiprocessors, c.uuid) for c in made] == [
        (0, node.Placement(1, 1), 14, None),
        (1, node.Placement(0, 1), 14, None),
    ]
    assert one.instances[-1].memory_bytes == 9984 * 2**20


def test_other_gpus_stay_as_they_are() -> None:
    other = parts.gpu("a100-40gb", uuid="GPU-1")
    state = advance.advance(parts.node_of(other, parts.gpu()), parts.UUID, create("7g.40gb", 0, 8, 0))
    assert state.gpus[0] is other
    assert len(state.gpus[1].instances) == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "by rule"])
@pytest.mark.parametrize(
    ("model", "gi", "part", "sms", "number"),
    [
        ("h100-sxm-80gb", "3g.40gb", "3g.40gb", 60, 2),
        ("h100-sxm-80gb", "3g.40gb", "2c.3g.40gb", 32, 1),
        ("h100-sxm-80gb", "1g.20gb", "1c.1g.20gb", 16, 0),
    ],
)
def test_a_compute_instance_has_the_sms_of_its_kind(
    model: str, gi: str, part: str, sms: int, number: int, told: bool
) -> None:
    one = parts.gpu(model, f"{gi}@0/", told=told)
    made = after(one, plan.CreateComputeInstance(one.instances[0].placement, P(part))).instances[0].compute[0]
    assert (made.multiprocessors, made.profile_id, str(made.profile)) == (sms, number, part)


def test_the_whole_compute_instance_of_a_double_slice_has_an_id_of_its_own() -> None:
    made = parts.gpu("h100-sxm-80gb", "1g.20gb@0").instances[0].compute[0]
    assert (made.multiprocessors, made.profile_id) == (26, 7)


def test_a_mode_waits_for_a_reset_where_the_part_needs_one() -> None:
    off = parts.gpu("a100-40gb", mode=node.ModeState(current=False, pending=False))
    asked = after(off, plan.SetMigMode(True))
    assert asked.mode == node.ModeState(current=False, pending=True)
    assert after(asked, plan.ResetGpu()).mode == node.ModeState(current=True, pending=True)
    assert after(asked, plan.SetMigMode(False)) == off
    assert after(off, plan.ResetGpu()) == off
    hopper = parts.gpu("h100-sxm-80gb", mode=node.ModeState(current=False, pending=False))
    assert after(hopper, plan.SetMigMode(True)).mode == node.ModeState(current=True, pending=True)


def test_a_reset_takes_the_instances_along() -> None:
    going = parts.gpu("a100-40gb", "1g.5gb@0", mode=node.ModeState(current=True, pending=False))
    assert after(going, plan.ResetGpu()).instances == ()


HELD = parts.gpu("a100-40gb", "3g.20gb@4", "1g.5gb+me@0")


@pytest.mark.parametrize(
    ("one", "step", "says"),
    [
        pytest.param(HELD, plan.SetMigMode(False), "still has GPU instances", id="MIG off with instances"),
        pytest.param(
            HELD,
            plan.DestroyGpuInstance(0, P("3g.20gb"), node.Placement(4, 4)),
            "still has compute instances",
            id="a GPU instance that has compute instances",
        ),
        pytest.param(
            HELD, plan.DestroyGpuInstance(9, P("3g.20gb"), node.Placement(4, 4)), "no GPU instance 9", id="unknown id"
        ),
        pytest.param(
            HELD,
            plan.DestroyComputeInstance(0, 7, P("3g.20gb"), node.Placement(4, 4)),
            "no compute instance 7",
            id="unknown compute instance",
        ),
        pytest.param(HELD, create("2g.10gb", 4, 2, 14), "overlaps GPU instance 0", id="taken slices"),
        pytest.param(HELD, create("2g.10gb", 1, 2, 14), "no place 1:2", id="a place that the profile has not"),
        pytest.param(HELD, create("2g.20gb", 0, 2, 14), "does not offer 2g.20gb", id="a profile of another GPU"),
        pytest.param(HELD, create("2g.10gb", 2, 2, 9), "does not offer 2g.10gb as profile 9", id="a wrong id"),
        pytest.param(HELD, create("1g.5gb+me", 1, 1, 20), "media engines ran out", id="no OFA left"),
        pytest.param(
            parts.gpu("a100-40gb", mode=node.ModeState(current=False, pending=True)),
            create("2g.10gb", 2, 2, 14),
            "MIG is off",
            id="MIG off",
        ),
        pytest.param(parts.gpu("a100-40gb", mode=None), plan.SetMigMode(True), "has no MIG", id="no MIG at all"),
        pytest.param(
            HELD,
            plan.CreateComputeInstance(node.Placement(4, 4), P("1c.3g.20gb")),
            "no room for 1c.3g.20gb",
            id="no compute slice left",
        ),
        pytest.param(
            HELD,
            plan.CreateComputeInstance(node.Placement(4, 4), P("2c.3g.20gb"), start=1),
            "no room for 2c.3g.20gb at 1",
            id="a compute slice where it may not start",
        ),
        pytest.param(
            HELD,
            plan.CreateComputeInstance(node.Placement(4, 4), P("1c.2g.10gb")),
            "does not offer 1c.2g.10gb",
            id="a part of another profile",
        ),
        pytest.param(
            HELD,
            plan.CreateComputeInstance(node.Placement(2, 2), P("2g.10gb")),
            "no GPU instance at 2:2",
            id="no GPU instance there",
        ),
    ],
)
def test_what_a_device_refuses_is_refused(one: node.Gpu, step: plan.Step, says: str) -> None:
    with pytest.raises(advance.IllegalStep, match=says):
        after(one, step)


def test_a_gpu_that_is_not_there_takes_no_step() -> None:
    with pytest.raises(advance.IllegalStep, match="no GPU GPU-x"):
        advance.advance(parts.node_of(parts.gpu()), "GPU-x", plan.ResetGpu())


def test_an_instance_of_unknown_place_is_no_obstacle_to_reason_about() -> None:
    one = parts.gpu("a100-40gb", "2g.10gb@0/1c")
    blind = dataclasses.replace(one.instances[0].compute[0], placement=None)
    one = dataclasses.replace(one, instances=(dataclasses.replace(one.instances[0], compute=(blind,)),))
    assert len(after(one, plan.CreateComputeInstance(node.Placement(0, 2), P("1c.2g.10gb"))).instances[0].compute) == 2
