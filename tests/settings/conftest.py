"""Small ways to write documents and load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.settings import model, source


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file below the test's directory and returns its path."""

    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


@pytest.fixture
def load(tmp_path: Path, write: Callable[..., Path]) -> Callable[..., model.Settings]:
    """Return a function that loads one document as `--settings` does."""

    def make(content: str | bytes, *, name: str = "settings.toml") -> model.Settings:
        return source.load(source.Request(root=tmp_path / "root", files=(write(name, content),)))

    return make
