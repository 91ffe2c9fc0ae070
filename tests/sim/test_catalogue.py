"""Every node that can be named can be described, and what is not known is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sim import catalogue, spec


@pytest.mark.parametrize("name", catalogue.names())
def test_every_name_is_described_and_can_be_opened_if_it_says_so(name: str) -> None:
    found = catalogue.describe(name)
    assert found["name"] == name
    assert found["mig"] in ("yes", "no", "geometry not published")
    assert (found["mig"] == "yes") == bool(found["profiles"]) or found["mig"] == "geometry not published"
    if found["simulated"]:
        assert spec.read(name).gpus
    else:
        assert found["unknown"]


def test_what_is_unknown_is_said() -> None:
    assert "profiles and placements are not published" in str(catalogue.describe("g7.2xlarge")["unknown"])
    assert "how many GPUs" in str(catalogue.describe("p6e-gb300.36xlarge")["unknown"])
    assert "1g.34gb: memory_mib" in str(catalogue.describe("p6-b300.48xlarge")["derived"])
    assert catalogue.describe("g6f.2xlarge")["virtual"] is True
    assert catalogue.describe("p4d.24xlarge")["mode_change"] == "by reset"
    assert catalogue.describe("p5.48xlarge")["mode_change"] == "at once"
    assert catalogue.describe("h100.80gb")["also"] == ["h100-pcie-80gb"]
    assert "memory is not published" in str(catalogue.describe("h20.nvl16")["unknown"])


def test_a_file_is_a_node_too_and_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[[gpu]]\nmodel = "h100.80gb"\n')
    assert catalogue.describe(str(file))["kind"] == "file"
    with pytest.raises(spec.SimulationError, match="did you mean"):
        catalogue.describe("h100.80g")
