"""Where a key stands: from a key path to line and column, for TOML and JSON.

tomli and json give values without places, and tree-sitter would be a heavy dependency for that. So
this walks a document that its parser has already accepted, and notes where each key and each list
member begins. It checks nothing; on a text that is not valid it may only return too little.
YAML needs no such walk: its nodes carry their marks.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Callable

Path = tuple[str | int, ...]

DEPTH = 64
"""How deep a document may nest; real ones need 8."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Position:
    """Line and column, both from 1."""

    line: int
    column: int


class Lines:
    """Turns an offset in a text into a position."""

    def __init__(self, text: str) -> None:
        self._starts = [0] + [match.end() for match in re.finditer("\n", text)]

    def at(self, offset: int) -> Position:
        """Return the position of the character at `offset`."""
        line = bisect.bisect_right(self._starts, offset)
        return Position(line, offset - self._starts[line - 1] + 1)


_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[^\s.=:\[\]{},#\"']+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_STRINGS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_STRINGS_AND_BRACKETS = re.compile(_STRINGS.pattern + r"|#[^\n]*|[\[{]|[\]}]", re.DOTALL)


def depth(text: str) -> int:
    """Return how deep brackets nest in a TOML or JSON text, strings and comments apart."""
    deepest = now = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        token = match[0]
        if token in "[{":
            now += 1
            deepest = max(deepest, now)
        elif token in "]}":
            now -= 1
    return deepest


def toml(text: str) -> dict[Path, Position]:
    """Return where the keys, tables and list members of a valid TOML text begin."""
    return _Walk(text, "=").document()


def json_text(text: str) -> dict[Path, Position]:
    """Return where the keys and list members of a valid JSON text begin."""
    walk = _Walk(text, ":")
    walk.value(())
    return walk.found


def json_repeated(text: str) -> dict[Path, Position]:
    """Return where keys of a valid JSON text that were there before stand again, in order."""
    walk = _Walk(text, ":")
    walk.value(())
    return walk.again


class _Walk:
    """One pass over a text. `equals` is what stands between a key and its value."""

    def __init__(self, text: str, equals: str) -> None:
        self._text = text
        self._equals = equals
        self._lines = Lines(text)
        self._at = 0
        self._tables: dict[Path, int] = {}
        self.found: dict[Path, Position] = {}
        self.again: dict[Path, Position] = {}

    def document(self) -> dict[Path, Position]:
        """Walk a whole TOML document."""
        base: Path = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                base = self._header()
            else:
                self._pair(base)
            self._skip(_BLANK)
        return self.found

    def value(self, path: Path) -> None:
        """Walk the value at the cursor, which belongs to `path`."""
        self._skip(_BLANK)
        if self._text.startswith("[", self._at):
            self._members("]", lambda index: self._member((*path, index)))
        elif self._text.startswith("{", self._at):
            self._members("}", lambda _: self._pair(path))
        else:
            match = _STRINGS.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            self._at = match.end() if match else self._at + 1

    def _skip(self, what: re.Pattern[str]) -> None:
        match = what.match(self._text, self._at)
        assert match is not None  # these patterns match the empty text too
        self._at = match.end()

    def _note(self, path: Path, offset: int) -> None:
        noted = self.again if path in self.found else self.found
        noted.setdefault(path, self._lines.at(offset))

    def _header(self) -> Path:
        """Walk `[a.b]` or `[[a.b]]` and return the path of the table that begins."""
        start = self._at
        double = self._text.startswith("[[", start)
        self._at += 2 if double else 1
        keys = self._keys()
        self._at = _end(self._text, "]]" if double else "]", self._at)
        path: Path = ()
        for number, (key, _) in enumerate(keys):
            path = (*path, key)
            self._note(path, start)
            if double and number == len(keys) - 1:
                self._tables[path] = self._tables.get(path, -1) + 1
            if path in self._tables:
                path = (*path, self._tables[path])
                self._note(path, start)
        return path

    def _keys(self) -> list[tuple[str, int]]:
        """Walk a dotted key; return its parts with their offsets."""
        parts: list[tuple[str, int]] = []
        while True:
            self._skip(_SPACE)
            start = self._at
            quoted = _STRINGS.match(self._text, start)
            match = quoted or _BARE.match(self._text, start)
            if match is None:
                return parts
            self._at = match.end()
            parts.append((_unquote(match[0]) if quoted else match[0], start))
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _pair(self, base: Path) -> None:
        path = base
        for key, offset in self._keys():
            path = (*path, key)
            self._note(path, offset)
        self._skip(_BLANK if self._equals == ":" else _SPACE)
        self._at += 1  # the equals sign or colon
        self.value(path)

    def _member(self, path: Path) -> None:
        self._note(path, self._at)
        self.value(path)

    def _members(self, close: str, walk: Callable[[int], None]) -> None:
        """Walk `[…]` or `{…}`: `walk(number)` for each member."""
        self._at += 1
        number = 0
        self._skip(_BLANK)
        while self._at < len(self._text) and self._text[self._at] != close:
            walk(number)
            number += 1
            self._skip(_BLANK)
            if self._text.startswith(",", self._at):
                self._at += 1
                self._skip(_BLANK)
        self._at += 1


def _end(text: str, token: str, start: int) -> int:
    found = text.find(token, start)
    return len(text) if found < 0 else found + len(token)


def _unquote(text: str) -> str:
    """Return the key that a quoted TOML or JSON key stands for."""
    if text.startswith("'"):
        return text[1:-1]
    try:
        return str(json.loads(text))
    except ValueError:  # an escape that only TOML has, or a broken text
        return text[1:-1]
