"""The tables agree with the facts, and with themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.mig import profile as profiles
from agent.sim import tables

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY: dict[str, Any] = json.loads((ROOT / "packaging/facts/mig-geometry.json").read_text())
MODELS = {model["id"]: model for model in GEOMETRY["models"]}
KNOWN = [identifier for identifier in tables.model_ids() if tables.model(identifier).geometry_known]


def generate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "packaging/generate_tables.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tables_are_what_the_facts_give() -> None:
    ran = generate("--check")
    assert ran.returncode == 0, ran.stderr


def test_a_changed_fact_is_noticed_and_a_new_table_written(tmp_path: Path) -> None:
    facts = json.loads((ROOT / "packaging/facts/mig-geometry.json").read_text())
    facts["models"][0]["gi_profiles"][0]["memory_mib"] += 1
    changed = tmp_path / "facts.json"
    changed.write_text(json.dumps(facts))
    ran = generate("--check", "--geometry", changed)
    assert ran.returncode == 1
    assert "a100-40gb.toml: differs" in ran.stderr
    assert generate("--geometry", changed, "--into", tmp_path / "sim").returncode == 0
    assert "memory_mib = 4865" in (tmp_path / "sim/gpus/a100-40gb.toml").read_text()
    (tmp_path / "sim/gpus/stray.toml").write_text("")
    assert "stray.toml" in generate("--check", "--geometry", changed, "--into", tmp_path / "sim").stderr
    generate("--geometry", changed, "--into", tmp_path / "sim")
    assert not (tmp_path / "sim/gpus/stray.toml").exists()


def test_every_model_of_the_facts_has_a_table() -> None:
    assert set(MODELS) <= set(tables.model_ids())
    assert len(KNOWN) == sum(
        bool(m["gi_profiles"]) and all(p["placements"] and p["profile_id"] is not None for p in m["gi_profiles"])
        for m in MODELS.values()
    )


@pytest.mark.parametrize("identifier", KNOWN)
def test_figures_that_somebody_printed_are_taken_over_and_the_others_marked(identifier: str) -> None:
    model = tables.model(identifier)
    for fact in MODELS[identifier]["gi_profiles"]:
        profile = model.profile_by_index(fact["nvml_profile_index"])
        assert profile is not None
        assert (profile.name, profile.id, list(profile.starts)) == (
            fact["name"],
            fact["profile_id"],
            fact["placements"]["starts"],
        )
        for ours, theirs, key in (
            (profile.memory_mib, fact["memory_mib"], "memory_mib"),
            (profile.multiprocessors, fact["sm_count"], "multiprocessors"),
        ):
            if theirs is None:
                assert key in profile.derived
            else:
                assert ours == theirs
        assert profile.engines == tuple(
            fact[key] for key in ("copy_engines", "decoders", "encoders", "jpeg", "ofa")
        )  # unknown stays unknown


@pytest.mark.parametrize("identifier", KNOWN)
def test_a_model_is_consistent(identifier: str) -> None:
    model = tables.model(identifier)
    total = model.memory_mib * 2**20
    for profile in model.profiles:
        name = profiles.parse(profile.name)
        assert name.gpu_slices == profile.slices
        assert profiles.name_gb(profile.memory_mib, total) == name.memory_gb
        assert max(profile.starts) + profile.size <= model.memory_slices
        defaults = [compute for compute in profile.compute if compute.default]
        assert len(defaults) == 1
        assert defaults[0].multiprocessors == profile.multiprocessors
        for compute in profile.compute:
            assert compute.multiprocessors <= profile.multiprocessors
            assert len(compute.starts) == compute.max_instances
            assert max(compute.starts) + compute.slices <= profile.slices


def test_double_memory_has_its_multiprocessors_through_compute_profile_seven() -> None:
    for identifier in ("h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb", "b300-269gb"):
        double = tables.model(identifier).profile(15)
        assert double is not None
        small, whole = double.compute_profile(0), double.compute_profile(7)
        assert small is not None
        assert whole is not None
        assert small.multiprocessors < whole.multiprocessors == double.multiprocessors
        assert whole.default


def test_compute_starts() -> None:
    part = tables.model("a100-40gb")
    three, seven = part.profile(9), part.profile(0)
    assert three is not None
    assert seven is not None
    assert {c.slices: c.starts for c in three.compute} == {1: (0, 1, 2), 2: (0,), 3: (0,)}
    assert {c.slices: c.starts for c in seven.compute} == {
        1: (0, 1, 2, 3, 4, 5, 6),
        2: (0, 2, 4),
        3: (0, 4),
        4: (0,),
        7: (0,),
    }


@pytest.mark.parametrize(
    ("key", "identifier"),
    [
        ("a100.40gb", "a100-40gb"),
        ("h100.80gb", "h100-sxm-80gb"),
        ("h100.94gb", "h100-nvl-94gb"),
        ("rtxpro6000.96gb", "rtxpro6000-server-96gb"),
        ("rtxpro4500.32gb", "rtxpro4500-server-32gb"),
        ("t4.16gb", "t4"),
    ],
)
def test_a_key_means_the_likeliest_part(key: str, identifier: str) -> None:
    assert tables.models_of_key(key)[0] == identifier


def test_the_order_of_automatic_placement_follows_the_driver() -> None:
    assert tables.automatic_order("a100-40gb", 9, 590) == (4, 0)
    assert tables.automatic_order("a100-40gb", 9, 470) == (0, 4)
    assert tables.automatic_order("a30-24gb", 14, 590) == (0, 1, 2, 3)
    with pytest.raises(KeyError):
        tables.automatic_order("a100-40gb", 77, 590)


def test_every_ec2_type_names_a_table() -> None:
    kinds = tables.instance_types()
    assert len(kinds) == 71
    for kind in kinds.values():
        assert tables.model(kind.model).mig_capable is kind.mig_capable, kind.name
    assert kinds["p4d.24xlarge"].count == 8
    assert kinds["p6e-gb300.36xlarge"].count is None
    assert kinds["g6f.2xlarge"].fraction == 0.25
    assert tables.model(kinds["g6f.2xlarge"].model).virtual


def test_unknown_names_are_key_errors() -> None:
    with pytest.raises(KeyError):
        tables.model("nothing")
    with pytest.raises(KeyError):
        tables.gi_id_map("nothing")
    assert tables.models_of_key("nothing.1gb") == ()
