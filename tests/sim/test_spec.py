"""Names and node files become nodes, or errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import errors
from agent.sim import spec, tables


def read(tmp_path: Path, text: str) -> spec.Node:
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return spec.read(str(path))


def test_an_ec2_type_has_its_gpus() -> None:
    node = spec.read("p4d.24xlarge")
    assert [gpu.model for gpu in node.gpus] == ["a100-40gb"] * 8
    assert node.instance_type == "p4d.24xlarge"
    assert node.persistenced
    assert len({gpu.uuid for gpu in node.gpus}) == len({gpu.pci_bus_id for gpu in node.gpus}) == 8
    assert [g.pci_bus_id for g in node.gpus] == sorted(g.pci_bus_id for g in node.gpus)
    assert all(gpu.mode_change == "pending" for gpu in node.gpus)


@pytest.mark.parametrize("kind", [k for k, t in tables.instance_types().items() if t.count is not None])
def test_every_type_of_known_count_can_be_opened(kind: str) -> None:
    node = spec.read(kind)
    assert len(node.gpus) == tables.instance_types()[kind].count
    assert len({gpu.pci_bus_id for gpu in node.gpus}) == len(node.gpus)


@pytest.mark.parametrize("kind", [k for k, t in tables.instance_types().items() if t.count is None])
def test_a_type_of_unknown_count_says_so(kind: str) -> None:
    with pytest.raises(spec.UnpublishedError, match=r"not published.*gb300\.278gb:4") as caught:
        spec.read(kind)
    assert caught.value.exit_code == 4


def test_a_model_key_with_and_without_a_count() -> None:
    assert [gpu.model for gpu in spec.read("h100.80gb:2").gpus] == ["h100-sxm-80gb"] * 2
    assert [gpu.model for gpu in spec.read("h100-pcie-80gb").gpus] == ["h100-pcie-80gb"]
    assert spec.read("h100.80gb:2") == spec.read("h100.80gb:2")
    assert spec.read("h100.80gb:2").digest() != spec.read("h100.80gb:3").digest()


def test_both_id_maps_are_drawn() -> None:
    assert {gpu.gi_id_map for gpu in spec.read("a100.40gb:32").gpus} == {"seven-slice-A", "seven-slice-B"}
    assert {gpu.gi_id_map for gpu in spec.read("a30.24gb:4").gpus} == {"a30"}
    assert {gpu.gi_id_map for gpu in spec.read("rtxpro6000.96gb:4").gpus} == {"rtxpro6000"}


def test_the_driver_fits_the_part() -> None:
    assert spec.read("g7.2xlarge").driver_major == 595
    assert spec.read("p4d.24xlarge").driver_major == 590


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("p4d.24xlarg", r"did you mean p4d\.24xlarge"),
        ("p4d", r"did you mean p4d\.24xlarge or p4de"),
        ("a100:2", r"did you mean a100\.40gb or a100\."),
        ("/", "it is no file"),
        ("h100.80gb:0", "from 1 to 128"),
        ("h100.80gb:many", "from 1 to 128"),
        ("missing.toml", "no such node file"),
        ("zzzzzz", "`gpunode simulate` lists them"),
    ],
)
def test_an_unknown_name_is_a_usage_error_that_helps(name: str, says: str) -> None:
    with pytest.raises(spec.SimulationError, match=says) as caught:
        spec.read(name)
    assert caught.value.exit_code == errors.EXIT_USAGE


def test_a_node_file(tmp_path: Path) -> None:
    node = read(
        tmp_path,
        """
        instance-type = "p4d.24xlarge"
        root = false
        driver-version = "550.163.01"
        missing-functions = ["nvmlDeviceGetPowerUsage"]
        scheduler = "kubelet"
        reset = "impossible"
        load = "busy"
        seed = 7
        [latency]
        create-gi = 0.15
        read = 0.0002
        [[gpu]]
        model = "a100.40gb"
        count = 2
        mode-change = "in-use"
        gi-id-map = "B"
        [[gpu]]
        model = "a30-24gb"
        uuid = "GPU-00000000-0000-0000-0000-000000000001"
        [[fault]]
        call = "nvmlDeviceGetName"
        action = "fail"
        """,
    )
    assert node.name == "lab"
    assert [gpu.model for gpu in node.gpus] == ["a100-40gb", "a100-40gb", "a30-24gb"]
    assert {gpu.gi_id_map for gpu in node.gpus[:2]} == {"seven-slice-B"}
    assert node.gpus[0].mode_change == "in-use"
    assert node.gpus[2].uuid.endswith("1")
    assert (node.root, node.driver_major, node.cuda_version, node.scheduler) == (False, 550, 12040, "kubelet")
    assert dict(node.latency) == {"create-gi": 0.15, "read": 0.0002, "pcie-throughput": 0.02}
    assert not node.reset_possible
    assert node.missing_functions == ("nvmlDeviceGetPowerUsage",)
    assert len(node.faults) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "no key x"),
        ("instanc-type = 'p4d.24xlarge'\n", "did you mean instance-type"),
        ("instance-type = 'p4x'\n", "no EC2 type"),
        ("instance-type = 'p6e-gb300.36xlarge'\n", "no GPUs"),
        ("name = 'x'\n", "no GPUs"),
        ("root = 1\n", "root takes bool"),
        ("seed = true\n", "seed takes int"),
        ("[[gpu]]\ncount = 1\n", "say which"),
        ("[[gpu]]\nmodel = 'a100.40gb'\ncount = 0\n", "1 to 128"),
        ("[[gpu]]\nmodel = 'nothing'\n", "model nothing"),
        ("[[gpu]]\nmodel = 'a30.24gb'\ncount = 2\nuuid = 'GPU-1'\n", "uuid is for one GPU"),
        ("[[gpu]]\nmodel = 'a30.24gb'\nuuid = 'GPU-1'\n[[gpu]]\nmodel = 'a30.24gb'\nuuid = 'GPU-1'\n", "same uuid"),
        ("[[gpu]]\nmodel = 'a30.24gb'\nmode-change = 'soon'\n", "mode-change is one of"),
        ("[[gpu]]\nmodel = 'a30.24gb'\n[latency]\nslow = 1\n", "no key slow"),
        ("[[gpu]]\nmodel = 'a30.24gb'\n[[fault]]\ncal = 'x'\n", "did you mean call"),
        ("driver-version = 'new'\n[[gpu]]\nmodel = 'a30.24gb'\n", "driver-version looks like"),
        ("gpu = [1]\n", "write a table"),
        ("= 1\n", "cannot read the node file"),
    ],
)
def test_a_bad_node_file_names_what_is_off(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(spec.SimulationError, match=says) as caught:
        read(tmp_path, text)
    assert "lab.toml" in str(caught.value)


def test_a_directory_is_no_node_file(tmp_path: Path) -> None:
    with pytest.raises(spec.SimulationError, match="no file"):
        spec.read(str(tmp_path))
    with pytest.raises(spec.SimulationError, match="cannot read"):
        spec.read_file(tmp_path)
