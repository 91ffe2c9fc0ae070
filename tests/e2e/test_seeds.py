"""The manifests, settings and tables of the two AWS guides, on the nodes they were written for.

`docs/schedulers.md` lists every statement of the guides with the test that shows it; most are here.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel import yaml

from agent.host import ec2
from agent.sim import tables
from tests import verbs

DATA = Path(__file__).resolve().parents[1] / "data"
SEEDS = DATA / "seeds"
P4D = ("--simulate", "p4d.24xlarge", "--sim-state")


def documents(name: str) -> list[Any]:
    return list(yaml.YAML(typ="safe", pure=True).load_all((SEEDS / name).read_text()))


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A p4d as the user data of the Bottlerocket node class makes it."""
    place = tmp_path_factory.mktemp("uniform")
    settings = place / "user-data.toml"
    settings.write_text(documents("nodeclass-bottlerocket.yaml")[0]["spec"]["userData"])
    ended = verbs.run("apply", "--yes", *P4D, place / "state", "--settings", settings)
    assert ended.code == 0, ended.err
    return (*P4D, place / "state")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A p4d as the MIG configuration in the operator's values makes it, by its label."""
    place = tmp_path_factory.mktemp("half")
    config = place / "config.yaml"
    values = documents("gpu-operator-values.yaml")[0]["migManager"]["config"]
    config.write_text(values["data"]["config.yaml"])
    default = verbs.run("plan", *P4D, place / "state", "--mig-config", f"{config}:{values['default']}")
    assert default.code == 0, "all-disabled is what a fresh node is"
    ended = verbs.run("apply", "--yes", *P4D, place / "state", "--mig-config", f"{config}:p4d-half-balanced")
    assert ended.code == 0, ended.err
    return (*P4D, place / "state")


# --- what the nodes become ----------------------------------------------------------------------------


def test_user_data_of_the_node_class_gives_24_gpus(uniform: tuple[object, ...]) -> None:
    told = verbs.run("resources", *uniform, "--output", "json").json()
    assert told["device_plugin"]["single"] == {"nvidia.com/gpu": 24}
    assert told["node_overlay"]["single"] == {"capacity": {"nvidia.com/gpu": "24"}}
    assert told["labels"]["single"]["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-MIG-2g.10gb"


def test_the_operators_configuration_gives_what_the_guide_says(half: tuple[object, ...]) -> None:
    told = verbs.run("resources", *half, "--output", "json").json()
    assert told["device_plugin"]["single"] is None
    assert told["device_plugin"]["mixed"] == {
        "nvidia.com/mig-1g.5gb": 8,
        "nvidia.com/mig-2g.10gb": 4,
        "nvidia.com/mig-3g.20gb": 4,
        "nvidia.com/gpu": 4,
    }
    assert [parent["devices"] for parent in told["parents"]] == [{"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}] * 4 + [
        {}
    ] * 4
    assert set(told["labels"]["mixed"]) >= {"nvidia.com/mig-1g.5gb.count", "nvidia.com/gpu.count"}


def test_nvidia_smi_on_the_host_lists_what_the_guide_prints(half: tuple[object, ...]) -> None:
    def masked(text: str) -> list[str]:
        return [re.sub(r"(GPU|MIG)-[0-9a-f-]+", r"\1-…", line) for line in text.splitlines()]

    ended = verbs.run("status", *half, "--output", "nvidia-smi")
    assert masked(ended.out) == masked((DATA / "nvidia-smi" / "p4d-half-balanced.txt").read_text())


def test_instances_have_the_figures_of_the_guides_table(half: tuple[object, ...]) -> None:
    status = verbs.run("status", *half, "--output", "json").json()
    gpu = status["gpus"][0]
    assert gpu["mig"] == {"capable": True, "current": True, "pending": True}
    figures = {
        i["profile"]: (i["memory"]["total_bytes"] >> 20, i["compute_instances"][0]["multiprocessors"])
        for i in gpu["gpu_instances"]
    }
    assert figures == {"3g.20gb": (20096, 42), "2g.10gb": (9984, 28), "1g.5gb": (4864, 14)}
    labels = verbs.run("resources", *half, "--output", "json").json()["labels"]["mixed"]
    engines = {
        name: tuple(labels[f"nvidia.com/mig-{name}.engines.{kind}"] for kind in ("copy", "decoder", "encoder"))
        for name in figures
    }
    assert engines == {"3g.20gb": ("3", "2", "0"), "2g.10gb": ("2", "1", "0"), "1g.5gb": ("1", "0", "0")}


def test_the_node_pool_itself_asks_for_no_gpu() -> None:
    ended = verbs.run("explain", "--simulate", "p4d.24xlarge", SEEDS / "nodepool-al2023.yaml")
    assert ended.code == 2
    assert "there is no workload in it: it holds only EC2NodeClass, NodePool" in ended.err


# --- pods and claims ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "on_half", "on_uniform", "why"),
    [
        ("dra-any-profile.yaml", True, True, ""),
        ("dra-one-profile.yaml", True, False, "no MIG device with profile 1g.5gb"),
        ("dra-same-parent.yaml", True, False, "no MIG device with profile 1g.5gb"),
    ],
)
def test_a_claim_is_given_a_device(
    manifest: str, on_half: bool, on_uniform: bool, why: str, half: tuple[object, ...], uniform: tuple[object, ...]
) -> None:
    for node, fits in ((half, on_half), (uniform, on_uniform)):
        ended = verbs.run("explain", *node, SEEDS / manifest, "--output", "json")
        (verdict,) = ended.json()
        assert (verdict["kind"], verdict["strategy"], verdict["fits"]) == ("Pod", "dra", fits), ended.out
        assert ended.code == (0 if fits else 1)
        assert fits or why in verdict["reasons"][0]
        assert fits or verdict["line"] is not None


@pytest.mark.parametrize(("strategy", "fits"), [("mixed", True), ("single", False), ("none", False)])
def test_the_pod_must_ask_by_the_strategy(strategy: str, fits: bool, half: tuple[object, ...]) -> None:
    ended = verbs.run("explain", *half, SEEDS / "pod-mixed.yaml", "--strategy", strategy, "--output", "json")
    (verdict,) = ended.json()
    assert verdict["fits"] is fits
    assert ended.code == (0 if fits else 1)


def test_a_profile_that_is_not_advertised_leaves_the_pod_pending(uniform: tuple[object, ...]) -> None:
    ended = verbs.run("explain", *uniform, SEEDS / "pod-mixed.yaml", "--strategy", "mixed")
    assert ended.code == 1
    assert "line 14: the node advertises no nvidia.com/mig-1g.5gb under mixed" in ended.out
    assert "the pod stays Pending" in ended.out


def test_bottlerockets_settings_say_which_strategy_there_is(uniform: tuple[object, ...], tmp_path: Path) -> None:
    settings = tmp_path / "user-data.toml"
    settings.write_text(documents("nodeclass-bottlerocket.yaml")[0]["spec"]["userData"])
    ended = verbs.run("explain", *uniform, "--settings", settings, SEEDS / "pod-mixed.yaml", "--output", "json")
    (verdict,) = ended.json()
    assert (verdict["strategy"], verdict["fits"]) == ("single", False)
    assert "strategy is single, by Bottlerocket's settings" in ended.err


def test_labels_of_feature_discovery_say_which_strategy_there_is(half: tuple[object, ...]) -> None:
    root = next((p for p in Path(str(half[3])).parent.iterdir() if p.is_dir()), None)
    assert root is not None, "a kept node has its files beside it"
    labels = root / "etc/kubernetes/node-feature-discovery/features.d/gfd"
    labels.parent.mkdir(parents=True)
    labels.write_text("nvidia.com/mig.strategy=mixed\n")
    try:
        ended = verbs.run("explain", *half, SEEDS / "pod-mixed.yaml", "--output", "json")
        resources = verbs.run("resources", *half, "--output", "json").json()
    finally:
        labels.unlink()
    assert [(v["strategy"], v["fits"]) for v in ended.json()] == [("mixed", True)]
    assert (resources["observed"]["strategy"], resources["differences"]) == ("mixed", [])


# --- task definitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "node", "fits", "why"),
    [
        ("ecs-two-gpus.json", "g4dn.12xlarge", True, ""),
        ("ecs-two-gpus.json", "g4dn.xlarge", False, "asks for 2 GPUs, the instance has 1"),
        ("ecs-tensorflow.json", "g4dn.xlarge", True, ""),
        ("ecs-fraction.json", "g6f.2xlarge", True, ""),
        ("ecs-fraction.json", "g6f.large", False, "belongs to g6f.2xlarge; this is a 0.125 instance"),
        ("ecs-fraction.json", "g4dn.xlarge", False, "does not slice a whole GPU"),
    ],
)
def test_a_task_definition_on_its_instance(task: str, node: str, fits: bool, why: str) -> None:
    ended = verbs.run("explain", "--simulate", node, SEEDS / task, "--output", "json")
    (verdict,) = ended.json()
    assert (verdict["kind"], verdict["strategy"], verdict["fits"]) == ("TaskDefinition", "ecs", fits)
    assert fits or why in verdict["reasons"][0]
    assert ended.code == (0 if fits else 1)


def test_the_comma_too_many_of_the_guide_is_told_with_its_line() -> None:
    ended = verbs.run("explain", "--simulate", "g4dn.xlarge", SEEDS / "ecs-tensorflow-as-printed.json")
    assert ended.code == 2
    assert "ecs-tensorflow-as-printed.json, line 13" in ended.err or ":13:" in ended.err, ended.err


@pytest.mark.parametrize(
    ("value", "nodes"), [("0.125", ("g6f.large", "g6f.xlarge")), ("0.25", ("g6f.2xlarge",)), ("0.5", ("g6f.4xlarge",))]
)
def test_each_fraction_belongs_to_its_types(value: str, nodes: tuple[str, ...]) -> None:
    for node in nodes:
        told = verbs.run("resources", "--simulate", node, "--output", "json").json()
        assert told["ecs"] == {"gpus": 1, "values": [value]}
        status = verbs.run("status", "--simulate", node, "--output", "json").json()
        (gpu,) = status["gpus"]
        assert gpu["mig"]["capable"] is False
        assert gpu["memory"]["total_bytes"] / 2**30 == pytest.approx(24 * float(value), rel=0.1)


def test_a_table_of_fractions_has_nothing_else() -> None:
    fractions = collections.defaultdict(list)
    for name, kind in tables.instance_types().items():
        for value in kind.ecs_values:
            if "." in value:
                fractions[value].append(name)
    assert {value: sorted(names) for value, names in fractions.items()} == {
        "0.125": ["g6f.large", "g6f.xlarge"],
        "0.25": ["g6f.2xlarge"],
        "0.5": ["g6f.4xlarge"],
    }


# --- tables of hardware -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model", "gigabytes"),
    [
        ("p4d.24xlarge", "A100", 320),
        ("p4de.24xlarge", "A100", 640),
        ("p5.48xlarge", "H100", 640),
        ("p5e.48xlarge", "H200", 1128),
        ("p5en.48xlarge", "H200", 1128),
        ("p6-b200.48xlarge", "B200", 1432),
        ("p6-b300.48xlarge", "B300", 2144),
        ("g7.48xlarge", "RTX PRO 4500", 256),
        ("g7e.48xlarge", "RTX PRO 6000", 768),
    ],
)
def test_the_types_that_can_do_mig(name: str, model: str, gigabytes: int) -> None:
    kind = ec2.instance_type(name)
    assert kind is not None
    assert (kind.gpus, kind.mig_capable) == (8, True)
    part = tables.model(tables.instance_types()[name].model)
    assert model in part.name
    assert part.mig_capable
    assert kind.memory_mib is not None
    assert 8 * kind.memory_mib / 1024 == pytest.approx(gigabytes, rel=0.05)


def test_an_ultraserver_can_do_mig() -> None:
    kind = ec2.instance_type("p6e-gb200.36xlarge")
    assert kind is not None
    assert (kind.gpus, kind.mig_capable) == (4, True)


@pytest.mark.parametrize("name", ["g5.xlarge", "g6.xlarge", "g6e.xlarge"])
def test_the_families_without_mig_are_refused_with_what_to_use_instead(name: str, tmp_path: Path) -> None:
    settings = tmp_path / "user-data.toml"
    settings.write_text(documents("nodeclass-bottlerocket.yaml")[0]["spec"]["userData"])
    ended = verbs.run("apply", "--yes", "--simulate", name, "--settings", settings)
    assert ended.code == 4
    assert name.split(".")[0] in ended.err + ended.out
    assert "time-slicing" in ended.err + ended.out


_SEVEN = {"1g": 7, "1g double": 4, "2g": 3, "3g": 2, "4g": 1, "7g": 1}
PROFILES: dict[str, dict[str, int]] = {
    node: dict(zip(names.split(), _SEVEN.values(), strict=True))
    for node, names in {
        "p4d.24xlarge": "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
        "p4de.24xlarge": "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
        "p5.48xlarge": "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
        "p5en.48xlarge": "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
        "p6-b200.48xlarge": "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
    }.items()
} | {"g7e.48xlarge": {"1g.24gb": 4, "2g.48gb": 2, "4g.96gb": 1}}


@pytest.mark.parametrize("node", PROFILES)
def test_each_type_offers_the_profiles_of_the_guide(node: str) -> None:
    told = verbs.run("profiles", "--simulate", node, "--output", "json").json()
    offered = {p["name"]: p["max_instances"] for p in told[0]["profiles"]}
    assert PROFILES[node].items() <= offered.items()
    for profile in told[0]["profiles"]:
        gigabytes = int(re.findall(r"\.(\d+)gb", profile["name"])[0])
        assert profile["memory_bytes"] / 2**30 == pytest.approx(gigabytes, rel=0.12)


def test_figures_that_the_guide_calls_preliminary_come_from_the_driver() -> None:
    told = verbs.run("profiles", "--simulate", "p6-b300.48xlarge", "--output", "json").json()
    offered = {p["name"]: p["max_instances"] for p in told[0]["profiles"]}
    assert {"1g.34gb": 7, "1g.67gb": 4, "2g.67gb": 3, "3g.135gb": 2, "7g.269gb": 1}.items() <= offered.items()


def test_rtx_pro_offers_graphics_and_media_variants() -> None:
    told = verbs.run("profiles", "--simulate", "g7e.48xlarge", "--output", "json").json()
    names = {p["name"] for p in told[0]["profiles"]}
    assert {"1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me"} <= names
