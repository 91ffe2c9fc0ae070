"""Parts that are new, unpublished or misnamed, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sim import catalogue
from tests import verbs


def layout(directory: Path, profile: str) -> Path:
    path = directory / "layout.toml"
    path.write_text(f'[[gpunode.layout]]\ngpus = "all"\ninstances = {{ "{profile}" = 1 }}\n')
    return path


@pytest.mark.parametrize("node", ["g7.2xlarge", "g7.48xlarge", "p6e-gb300.36xlarge", "p6e-gb300.72xlarge"])
def test_what_is_not_published_is_listed_and_refused_with_the_reason(node: str, tmp_path: Path) -> None:
    assert node in catalogue.names()
    done = verbs.run("apply", "--yes", "--simulate", node, "--settings", layout(tmp_path, "1g.16gb"))
    assert done.code == 4
    assert "not published" in done.err


@pytest.mark.parametrize(
    ("node", "written", "meant"),
    [
        pytest.param("p6-b300.48xlarge", "1g.32gb", "1g.34gb", id="the seventh of a B300 as a page has it"),
        pytest.param("p6-b300.48xlarge", "7g.270gb", "7g.269gb", id="the whole B300 as a page has it"),
        pytest.param("p4d.24xlarge", "2g.20gb", "2g.10gb", id="a profile of the larger A100"),
        pytest.param("p5.4xlarge", "1g.10gb+m", "1g.10gb+me", id="half an attribute"),
    ],
)
def test_a_slip_in_a_name_gets_the_right_one(node: str, written: str, meant: str, tmp_path: Path) -> None:
    done = verbs.run("plan", "--simulate", node, "--settings", layout(tmp_path, written))
    assert done.code == 2
    assert meant in done.err


@pytest.mark.parametrize(
    ("node", "alias", "profile"), [("p4de.24xlarge", "7g.79gb", "7g.80gb"), ("p4de.24xlarge", "3g.39gb", "3g.40gb")]
)
def test_a_name_that_older_tools_print_is_taken_with_a_warning(
    node: str, alias: str, profile: str, tmp_path: Path
) -> None:
    done = verbs.run("plan", "--simulate", node, "--settings", layout(tmp_path, alias))
    assert done.code == 3
    assert profile in done.out
    assert "warning" in done.err
    assert alias in done.err


# Sizes of a family differ in the number of GPUs alone; status measures, which takes its time.
FIRSTS = {name.partition(".")[0]: name for name in reversed(catalogue.names())}


@pytest.mark.parametrize("node", catalogue.names())
def test_every_type_is_told_of_without_a_fault(node: str) -> None:
    for verb in ("profiles", "resources", "status") if node in FIRSTS.values() else ("profiles",):
        done = verbs.run(verb, "--simulate", node, "--output", "json")
        assert done.code in (0, 4), f"{verb}: {done.err}"
        assert "internal error" not in done.err
        assert (done.code == 4) == (node.startswith("p6e-gb300")), done.err
        assert done.out or done.code == 4
