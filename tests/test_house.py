"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = {"agent.serve.families.family"}
"""Modules whose words stand bare where they are used: the metric families are tables written with them."""
FILES = sorted((ROOT / "agent").rglob("*.py"))


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_modules_are_imported_and_not_what_is_in_them() -> None:
    objects = [
        f"{name}:{node.lineno}: {alias.name}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agent"
        if node.module not in VOCABULARY
        for alias in node.names
        if alias.name[0].islower() and not _is_module(f"{node.module}.{alias.name}")
    ]
    assert not objects


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_records_are_slotted() -> None:
    loose = [
        f"{name}:{node.lineno}: {node.name}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("dataclasses.dataclass") and "slots=True" not in ast.unparse(decorator)
    ]
    assert not loose


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: str(path.relative_to(ROOT / "tests"))
)
def test_every_test_file_has_tests(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
    ]
    machines = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and "TestCase" in ast.unparse(n.value)]
    assert found or machines
