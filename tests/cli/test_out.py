"""Colour: on a terminal only, and never needed."""

from __future__ import annotations

import io

import pytest

from agent.cli import out

TEXT = "GPU 0\n  + create\n  - destroy\n  ! in the way\n  ~ mode\n  -dashed"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_with_a_sign_are_coloured_on_a_terminal() -> None:
    stream = Terminal()
    out.table(TEXT, stream, {"TERM": "xterm"})
    assert stream.getvalue().splitlines() == [
        "GPU 0",
        "\x1b[32m  + create\x1b[0m",
        "\x1b[31m  - destroy\x1b[0m",
        "\x1b[33m  ! in the way\x1b[0m",
        "\x1b[36m  ~ mode\x1b[0m",
        "  -dashed",
    ]


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_it_is_not_wanted(environ: dict[str, str]) -> None:
    stream = Terminal()
    out.table(TEXT, stream, environ)
    assert stream.getvalue() == TEXT + "\n"


def test_no_colour_into_a_file() -> None:
    stream = io.StringIO()
    out.table(TEXT, stream, {})
    assert stream.getvalue() == TEXT + "\n"
