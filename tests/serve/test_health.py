"""The verdict, case by case: what stops a node from being ready, what only degrades it, and why."""

from __future__ import annotations

import dataclasses

import pytest

from agent import measures
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.reconcile import snapshot as snapshots
from agent.serve import health
from tests.serve import built

Phase = snapshots.Phase


def judge(
    snapshot: snapshots.Snapshot | None, sample: measures.Sample | None = None, *, turned: float = built.NOW - 1
) -> health.Health:
    return health.judge(snapshot, sample, now=built.NOW, loop_turned=turned)


def with_gpu(index: int, **more: object) -> nodes.NodeState:
    node = built.snapshot().node
    assert node is not None
    gpus = tuple(dataclasses.replace(gpu, **more) if gpu.index == index else gpu for gpu in node.gpus)  # type: ignore[arg-type]
    return dataclasses.replace(node, gpus=gpus)


def test_a_node_as_wanted_is_healthy_and_gives_no_reason() -> None:
    verdict = judge(built.snapshot(), built.sample())
    assert verdict == health.Health(live=True, ready=True, degraded=False)
    assert verdict.healthy


@pytest.mark.parametrize("age", [0.0, 9.9, 10.0])
def test_live_while_the_loop_turned_within_ten_seconds(age: float) -> None:
    assert judge(built.snapshot(), built.sample(), turned=built.NOW - age).live


def test_not_live_means_not_ready() -> None:
    verdict = judge(built.snapshot(), built.sample(), turned=built.NOW - 10.1)
    assert (verdict.live, verdict.ready, verdict.codes) == (False, False, ("loop-stuck",))


@pytest.mark.parametrize("snapshot", [None, snapshots.Snapshot(phase=Phase.STARTING)], ids=["nothing yet", "starting"])
def test_before_the_first_cycle_has_ended_it_is_live_and_not_ready(snapshot: snapshots.Snapshot | None) -> None:
    verdict = judge(snapshot)
    assert (verdict.live, verdict.ready, verdict.degraded, verdict.codes) == (True, False, False, ("starting",))


def test_without_a_driver_it_is_live_and_not_ready_also_when_nothing_is_declared() -> None:
    lacking = snapshots.Snapshot(
        phase=Phase.WAITING, cycle=1, driver_problem="no driver", reasons=(snapshots.Reason("driver", "no driver"),)
    )
    verdict = judge(lacking, built.sample(nvml_up=False, gpus=()))
    assert (verdict.live, verdict.ready, verdict.degraded) == (True, False, False)
    assert verdict.reasons == (health.Reason("driver", "no driver"),)


def test_nothing_declared_on_a_node_with_a_driver_is_ready() -> None:
    free = built.snapshot(
        layout=layouts.Layout(),
        plan=built.plan_of(plans.GpuPlan(built.uuid(0), 0, managed=False)),
        settings=snapshots.SettingsView(),
    )
    assert judge(free, built.sample()).healthy


def test_invalid_settings_are_not_ready_although_the_last_good_ones_are_in_force() -> None:
    verdict = judge(built.bad_settings(), built.sample())
    assert (verdict.ready, verdict.degraded) == (False, False)
    assert [(r.code, r.message) for r in verdict.reasons] == [
        ("settings-invalid", "config.toml, line 3, key gpunode.layot: unknown key")
    ]


def test_invalid_settings_are_told_even_when_the_cycle_gave_no_reason() -> None:
    verdict = judge(dataclasses.replace(built.bad_settings(), reasons=()), built.sample())
    assert (verdict.ready, verdict.codes) == (False, ("settings-invalid",))


def test_a_needed_gpu_that_is_not_as_wanted_is_not_ready() -> None:
    state = built.snapshot(phase=Phase.DRIFTED, plan=built.plan_of(built.drifted(0), plans.GpuPlan(built.uuid(1), 1)))
    verdict = judge(state, built.sample())
    assert not verdict.ready
    assert verdict.reasons == (health.Reason("drift", "GPU 0: 1g.10gb at 0:1 is missing", built.uuid(0)),)


def test_a_gpu_that_no_layout_needs_only_degrades_when_it_is_not_as_it_should_be() -> None:
    state = built.snapshot(
        layout=built.layout_of(0), plan=built.plan_of(plans.GpuPlan(built.uuid(0), 0), built.drifted(1))
    )
    verdict = judge(state, built.sample())
    assert (verdict.ready, verdict.degraded, verdict.codes) == (True, True, ("drift",))


@pytest.mark.parametrize("kind", list(plans.BlockedKind))
def test_a_needed_gpu_that_is_blocked_is_not_ready_and_the_code_says_why(kind: plans.BlockedKind) -> None:
    state = built.snapshot(
        phase=Phase.BLOCKED, plan=built.plan_of(built.blocked(0, kind), plans.GpuPlan(built.uuid(1), 1))
    )
    verdict = judge(state, built.sample())
    assert (verdict.ready, verdict.codes) == (False, (kind.value,))


def test_every_code_of_a_blocked_gpu_is_documented() -> None:
    assert {kind.value for kind in plans.BlockedKind} <= health.CODES.keys()


def test_a_layout_that_could_not_be_tied_to_a_card_is_not_ready() -> None:
    unresolved = plans.GpuPlan(
        built.uuid(1), 1, blocked=plans.Blocked(plans.BlockedKind.LOST, "index 1 is not known"), managed=False
    )
    state = built.snapshot(
        phase=Phase.BLOCKED, layout=built.layout_of(0), plan=built.plan_of(plans.GpuPlan(built.uuid(0), 0), unresolved)
    )
    assert not judge(state, built.sample()).ready


@pytest.mark.parametrize("state", [nodes.GpuState.LOST, nodes.GpuState.HUNG, nodes.GpuState.ERROR])
@pytest.mark.parametrize("needed", [True, False], ids=["needed", "not needed"])
def test_a_gpu_that_does_not_answer(state: nodes.GpuState, *, needed: bool) -> None:
    snapshot = built.snapshot(
        node=with_gpu(1, state=state, problem="it fell silent"),
        layout=built.layout_of(0, 1) if needed else built.layout_of(0),
        plan=built.plan_of(plans.GpuPlan(built.uuid(0), 0), plans.GpuPlan(built.uuid(1), 1, managed=needed)),
    )
    verdict = judge(snapshot, built.sample(built.gpu_sample(0), built.silent(1)))
    assert verdict.live
    assert verdict.ready is not needed
    assert verdict.reasons == (health.Reason(state.value, f"GPU 1 is {state.value}: it fell silent", built.uuid(1)),)


def test_a_lost_gpu_that_is_blocked_for_it_is_told_once() -> None:
    snapshot = built.snapshot(
        node=with_gpu(0, state=nodes.GpuState.LOST),
        plan=built.plan_of(built.blocked(0, plans.BlockedKind.LOST), plans.GpuPlan(built.uuid(1), 1)),
        reasons=(snapshots.Reason("lost", "GPU 0 may not change", built.uuid(0)),),
    )
    verdict = judge(snapshot, built.sample())
    assert (verdict.ready, [r.code for r in verdict.reasons]) == (False, ["lost"])


def test_a_needed_gpu_that_left_the_bus_is_not_ready() -> None:
    node = built.snapshot().node
    assert node is not None
    snapshot = built.snapshot(
        node=dataclasses.replace(node, gpus=node.gpus[:1]), plan=built.plan_of(plans.GpuPlan(built.uuid(0), 0))
    )
    verdict = judge(snapshot, built.sample(built.gpu_sample(0)))
    assert (verdict.ready, verdict.codes) == (False, ("lost", "gpu-missing"))


def test_fewer_gpus_than_the_machine_has_degrade_it() -> None:
    verdict = judge(built.snapshot(gpus_expected=8), built.sample())
    assert (verdict.ready, verdict.degraded) == (True, True)
    assert verdict.reasons == (health.Reason("gpu-missing", "6 of the 8 GPUs of this machine are not there"),)


def test_a_step_that_failed_and_left_the_node_apart_is_not_ready() -> None:
    reason = snapshots.Reason("step-failed", "cannot create", built.uuid(0))
    state = built.snapshot(
        phase=Phase.FAILED, plan=built.plan_of(built.drifted(0), plans.GpuPlan(built.uuid(1), 1)), reasons=(reason,)
    )
    verdict = judge(state, built.sample())
    assert not verdict.ready
    assert reason in verdict.reasons


def test_a_reboot_that_is_awaited_is_not_ready() -> None:
    state = built.snapshot(
        phase=Phase.REBOOT_PENDING, reasons=(snapshots.Reason("reboot-pending", "a reboot was requested"),)
    )
    assert not judge(state, built.sample()).ready


def test_what_a_cycle_says_about_a_node_in_sync_degrades_it() -> None:
    state = built.snapshot(reasons=(snapshots.Reason("after-change", "the hook failed"),))
    verdict = judge(state, built.sample())
    assert (verdict.ready, verdict.degraded, verdict.codes) == (True, True, ("after-change",))


def test_samples_that_are_old_degrade_and_their_figures_are_not_used() -> None:
    old = built.sample(built.gpu_sample(0, remap_failed=True), taken=built.NOW - 31)
    verdict = judge(built.snapshot(), old)
    assert (verdict.ready, verdict.degraded) == (True, True)
    assert verdict.reasons == (health.Reason("samples-stale", "the newest measurement is 31 s old"),)


def test_no_sample_at_all_long_after_the_cycle_is_a_reason_and_soon_after_it_is_none() -> None:
    assert judge(built.snapshot(started=built.NOW - 31)).codes == ("samples-stale",)
    assert judge(built.snapshot(started=built.NOW - 29)).healthy


@pytest.mark.parametrize(
    ("sample", "code"),
    [
        (built.sample(nvml_up=False, gpus=()), "nvml-down"),
        (built.sample(event_watch_up=False), "events-down"),
        (built.sample(collectors={"pods": measures.Collector(False, 0.1, None)}), "collector-failed"),
        (built.sample(built.gpu_sample(0, recovery_action="node-reboot")), "recovery-action"),
        (built.sample(built.gpu_sample(0, remap_failed=True)), "remap-failed"),
        (built.sample(built.gpu_sample(0, remap_pending=True)), "remap-pending"),
        (built.sample(xid_last={(built.uuid(0), "", "", 79): built.NOW - 599}), "xid"),
        (built.sample(built.gpu_sample(0), built.silent(1)), "not-measured"),
        (
            built.sample(built.silent(1), collectors={"gpu": measures.Collector(False, 0.1, None)}),
            "not-measured",
        ),
        (built.sample(collectors={"gpu": measures.Collector(False, 0.1, None)}), "collector-failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_measured_degrades_and_does_not_make_it_not_ready(sample: measures.Sample, code: str) -> None:
    verdict = judge(built.snapshot(), sample)
    assert (verdict.ready, verdict.degraded, verdict.codes) == (True, True, (code,))


@pytest.mark.parametrize(
    "last",
    [{(built.uuid(0), "", "", 79): built.NOW - 601}, {(built.uuid(0), "7", "0", 31): built.NOW - 1}],
    ids=["a fatal XID long ago", "an XID that an application causes"],
)
def test_other_xids_are_no_reason(last: dict[tuple[str, str, str, int], float]) -> None:
    assert judge(built.snapshot(), built.sample(xid_last=last)).healthy


def test_an_xid_of_an_instance_says_which() -> None:
    last = {(built.uuid(0), "8", "0", 94): built.NOW - 5}
    (reason,) = judge(built.snapshot(), built.sample(xid_last=last)).reasons
    assert reason.message == "instance 8 of GPU 0 reported XID 94 5 s ago"
    assert reason.gpu == built.uuid(0)


WHOLE = (built.uuid(0), "", "", 79)
OWN = (built.uuid(0), "7", "0", 94)


@pytest.mark.parametrize(
    ("last", "unsound"),
    [
        ({}, set()),
        ({WHOLE: built.NOW - 5}, {(0, 7), (0, 8)}),
        ({WHOLE: built.NOW - 601}, set()),
        ({OWN: built.NOW - 5}, {(0, 7)}),
        ({OWN: built.NOW - 60}, set()),
        ({(built.uuid(0), "7", "0", 31): built.NOW - 5}, set()),
        ({(built.uuid(1), "", "", 48): built.NOW - 5, OWN: built.NOW - 5}, {(0, 7), (1, 7), (1, 8)}),
    ],
    ids=["nothing", "of the GPU", "long ago", "of one", "of its forerunner", "an application's", "of two"],
)
def test_an_instance_suffers_from_what_hits_it_or_its_gpu(
    last: dict[tuple[str, str, str, int], float], unsound: set[tuple[int, int]]
) -> None:
    sample = built.sample(*(built.gpu_sample(n, instances=2) for n in (0, 1)), xid_last=last)
    young = [
        dataclasses.replace(
            gpu, instances=tuple(dataclasses.replace(one, first_seen=built.NOW - 30) for one in gpu.instances)
        )
        for gpu in sample.gpus
    ]
    assert unsound == {
        (gpu.index, one.id)
        for gpu in young
        for one in gpu.instances
        if not health.sound(sample, gpu, one, now=built.NOW)
    }


@pytest.mark.parametrize(
    ("action", "sound"), [(None, True), ("none", True), ("drain-p2p", True), ("gpu-reset", False), ("bus-reset", False)]
)
def test_an_instance_suffers_from_a_recovery_that_ends_it(action: str | None, *, sound: bool) -> None:
    gpu = built.gpu_sample(0, recovery_action=action)
    assert health.sound(built.sample(gpu), gpu, gpu.instances[0], now=built.NOW) is sound


@pytest.mark.parametrize("state", ["not-started", "in-progress", "in_progress", "failed"])
def test_a_whole_gpu_without_a_completed_fabric_is_not_ready(state: str) -> None:
    verdict = judge(built.snapshot(), built.sample(built.gpu_sample(0), built.whole_sample(1, fabric_state=state)))
    assert (verdict.ready, verdict.codes) == (False, ("fabric",))


@pytest.mark.parametrize(
    "gpu",
    [
        built.whole_sample(1, fabric_state="completed"),
        built.whole_sample(1, fabric_state="not-supported"),
        built.whole_sample(1, fabric_state=None),
        built.gpu_sample(1, fabric_state="not-started"),
    ],
    ids=["completed", "no fabric here", "not told", "MIG on needs none"],
)
def test_fabrics_that_are_no_hindrance(gpu: measures.GpuSample) -> None:
    assert judge(built.snapshot(), built.sample(built.gpu_sample(0), gpu)).healthy


def test_ready_implies_live_and_healthy_implies_both() -> None:
    for live in (True, False):
        for ready in (True, False):
            for degraded in (True, False):
                verdict = health.Health(live=live, ready=ready, degraded=degraded)
                assert verdict.healthy is (live and ready and not degraded)
