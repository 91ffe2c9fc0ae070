"""docs/settings.md against the code: every key, its default, an example that is good, every variable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.settings import bottlerocket, model, shown, source, userdata

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "settings.md").read_text()
Load = Callable[..., model.Settings]


def table(title: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    _, _, rest = TEXT.partition(f"## {title}\n")
    lines = rest.split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


KEYS = {row[0].strip("`"): row[1:] for row in table("Keys of `[gpunode]`")}


def test_every_key_has_a_row_in_the_order_of_the_model() -> None:
    assert list(KEYS) == [field.replace("_", "-") for field in model.OPTIONS]
    assert set(model.GpunodeTable.model_fields) - set(model.OPTIONS) == {"layout", "mig_parted"}
    for other in ("[[gpunode.layout]]", "[gpunode.mig-parted]"):
        assert f"`{other}`" in TEXT


@pytest.mark.parametrize("key", KEYS)
def test_the_default_is_that_of_the_model_and_the_example_is_taken(key: str, load: Load) -> None:
    default, example, what = KEYS[key]
    assert what
    told = shown.values(load("[gpunode]\n"))[key]["value"]
    written = tomllib.loads(f"x = {default.strip('`')}")["x"] if default else None
    assert written == told
    settings = load(f"[gpunode]\n{key} = {example.strip('`')}\n")
    assert settings.problems == ()
    assert settings.provenance[key].line == 2
    assert getattr(settings, key.replace("-", "_")) != getattr(model.Settings(), key.replace("-", "_"))


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_every_example_is_good(block: str, load: Load, tmp_path: Path) -> None:
    parted = tmp_path / "root/etc/gpunode/mig-parted.yaml"
    parted.parent.mkdir(parents=True)
    parted.write_text("version: v1\nmig-configs:\n  half-balanced:\n  - {devices: all, mig-enabled: false}\n")
    settings = load(block)
    assert settings.declaration is not None
    assert settings.problems == ()


def test_every_place_is_named() -> None:
    for place in (
        *bottlerocket.SOCKETS[:1],
        *bottlerocket.MANAGER_FILES[:1],
        userdata.EC2_FILE,
        *userdata.CONTAINER_FILES,
        source.CONFIG_FILE,
        source.CONFIG_DIRECTORY,
    ):
        assert f"`/{place}" in TEXT
    assert userdata.CONTENT_TYPE in TEXT
    assert bottlerocket.PREFIX in TEXT


def test_every_variable_is_named() -> None:
    named = set(re.findall(r"GPUNODE_[A-Z_]*[A-Z]", TEXT)) | {"GPUNODE_" + k.upper().replace("-", "_") for k in KEYS}
    used = set()
    for path in (ROOT / "agent").rglob("*.py"):
        used |= set(re.findall(r"\b((?:GPUNODE|AWS)_[A-Z_0-9]*[A-Z])\b", path.read_text()))
    assert {name for name in used if name.startswith("GPUNODE_")} - named == set()
    for name in used:
        assert name in TEXT or name in named, name
