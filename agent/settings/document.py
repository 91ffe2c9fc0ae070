"""A settings document: read bounded, decoded, parsed, with the place of every key.

Whatever is wrong with a file ends as one `errors.Problem` that names it. A document is only parsed
here; what its keys mean is for `toml`, `bottlerocket` and `migparted`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from agent import errors, records
from agent.settings import locate, model

LIMIT = 2**20
"""Bytes read of a file at most; settings are a few hundred."""

_REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "its symbolic links go in a circle",
    errno.ENOTDIR: "a part of its path is not a directory",
    errno.ENAMETOOLONG: "its name is too long",
}
_AT = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


class Unreadable(Exception):
    """A document cannot be used at all; `problem` says which and why."""

    def __init__(self, problem: errors.Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


@records.dataclass(frozen=True, slots=True)
class Document:
    """A parsed document. `name` is how messages call it, `source` the layer it belongs to, `path`
    the file (None when it is none). `positions` tell where keys stand."""

    name: str
    source: str
    data: Mapping[str, object]
    positions: Mapping[locate.Path, locate.Position] = dataclasses.field(default_factory=dict)
    path: Path | None = None

    def line(self, path: locate.Path) -> int | None:
        """Return the line of `path`, or of the nearest thing around it that has one."""
        for end in range(len(path), 0, -1):
            position = self.positions.get(path[:end])
            if position is not None:
                return position.line
        return None

    def origin(self, path: locate.Path) -> model.Origin:
        """Return where the value at `path` was declared."""
        return model.Origin(self.source, self.name, self.line(path), dotted(path))

    def problem(self, code: str, message: str, path: locate.Path, *, severity: str = "error") -> errors.Problem:
        """Return a problem with the value at `path`."""
        return errors.Problem(severity, code, message, file=self.name, line=self.line(path), key=dotted(path) or None)


def dotted(path: locate.Path) -> str:
    """Return a key path as people write it: `gpunode.layout[0].gpus[1]`, odd keys in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else quote(part)
            text += f".{word}" if text else word
    return text


def quote(value: object) -> str:
    """Return a value of the document for use in a message: in quotes, short, printable."""
    text = str(value) if isinstance(value, str) else _plain(value)
    if len(text) > 60:
        text = text[:57] + "..."
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return f'"{text}"' if isinstance(value, str) else text


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    try:
        return str(value)
    except ValueError:  # more digits than Python is willing to print
        return "a huge number"


def shown(path: Path) -> str:
    """Return a path so that it can always be printed."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read(path: Path, *, name: str | None = None) -> bytes | None:
    """Return what a file holds, None when there is no such file. Raises Unreadable for all else."""
    called = shown(path) if name is None else name

    def fail(code: str, message: str) -> Unreadable:
        return Unreadable(errors.Problem("error", code, message, file=called))

    try:
        # Not blocking, as a pipe that nobody writes to would hold the daemon for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise fail("unreadable", "cannot read it: it is a symbolic link to a file that does not exist") from None
        return None
    except OSError as cause:
        why = _REASONS.get(cause.errno or 0, cause.strerror or "unknown cause")
        raise fail("unreadable", f"cannot read it: {why}") from cause
    except ValueError as cause:  # a NUL byte in the path
        raise fail("unreadable", "cannot read it: its name holds a NUL byte") from cause
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise fail("unreadable", "cannot read it: it is a directory")
        if not stat.S_ISREG(kind):
            raise fail("unreadable", "cannot read it: it is not a regular file, and settings are read again and again")
        parts: list[bytes] = []
        left = LIMIT + 1
        while left > 0:
            part = os.read(descriptor, left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
    except OSError as cause:
        raise fail("unreadable", f"cannot read it: {cause.strerror}") from cause
    finally:
        os.close(descriptor)
    if left <= 0:
        raise fail("too-large", f"is larger than {LIMIT // 2**20} MiB, the most that is read of a settings file")
    return b"".join(parts)


def decode(data: bytes, name: str) -> str:
    """Return the text of a document; UTF-8, with or without a byte order mark. Raises Unreadable."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unreadable(errors.Problem("error", "encoding", "is written in UTF-16; save it as UTF-8", file=name))
    place = data.find(b"\0")
    if place >= 0:
        line = data.count(b"\n", 0, place) + 1
        raise Unreadable(
            errors.Problem("error", "nul-byte", "holds a NUL byte, so it is no text", file=name, line=line)
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = data.count(b"\n", 0, cause.start) + 1
        message = f"is not UTF-8: the byte 0x{data[cause.start]:02x} belongs to no character; save it as UTF-8"
        raise Unreadable(errors.Problem("error", "encoding", message, file=name, line=line)) from cause


def parse_toml(data: bytes, *, name: str, source: str, path: Path | None = None) -> Document:
    """Parse a TOML document. Raises Unreadable."""
    import tomli  # only here, so that a node without TOML settings does not pay for it

    text = decode(data, name).replace("\r\n", "\n")
    _check_depth(text, name)
    try:
        values = tomli.loads(text)
    except tomli.TOMLDecodeError as cause:
        raise Unreadable(_toml_problem(str(cause), text, name)) from cause
    except (ValueError, RecursionError) as cause:
        raise Unreadable(errors.Problem("error", "syntax", f"is not valid TOML: {_short(cause)}", file=name)) from cause
    return Document(name, source, values, locate.toml(text), path)


def parse_json(data: bytes, *, name: str, source: str, path: Path | None = None) -> Document:
    """Parse a JSON document that is an object. Raises Unreadable."""
    text = decode(data, name)
    _check_depth(text, name)
    doubles: list[str] = []

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                doubles.append(key)
            found[key] = value
        return found

    try:
        values = json.loads(text, object_pairs_hook=members)
    except json.JSONDecodeError as cause:
        message = f"is not valid JSON: {cause.msg} (column {cause.colno})"
        raise Unreadable(errors.Problem("error", "syntax", message, file=name, line=cause.lineno)) from cause
    except (ValueError, RecursionError) as cause:
        raise Unreadable(errors.Problem("error", "syntax", f"is not valid JSON: {_short(cause)}", file=name)) from cause
    if doubles:
        where, place = next(iter(locate.json_repeated(text).items()), ((doubles[0],), None))
        raise Unreadable(
            errors.Problem(
                "error",
                "duplicate-key",
                f"has the key {quote(where[-1])} twice",
                file=name,
                line=None if place is None else place.line,
                key=dotted(where),
            )
        )
    if not isinstance(values, dict):
        raise Unreadable(errors.Problem("error", "wrong-type", "must be a JSON object", file=name, line=1))
    return Document(name, source, values, locate.json_text(text), path)


def _check_depth(text: str, name: str) -> None:
    if locate.depth(text) > locate.DEPTH:
        message = f"nests deeper than {locate.DEPTH} levels"
        raise Unreadable(errors.Problem("error", "too-deep", message, file=name))


def _toml_problem(said: str, text: str, name: str) -> errors.Problem:
    """Tell what tomli said in our way: the line apart, duplicates by their own code."""
    match = _AT.search(said)
    message = said if match is None else said[: match.start()]
    line = text.count("\n") + 1
    column = ""
    if match is not None and match["line"]:
        line = int(match["line"])
        column = f" (column {match['column']})"
    double = message.startswith(("Cannot overwrite", "Cannot declare", "Duplicate"))
    code = "duplicate-key" if double else "syntax"
    hint = ": a key or table is given twice" if double else ""
    return errors.Problem("error", code, f"is not valid TOML: {message}{column}{hint}", file=name, line=line)


def _short(cause: BaseException) -> str:
    return str(cause).split(";")[0] or type(cause).__name__
