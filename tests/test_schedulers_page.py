"""docs/schedulers.md names tests that exist, for every row of both guides."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from agent import findings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([CE]\d+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)+)`", PAGE)))


def test_every_row_is_there_once_and_in_order() -> None:
    wanted = [f"C{n}" for n in range(1, 15)] + [f"E{n}" for n in range(1, 52)]
    assert [row[0] for row in ROWS] == wanted


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_a_test_or_says_why_it_has_none(row: tuple[str, str, str, str]) -> None:
    _, _, where, shown = row
    assert "`tests/" in shown or (shown == "–" and where.startswith(("documented: ", "not covered: ")))


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_exists(name: str) -> None:
    path, *inside = name.split("::")
    names: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for word in inside:
        found = [
            n for n in names if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and n.name == word
        ]
        assert found, f"{word} is not in {path}"
        names = found[0].body
    assert inside[-1].startswith("test_")


def test_findings_that_are_named_exist() -> None:
    for told in re.findall(r"findings? ((?:`[\w-]+`(?:, )?)+)", PAGE):
        assert set(re.findall(r"`([\w-]+)`", told)) <= set(findings.CODES)


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:agent|tests/data)/[\w./-]+)`", PAGE):
        assert (ROOT / name).exists(), name
