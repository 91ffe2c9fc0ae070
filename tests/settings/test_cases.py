"""Documents people write, on the nodes they write them for: the layout each means, or the refusal."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.settings import resolve, source
from tests.settings import gpus

CASES = Path(__file__).parent / "data" / "cases"
EXAMPLES = Path(__file__).parents[2] / "bottlerocket" / "examples"


def found(path: Path, node: nodes.NodeState, label: str | None = None) -> resolve.Resolution:
    request = source.Request(root=CASES / "none", files=(path,))
    if label is not None:
        request = source.Request(root=CASES / "none", mig_config=f"{path}:{label}")
    return resolve.resolve(source.load(request), node)


def split(resolution: resolve.Resolution) -> list[dict[str, int] | None]:
    """The layout GPU by GPU: profile to count, None for MIG off."""
    return [
        dict(collections.Counter(str(i.profile) for i in gpu.instances)) if gpu.mig else None
        for gpu in resolution.layout.gpus
    ]


HALF: list[dict[str, int] | None] = [{"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}] * 4 + [None] * 4


@pytest.mark.parametrize(
    ("document", "model", "count", "wanted"),
    [
        ("p4d-uniform.toml", "a100.40gb", 8, [{"2g.10gb": 3}] * 8),
        ("half-balanced.gpunode.toml", "a100.40gb", 8, HALF),
        ("no-profile.toml", "a100.40gb", 8, [{"7g.40gb": 1}] * 8),
        ("no-profile.toml", "rtxpro6000.96gb", 8, [{"4g.96gb": 1}] * 8),
        ("fleet.toml", "a100.40gb", 8, [{"1g.5gb": 7}] * 8),
        ("fleet.toml", "a100.80gb", 8, [{"2g.20gb": 3}] * 8),
        ("fleet.toml", "h100.80gb", 1, [{"1g.20gb": 4}]),
        ("fleet.toml", "h200.141gb", 8, [{"1g.35gb": 4}] * 8),
        ("fleet.toml", "b200.180gb", 8, [{"2g.45gb": 3}] * 8),
        ("fleet.toml", "rtxpro6000.96gb", 2, [{"2g.48gb": 2}] * 2),
        ("fleet.toml", "b300.269gb", 8, [{"7g.269gb": 1}] * 8),
        ("exact.gpunode.toml", "h100.80gb", 1, [{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb+me": 1}]),
    ],
)
def test_a_document_means_this_layout(
    document: str, model: str, count: int, wanted: list[dict[str, int] | None]
) -> None:
    assert split(found(CASES / "settings" / document, gpus.node(model, count))) == wanted


def test_a_mig_parted_label_means_the_same_as_our_own_words() -> None:
    theirs = found(CASES / "settings" / "half-balanced.mig-parted.yaml", gpus.node(), "half-balanced")
    ours = found(CASES / "settings" / "half-balanced.gpunode.toml", gpus.node())
    assert split(theirs) == HALF
    assert [(g.uuid, g.mig, g.instances) for g in theirs.layout.gpus] == [
        (g.uuid, g.mig, g.instances) for g in ours.layout.gpus
    ]


def test_a_model_without_a_line_is_warned_about_with_the_keys_that_are_there() -> None:
    (warning,) = found(CASES / "settings" / "fleet.toml", gpus.node("b300.269gb")).problems
    assert warning.severity == "warning"
    for word in ("b300.269gb", "7g.269gb", "a100.40gb", "rtxpro6000.96gb"):
        assert word in warning.message


def test_gpus_without_mig_stay_in_the_layout_for_the_planner_to_refuse() -> None:
    (gpu,) = found(CASES / "settings" / "fleet.toml", nodes.NodeState((gpus.incapable(0),))).layout.gpus
    assert gpu.mig
    assert gpu.instances == ()


GOLDEN = {
    "unknown-profile.toml": (
        'unknown-profile.toml, line 4, key settings.kubelet-device-plugins.nvidia.mig.profile."a100.40gb": '
        "a100.40gb has no profile 2g.20gb; did you mean 2g.10gb? "
        "It has 1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
    ),
    "typo-key.toml": (
        'typo-key.toml, line 2, key gpunode.enforcment: unknown key "enforcment"; did you mean "enforcement"?'
    ),
    "two-owners.toml": (
        "two-owners.toml, line 6, key gpunode.layout[1].gpus[0]: "
        "GPU 1 is named by two layouts: here, and at two-owners.toml line 2"
    ),
    "no-such-gpu.toml": (
        "no-such-gpu.toml, line 2, key gpunode.layout[0].gpus[1]: there is no GPU 8 (this node has 8 GPUs, 0 to 7)"
    ),
    "syntax.toml": (
        "syntax.toml, line 1: is not valid TOML: Expected ']' at the end of a table declaration (column 40)"
    ),
    "mig-parted.yaml": (
        'mig-parted.yaml, line 4, key mig-configs.half[0].devices: must be "all" or a list like [7], and is 7\n'
        'mig-parted.yaml, line 6, key mig-configs.half[0].mig-devices."1g.5gb": '
        "must be a whole number from 0 to 64, and is -1"
    ),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_bad_document_is_refused_in_these_words(name: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        found(CASES / "bad" / name, gpus.node())
    assert str(caught.value).replace(f"{CASES}/bad/", "") == GOLDEN[name]
    assert caught.value.exit_code == 2


def test_what_no_empty_gpu_holds_is_refused_once_for_all_equal_gpus() -> None:
    with pytest.raises(errors.SettingsError) as caught:
        found(CASES / "bad" / "too-much.toml", gpus.node())
    (problem,) = caught.value.problems
    assert problem.code == "too-much"
    assert problem.line == 1
    for word in ("3g.20gb", "1g.5gb", "memory slices", "GPU 1, 2, 3, 4, 5, 6, 7"):
        assert word in problem.message


def test_every_bad_case_is_looked_at() -> None:
    assert {path.name for path in (CASES / "bad").iterdir()} == {*GOLDEN, "too-much.toml"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_we_ship_are_good_where_they_are_meant_for(path: Path) -> None:
    meant_for = "h100.80gb" if path.name.startswith("p5") else "a100.40gb"
    assert found(path, gpus.node(meant_for)).problems == ()


@pytest.mark.parametrize("model", sorted(set(gpus.MODELS) - {"h100.94gb"}))
def test_the_fleet_example_has_a_line_for_every_model(model: str) -> None:
    resolution = found(EXAMPLES / "fleet.toml", gpus.node(model, 2))
    assert resolution.problems == ()
    assert all(gpu.instances for gpu in resolution.layout.gpus)
