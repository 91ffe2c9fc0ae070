"""Where the revision of the running source comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.serve import exposition, revision

A, B = "a" * 40, "b" * 40


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "agent").mkdir()
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    return tmp_path / "agent"


def test_nothing_tells(package: Path) -> None:
    assert revision.find(package) == ""


def test_a_checkout(package: Path) -> None:
    git = package.parent / ".git"
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert revision.find(package) == ""
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{B} refs/heads/other\n{A} refs/heads/main\n")
    assert revision.find(package) == A
    (git / "refs/heads/main").write_text(f"{B}\n")
    assert revision.find(package) == B, "what lies apart is newer than what is packed"
    (git / "HEAD").write_text(f"{A}\n")
    assert revision.find(package) == A


def test_a_package_says_so_first(package: Path) -> None:
    (package.parent / ".git/HEAD").write_text(f"{A}\n")
    (package / revision.FILE).write_text(f"{B}\n")
    assert revision.find(package) == B
    (package / revision.FILE).write_text("unknown\n")
    assert revision.find(package) == A


def test_what_git_itself_says(package: Path) -> None:
    root = package.parent / "clone"
    commands = (
        ("init", "-q", root),
        ("-C", root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "one"),
    )
    for command in commands:
        subprocess.run(["git", *command], check=True)
    told = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert revision.find(root / "agent") == told.stdout.strip() != ""


def test_the_exposition_carries_it() -> None:
    assert exposition.build().revision == revision.find()
