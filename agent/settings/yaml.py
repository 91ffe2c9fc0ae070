"""YAML as nodes: plain values with the place of every key, all duplicates found, nothing constructed.

A loader that builds objects would swallow or stop at the first duplicate, follow tags, and let a few
aliases grow into millions of values. The words for true and false are those of YAML 1.1 too, as the
tools these documents are written for read them so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agent import errors
from agent.settings import document, locate

VALUES = 100_000
"""How many values a document may have once its aliases are written out."""
_DEEP = re.compile(rf"(?:[\[{{][ \t\n]*){{{locate.DEPTH + 1}}}")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,17})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_TAGS = tuple(
    f"tag:yaml.org,2002:{name}"
    for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)


def parse(data: bytes, *, name: str, source: str, path: Path | None = None) -> document.Document:
    """Parse a YAML document that is a mapping. Raises document.Unreadable."""
    import ruamel.yaml  # only here: it costs a fifth of a second, and most nodes have no YAML
    from ruamel.yaml import error as yaml_errors

    text = document.decode(data, name)
    if _DEEP.search(text):  # else the parser takes seconds to find out
        raise document.Unreadable(errors.Problem("error", "too-deep", "nests too deep", file=name))
    try:
        parser = ruamel.yaml.YAML(typ="rt", pure=True)
        parser.composer.warn_double_anchors = False  # legal, and no reason to write to stderr
        root = parser.compose(text)
        reading = _Reading(name)
        values = reading.value(root, ()) if root is not None else None
    except yaml_errors.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        line = None if mark is None else mark.line + 1
        said = " ".join(str(cause.problem or cause.context or "unknown cause").split())
        raise document.Unreadable(
            errors.Problem("error", "syntax", f"is not valid YAML: {said}", file=name, line=line)
        ) from cause
    except yaml_errors.YAMLError as cause:
        said = " ".join(str(cause).split())[:100]
        raise document.Unreadable(errors.Problem("error", "syntax", f"is not valid YAML: {said}", file=name)) from cause
    except RecursionError as cause:
        raise document.Unreadable(errors.Problem("error", "too-deep", "nests too deep", file=name)) from cause
    except (ValueError, AttributeError, TypeError, IndexError, AssertionError, KeyError, OverflowError) as cause:
        # ruamel.yaml stumbles over some broken texts in other ways than by its own errors.
        raise document.Unreadable(errors.Problem("error", "syntax", "is not valid YAML", file=name)) from cause
    if not isinstance(values, dict):
        what = "is empty" if values is None else "must be a mapping at the top"
        raise document.Unreadable(errors.Problem("error", "wrong-type", what, file=name, line=1))
    if reading.doubles:
        raise document.Unreadable(reading.doubles[0])
    return document.Document(name, source, values, reading.positions, path)


class _Reading:
    """Turns nodes into values, noting places and duplicates."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._open: set[int] = set()
        self.positions: dict[locate.Path, locate.Position] = {}
        self.doubles: list[errors.Problem] = []

    def value(self, node: Any, path: locate.Path) -> object:
        """Return the value of a node, which stands at `path`."""
        self._count += 1
        if self._count > VALUES:
            raise self._fail("too-large", f"has more than {VALUES} values once its aliases are written out", node)
        if id(node) in self._open:
            raise self._fail("syntax", "is not valid YAML for settings: an alias holds itself", node)
        if str(node.tag) not in _TAGS:
            raise self._fail("syntax", f"uses the tag {document.quote(str(node.tag))}, which means nothing here", node)
        self.positions.setdefault(path, _position(node))
        kind = node.id
        if kind == "scalar":
            if not _is_text(str(node.value)):
                raise self._fail("encoding", "holds half a character (a lone surrogate), so it is no text", node)
            return _scalar(node)
        if len(path) > locate.DEPTH:
            raise self._fail("too-deep", f"nests deeper than {locate.DEPTH} levels", node)
        self._open.add(id(node))
        try:
            if kind == "sequence":
                return [self.value(child, (*path, number)) for number, child in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: Any, path: locate.Path) -> dict[str, object]:
        found: dict[str, object] = {}
        merged: list[dict[str, object]] = []
        for key_node, value_node in node.value:
            if key_node.id != "scalar":
                raise self._fail("wrong-type", "has a key that is no plain word", key_node)
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                below = self.value(value_node, path)
                merged += [m for m in (below if isinstance(below, list) else [below]) if isinstance(m, dict)]
                continue
            at = (*path, key)
            if key in found:
                message = f"has the key {document.quote(key)} twice"
                line = key_node.start_mark.line + 1
                self.doubles.append(
                    errors.Problem(
                        "error", "duplicate-key", message, file=self._name, line=line, key=document.dotted(at)
                    )
                )
            self.positions[at] = _position(key_node)
            found[key] = self.value(value_node, at)
        for lower in merged:
            found = {**lower, **found}
        return found

    def _fail(self, code: str, message: str, node: Any) -> document.Unreadable:
        return document.Unreadable(
            errors.Problem("error", code, message, file=self._name, line=node.start_mark.line + 1)
        )


def _position(node: Any) -> locate.Position:
    return locate.Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _scalar(node: Any) -> object:
    text = str(node.value)
    if node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
