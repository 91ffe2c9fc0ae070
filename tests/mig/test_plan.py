"""Plans: what stays, goes and comes, what is in the way, and what waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.mig import layout, node, plan
from tests.mig import parts

ON = node.ModeState(current=True, pending=True)
OFF = node.ModeState(current=False, pending=False)
GOING_ON = node.ModeState(current=False, pending=True)
GOING_OFF = node.ModeState(current=True, pending=False)
PYTHON = node.Holder("process", "python", pid=4711)
TRAIN = node.Holder("pod", "train", pod="train", namespace="ml")
ANYTHING = plan.Policy(reset=True, reboot=True)
NOTHING = plan.Policy(reset=False, reboot=False)


def compute(wanted: layout.Layout, one: node.Gpu, policy: plan.Policy = plan.Policy(), **fields: Any) -> plan.GpuPlan:
    return plan.compute(wanted, parts.node_of(one, **fields), policy).gpus[0]


def words(found: plan.GpuPlan) -> list[str]:
    """Return the steps in short: "+2g.10gb@0" create, "-" destroy, "(…)" compute instances."""
    short = []
    for step in found.steps:
        match step:
            case plan.SetMigMode():
                short.append("on" if step.enabled else "off")
            case plan.ResetGpu():
                short.append("reset")
            case plan.DestroyComputeInstance():
                short.append(f"-({step.profile} {step.id} of {step.gpu_instance_id})")
            case plan.DestroyGpuInstance():
                short.append(f"-{step.profile}@{step.placement.start}")
            case plan.CreateGpuInstance():
                short.append(f"+{step.profile}@{step.placement.start}")
            case plan.CreateComputeInstance():
                start = "" if step.start is None else f"@{step.start}"
                short.append(f"+({step.profile}{start})")
    return short


def explained(found: plan.GpuPlan) -> plan.GpuPlan:
    """Return the plan after checking what holds for every plan: all is explained, drift is told."""
    assert all(step.why for step in found.steps)
    assert all(kept.why for kept in found.kept)
    assert all(one.message for one in found.drift)
    assert {one.kind for one in found.drift} <= {"mode", "missing", "extra"}
    if found.steps or found.blocked is not None:
        assert found.drift
    if found.blocked is not None:
        assert found.blocked.message.startswith("cannot ")
        assert not found.steps
    return found


# ---- least change


@pytest.mark.parametrize(
    ("held", "wanted", "steps"),
    [
        pytest.param(
            [],
            ["2g.10gb"] * 3,
            ["+2g.10gb@0", "+(2g.10gb)", "+2g.10gb@2", "+(2g.10gb)", "+2g.10gb@4", "+(2g.10gb)"],
            id="an empty GPU gets its instances with their compute instances",
        ),
        pytest.param(["2g.10gb@0", "2g.10gb@4"], ["2g.10gb"] * 2, [], id="what is as wanted gets no step"),
        pytest.param(
            ["2g.10gb@0", "2g.10gb@2", "2g.10gb@4"],
            ["3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"],
            [
                "-(2g.10gb 0 of 0)",
                "-2g.10gb@0",
                "-(2g.10gb 0 of 2)",
                "-2g.10gb@4",
                "+3g.20gb@4",
                "+(3g.20gb)",
                "+1g.5gb@0",
                "+(1g.5gb)",
                "+1g.5gb@1",
                "+(1g.5gb)",
            ],
            id="one instance stays in the middle and the rest is built around it",
        ),
        pytest.param(
            ["1g.5gb@6"],
            ["1g.5gb", "3g.20gb", "2g.10gb"],
            ["+3g.20gb@0", "+(3g.20gb)", "+2g.10gb@4", "+(2g.10gb)"],
            id="placement bends around what is there",
        ),
        pytest.param(
            ["1g.5gb@4", "1g.5gb@5", "1g.5gb@6"],
            ["1g.5gb", "3g.20gb", "4g.20gb"],
            None,
            id="too much is refused",
        ),
        pytest.param(
            ["1g.5gb@0", "1g.5gb@6"],
            ["1g.5gb"],
            ["-(1g.5gb 0 of 0)", "-1g.5gb@0"],
            id="of duplicates the one stays that leaves the larger block",
        ),
        pytest.param(["2g.10gb@0/"], ["2g.10gb"], ["+(2g.10gb)"], id="an orphan GPU instance is adopted"),
        pytest.param(
            ["2g.10gb@0/", "2g.10gb@2"],
            ["2g.10gb"],
            ["-2g.10gb@0"],
            id="a whole instance is kept rather than an orphan",
        ),
        pytest.param(
            ["3g.20gb@4/1c+1c"],
            ["3g.20gb"],
            ["-(1c.3g.20gb 0 of 0)", "-(1c.3g.20gb 1 of 0)", "+(3g.20gb)"],
            id="a GPU instance with foreign compute instances stays and they are replaced",
        ),
        pytest.param(
            ["3g.20gb@4/2c+1c"],
            ["3g.20gb/1c+1c"],
            ["-(2c.3g.20gb 0 of 0)", "+(1c.3g.20gb@0)"],
            id="compute instances that match stay",
        ),
        pytest.param(
            ["3g.20gb@4/1c"],
            ["3g.20gb/1c+2c"],
            ["-(1c.3g.20gb 0 of 0)", "+(2c.3g.20gb@0)", "+(1c.3g.20gb@2)"],
            id="a 1c at 0 makes way for the 2c that fits nowhere else",
        ),
        pytest.param(
            ["2g.10gb@0"],
            ["2g.10gb@4"],
            ["-(2g.10gb 0 of 0)", "-2g.10gb@0", "+2g.10gb@4", "+(2g.10gb)"],
            id="an instance at the wrong place is moved",
        ),
        pytest.param(
            ["3g.20gb@0/2c+1c", "3g.20gb@4"],
            ["3g.20gb", "3g.20gb/1c+2c"],
            [],
            id="specs of one profile go to the instances that match their split",
        ),
        pytest.param(["7g.40gb@0"], ["7g.40gb/7c"], [], id="7c.7g.40gb is the default of 7g.40gb"),
        pytest.param(["3g.20gb@0"], [], ["-(3g.20gb 0 of 0)", "-3g.20gb@0"], id="MIG on and empty can be wanted"),
        pytest.param([], [], [], id="MIG on and empty can be there"),
    ],
)
def test_the_least_is_changed(held: list[str], wanted: list[str], steps: list[str] | None) -> None:
    one = parts.gpu("a100-40gb", *held)
    found = explained(compute(parts.wanted(*wanted), one))
    if steps is None:
        assert found.blocked is not None
        assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE
        return
    assert found.blocked is None
    assert words(found) == steps
    assert found.in_sync == (not steps)
    after = parts.walk(parts.node_of(one), found.steps)
    assert plan.compute(parts.wanted(*wanted), after, plan.Policy()).in_sync


def test_the_small_compute_instance_of_a_double_slice_is_replaced_by_the_whole_one() -> None:
    for told in (True, False):
        one = parts.gpu("h100-sxm-80gb", "1g.20gb@0/1c", told=told)
        assert parts.shape(one) == ["1g.20gb@0/1c"]
        found = explained(compute(parts.wanted("1g.20gb"), one))
        assert words(found) == ["-(1c.1g.20gb 0 of 0)", "+(1g.20gb)"]
        assert compute(parts.wanted("1g.20gb/1c"), one).in_sync


def test_kept_and_changed_instances_say_why() -> None:
    one = parts.hold(parts.gpu("a100-40gb", "2g.10gb@0", "2g.10gb@2", "2g.10gb@4"), 2, PYTHON)
    found = explained(compute(parts.wanted("3g.20gb", "2g.10gb/1c", "1g.5gb"), one))
    assert found.blocked is not None
    found = explained(compute(parts.wanted("3g.20gb", "2g.10gb", "1g.5gb"), one))
    assert [kept.why for kept in found.kept] == [
        "wanted, and there (test.toml, line 1); in use by process python (pid 4711)"
    ]
    reasons = {str(getattr(step, "placement", "")): step.why for step in found.steps}
    assert reasons["4:2"] == "its slices are needed for 3g.20gb at 4:4"
    split = explained(compute(parts.wanted("2g.10gb/1c"), parts.gpu("a100-40gb", "2g.10gb@0")))
    assert split.kept[0].why.endswith("its compute instances change")
    assert split.steps[0].why == "the GPU instance is wanted with 1c.2g.10gb"
    assert split.steps[1].why == "wanted in it (test.toml, line 1)"
    orphan = compute(parts.wanted("2g.10gb"), parts.gpu("a100-40gb", "2g.10gb@0/"))
    assert orphan.steps[0].why == "GPU instance 0 has none, so nothing can use it"
    gone = compute(layout.Layout((layout.GpuLayout(parts.UUID, mig=True),)), parts.gpu("a100-40gb", "2g.10gb@0"))
    assert [step.why for step in gone.steps] == ["its GPU instance goes", "not wanted"]


def test_drift_tells_every_difference() -> None:
    one = parts.gpu("a100-40gb", "3g.20gb@4/1c+1c", "1g.5gb@0", "2g.10gb@2")
    found = explained(compute(parts.wanted("3g.20gb/1c+2c", "1g.5gb@1"), one))
    assert [(drift.kind, drift.message) for drift in found.drift] == [
        ("missing", "1g.5gb at 1: 1 missing (1 wanted, 0 there)"),
        ("missing", "compute instance 2c.3g.20gb of GPU instance 0 (3g.20gb at 4:4) is missing"),
        ("missing", "compute instance 1c.3g.20gb of GPU instance 0 (3g.20gb at 4:4) is missing"),
        ("extra", "compute instance 0 (1c.3g.20gb) of GPU instance 0 (3g.20gb at 4:4) is not wanted"),
        ("extra", "compute instance 1 (1c.3g.20gb) of GPU instance 0 (3g.20gb at 4:4) is not wanted"),
        ("extra", "GPU instance 1 (1g.5gb at 0:1) does not lie where it is wanted"),
        ("extra", "GPU instance 2 (2g.10gb at 2:2) is not wanted"),
    ]


def test_an_instance_of_a_profile_nobody_offers_is_removed() -> None:
    one = parts.gpu("a100-40gb", "2g.10gb@0", "1g.5gb@6")
    strange = dataclasses.replace(one.instances[0], profile=parts.spec("2g.99gb").profile)
    one = dataclasses.replace(one, instances=(strange, one.instances[1]))
    found = explained(compute(parts.wanted("1g.5gb", "2g.10gb"), one))
    assert "-2g.99gb@0" in words(found)
    busy = explained(compute(parts.wanted("1g.5gb", "2g.10gb"), parts.hold(one, 0, PYTHON)))
    assert busy.blocked is not None
    assert busy.blocked.kind is plan.BlockedKind.IN_USE


# ---- in use


def test_what_is_in_use_and_wanted_stays_and_the_rest_moves_around_it() -> None:
    one = parts.hold(parts.gpu("a100-40gb", "1g.5gb@2", "2g.10gb@4"), 2, PYTHON)
    found = explained(compute(parts.wanted("1g.5gb", "3g.20gb"), one))
    assert words(found) == ["-(2g.10gb 0 of 1)", "-2g.10gb@4", "+3g.20gb@4", "+(3g.20gb)"]


def test_an_instance_in_use_that_is_not_wanted_blocks_the_gpu_and_names_who() -> None:
    one = parts.hold(parts.gpu("a100-40gb", "1g.5gb@2", "2g.10gb@4"), 2, PYTHON, compute=0)
    found = explained(compute(parts.wanted("3g.20gb"), one))
    assert found.blocked == plan.Blocked(
        plan.BlockedKind.IN_USE,
        "cannot bring GPU 0 to its layout: GPU instance 0 (1g.5gb at 2:1) would have to go and is in use by "
        "process python (pid 4711)",
        (PYTHON,),
    )
    assert ("extra", "GPU instance 0 (1g.5gb at 2:1) is not wanted") in [(d.kind, d.message) for d in found.drift]


def test_a_wanted_instance_in_use_can_lie_in_the_way() -> None:
    one = parts.hold(parts.gpu("a100-40gb", "1g.5gb@2"), 2, PYTHON)
    found = explained(compute(parts.wanted("1g.5gb", "4g.20gb"), one))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE
    assert found.blocked.holders == (PYTHON,)
    assert "cannot place 4g.20gb and 1g.5gb on GPU 0: GPU instance 0 (1g.5gb at 2:1) lies in the way" in (
        found.blocked.message
    )
    assert "|1g.5gb|" in found.blocked.message


def test_several_in_the_way_are_all_named() -> None:
    one = parts.gpu("a100-40gb", "1g.5gb@0", "1g.5gb@4")
    one = parts.hold(parts.hold(one, 0, PYTHON), 4, TRAIN)
    found = explained(compute(parts.wanted("7g.40gb"), one))
    assert found.blocked is not None
    assert "GPU instance 0 (1g.5gb at 0:1) and GPU instance 1 (1g.5gb at 4:1) would have to go and are in use" in (
        found.blocked.message
    )
    assert found.blocked.holders == (PYTHON, TRAIN)
    way = parts.hold(parts.hold(parts.gpu("a100-40gb", "1g.5gb@0", "1g.5gb@4"), 0, PYTHON), 4, TRAIN)
    found = explained(compute(parts.wanted("1g.5gb", "1g.5gb", "4g.20gb"), way))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE
    assert "GPU instance 0 (1g.5gb at 0:1)" in found.blocked.message
    assert "GPU instance 1" not in found.blocked.message


def test_a_compute_instance_in_use_keeps_its_place_in_the_split() -> None:
    one = parts.gpu("a100-40gb", "3g.20gb@0/1c+1c")
    held = parts.hold(one, 0, PYTHON, compute=1)
    found = explained(compute(parts.wanted("3g.20gb/1c"), held))
    assert words(found) == ["-(1c.3g.20gb 0 of 0)"]
    found = explained(compute(parts.wanted("3g.20gb"), held))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.IN_USE
    # A 2c fits only at 0, and somebody sits at 1.
    found = explained(compute(parts.wanted("3g.20gb/1c+2c"), held))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.IN_USE


def test_two_specs_of_one_profile_leave_a_busy_split_alone() -> None:
    one = parts.hold(parts.gpu("a100-40gb", "3g.20gb@0/2c+1c", "3g.20gb@4"), 0, PYTHON, compute=0)
    found = explained(compute(parts.wanted("3g.20gb@4/1c+2c", "3g.20gb"), one))
    assert found.blocked is not None
    found = explained(compute(parts.wanted("3g.20gb/1c+2c", "3g.20gb"), one))
    assert found.in_sync


def test_whether_all_in_use_are_wanted_does_not_hang_on_the_order_they_are_asked_in() -> None:
    one = parts.gpu("a100-40gb", "2g.10gb@0/1c", "2g.10gb@4/1c+1c")
    one = parts.hold(parts.hold(one, 0, PYTHON), 4, PYTHON)
    found = explained(compute(parts.wanted("2g.10gb/1c+1c", "2g.10gb/1c", "3g.20gb"), one))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE


@pytest.mark.parametrize(
    ("kind", "forced", "free"),
    [
        ("process", False, False),
        ("process", True, False),
        ("open-file", False, False),
        ("open-file", True, False),
        ("pod", False, False),
        ("pod", True, True),
        ("task", False, False),
        ("task", True, True),
        ("service", False, True),
    ],
)
def test_force_lifts_allocations_and_nothing_else(kind: str, forced: bool, free: bool) -> None:
    one = parts.hold(parts.gpu("a100-40gb", "1g.5gb@2"), 2, node.Holder(kind, "somebody"))
    policy = plan.Policy(force=forced)
    found = explained(compute(parts.wanted("2g.10gb"), one, policy))
    assert (found.blocked is None) == free
    off = explained(compute(parts.wanted(mig=False), one, policy))
    assert (off.blocked is None) == free


@pytest.mark.parametrize(
    ("kind", "free"), [("process", False), ("pod", False), ("open-file", False), ("service", True)]
)
def test_who_uses_the_whole_gpu_may_use_any_instance(kind: str, free: bool) -> None:
    one = parts.gpu("a100-40gb", "1g.5gb@2", holders=(node.Holder(kind, "somebody"),))
    found = explained(compute(parts.wanted("2g.10gb"), one))
    assert (found.blocked is None) == free
    if not free:
        assert found.blocked is not None
        assert found.blocked.holders == one.holders


def test_allocations_that_cannot_be_read_count_as_use_on_a_serving_node() -> None:
    one = parts.gpu("a100-40gb", "1g.5gb@2")
    blind: dict[str, Any] = {"serving": "kubelet", "allocations_known": False}
    found = explained(compute(parts.wanted("2g.10gb"), one, **blind))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.IN_USE
    assert "kubelet is active and what it has allocated cannot be read" in found.blocked.message
    off = explained(compute(parts.wanted(mig=False), one, **blind))
    assert off.blocked is not None
    assert "cannot be read" in off.blocked.message
    assert compute(parts.wanted("2g.10gb"), one, plan.Policy(force=True), **blind).blocked is None
    # Nothing has to go: nothing is asked.
    grown = explained(compute(parts.wanted("1g.5gb", "3g.20gb"), one, **blind))
    assert words(grown) == ["+3g.20gb@4", "+(3g.20gb)"]
    assert compute(parts.wanted("2g.10gb"), one, serving="kubelet").blocked is None


# ---- the mode


def mode(state: node.ModeState, *, resetless: bool | None = False, architecture: str = "Ampere") -> node.Gpu:
    held = ["1g.5gb@0"] if state.current else []
    return parts.gpu("a100-40gb", *held, mode=state, resetless=resetless, architecture=architecture)


CREATES = ["+2g.10gb@4", "+(2g.10gb)"]
GOES = ["-(1g.5gb 0 of 0)", "-1g.5gb@0"]


@pytest.mark.parametrize(
    ("state", "policy", "steps", "needs", "partial"),
    [
        pytest.param(OFF, plan.Policy(), ["on", "reset", *CREATES], "reset", False, id="off, reset allowed"),
        pytest.param(OFF, ANYTHING, ["on", "reset", *CREATES], "reset", False, id="a reset is preferred to a reboot"),
        pytest.param(OFF, plan.Policy(reset=False, reboot=True), ["on"], "reboot", True, id="off, reboot allowed"),
        pytest.param(OFF, NOTHING, ["on"], None, True, id="off, neither allowed"),
        pytest.param(GOING_ON, plan.Policy(), ["reset", *CREATES], "reset", False, id="the change waits already"),
        pytest.param(GOING_ON, plan.Policy(reset=False, reboot=True), [], "reboot", True, id="it waits for a reboot"),
        pytest.param(ON, NOTHING, [*GOES, *CREATES], None, False, id="on"),
        pytest.param(GOING_OFF, NOTHING, ["on", *GOES, *CREATES], None, False, id="on, and would go off"),
    ],
)
def test_turning_mig_on(
    state: node.ModeState, policy: plan.Policy, steps: list[str], needs: str | None, partial: bool
) -> None:
    found = explained(compute(parts.wanted("2g.10gb"), mode(state), policy))
    assert found.blocked is None
    assert (words(found), found.needs, found.partial) == (steps, needs, partial)


@pytest.mark.parametrize(
    ("state", "policy", "steps", "needs", "partial"),
    [
        pytest.param(OFF, NOTHING, [], None, False, id="off"),
        pytest.param(GOING_ON, NOTHING, ["off"], None, False, id="off, and would come on"),
        pytest.param(ON, plan.Policy(), [*GOES, "off", "reset"], "reset", False, id="on, reset allowed"),
        pytest.param(
            ON, plan.Policy(reset=False, reboot=True), [*GOES, "off"], "reboot", True, id="on, reboot allowed"
        ),
        pytest.param(ON, NOTHING, [*GOES, "off"], None, True, id="on, neither allowed"),
        pytest.param(GOING_OFF, plan.Policy(), [*GOES, "reset"], "reset", False, id="the change waits already"),
        pytest.param(GOING_OFF, plan.Policy(reset=False, reboot=True), [], "reboot", False, id="it waits for a reboot"),
    ],
)
def test_turning_mig_off(
    state: node.ModeState, policy: plan.Policy, steps: list[str], needs: str | None, partial: bool
) -> None:
    found = explained(compute(parts.wanted(mig=False), mode(state), policy))
    assert found.blocked is None
    assert (words(found), found.needs, found.partial) == (steps, needs, partial)
    assert found.in_sync == (state == OFF)


@pytest.mark.parametrize("wanted", [parts.wanted("2g.10gb"), parts.wanted(mig=False)], ids=["on", "off"])
def test_a_change_that_waits_for_what_is_not_allowed_blocks(wanted: layout.Layout) -> None:
    state = GOING_ON if wanted.gpus[0].mig else GOING_OFF
    found = explained(compute(wanted, mode(state), NOTHING))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.MODE_PENDING
    assert "waits for a GPU reset or a reboot, and neither is allowed now" in found.blocked.message


@pytest.mark.parametrize(
    ("resetless", "architecture", "free"),
    [
        (True, "Ampere", True),
        (False, "Hopper", False),
        (None, "Ampere", False),
        (None, "ampere", False),
        (None, "Hopper", True),
        (None, "Blackwell", True),
        (None, "Rubin", True),
        (None, "", False),
    ],
)
def test_whether_a_reset_is_needed_is_asked_of_the_driver_and_else_of_the_architecture(
    resetless: bool | None, architecture: str, free: bool
) -> None:
    found = explained(compute(parts.wanted("2g.10gb"), mode(OFF, resetless=resetless, architecture=architecture)))
    assert words(found) == (["on", *CREATES] if free else ["on", "reset", *CREATES])
    assert found.needs == (None if free else "reset")


@pytest.mark.parametrize("state", [GOING_ON, GOING_OFF], ids=["on", "off"])
def test_a_resetless_change_that_hangs_is_asked_for_again(state: node.ModeState) -> None:
    wanted = parts.wanted("2g.10gb") if state is GOING_ON else parts.wanted(mig=False)
    found = explained(compute(wanted, mode(state, resetless=True), NOTHING))
    assert words(found) == (["on", *CREATES] if state is GOING_ON else [*GOES, "off"])


@pytest.mark.parametrize(
    ("state", "wanted"),
    [(OFF, ["2g.10gb"]), (GOING_ON, ["2g.10gb"]), (ON, None), (GOING_OFF, None)],
    ids=["on", "on, waiting", "off", "off, waiting"],
)
@pytest.mark.parametrize("resetless", [True, False], ids=["resetless", "with reset"])
def test_the_mode_of_a_gpu_in_use_is_not_changed(
    state: node.ModeState, wanted: list[str] | None, resetless: bool
) -> None:
    one = dataclasses.replace(mode(state, resetless=resetless), holders=(PYTHON,))
    found = explained(compute(parts.wanted(*(wanted or []), mig=wanted is not None), one, ANYTHING))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.IN_USE
    assert found.blocked.holders == (PYTHON,)
    assert f"cannot turn MIG {'off' if wanted is None else 'on'} on GPU 0" in found.blocked.message


def test_a_mode_that_is_only_set_back_disturbs_nobody() -> None:
    one = dataclasses.replace(mode(GOING_OFF), holders=(PYTHON,))
    assert words(explained(compute(parts.wanted("1g.5gb"), one))) == ["on"]
    two = dataclasses.replace(mode(GOING_ON), holders=(PYTHON,))
    assert words(explained(compute(parts.wanted(mig=False), two))) == ["off"]


def test_without_profiles_only_the_mode_can_be_planned() -> None:
    one = dataclasses.replace(mode(OFF), offers=())
    found = explained(compute(parts.wanted("2g.10gb"), one))
    assert (words(found), found.needs, found.partial) == (["on", "reset"], "reset", True)
    bare = explained(compute(parts.wanted(), one))
    assert (words(bare), bare.partial) == (["on", "reset"], False)


def test_a_gpu_with_mig_on_whose_driver_tells_no_profiles_is_blocked() -> None:
    one = dataclasses.replace(mode(ON), offers=())
    found = explained(compute(parts.wanted("2g.10gb"), one))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNKNOWN_GEOMETRY
    assert words(explained(compute(parts.wanted(), one))) == GOES


# ---- what forbids a plan


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (node.GpuState.LOST, plan.BlockedKind.LOST),
        (node.GpuState.HUNG, plan.BlockedKind.HUNG),
        (node.GpuState.ERROR, plan.BlockedKind.ERROR),
    ],
)
@pytest.mark.parametrize("problem", [None, "XID 79"])
def test_a_gpu_that_does_not_answer_is_left_alone(
    state: node.GpuState, kind: plan.BlockedKind, problem: str | None
) -> None:
    one = parts.gpu("a100-40gb", state=state, problem=problem)
    found = explained(compute(parts.wanted("2g.10gb"), one))
    assert found.blocked is not None
    assert found.blocked.kind is kind
    assert found.blocked.message == f"cannot work on GPU 0: it is {state.value}" + (f": {problem}" if problem else "")


def test_a_gpu_without_mig_is_refused_with_its_family_and_the_alternative() -> None:
    one = parts.gpu("a100-40gb", mode=None, name="NVIDIA L4", offers=())
    found = explained(compute(parts.wanted("2g.10gb"), one, instance_type="g6.12xlarge"))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.NOT_CAPABLE
    for word in ("GPU 0", "NVIDIA L4", "g6.12xlarge", "g6 family", "MIG", "time-slicing"):
        assert word in found.blocked.message
    anywhere = explained(compute(parts.wanted("2g.10gb"), one))
    assert anywhere.blocked is not None
    assert "it cannot do MIG" in anywhere.blocked.message
    assert compute(parts.wanted(mig=False), one).in_sync


@pytest.mark.parametrize("state", [ON, OFF], ids=["on", "off"])
def test_a_part_whose_geometry_nobody_tells_is_refused_with_the_reason(state: node.ModeState) -> None:
    one = parts.gpu("a100-40gb", mode=state, offers=(), geometry_unknown="its profiles are not published")
    found = explained(compute(parts.wanted("2g.10gb"), one))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNKNOWN_GEOMETRY
    assert "its profiles are not published" in found.blocked.message
    assert compute(parts.wanted(mig=False), dataclasses.replace(one, mode=OFF)).in_sync


@pytest.mark.parametrize("wanted", [["3g.20gb", "3g.20gb", "1g.5gb"], ["9g.99gb"]])
@pytest.mark.parametrize("state", [ON, OFF], ids=["on", "off"])
def test_what_no_such_gpu_can_hold_is_refused_before_anything_is_touched(
    wanted: list[str], state: node.ModeState
) -> None:
    found = explained(compute(parts.wanted(*wanted), mode(state)))
    assert found.blocked is not None
    assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE


# ---- the node


def test_gpus_that_nobody_declared_are_not_managed() -> None:
    second = parts.gpu("a100-40gb", "1g.5gb@0", index=1, uuid="GPU-1")
    found = plan.compute(parts.wanted("1g.5gb@0"), parts.node_of(parts.gpu("a100-40gb", "1g.5gb@0"), second), ANYTHING)
    assert [gpu.managed for gpu in found.gpus] == [True, False]
    assert found.in_sync
    assert found.steps == 0
    assert found.blocked == ()
    assert found.gpu("GPU-1") is found.gpus[1]
    assert found.gpu("GPU-2") is None


def test_unlisted_gpus_lose_mig_only_where_a_layout_is_declared_and_they_have_it() -> None:
    gpus = (
        parts.gpu("a100-40gb", "1g.5gb@0"),
        parts.gpu("a100-40gb", "1g.5gb@0", index=1, uuid="GPU-1"),
        parts.gpu("a100-40gb", mode=None, index=2, uuid="GPU-2"),
        parts.gpu("a100-40gb", state=node.GpuState.LOST, index=3, uuid="GPU-3"),
    )
    policy = plan.Policy(disable_unlisted=True)
    found = plan.compute(parts.wanted("1g.5gb@0"), parts.node_of(*gpus), policy)
    assert [gpu.managed for gpu in found.gpus] == [True, True, False, False]
    assert words(found.gpus[1]) == [*GOES, "off", "reset"]
    assert 'unlisted-gpus = "disable"' in found.gpus[1].steps[-2].why
    assert found.steps == 4
    assert not found.in_sync
    nothing = plan.compute(layout.Layout(), parts.node_of(*gpus), policy)
    assert not any(gpu.managed for gpu in nothing.gpus)


def test_the_gpus_that_may_not_change_are_listed() -> None:
    one = parts.gpu("a100-40gb", state=node.GpuState.LOST)
    found = plan.compute(parts.wanted("1g.5gb"), parts.node_of(one), ANYTHING)
    assert found.blocked == found.gpus
    assert not found.in_sync
