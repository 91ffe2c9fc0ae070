"""Verbs in this process: run with arguments, heard through what they print."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.cli import parser
from tests import verbs

Run = Callable[..., verbs.Ended]


@pytest.fixture
def gpunode(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `gpunode` with words, printing to the descriptors that the test captures."""

    def run(*words: object) -> verbs.Ended:
        capsys.readouterr()
        code = parser.run([str(word) for word in words])
        said = capsys.readouterr()
        return verbs.Ended(code, said.out, said.err)

    return run
