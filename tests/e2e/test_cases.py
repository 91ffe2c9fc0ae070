"""Every layout and every refusal of the case file, through the command line, on nodes kept in a file.

The verbs run in this process (a start costs 0.4 s, the matrix has hundreds); that the command itself
works from a shell is asked in `test_main_job`.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.sim import node as simulated
from tests import verbs

DATA = Path(__file__).resolve().parents[1] / "data"
CASES = DATA / "cases"
EXPECTED: dict[str, Any] = json.loads((CASES / "expected.json").read_text())
LAYOUTS: list[dict[str, Any]] = EXPECTED["layouts"]


def asked(case: dict[str, Any]) -> tuple[object, ...]:
    """The flags that hand a case's document to a verb."""
    path = CASES / case["settings"]
    if path.suffix == ".toml":
        return ("--settings", path)
    return ("--mig-config", f"{path}:{case['label']}" if "label" in case else path)


def name_of(case: dict[str, Any]) -> str:
    return f"{case['settings']} on {case['node']}"


def whole(case: dict[str, Any]) -> dict[str, Any]:
    """A case with what it takes over from the one it is the same as."""
    if "same_as" not in case:
        return case
    (like,) = [other for other in LAYOUTS if other.get("label") == case["same_as"]]
    return {**{k: v for k, v in like.items() if k != "label"}, **case}


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], tuple[object, ...]]:
    """The flags of a node kept in a file of this test."""
    return lambda name: ("--simulate", name, "--sim-state", tmp_path / "state")


def mutations(flags: tuple[object, ...]) -> int:
    opened = simulated.open_node(str(flags[1]), state=Path(str(flags[3])))
    try:
        return opened.mutations
    finally:
        opened.close()


Node = Callable[[str], tuple[object, ...]]


@pytest.mark.parametrize("case", [whole(case) for case in LAYOUTS], ids=name_of)
def test_layout_is_applied_exactly(case: dict[str, Any], node: Node) -> None:
    flags = node(case["node"])
    applied = verbs.run("apply", "--yes", *flags, *asked(case), "--output", "json")
    assert applied.code == 0, applied.err
    assert applied.json()["outcome"]["changed"]
    warnings = [line for line in applied.err.splitlines() if line.startswith("warning:")]
    for word in case.get("warns", ()):
        assert any(word in line for line in warnings), applied.err

    status = verbs.run("status", *flags, *asked(case), "--output", "json").json()
    assert status["phase"] == "converged"
    declared = [gpu for gpu in status["gpus"] if "gpus" not in case or gpu["index"] in case["gpus"]]
    assert declared
    for gpu in declared:
        found = gpu["gpu_instances"]
        if "instances_per_gpu" in case:
            assert collections.Counter(i["profile"] for i in found) == case["instances_per_gpu"]
        for profile, places in case.get("placements", {}).items():
            got = sorted([i["placement"]["start"], i["placement"]["size"]] for i in found if i["profile"] == profile)
            assert got == sorted(places)
        if "gpu_instances" in case:
            got = [[i["profile"], i["placement"]["start"], i["placement"]["size"]] for i in found]
            assert sorted(got) == sorted(case["gpu_instances"])
        if "mig_devices" in case:
            assert sorted(c["profile"] for i in found for c in i["compute_instances"]) == sorted(case["mig_devices"])
        for instance in found:
            assert instance["compute_instances"], "every instance can be opened"
            for compute in instance["compute_instances"]:
                assert compute["uuid"].startswith("MIG-")
    for gpu in status["gpus"]:
        if gpu["index"] in case.get("whole_gpus", ()):
            assert gpu["mig"]["current"] is False
            assert gpu["gpu_instances"] == []

    resources = verbs.run("resources", *flags, "--output", "json").json()
    for key, strategy in (("plugin_single", "single"), ("plugin_mixed", "mixed")):
        if key in case:
            assert resources["device_plugin"][strategy] == case[key]
            if case[key] is None:
                assert resources["device_plugin"]["refused"][strategy]
    if "dra_mig_devices" in case:
        assert sum(d["attributes"]["type"] == "mig" for d in resources["dra"]) == case["dra_mig_devices"]

    # Again: in sync everywhere, and not one call that changes anything.
    before = mutations(flags)
    again = verbs.run("apply", "--yes", *flags, *asked(case), "--output", "json")
    assert again.code == 0, again.err
    assert again.json()["in_sync"]
    assert not again.json()["outcome"]["changed"]
    assert verbs.run("plan", *flags, *asked(case)).code == 0
    assert verbs.run("status", "--check", *flags, *asked(case)).code == 0
    assert mutations(flags) == before


@pytest.mark.parametrize("case", [whole(case) for case in LAYOUTS], ids=name_of)
@pytest.mark.parametrize("form", ["gpunode", "bottlerocket", "mig-parted"])
def test_export_read_back_changes_nothing(case: dict[str, Any], form: str, node: Node, tmp_path: Path) -> None:
    flags = node(case["node"])
    assert verbs.run("apply", "--yes", *flags, *asked(case)).code == 0
    exported = verbs.run("export", *flags, "--format", form)
    if exported.code != 0:
        assert exported.code == 1
        assert not exported.out
        assert "cannot write" in exported.err
        mixed = "whole_gpus" in case or "gpu_instances" in case
        assert form == "bottlerocket" and mixed, exported.err  # noqa: PT018  # one sentence
        return
    written = tmp_path / ("export.yaml" if form == "mig-parted" else "export.toml")
    written.write_text(exported.out)
    before = mutations(flags)
    flag = ("--mig-config", f"{written}:current") if form == "mig-parted" else ("--settings", written)
    again = verbs.run("apply", "--yes", *flags, *flag, "--output", "json")
    assert again.code == 0, again.err
    assert again.json()["in_sync"], exported.out
    assert mutations(flags) == before


@pytest.mark.parametrize("case", EXPECTED["refused"], ids=name_of)
def test_refusal_says_why_and_touches_nothing(case: dict[str, Any], node: Node) -> None:
    flags = node(case["node"])
    ended = verbs.run("apply", "--yes", *flags, *asked(case))
    assert ended.code == case["exit"], ended.err
    for word in case["says"]:
        assert word in ended.err + ended.out
    assert "Traceback" not in ended.err
    assert mutations(flags) == 0
    checked = verbs.run("check", *flags, *asked(case), "--output", "json")
    assert checked.code == case["exit"], checked.err
    verdict = checked.json()
    assert verdict["ok"] is False
    assert any(problem["severity"] == "error" for problem in verdict["problems"])
    text = json.dumps(verdict)
    for word in case["says"]:
        spoken = word if not word.startswith("line ") else f'"line": {word[5:]}'
        assert spoken in text or word in text


def workload_name(case: dict[str, Any]) -> str:
    settings, where = case["after"]
    return f"{case['workload']} after {settings} on {where}, {case.get('strategy', 'any')}"


@pytest.mark.parametrize("case", EXPECTED["workloads"], ids=workload_name)
def test_workload_is_judged_right(case: dict[str, Any], node: Node) -> None:
    settings, where = case["after"]
    flags = node(where)
    if settings is not None:
        assert verbs.run("apply", "--yes", *flags, "--settings", CASES / settings).code == 0
    strategy = ("--strategy", case["strategy"]) if "strategy" in case else ()
    ended = verbs.run("explain", *flags, *strategy, DATA / case["workload"], "--output", "json")
    if "error" in case:
        assert ended.code == 2
        assert f"line {case['line']}" in ended.err
        return
    assert ended.code == (0 if case["fits"] else 1), ended.err
    told = ended.json()
    assert any(verdict["fits"] for verdict in told) is case["fits"]
    for word in case.get("warns", ()):
        assert any(word in warning for verdict in told for warning in verdict["warnings"])


def test_from_uniform_to_mixed_and_back_with_the_least_change(node: Node) -> None:
    flags = node("p4d.24xlarge")
    uniform = ("--settings", CASES / "settings/p4d-uniform.toml")
    mixed = ("--settings", CASES / "settings/half-balanced.gpunode.toml")
    assert verbs.run("apply", "--yes", *flags, *uniform).code == 0

    planned = verbs.run("plan", *flags, *mixed, "--output", "json")
    assert planned.code == 3
    for gpu in planned.json()["gpus"]:
        kinds = collections.Counter(step["kind"] for step in gpu["steps"])
        if gpu["index"] < 4:
            assert [k["profile"] for k in gpu["kept"]] == ["2g.10gb"]
            assert kinds["destroy-gpu-instance"] == 2
            assert kinds["create-gpu-instance"] == 3
            assert "set-mig-mode" not in kinds
        else:
            assert gpu["kept"] == []
            assert kinds["destroy-gpu-instance"] == 3
            assert next(step for step in gpu["steps"] if step["kind"] == "set-mig-mode")["enabled"] is False

    there = verbs.run("apply", "--yes", *flags, *mixed)
    assert there.code == 0, there.err
    assert "keep GPU instance" in there.out, "the plan is printed before it runs"
    assert there.out.index("keep GPU instance") < there.out.index("done:")
    kept = {i["compute_instances"][0]["uuid"] for i in instances(flags, 0) if i["profile"] == "2g.10gb"}

    back = verbs.run("apply", "--yes", *flags, *uniform, "--output", "json")
    assert back.code == 0, back.err
    assert "keep GPU instance" in back.err, "with JSON the plan is printed to stderr"
    (gpu,) = [gpu for gpu in back.json()["gpus"] if gpu["index"] == 0]
    assert [k["profile"] for k in gpu["kept"]] == ["2g.10gb"]
    assert kept < {i["compute_instances"][0]["uuid"] for i in instances(flags, 0)}
    assert verbs.run("status", "--check", *flags, *uniform).code == 0


def instances(flags: tuple[object, ...], index: int) -> list[dict[str, Any]]:
    status = verbs.run("status", *flags, "--output", "json").json()
    found: list[dict[str, Any]] = status["gpus"][index]["gpu_instances"]
    return found
