"""What every tracked file must and must not say."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from agent import __version__

ROOT = Path(__file__).resolve().parents[1]

# In pieces, so that this file does not name them itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            "/wor" + "k/",
            r"/\." + "librar" + "y",
            r"(?<![\w/.])shar" + r"ed/(?:design|facts|cases|seeds|hooks)",
            "/far" + "m/",
            "suba" + "gent",
            "before" + "-stop",
            r"steering " + "repo",
            r"(?:pypi|pythonhosted|npmjs|deb\.debian)\." + r"org",
        )
    ),
    re.IGNORECASE,
)


def tracked() -> list[Path]:
    """The files of this checkout that git knows, or all but build output where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_files_speak_of_the_project_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(text(path).splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n".join(found)


def test_changelog_tells_this_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", text(ROOT / "CHANGELOG.md"), re.MULTILINE)


def test_each_source_file_says_why_it_exists() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix == ".py" and path.is_relative_to(ROOT / "agent") and not ast.get_docstring(ast.parse(text(path)))
    ]
    assert not silent


def test_no_room_is_called_by_a_word_that_says_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "misc"}
    found = [
        str(path.relative_to(ROOT)) for path in tracked() if {part.removesuffix(".py") for part in path.parts} & empty
    ]
    assert not [name for name in found if not name.startswith(".venv")]


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(path))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken
