"""A node, a plan and its resources as text and as JSON: told the same, and legible."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from agent import errors, measures
from agent.mig import advertise, layout, node, plan, profile
from agent.reconcile import snapshot
from agent.serve import health, render
from tests.mig import parts

GIB = 1 << 30


def split_gpu(index: int, *held: str, model: str = "a100-40gb", **fields: Any) -> node.Gpu:
    """A GPU of a node: like `parts.gpu`, with an index, UUID and MIG UUIDs of its own."""
    gpu = parts.gpu(model, *held, **fields)
    instances = tuple(
        dataclasses.replace(
            instance,
            id=instance.placement.start + 7,
            compute=tuple(
                dataclasses.replace(compute, uuid=f"MIG-{index}-{instance.placement.start}-{compute.id}")
                for compute in instance.compute
            ),
        )
        for instance in gpu.instances
    )
    return dataclasses.replace(gpu, index=index, uuid=f"GPU-{index}", minor=index, instances=instances)


def state(*gpus: node.Gpu, **fields: Any) -> node.NodeState:
    return node.NodeState(gpus=gpus, driver_version="590.48.01", instance_type="p4d.24xlarge", **fields)


def shown(
    seen: node.NodeState | None,
    plan_: plan.Plan | None = None,
    phase: snapshot.Phase = snapshot.Phase.CONVERGED,
    **fields: Any,
) -> snapshot.Snapshot:
    if plan_ is None and seen is not None:
        plan_ = plan.Plan(tuple(plan.GpuPlan(uuid=g.uuid, index=g.index) for g in seen.gpus))
    return snapshot.Snapshot(phase=phase, node=seen, plan=plan_ or plan.Plan(), **fields)


UNIFORM = ("2g.10gb@0", "2g.10gb@2", "2g.10gb@4")


# --- status -----------------------------------------------------------------------------------------


def test_status_shows_each_gpu_on_a_line_with_its_map_and_instances() -> None:
    text = render.status_table(
        shown(
            state(*(split_gpu(i, *UNIFORM) for i in range(8))),
            simulated="p4d.24xlarge",
            settings=snapshot.SettingsView(sources=("p4d-uniform.toml",), declared=True),
        )
    )
    lines = text.splitlines()
    assert lines[0] == "SIMULATED NODE p4d.24xlarge: these GPUs are not there"
    assert "converged" in lines[1]
    assert "8 GPUs" in lines[1]
    assert lines[2] == "settings from p4d-uniform.toml"
    assert len(lines) == 4 + 8 * 5
    assert sum("|2g.10gb|2g.10gb|2g.10gb|free   |" in line for line in lines) == 8
    assert sum("MIG-3-" in line for line in lines) == 3
    assert max(map(len, lines)) <= 120


def test_status_tells_memory_and_activity_only_where_they_were_measured() -> None:
    gpu = split_gpu(0, "3g.20gb@0", "2g.10gb@4")
    sample = measures.Sample(
        taken=0.0,
        generation=1,
        nvml_up=True,
        gpus=(
            measures.GpuSample(
                index=0,
                uuid="GPU-0",
                pci_bus_id="",
                name="",
                up=True,
                taken=0.0,
                memory=measures.Memory(total=40 * GIB, used=3 * GIB, free=37 * GIB),
                power_watts=61.4,
                instances=(
                    measures.InstanceSample(
                        id=7,
                        profile="3g.20gb",
                        start=0,
                        size=4,
                        first_seen=0.0,
                        memory=measures.Memory(total=20 * GIB, used=2 * GIB, free=18 * GIB),
                        activity=measures.Activity(sm=0.25),
                    ),
                ),
            ),
        ),
    )
    seen = shown(state(gpu))
    text = render.status_table(seen, sample)
    assert "2.0 GiB of" in text
    assert "25%" in text
    assert "61 W" in text
    assert "- of" in text, "an instance that was not measured has no figure"
    document = render.status_document(seen, sample)
    first, second = document["gpus"][0]["gpu_instances"]
    assert first["memory"]["used_bytes"] == 2 * GIB
    assert first["activity"] == {"sm": 0.25}
    assert second["memory"]["used_bytes"] is None
    assert document["gpus"][0]["memory"]["used_bytes"] == 3 * GIB
    json.dumps(document)


def test_status_ignores_figures_of_a_gpu_that_did_not_answer() -> None:
    sample = measures.Sample(
        taken=0.0,
        generation=1,
        nvml_up=True,
        gpus=(
            measures.GpuSample(
                index=0,
                uuid="GPU-0",
                pci_bus_id="",
                name="",
                up=False,
                taken=0.0,
                memory=measures.Memory(total=1, used=1, free=0),
            ),
        ),
    )
    lost = dataclasses.replace(split_gpu(0), state=node.GpuState.LOST, problem="it fell off the bus")
    document = render.status_document(shown(state(lost)), sample)
    assert document["gpus"][0]["state"] == "lost"
    assert document["gpus"][0]["memory"]["used_bytes"] is None
    assert "! it fell off the bus" in render.status_table(shown(state(lost)), sample)


def test_status_names_holders_splits_and_orphans() -> None:
    gpu = split_gpu(0, "3g.20gb@4/2c+1c", "2g.10gb@0/")
    busy = node.Holder(kind="process", name="python3", pid=4711, pod="train-0", namespace="ml")
    instances = tuple(
        dataclasses.replace(i, compute=(dataclasses.replace(i.compute[0], holders=(busy,)), *i.compute[1:]))
        if i.compute
        else i
        for i in gpu.instances
    )
    gpu = dataclasses.replace(gpu, instances=instances)
    text = render.status_table(shown(state(gpu)))
    assert "2 compute instances" in text
    assert "1c.3g.20gb" in text
    assert "used by process python3 (pid 4711) in pod ml/train-0" in text
    assert "no compute instance" in text
    document = render.status_document(shown(state(gpu)))
    orphan, shared = document["gpus"][0]["gpu_instances"]
    assert orphan["compute_instances"] == []
    assert shared["in_use"] == [
        {"kind": "process", "name": "python3", "pid": 4711, "pod": "train-0", "namespace": "ml"}
    ]
    assert [c["profile"] for c in shared["compute_instances"]] == ["2c.3g.20gb", "1c.3g.20gb"]


@pytest.mark.parametrize(
    ("gpu", "document", "words"),
    [
        pytest.param(split_gpu(0), {"capable": True, "current": True, "pending": True}, "on", id="on"),
        pytest.param(
            dataclasses.replace(split_gpu(0), mode=None),
            {"capable": False, "current": None, "pending": None},
            "none",
            id="a part without MIG",
        ),
        pytest.param(
            dataclasses.replace(split_gpu(0), mode=None, state=node.GpuState.HUNG),
            {"capable": None, "current": None, "pending": None},
            "-",
            id="a GPU that cannot be read",
        ),
    ],
)
def test_the_mig_mode_is_told_where_it_is_known(gpu: node.Gpu, document: dict[str, bool | None], words: str) -> None:
    assert render.mig_document(gpu) == document
    assert render.mode_words(gpu) == words


def test_of_a_gpu_that_cannot_be_read_nobody_says_that_it_cannot_be_split() -> None:
    gpu = dataclasses.replace(
        split_gpu(0), mode=None, offers=(), instances=(), state=node.GpuState.LOST, problem="gone"
    )
    told = render.profiles_table(state(gpu))
    assert "its profiles cannot be read: it is lost" in told
    assert "cannot be split" not in told


def test_status_document_has_the_promised_shape() -> None:
    seen = shown(state(split_gpu(0, "2g.10gb@0")), simulated="p4d.24xlarge")
    document = render.status_document(seen, None, health.judge(seen, None, now=1.0, loop_turned=1.0))
    assert document["simulated"] == "p4d.24xlarge"
    assert document["phase"] == "converged"
    assert document["reasons"] == []
    assert document["settings"]["sources"] == []
    gpu = document["gpus"][0]
    assert gpu["mig"] == {"capable": True, "current": True, "pending": True}
    assert gpu["gpu_instances"][0]["placement"] == {"start": 0, "size": 2}
    assert gpu["gpu_instances"][0]["compute_instances"][0].keys() >= {"id", "profile", "uuid", "multiprocessors"}
    assert json.loads(json.dumps(document)) == document


def test_status_without_a_driver_says_why_and_lists_no_gpus() -> None:
    seen = shown(None, phase=snapshot.Phase.WAITING, driver_problem="no NVIDIA driver is loaded")
    assert "no GPUs: no NVIDIA driver is loaded" in render.status_table(seen)
    assert render.status_document(seen)["gpus"] == []
    assert render.status_document(seen)["versions"] is None


def test_status_tells_drift_mode_and_other_owners() -> None:
    gpu = dataclasses.replace(split_gpu(0), mode=node.ModeState(current=False, pending=True))
    drift = plan.Plan((plan.GpuPlan(uuid="GPU-0", index=0, drift=(plan.Drift("mode", "MIG is off"),)),))
    seen = shown(
        state(gpu, serving="kubelet"),
        drift,
        snapshot.Phase.DRIFTED,
        owner="migmanager",
        reasons=(snapshot.Reason("drift", "GPU 0: MIG is off", "GPU-0"),),
    )
    text = render.status_table(seen)
    assert "off, on after a reset" in text
    assert "! drift: GPU 0: MIG is off" in text
    assert "kubelet is active" in text
    assert "belongs to migmanager" in text
    assert text.splitlines()[-1].endswith("drift")
    document = render.status_document(seen)
    assert document["gpus"][0]["drift"] == [{"kind": "mode", "message": "MIG is off"}]
    assert document["reasons"] == [{"code": "drift", "message": "GPU 0: MIG is off", "gpu": "GPU-0"}]


# --- nvidia-smi -L ----------------------------------------------------------------------------------


def test_nvidia_smi_form_is_padded_as_the_tool_pads() -> None:
    gpu = split_gpu(0, "1g.5gb@6", "3g.20gb@0", "2g.10gb@4/")
    lost = dataclasses.replace(split_gpu(1), state=node.GpuState.LOST)
    assert render.nvidia_smi(state(gpu, lost)) == (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-0-0-0)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-0-6-0)"
    )


# --- plan -------------------------------------------------------------------------------------------


def planned(wanted: str, *gpus: node.Gpu, policy: plan.Policy | None = None) -> tuple[plan.Plan, node.NodeState]:
    """Plan `wanted` ("2g.10gb 1g.5gb", "off") for all of these GPUs."""
    seen = state(*gpus, simulated="p4d.24xlarge")
    specs = () if wanted == "off" else tuple(parts.spec(word) for word in wanted.split())
    asked = layout.Layout(tuple(layout.GpuLayout(uuid=g.uuid, mig=wanted != "off", instances=specs) for g in gpus))
    return plan.compute(asked, seen, policy or plan.Policy()), seen


def test_plan_shows_each_kept_destroyed_and_created_instance_with_its_why() -> None:
    made, seen = planned("2g.10gb 3g.20gb", split_gpu(0, *UNIFORM))
    text = render.plan_table(made, seen)
    (kept,) = [line for line in text.splitlines() if line.startswith("  = ")]
    destroyed = [line for line in text.splitlines() if line.startswith("  - destroy GPU")]
    created = [line for line in text.splitlines() if line.startswith("  + create GPU")]
    assert "keep GPU instance" in kept
    assert len(destroyed) == 2
    assert len(created) == 1
    for line in (kept, *destroyed, *created):
        assert len(line.split("  ")) >= 3, f"no why: {line}"
    assert "now   |2g.10gb|2g.10gb|2g.10gb|free" in text
    assert "then  |" in text
    assert text.splitlines()[0].startswith("SIMULATED NODE")
    assert text.splitlines()[-1].endswith("1 instance kept, 2 destroyed, 1 created")


def test_plan_tells_equal_gpus_once() -> None:
    made, seen = planned("1g.5gb 1g.5gb", *(split_gpu(i, *UNIFORM) for i in (0, 1, 2)), split_gpu(3))
    text = render.plan_table(made, seen)
    assert "GPU 0-2: 3 x NVIDIA A100-SXM4-40GB (a100.40gb)" in text
    assert "GPU 3: NVIDIA A100-SXM4-40GB (a100.40gb)" in text


def test_plan_in_sync_says_so() -> None:
    made, seen = planned("2g.10gb 2g.10gb 2g.10gb", split_gpu(0, *UNIFORM))
    assert render.plan_table(made, seen).splitlines()[-1] == "in sync: nothing to do"
    document = render.plan_document(made, seen)
    assert document["in_sync"] is True
    assert document["gpus"][0]["steps"] == []
    assert [k["profile"] for k in document["gpus"][0]["kept"]] == ["2g.10gb"] * 3


def test_plan_names_who_is_in_the_way() -> None:
    gpu = split_gpu(0, *UNIFORM)
    busy = node.Holder(kind="process", name="python3", pid=4711, hint="end it first")
    gpu = dataclasses.replace(gpu, instances=tuple(dataclasses.replace(i, holders=(busy,)) for i in gpu.instances))
    made, seen = planned("3g.20gb 3g.20gb", gpu)
    text = render.plan_table(made, seen)
    assert "! in-use:" in text
    assert "process python3 (pid 4711): end it first" in text
    assert "blocked: GPU 0" in text.splitlines()[-1]
    blocked = render.plan_document(made, seen)["gpus"][0]["blocked"]
    assert blocked["kind"] == "in-use"
    assert {h["pid"] for h in blocked["holders"]} == {4711}


def test_plan_of_a_fresh_gpu_tells_the_reset_it_needs() -> None:
    gpu = dataclasses.replace(split_gpu(0), mode=node.ModeState(current=False, pending=False))
    made, seen = planned("2g.10gb", gpu)
    text = render.plan_table(made, seen)
    assert "~ turn MIG on" in text
    assert "~ reset the GPU" in text
    assert "needs a GPU reset" in text
    document = render.plan_document(made, seen)
    assert document["gpus"][0]["needs"] == "reset"
    assert document["gpus"][0]["steps"][0]["kind"] == "set-mig-mode"
    assert json.loads(json.dumps(document)) == document


def test_plan_leaves_undeclared_gpus_alone_and_says_so() -> None:
    seen = state(split_gpu(0, *UNIFORM))
    made = plan.compute(layout.Layout(), seen, plan.Policy())
    assert "nothing is declared for it: left as it is" in render.plan_table(made, seen)


PLACE = node.Placement(4, 4)
WHOLE = profile.parse("3g.20gb")
STEPS: list[tuple[plan.Step, dict[str, Any]]] = [
    (plan.SetMigMode(enabled=True, why="w"), {"kind": "set-mig-mode", "enabled": True}),
    (plan.ResetGpu(why="w"), {"kind": "reset-gpu"}),
    (
        plan.DestroyComputeInstance(gpu_instance_id=2, id=0, profile=WHOLE, gpu_instance=PLACE, why="w"),
        {"kind": "destroy-compute-instance", "id": 0, "gpu_instance_id": 2, "profile": "3g.20gb"},
    ),
    (
        plan.DestroyGpuInstance(id=2, profile=WHOLE, placement=PLACE, why="w"),
        {"kind": "destroy-gpu-instance", "id": 2, "placement": {"start": 4, "size": 4}},
    ),
    (
        plan.CreateGpuInstance(profile=WHOLE, profile_id=node.ProfileId(9), placement=PLACE, why="w"),
        {"kind": "create-gpu-instance", "profile_id": 9, "placement": {"start": 4, "size": 4}},
    ),
    (
        plan.CreateComputeInstance(gpu_instance=PLACE, profile=WHOLE.part(1), start=2, why="w"),
        {"kind": "create-compute-instance", "profile": "1c.3g.20gb", "start": 2},
    ),
]


@pytest.mark.parametrize(("step", "wanted"), STEPS, ids=[step.kind for step, _ in STEPS])
def test_each_step_is_told_with_what_it_is_about(step: plan.Step, wanted: dict[str, Any]) -> None:
    document = render.step_document(step)
    assert document.items() >= wanted.items()
    assert document["why"] == "w"
    words = render.step_words(step)
    assert words
    if "profile" in wanted:
        assert wanted["profile"] in words


def test_outcome_tells_what_was_done_what_failed_and_what_is_left() -> None:
    done = plan.SetMigMode(enabled=True)
    failed = plan.CreateGpuInstance(profile=WHOLE, profile_id=node.ProfileId(9), placement=PLACE)
    outcome = snapshot.Outcome(
        done=(("GPU-0", (done,)),),
        failures=(snapshot.Failure("GPU-0", failed, "cannot create", rolled_back=True, remains="GPU 0 has MIG off"),),
        rolled_back=("GPU-0",),
    )
    document = render.outcome_document(outcome, state(split_gpu(0)))
    assert document["changed"] is True
    assert document["failed"][0]["index"] == 0
    assert document["failed"][0]["step"]["kind"] == "create-gpu-instance"
    assert document["failed"][0]["remains"] == "GPU 0 has MIG off"
    assert document["rolled_back"] == ["GPU-0"]
    assert render.outcome_document(None, None)["changed"] is False


# --- resources and profiles -------------------------------------------------------------------------


def test_resources_tell_counts_and_refusals() -> None:
    seen = state(split_gpu(0, *UNIFORM), dataclasses.replace(split_gpu(1), mode=node.ModeState(False, False)))
    told = advertise.advertise(seen)
    document = render.resources_document(told)
    assert document["device_plugin"]["mixed"] == {"nvidia.com/gpu": 1, "nvidia.com/mig-2g.10gb": 3}
    assert document["device_plugin"]["single"] is None
    assert document["device_plugin"]["refused"]["single"]
    assert len(document["dra"]) == 4
    assert document["ecs"].keys() == {"refused"}
    text = render.resources_table(told, simulated="p4d.24xlarge")
    assert text.startswith("SIMULATED NODE")
    assert "nvidia.com/mig-2g.10gb  3" in text
    assert "single  refused" in text
    assert "3 x  type mig  2g.10gb" in text
    assert "ECS: refused" in text


def test_resources_of_a_whole_node_say_what_a_task_may_ask() -> None:
    seen = state(*(dataclasses.replace(split_gpu(i), mode=None) for i in (0, 1)))
    text = render.resources_table(advertise.advertise(seen))
    assert "ECS: 2 GPUs; a task may ask for 1, 2, ALL" in text


def test_profiles_tell_what_still_fits_beside_what_is_there() -> None:
    seen = state(split_gpu(0, "3g.20gb@0"), split_gpu(1, "3g.20gb@0"))
    document = render.profiles_document(seen)
    remaining = {p["name"]: p["remaining"] for p in document[0]["profiles"]}
    assert remaining["7g.40gb"] == 0
    assert remaining["3g.20gb"] == 1
    assert remaining["1g.5gb"] == 3
    entry = next(p for p in document[0]["profiles"] if p["name"] == "2g.10gb")
    assert entry["placements"] == {"starts": [0, 2, 4], "size": 2}
    assert entry["max_instances"] == 3
    text = render.profiles_table(seen)
    assert "GPU 0-1: 2 x NVIDIA A100-SXM4-40GB (a100.40gb), MIG on" in text
    assert "|3g.20gb" in text


def test_profiles_with_mig_off_leave_open_what_fits() -> None:
    seen = state(dataclasses.replace(split_gpu(0), mode=node.ModeState(False, False)))
    assert {p["remaining"] for p in render.profiles_document(seen)[0]["profiles"]} == {None}


def test_profiles_of_a_gpu_without_mig_point_to_sharing() -> None:
    seen = state(dataclasses.replace(split_gpu(0), mode=None, offers=()))
    assert "time-slicing" in render.profiles_table(seen)


def test_profiles_of_a_gpu_nobody_described_say_so() -> None:
    seen = state(dataclasses.replace(split_gpu(0), offers=(), geometry_unknown="its profiles are not published"))
    assert "! its profiles are not published" in render.profiles_table(seen)
    assert render.profiles_document(seen)[0]["problem"] == "its profiles are not published"


def test_problem_tells_where() -> None:
    problem = errors.Problem("error", "unknown-key", "no such key", file="a.toml", line=2, key="gpunode.x")
    assert render.problem_document(problem) == {
        "severity": "error",
        "code": "unknown-key",
        "message": "no such key",
        "where": {"file": "a.toml", "line": 2, "key": "gpunode.x"},
    }


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 3], "0-3"), ([5], "5"), ([7, 0, 1, 3], "0-1, 3, 7"), ([], "")]
)
def test_gpu_numbers_in_short(numbers: list[int], text: str) -> None:
    assert render.indexes(numbers) == text


def test_reasons_that_say_the_same_of_several_gpus_are_one_line() -> None:
    seen = state(*(split_gpu(i) for i in range(12)))
    reasons = [snapshot.Reason("drift", f"GPU {i}: MIG is off", f"GPU-{i}") for i in (0, 1, 2, 11)]
    reasons += [snapshot.Reason("lost", "GPU 1 fell off the bus", "GPU-1"), snapshot.Reason("lock", "GPU 1 is locked")]
    assert render.reason_lines(reasons, seen) == [
        "drift: GPU 0-2, 11: MIG is off",
        "lost: GPU 1 fell off the bus",
        "lock: GPU 1 is locked",
    ]
    assert render.reason_lines(reasons[:1], None) == ["drift: GPU 0: MIG is off"]


def test_gpus_that_are_blocked_alike_are_told_once() -> None:
    gpus = tuple(dataclasses.replace(split_gpu(i), mode=None, offers=()) for i in range(4))
    made, seen = planned("2g.10gb", *gpus)
    text = render.plan_table(made, seen)
    assert text.count("not-capable") == 1
    assert "GPU 0-3: 4 x NVIDIA A100-SXM4-40GB" in text


def test_gpus_that_differ_in_ids_alone_are_told_once() -> None:
    one, two = split_gpu(0, *UNIFORM), split_gpu(1, *UNIFORM)
    two = dataclasses.replace(two, instances=tuple(dataclasses.replace(i, id=i.id + 20) for i in two.instances))
    made, seen = planned("2g.10gb 3g.20gb", one, two)
    assert "GPU 0-1: 2 x" in render.plan_table(made, seen)
