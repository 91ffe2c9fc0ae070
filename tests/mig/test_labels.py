"""The labels of GPU feature discovery, against what it has been seen to write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.mig import labels, node
from tests.mig import parts

OFF = node.ModeState(current=False, pending=False)
UNIFORM = ["2g.10gb@0", "2g.10gb@2", "2g.10gb@4"]
BALANCED = ["3g.20gb@4", "2g.10gb@0", "1g.5gb@2", "1g.5gb@3"]
INVALID = {
    "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID",
    "nvidia.com/gpu.count": "0",
    "nvidia.com/gpu.replicas": "0",
    "nvidia.com/gpu.memory": "0",
}


def nodes(*held: list[str] | None, model: str = "a100-40gb", **fields: Any) -> node.NodeState:
    gpus = []
    for index, instances in enumerate(held):
        one = parts.gpu(model, *(instances or []), index=index, minor=index, uuid=f"GPU-{index}")
        gpus.append(one if instances is not None else dataclasses.replace(one, mode=OFF))
    return node.NodeState(gpus=tuple(gpus), **fields)


def test_a_uniform_node_under_single_is_labelled_as_its_instances_are() -> None:
    found = labels.labels(nodes(*[UNIFORM] * 8), "single")
    assert found == {
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-2g.10gb",
        "nvidia.com/gpu.count": "24",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.memory": "9984",
        "nvidia.com/gpu.multiprocessors": "28",
        "nvidia.com/gpu.slices.gi": "2",
        "nvidia.com/gpu.slices.ci": "2",
        "nvidia.com/gpu.engines.copy": "2",
        "nvidia.com/gpu.engines.decoder": "1",
        "nvidia.com/gpu.engines.encoder": "0",
        "nvidia.com/gpu.engines.jpeg": "0",
        "nvidia.com/gpu.engines.ofa": "0",
    }


@pytest.mark.parametrize(
    "held", [(UNIFORM, None), (UNIFORM, []), (BALANCED,)], ids=["one whole", "one empty", "two types"]
)
def test_where_single_cannot_be_the_labels_say_invalid(held: tuple[list[str] | None, ...]) -> None:
    assert labels.labels(nodes(*held), "single").items() >= INVALID.items()


def test_mixed_labels_each_profile_and_the_whole_gpus() -> None:
    found = labels.labels(nodes(*[BALANCED] * 4, *[None] * 4), "mixed")
    counts = {key: value for key, value in found.items() if key.endswith(".count")}
    assert counts == {
        "nvidia.com/gpu.count": "8",
        "nvidia.com/mig-1g.5gb.count": "8",
        "nvidia.com/mig-2g.10gb.count": "4",
        "nvidia.com/mig-3g.20gb.count": "4",
    }
    assert found["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert found["nvidia.com/gpu.replicas"] == "1"
    assert found["nvidia.com/mig-3g.20gb.product"] == "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"
    assert found["nvidia.com/mig-3g.20gb.multiprocessors"] == "42"


def test_a_plus_stays_in_a_label() -> None:
    found = labels.labels(nodes(["1g.10gb+me@0"], model="h100-sxm-80gb"), "mixed")
    assert found["nvidia.com/mig-1g.10gb+me.count"] == "1"


@pytest.mark.parametrize("strategy", ["none", "single"])
def test_without_mig_a_node_is_labelled_by_its_gpus(strategy: str) -> None:
    found = labels.labels(nodes(None, None), strategy)
    assert found["nvidia.com/gpu.count"] == "2"
    assert found["nvidia.com/gpu.memory"] == "40960"
    assert found.get("nvidia.com/mig.strategy") == (None if strategy == "none" else "single")


def test_a_gpu_with_mig_on_shares_nothing_under_none() -> None:
    found = labels.labels(nodes(UNIFORM), "none")
    assert (found["nvidia.com/gpu.count"], found["nvidia.com/gpu.replicas"]) == ("1", "0")


def test_what_nobody_knows_is_left_out() -> None:
    assert labels.labels(node.NodeState(gpus=()), "mixed") == {}
    strange = dataclasses.replace(nodes(UNIFORM).gpus[0], offers=(), memory_bytes=0)
    found = labels.labels(node.NodeState(gpus=(strange,)), "mixed")
    assert "nvidia.com/gpu.memory" not in found
    assert not any("engines" in key for key in found)
