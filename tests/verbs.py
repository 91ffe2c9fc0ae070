"""`gpunode` run as a verb within the test's own process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from agent.cli import parser


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a verb ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return what it printed, parsed; a test that asks fails with what was said instead."""
        assert self.out, self.err
        return json.loads(self.out)


def run(*words: object) -> Ended:
    """Run `gpunode` with words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = parser.run([str(word) for word in words])
    return Ended(code, out.getvalue(), err.getvalue())
