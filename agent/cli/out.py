"""How verbs print: JSON that scripts read, tables that people read, colour only on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TextIO

_COLOURS = {"+": "32", "-": "31", "!": "33", "~": "36"}


def document(value: object, stream: TextIO) -> None:
    """Print `value` as JSON, in the order it was made."""
    print(json.dumps(value, indent=2, ensure_ascii=False), file=stream, flush=True)


def table(text: str, stream: TextIO, environ: Mapping[str, str]) -> None:
    """Print a table. On a terminal, lines that begin with a sign of a plan are coloured by it."""
    if stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb":
        text = "\n".join(_coloured(line) for line in text.splitlines())
    # At once, also into a pipe: a plan must have been seen before it runs.
    print(text, file=stream, flush=True)


def _coloured(line: str) -> str:
    bare = line.lstrip()
    colour = _COLOURS.get(bare[:1]) if bare[1:2] == " " else None
    return line if colour is None else f"\x1b[{colour}m{line}\x1b[0m"
