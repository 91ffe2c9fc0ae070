"""What schedulers will see: figures from the project's own cases and the refusals of each scheduler."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.mig import advertise, node, profile
from tests.mig import parts

OFF = node.ModeState(current=False, pending=False)


def nodes(*held: list[str] | None, model: str = "a100-40gb", **fields: Any) -> node.NodeState:
    """Return a node with one GPU an entry: what is on it, or None for MIG off."""
    gpus = []
    for index, instances in enumerate(held):
        one = parts.gpu(model, *(instances or []), index=index, minor=index, uuid=f"GPU-{index}")
        gpus.append(one if instances is not None else dataclasses.replace(one, mode=OFF))
    return node.NodeState(gpus=tuple(gpus), **fields)


UNIFORM = ["2g.10gb@0", "2g.10gb@2", "2g.10gb@4"]
BALANCED = ["3g.20gb@4", "2g.10gb@0", "1g.5gb@2", "1g.5gb@3"]


@pytest.mark.parametrize(
    ("state", "none", "single", "mixed"),
    [
        pytest.param(
            nodes(*[UNIFORM] * 8),
            {"nvidia.com/gpu": 8},
            {"nvidia.com/gpu": 24},
            {"nvidia.com/mig-2g.10gb": 24},
            id="eight uniform GPUs",
        ),
        pytest.param(
            nodes(*[BALANCED] * 4, *[None] * 4),
            {"nvidia.com/gpu": 8},
            None,
            {
                "nvidia.com/mig-1g.5gb": 8,
                "nvidia.com/mig-2g.10gb": 4,
                "nvidia.com/mig-3g.20gb": 4,
                "nvidia.com/gpu": 4,
            },
            id="half balanced, half whole",
        ),
        pytest.param(
            nodes(None, None), {"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 2}, id="whole"
        ),
        pytest.param(
            nodes(["3g.40gb@4/2c+1c", "2g.20gb@0", "1g.10gb+me@2"], model="h100-sxm-80gb"),
            {"nvidia.com/gpu": 1},
            None,
            {
                "nvidia.com/mig-1c.3g.40gb": 1,
                "nvidia.com/mig-2c.3g.40gb": 1,
                "nvidia.com/mig-2g.20gb": 1,
                "nvidia.com/mig-1g.10gb.me": 1,
            },
            id="a split instance and media engines",
        ),
        pytest.param(
            nodes(["1g.24gb-me@0", "1g.24gb+me.all@3"], model="rtxpro6000-server-96gb"),
            {"nvidia.com/gpu": 1},
            None,
            {"nvidia.com/mig-1g.24gb-me": 1, "nvidia.com/mig-1g.24gb.me.all": 1},
            id="a plus becomes a dot, a minus stays",
        ),
        pytest.param(
            nodes(["1g.24gb@0", "1g.24gb+gfx@3"], model="rtxpro6000-server-96gb"),
            {"nvidia.com/gpu": 1},
            {"nvidia.com/gpu": 2},
            {"nvidia.com/mig-1g.24gb": 1, "nvidia.com/mig-1g.24gb.gfx": 1},
            id="graphics alone makes no other type, as the plugin compares figures",
        ),
        pytest.param(nodes(), {"nvidia.com/gpu": 0}, {"nvidia.com/gpu": 0}, {}, id="no GPU"),
    ],
)
def test_the_device_plugin_sees(
    state: node.NodeState, none: dict[str, int], single: dict[str, int] | None, mixed: dict[str, int]
) -> None:
    found = advertise.advertise(state).device_plugin
    assert (found.none, found.single, found.mixed) == (none, single, mixed)
    assert ("single" in found.refused) == (single is None)
    assert "mixed" not in found.refused


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (nodes(BALANCED, None), "the same MIG mode: it is on for GPU 0 and off for GPU 1"),
        (nodes(UNIFORM, []), "GPU 1 has MIG on and no MIG device"),
        (nodes(UNIFORM, ["2g.10gb@0/"]), "GPU 1 has MIG on and no MIG device"),
        (nodes(BALANCED), "more than one type of MIG device is on the node (1g.5gb, 2g.10gb, 3g.20gb)"),
        (nodes(["1g.10gb@0", "1g.10gb+me@1"], model="h100-sxm-80gb"), "(1g.10gb, 1g.10gb+me)"),
        (nodes(["1g.12gb@0", "1g.12gb+me@1"], model="a100-96gb"), "(1g.12gb, 1g.12gb+me)"),
        (nodes(["1g.20gb@0", "1g.20gb@2/1c"], model="h100-sxm-80gb"), "more than one type"),
    ],
)
def test_the_single_strategy_is_refused_with_the_reason(state: node.NodeState, says: str) -> None:
    assert says in advertise.advertise(state).device_plugin.refused["single"]


def test_a_name_that_kubernetes_does_not_take_refuses_the_mixed_strategy() -> None:
    state = nodes(["1g.5gb@0"])
    long = profile.Profile(1, 5, None, ("x" * 60,))
    gpu = state.gpus[0]
    instance = dataclasses.replace(
        gpu.instances[0], compute=(dataclasses.replace(gpu.instances[0].compute[0], profile=long),)
    )
    found = advertise.advertise(node.NodeState(gpus=(dataclasses.replace(gpu, instances=(instance,)),))).device_plugin
    assert found.mixed is None
    assert "Kubernetes takes 63" in found.refused["mixed"]
    assert advertise.resource_name("1g.24gb+me.all") == "nvidia.com/mig-1g.24gb.me.all"


def test_a_small_compute_instance_goes_under_the_name_of_the_whole_one_and_that_is_noted() -> None:
    found = advertise.advertise(nodes(["1g.20gb@0/1c"], model="h100-sxm-80gb"))
    assert found.device_plugin.mixed == {"nvidia.com/mig-1g.20gb": 1}
    assert found.notes == ("1c.1g.20gb is advertised under the name of the whole instance, with fewer SMs",)


def test_a_gpu_that_does_not_answer_is_not_counted() -> None:
    state = nodes(None, None)
    lost = dataclasses.replace(state.gpus[1], state=node.GpuState.LOST)
    found = advertise.advertise(node.NodeState(gpus=(state.gpus[0], lost)))
    assert found.device_plugin.none == {"nvidia.com/gpu": 1}
    assert found.ecs.values == ("1", "ALL")


def test_dra_devices_carry_names_attributes_and_capacity() -> None:
    state = nodes(BALANCED, None, driver_version="580.159.03", cuda_version="13.0")
    state = dataclasses.replace(
        state,
        gpus=(
            dataclasses.replace(
                state.gpus[0],
                instances=tuple(
                    dataclasses.replace(i, compute=tuple(dataclasses.replace(c, uuid=f"MIG-{i.id}") for c in i.compute))
                    for i in state.gpus[0].instances
                ),
            ),
            state.gpus[1],
        ),
    )
    found = {device.name: device for device in advertise.advertise(state).dra}
    assert list(found) == [
        "gpu-1",
        "gpu-0-mig-2g10gb-14-0",
        "gpu-0-mig-1g5gb-19-2",
        "gpu-0-mig-1g5gb-19-3",
        "gpu-0-mig-3g20gb-9-4",
    ]
    half = found["gpu-0-mig-3g20gb-9-4"]
    assert half.attributes == {
        "type": "mig",
        "profile": "3g.20gb",
        "parentUUID": "GPU-0",
        "productName": "NVIDIA A100-SXM4-40GB",
        "architecture": "Ampere",
        "driverVersion": "580.159.3",
        "cudaDriverVersion": "13.0.0",
        "resource.kubernetes.io/pciBusID": "0000:10:1c.0",
        "uuid": "MIG-0",
    }
    offer = state.gpus[0].offer(profile.parse("3g.20gb"))
    assert offer is not None
    assert half.capacity == {
        "memory": offer.memory_bytes,
        "multiprocessors": 42,
        "copyEngines": 3,
        "decoders": 2,
        "encoders": 0,
        "jpegEngines": 0,
        "ofaEngines": 0,
        **{f"memorySlice{slot}": 1 for slot in (4, 5, 6, 7)},
    }
    assert (half.gpu_index, half.uuid) == (0, "MIG-0")
    whole = found["gpu-1"]
    assert whole.attributes["type"] == "gpu"
    assert whole.attributes["uuid"] == "GPU-1"
    assert whole.capacity == {"memory": 40960 * 2**20}


def test_dra_names_follow_the_minor_and_write_attributes_with_dashes() -> None:
    state = nodes(["1g.10gb+me@5"], model="h100-sxm-80gb")
    moved = dataclasses.replace(state.gpus[0], minor=3)
    [device] = advertise.advertise(node.NodeState(gpus=(moved,))).dra
    assert device.name == "gpu-3-mig-1g10gb-me-20-5"
    unknown = dataclasses.replace(moved, minor=None, index=6)
    [device] = advertise.advertise(node.NodeState(gpus=(unknown,))).dra
    assert device.name.startswith("gpu-6-")


def test_engines_that_nobody_tells_are_no_capacity() -> None:
    [device] = advertise.advertise(nodes(["7g.96gb@0"], model="a100-96gb")).dra
    assert not any("ngines" in key or "coders" in key for key in device.capacity)
    strange = dataclasses.replace(nodes(["7g.96gb@0"], model="a100-96gb").gpus[0], offers=parts.offers("a100-40gb"))
    [device] = advertise.advertise(node.NodeState(gpus=(strange,))).dra
    assert "decoders" not in device.capacity


def test_equal_parts_of_one_instance_share_a_dra_name_and_an_empty_gpu_hides_and_both_are_noted() -> None:
    found = advertise.advertise(nodes(["3g.20gb@4/1c+1c"], []))
    assert found.notes == (
        "GPU 1 has MIG on and no MIG device: only the strategy none advertises it",
        "compute instances of one GPU instance share the DRA device name gpu-0-mig-1c3g20gb-9-4",
    )


@pytest.mark.parametrize(
    ("instance_type", "values"),
    [
        ("g6f.large", ("0.125",)),
        ("g6f.xlarge", ("0.125",)),
        ("g6f.2xlarge", ("0.25",)),
        ("g6f.4xlarge", ("0.5",)),
        ("g5.12xlarge", ("1", "2", "ALL")),
        (None, ("1", "2", "ALL")),
    ],
)
def test_ecs_takes(instance_type: str | None, values: tuple[str, ...]) -> None:
    held = [None] if len(values) == 1 else [None, None]
    found = advertise.advertise(nodes(*held, instance_type=instance_type)).ecs
    assert (found.gpus, found.values, found.refused) == (len(held), values, None)


def test_ecs_is_refused_where_mig_is_on_and_where_nobody_knows() -> None:
    found = advertise.advertise(nodes(UNIFORM, None)).ecs
    assert found.values == ()
    assert found.refused == "ECS does not support MIG, and MIG is on for GPU 0 of this node"
    found = advertise.advertise(nodes(None, instance_type="gr6f.4xlarge")).ecs
    assert found.refused is not None
    assert "gr6f.4xlarge" in found.refused
    assert advertise.advertise(nodes()).ecs == advertise.Ecs(0)


@pytest.mark.parametrize(
    ("told", "published"),
    [("580.159.03", "580.159.3"), ("13.0", "13.0.0"), ("", None), ("new", "new"), ("1.2.3.4", "1.2.3.4")],
)
def test_versions_are_published_as_kubernetes_takes_them(told: str, published: str | None) -> None:
    [device] = advertise.advertise(nodes(None, driver_version=told)).dra
    assert device.attributes.get("driverVersion") == published


def test_an_address_of_no_known_form_stays() -> None:
    gpu = dataclasses.replace(nodes(None).gpus[0], pci_bus_id="somewhere")
    [device] = advertise.advertise(node.NodeState(gpus=(gpu,))).dra
    assert device.attributes["resource.kubernetes.io/pciBusID"] == "somewhere"


def test_devices_are_counted_per_parent() -> None:
    state = nodes(BALANCED, None, ["3g.20gb@4/2c+1c", "1g.5gb@0/"])
    lost = dataclasses.replace(nodes(UNIFORM).gpus[0], uuid="GPU-lost", state=node.GpuState.LOST)
    assert advertise.per_parent(dataclasses.replace(state, gpus=(*state.gpus, lost))) == {
        "GPU-0": {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
        "GPU-1": {},
        "GPU-2": {"1c.3g.20gb": 1, "2c.3g.20gb": 1},
    }
