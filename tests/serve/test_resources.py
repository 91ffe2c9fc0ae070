"""What `resources` says beside the counts: parents, labels, NodeOverlay, and what is really there."""

from __future__ import annotations

import dataclasses
import json

import pytest

from agent.host import facts
from agent.mig import advertise, node
from agent.serve import render
from tests.mig import parts

OFF = node.ModeState(current=False, pending=False)
SPLIT = parts.gpu("a100-40gb", "2g.10gb@0", "2g.10gb@2", "1g.5gb@4", index=0, minor=0, uuid="GPU-0")
WHOLE = dataclasses.replace(parts.gpu("a100-40gb", index=1, minor=1, uuid="GPU-1"), mode=OFF)
STATE = node.NodeState(gpus=(SPLIT, WHOLE), serving="kubelet")
SEEN = advertise.advertise(STATE)


def document(around: facts.HostFacts | None) -> render.Document:
    told = render.resources_document(SEEN, STATE, around)
    assert json.loads(json.dumps(told)) == told
    return told


def table(around: facts.HostFacts | None) -> str:
    return render.resources_table(SEEN, node=STATE, facts=around)


def test_parents_labels_and_overlay() -> None:
    told = document(None)
    assert told["parents"] == [
        {"index": 0, "uuid": "GPU-0", "devices": {"2g.10gb": 2, "1g.5gb": 1}},
        {"index": 1, "uuid": "GPU-1", "devices": {}},
    ]
    assert told["node_overlay"] == {
        "none": {"capacity": {"nvidia.com/gpu": "2"}},
        "mixed": {
            "capacity": {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "1", "nvidia.com/mig-2g.10gb": "2"},
        },
    }
    assert told["labels"]["mixed"]["nvidia.com/mig-2g.10gb.count"] == "2"
    assert told["labels"]["single"]["nvidia.com/gpu.product"].endswith("MIG-INVALID")
    assert "observed" not in told
    assert "GPU 0  1 x 1g.5gb, 2 x 2g.10gb" in table(None)


def test_the_form_without_a_node_is_the_old_one() -> None:
    assert set(render.resources_document(SEEN)) == {"device_plugin", "dra", "ecs", "notes"}
    assert "on one GPU" not in render.resources_table(SEEN)


@pytest.mark.parametrize(
    ("allocatable", "differs"),
    [
        ({"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 1, "nvidia.com/mig-2g.10gb": 2}, False),
        ({"nvidia.com/gpu": 1, "nvidia.com/mig-2g.10gb": 3}, True),
    ],
)
def test_what_the_kubelet_has_is_compared(allocatable: dict[str, int], differs: bool) -> None:
    around = facts.HostFacts(allocatable=allocatable, plugins=1, strategy="mixed", strategy_source=facts.GFD_LABELS)
    told = document(around)
    assert told["observed"]["kubelet"] == allocatable
    assert [d["code"] for d in told["differences"]] == (["kubelet-differs"] if differs else [])
    text = table(around)
    assert "the device plugin is set to mixed" in text
    assert f"the kubelet has {allocatable['nvidia.com/gpu']} nvidia.com/gpu" in text
    assert ("! kubelet-differs" in text) is differs


def test_a_kubelet_that_does_not_tell_is_said() -> None:
    around = facts.HostFacts(allocatable_problem="cannot ask the kubelet")
    assert document(around)["observed"]["kubelet"] is None
    assert document(around)["observed"]["kubelet_problem"] == "cannot ask the kubelet"
    assert "what the kubelet has is not known: cannot ask the kubelet" in table(around)


def test_what_the_ecs_agent_was_told_is_compared() -> None:
    around = facts.HostFacts(ecs="x", ecs_gpu_info=facts.EcsGpuInfo(("GPU-0", "GPU-9")))
    assert document(around)["observed"]["ecs"] == ["GPU-0", "GPU-9"]
    assert [d["code"] for d in document(around)["differences"]] == ["ecs-gpu-info-differs"]
    assert "the ECS agent was told of 2 GPUs" in table(around)
    missing = facts.HostFacts(ecs="x", ecs_gpu_info=facts.EcsGpuInfo(problem="it is not there"))
    assert document(missing)["observed"]["ecs"] is None
    assert document(missing)["observed"]["ecs_problem"] == "it is not there"
    assert "ECS agent was told" not in table(missing)
