"""Verbs in this process: run with arguments, heard through what they print."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cli import parser


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a verb ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]


@pytest.fixture
def gpunode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `gpunode` with words, in an environment that steers nothing."""
    for name in list(os.environ):
        if name.startswith("GPUNODE_"):
            monkeypatch.delenv(name)

    def run(*words: str | Path) -> Ended:
        capsys.readouterr()
        code = parser.run([str(word) for word in words])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run
