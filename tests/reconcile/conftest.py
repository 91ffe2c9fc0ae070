"""Rigs that are closed when a test has ended."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("rig", Path(__file__).with_name("rig.py"))
assert _spec is not None
assert _spec.loader is not None
rig = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("rig", rig)
_spec.loader.exec_module(rig)


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
    if os.access("/dev/shm", os.W_OK):  # noqa: S108
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # noqa: S108
