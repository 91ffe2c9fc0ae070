"""Each finding where it belongs, and none where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent import findings, measures, threads
from agent.host import ec2, facts
from agent.mig import layout, node
from agent.nvml import gpus, session
from agent.reconcile import snapshot
from agent.serve import board, health, render
from agent.sim import node as simulated
from agent.sim import tables
from tests.mig import parts

OFF = node.ModeState(current=False, pending=False)
UNIFORM = ["2g.10gb@0", "2g.10gb@2", "2g.10gb@4"]
MIXED = ["1g.5gb@0", "2g.10gb@4"]
KUBELET: dict[str, Any] = {"serving": "kubelet"}


def with_uuids(gpu: node.Gpu) -> node.Gpu:
    """Give the MIG devices UUIDs: MIG-<GPU>-<start>."""
    return dataclasses.replace(
        gpu,
        instances=tuple(
            dataclasses.replace(
                i,
                compute=tuple(dataclasses.replace(c, uuid=f"MIG-{gpu.index}-{i.placement.start}") for c in i.compute),
            )
            for i in gpu.instances
        ),
    )


def state(*held: list[str] | None, **fields: Any) -> node.NodeState:
    """A node of A100s with these instances; None is MIG off."""
    gpus = []
    for index, instances in enumerate(held):
        one = parts.gpu("a100-40gb", *(instances or []), index=index, minor=index, uuid=f"GPU-{index}")
        gpus.append(with_uuids(one) if instances is not None else dataclasses.replace(one, mode=OFF))
    return node.NodeState(gpus=tuple(gpus), driver_version="580.159.03", **fields)


def host(**fields: Any) -> facts.HostFacts:
    return facts.HostFacts(**fields)


def info(*ids: str, **fields: Any) -> facts.EcsGpuInfo:
    return facts.EcsGpuInfo(ids, **fields)


def on(name: str) -> ec2.InstanceType:
    kind = ec2.instance_type(name)
    assert kind is not None
    return kind


def seen(name: str, *gpus: str) -> facts.Seen:
    return facts.Seen(name, gpus)


def spec(*devices: str, written: float = 50.0) -> facts.CdiSpec:
    return facts.CdiSpec("/var/run/cdi/nvidia.yaml", written, frozenset(devices))


def wanted(*indexes: int) -> layout.Layout:
    return layout.Layout(tuple(layout.GpuLayout(f"GPU-{i}", mig=True) for i in indexes))


P4D = on("p4d.24xlarge")
EIGHT = [None] * 8
SLICE = dataclasses.replace(
    parts.gpu("a100-40gb"), mode=None, name="NVIDIA L4-6Q", uuid="GPU-0", memory_bytes=6144 << 20
)
ECS = "/etc/ecs/ecs.config is there"


FOUND = [
    pytest.param("ecs-mig-on", "critical", state(UNIFORM), host(ecs=ECS), id="MIG on an ECS node"),
    pytest.param("ecs-mig-on", "critical", state(UNIFORM, serving="ecs"), host(), id="MIG, the ECS agent active"),
    pytest.param(
        "ecs-gpu-info-missing",
        "critical",
        state(None, serving="ecs"),
        host(ecs=ECS, ecs_gpu_info=info(problem="it is not there")),
        id="no file for the ECS agent",
    ),
    pytest.param(
        "ecs-gpu-info-differs",
        "critical",
        state(None, None),
        host(ecs=ECS, ecs_gpu_info=info("GPU-0", "GPU-9", "GPU-9")),
        id="the file names one missing, one unknown, one twice",
    ),
    pytest.param(
        "ecs-gpu-info-differs",
        "warning",
        state(None),
        host(ecs=ECS, ecs_gpu_info=info("GPU-0", driver_version="570.1")),
        id="the file is of another driver",
    ),
    pytest.param(
        "container-gpu-unknown",
        "critical",
        state(None),
        host(ecs=ECS, containers=(seen("a", "GPU-7"),)),
        id="a container with a GPU that is not there",
    ),
    pytest.param(
        "container-gpu-shared",
        "warning",
        state(None),
        host(ecs=ECS, containers=(seen("a", "GPU-0"), seen("b", "GPU-0"))),
        id="one GPU for two containers",
    ),
    pytest.param(
        "container-sees-all",
        "warning",
        state(None),
        host(containers=(seen("a", "all"),)),
        id="a container with all",
    ),
    pytest.param(
        "overcommit",
        "warning",
        node.NodeState(gpus=(SLICE,)),
        host(ecs=ECS, instance_type=on("g6f.large"), overcommit=0, gridd=True),
        id="g6f.large",
    ),
    pytest.param(
        "vgpu-licence",
        "critical",
        node.NodeState(gpus=(SLICE,)),
        host(instance_type=on("g6f.2xlarge"), gridd=False),
        id="a slice without licence daemon",
    ),
    pytest.param(
        "driver-too-old", "critical", state(None), host(instance_type=on("g7.2xlarge")), id="g7 under driver 580"
    ),
    pytest.param(
        "driver-excluded",
        "critical",
        dataclasses.replace(state(None), driver_version="595.10"),
        host(instance_type=on("p3.2xlarge")),
        id="p3 under driver 595",
    ),
    pytest.param("gpu-count", "warning", state(*EIGHT[:7]), host(instance_type=P4D), id="seven of eight"),
    pytest.param("gpu-count", "critical", state(), host(instance_type=P4D), id="none of eight"),
    pytest.param(
        "gpu-memory",
        "warning",
        state(*EIGHT),
        host(instance_type=on("p4de.24xlarge")),
        id="half the memory of the type",
    ),
    pytest.param(
        "mig-capability",
        "hint",
        node.NodeState(gpus=tuple(dataclasses.replace(g, mode=None) for g in state(*EIGHT).gpus)),
        host(instance_type=P4D),
        id="no MIG where the table has it",
    ),
    pytest.param(
        "time-slicing-with-mig", "warning", state(UNIFORM), host(time_slicing="labels"), id="time-slicing and MIG"
    ),
    pytest.param("two-device-plugins", "warning", state(None), host(plugins=2), id="two plugins"),
    pytest.param(
        "plugin-with-dra", "critical", state(None), host(plugins=1, dra=True), id="device plugin and DRA driver"
    ),
    pytest.param(
        "bottlerocket-mixed",
        "critical",
        state(MIXED, **KUBELET),
        host(bottlerocket="1.64.0", strategy="single", strategy_source=facts.BOTTLEROCKET_PLUGIN),
        id="a mixed layout under Bottlerocket's plugin",
    ),
    pytest.param(
        "strategy-refused",
        "warning",
        state(UNIFORM, None),
        host(strategy="single", strategy_source=facts.GFD_LABELS),
        id="single with a whole GPU left",
    ),
    pytest.param(
        "mig-hidden-by-none",
        "critical",
        state(UNIFORM, **KUBELET),
        host(strategy="none", strategy_source=facts.GFD_LABELS),
        id="none on a GPU with MIG",
    ),
    pytest.param(
        "plugin-behind",
        "warning",
        state(UNIFORM),
        host(instances_since=200.0, plugin_since=100.0),
        id="the plugin came first",
    ),
    pytest.param(
        "dra-behind", "warning", state(UNIFORM), host(instances_since=200.0, dra_since=100.0), id="DRA came first"
    ),
    pytest.param(
        "kubelet-differs",
        "warning",
        state(UNIFORM, **KUBELET),
        host(allocatable={"nvidia.com/gpu": 1}, strategy="single"),
        id="the kubelet has an old count",
    ),
    pytest.param(
        "kubelet-differs",
        "warning",
        state(UNIFORM, None, **KUBELET),
        host(allocatable={"nvidia.com/gpu": 4}, strategy="single"),
        id="the kubelet has what nothing allows",
    ),
    pytest.param(
        "cdi-behind",
        "warning",
        state(UNIFORM),
        host(cdi=(spec("0:0", "0:1", "0:2"),), instances_since=100.0),
        id="a specification older than the layout",
    ),
    pytest.param(
        "cdi-behind", "warning", state(UNIFORM), host(cdi=(spec("0", "all"),)), id="a specification of whole GPUs"
    ),
    pytest.param(
        "capability-file-missing",
        "warning",
        state(UNIFORM),
        host(files_missing=((state(UNIFORM).gpus[0].uuid, "/dev/nvidia-caps/nvidia-cap30"),) * 2),
        id="an instance that no container can open",
    ),
    pytest.param("no-peer-to-peer", "hint", state(UNIFORM, None, None), host(), id="MIG on one of three"),
]


@pytest.mark.parametrize(("code", "severity", "where", "around"), FOUND)
def test_found(code: str, severity: str, where: node.NodeState, around: facts.HostFacts) -> None:
    found = [f for f in findings.find(where, around) if f.code == code]
    assert found, "not found"
    assert {f.severity for f in found} == {severity}
    assert code in findings.CODES
    for finding in found:
        assert finding.message
        assert finding.advice


@pytest.mark.parametrize(
    ("where", "around"),
    [
        pytest.param(state(None), facts.HostFacts(), id="nothing is known"),
        pytest.param(
            state(None),
            host(ecs=ECS, ecs_gpu_info=info("GPU-0", driver_version="580.159.03"), containers=(seen("a", "GPU-0"),)),
            id="an ECS node in order",
        ),
        pytest.param(
            state(None),
            host(ecs=ECS, ecs_gpu_info=info(problem="it is not there")),
            id="the ECS agent has not started yet",
        ),
        pytest.param(
            state(None),
            host(ecs=ECS, mps=True, containers=(seen("a", "GPU-0"), seen("b", "GPU-0"))),
            id="one GPU for two containers by MPS",
        ),
        pytest.param(state(*EIGHT), host(instance_type=P4D), id="a p4d in order"),
        pytest.param(
            node.NodeState(gpus=(SLICE,), driver_version="580.1"),
            host(instance_type=on("g6f.2xlarge"), gridd=True, overcommit=0),
            id="a slice in order, which has a little more memory than sold",
        ),
        pytest.param(
            state(UNIFORM, **KUBELET),
            host(
                plugins=1,
                strategy="single",
                strategy_source=facts.BOTTLEROCKET_PLUGIN,
                allocatable={"nvidia.com/gpu": 3, "nvidia.com/mig-1g.5gb": 0},
                instances_since=100.0,
                plugin_since=120.0,
                dra_since=99.5,
                cdi=(spec("MIG-0-0", "MIG-0-2", "MIG-0-4", written=101.0),),
            ),
            id="a Kubernetes node in order",
        ),
        pytest.param(
            state(UNIFORM, **KUBELET), host(allocatable={"nvidia.com/mig-2g.10gb": 3}), id="any strategy may be meant"
        ),
        pytest.param(
            state(UNIFORM, **KUBELET), host(allocatable={"nvidia.com/gpu": 0}), id="no device plugin has come yet"
        ),
        pytest.param(state(None, **KUBELET), host(plugins=1, strategy="single"), id="single without MIG"),
        pytest.param(state(UNIFORM), host(strategy="mixed", strategy_source="x"), id="mixed takes all"),
    ],
)
def test_nothing_to_find(where: node.NodeState, around: facts.HostFacts) -> None:
    assert findings.find(where, around) == ()


def test_a_gpu_that_should_be_split_is_given_away_whole_only_once_the_kubelet_runs() -> None:
    codes = [f.code for f in findings.find(state(UNIFORM, None, **KUBELET), host(), layout=wanted(0, 1))]
    assert "whole-despite-layout" in codes
    codes = [f.code for f in findings.find(state(UNIFORM, None), host(), layout=wanted(0, 1))]
    assert "whole-despite-layout" not in codes


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "off nodes of the DRA driver"), ("1.62.1", "update Bottlerocket"), ("1.63.0", "enabled = false")],
)
def test_what_to_do_about_plugin_and_dra_depends_on_the_system(version: str | None, says: str) -> None:
    (found,) = findings.find(state(None), host(plugins=1, dra=True, bottlerocket=version))
    assert says in found.advice


def test_a_lost_gpu_is_not_judged_by_its_figures() -> None:
    gpus = state(*EIGHT).gpus
    hung = dataclasses.replace(gpus[0], state=node.GpuState.HUNG, memory_bytes=1, mode=None)
    lost = dataclasses.replace(gpus[1], state=node.GpuState.LOST)
    found = findings.find(node.NodeState(gpus=(hung, lost, *gpus[2:])), host(instance_type=P4D))
    assert [f.code for f in found] == ["gpu-count"]


def test_a_gpu_that_is_lost_under_the_ecs_agent_is_named_by_its_number() -> None:
    gpus = state(None, None).gpus
    lost = dataclasses.replace(gpus[1], state=node.GpuState.LOST)
    (found,) = findings.find(node.NodeState(gpus=(gpus[0], lost)), host(ecs=ECS, ecs_gpu_info=info("GPU-0", "GPU-1")))
    assert "GPU 1 is in it and does not answer" in found.message


def test_worst_comes_first() -> None:
    found = findings.find(state(UNIFORM, None), host(ecs=ECS, time_slicing="x"))
    assert [f.severity for f in found] == ["critical", "warning", "hint"]


def gpu_sample(**fields: Any) -> measures.GpuSample:
    return measures.GpuSample(0, "GPU-0", "0000:10:00.0", "NVIDIA H100", True, 1.0, **fields)


@pytest.mark.parametrize(
    ("fields", "hurts"),
    [
        ({"fabric_state": "in_progress"}, True),
        ({"fabric_state": "completed"}, False),
        ({"fabric_state": "not_supported"}, False),
        ({"fabric_state": "in_progress", "mig_enabled": True}, False),
        ({}, False),
    ],
)
def test_the_fabric_of_whole_gpus(fields: dict[str, Any], hurts: bool) -> None:
    sample = measures.Sample(taken=1.0, generation=0, nvml_up=True, gpus=(gpu_sample(**fields),))
    assert bool(findings.measured(sample)) is hurts
    assert findings.measured(None) == ()


def test_persistence_mode_is_told_once_for_all_gpus() -> None:
    gpus = (gpu_sample(persistence=False), dataclasses.replace(gpu_sample(persistence=False), index=3), gpu_sample())
    (found,) = findings.measured(measures.Sample(taken=1.0, generation=0, nvml_up=True, gpus=gpus))
    assert (found.code, found.severity) == ("persistence-off", "hint")
    assert "GPU 0, 3:" in found.message
    on = measures.Sample(taken=1.0, generation=0, nvml_up=True, gpus=(gpu_sample(persistence=True),))
    assert findings.measured(on) == ()


def snapshot_of(where: node.NodeState, around: facts.HostFacts | None) -> snapshot.Snapshot:
    return snapshot.Snapshot(phase=snapshot.Phase.CONVERGED, cycle=1, node=where, facts=around)


def test_what_is_critical_degrades_and_the_rest_is_only_shown() -> None:
    taken = snapshot_of(state(UNIFORM, None), host(ecs=ECS, time_slicing="x"))
    verdict = board.verdict(taken, now=0.0)
    assert (verdict.ready, verdict.degraded, verdict.codes) == (True, True, ("ecs-mig-on",))
    assert {f.code for f in verdict.findings} == {"ecs-mig-on", "time-slicing-with-mig", "no-peer-to-peer"}
    document = render.status_document(taken, None, verdict)
    assert document["findings"][0].keys() == {"code", "severity", "message", "advice", "gpu"}
    table = render.status_table(taken, None, verdict)
    assert "! ecs-mig-on: " in table
    assert "warning time-slicing-with-mig: " in table
    assert "hint no-peer-to-peer: " in table


def test_the_board_finds_once_a_snapshot_and_by_each_sample() -> None:
    hung = board.Board()
    nothing: tuple[findings.Finding, ...] = ()
    assert hung.findings == nothing
    hung.publish_snapshot(snapshot_of(state(UNIFORM), None))
    assert hung.advertised is not None
    assert hung.findings == nothing
    hung.publish_snapshot(snapshot_of(state(UNIFORM), host(time_slicing="x")))
    hung.publish_sample(
        measures.Sample(taken=1.0, generation=0, nvml_up=True, gpus=(gpu_sample(fabric_state="in_progress"),))
    )
    assert [f.code for f in hung.findings] == ["time-slicing-with-mig", "fabric-incomplete"]
    applying = dataclasses.replace(snapshot_of(state(UNIFORM), None), phase=snapshot.Phase.APPLYING)
    hung.publish_snapshot(applying)
    assert [f.code for f in hung.findings] == ["time-slicing-with-mig", "fabric-incomplete"], "kept meanwhile"
    verdict = health.judge(hung.snapshot, hung.sample, now=1.0, loop_turned=1.0, noticed=hung.findings)
    assert verdict.codes == ("fabric",), "it has a reason of its own, which also means not ready"


def test_every_code_is_told_of_in_a_case_here() -> None:
    told = {case.values[0] for case in FOUND} | {"whole-despite-layout", "fabric-incomplete", "persistence-off"}
    assert told == set(findings.CODES)


FAMILIES = {kind.family: name for name, kind in tables.instance_types().items() if kind.count is not None}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
async def test_a_fresh_node_of_every_family_is_in_order(name: str) -> None:
    opened = simulated.open_node(name)
    door = gpus.NvmlGpus(session.Session(opened.library, root=opened.machine.root), machine=opened.machine)
    try:
        seen_now = await door.observe()
        around = await threads.run(lambda: facts.gather(opened.machine, seen_now))
        assert findings.find(seen_now, around) == ()
    finally:
        await door.close()
        opened.close()
