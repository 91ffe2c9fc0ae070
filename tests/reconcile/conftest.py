"""Rigs that are closed when a test has ended."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reconcile import rig


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(spec: str, settings: str, **options: Any) -> Any:
        made.append(rig.Rig(tmp_path, spec, settings, **options))
        return made[-1]

    yield build
    for one in made:
        asyncio.run(one.close())


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the roots of simulated hosts where writing costs nothing; they are made anew by the thousand."""
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
