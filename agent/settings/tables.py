"""From a table of a document to a checked pydantic model, and from pydantic's complaints to ours.

Every complaint gets the file, line and key, says what is valid there, and names the nearest valid
word where one is near.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
import pydantic_core

from agent import errors
from agent.mig import profile as profiles
from agent.settings import document, locate, model

T = TypeVar("T", bound=pydantic.BaseModel)

_TYPES = {
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "union_tag_invalid": "another kind of value",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the valid word that `word` was probably meant to be, or None."""
    import difflib  # only when something is wrong

    found = difflib.get_close_matches(word[:100].lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def alike(word: str, known: str) -> bool:
    """Whether a word is so near a known one that it is surely a slip."""
    import difflib

    return word != known and difflib.SequenceMatcher(None, word[:100].lower(), known).ratio() >= 0.85


def listing(words: Sequence[str], *, last: str = "or") -> str:
    """Return words in quotes as a sentence lists them: `"a", "b" or "c"`."""
    quoted = [f'"{word}"' for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the sentence about a key that does not exist here."""
    words = list(known)
    near = nearest(key, words)
    if near is not None:
        return f'unknown key {document.quote(key)}; did you mean "{near}"?'
    return f"unknown key {document.quote(key)}; valid here: {', '.join(sorted(words))}"


def check(
    kind: type[T], doc: document.Document, path: locate.Path, raw: object, problems: list[errors.Problem]
) -> T | None:
    """Return the table at `path` as a `kind`, or None with everything wrong with it in `problems`."""
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as cause:
        found = [_problem(kind, doc, path, raw, error) for error in cause.errors(include_url=False)]
        problems += sorted(found, key=lambda problem: problem.line or 0)  # as they stand in the document
        return None


def explain(kind: type[pydantic.BaseModel], raw: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return (key, code, message) of everything wrong with a flat table that is no document's."""
    try:
        kind.model_validate(raw)
    except pydantic.ValidationError as cause:
        return [(str(e["loc"][0]), *_words(kind, e)) for e in cause.errors(include_url=False)]
    return []


def parse_profile(
    doc: document.Document, path: locate.Path, text: str, problems: list[errors.Problem]
) -> profiles.Profile | None:
    """Return a profile by its name, or None with what is wrong in `problems`."""
    try:
        return profiles.parse(text)
    except profiles.ProfileSyntaxError:
        message = f"{document.quote(text)} is not a MIG profile name (like 1g.10gb, 1c.3g.40gb or 1g.10gb+me)"
        problems.append(doc.problem("profile-syntax", message, path))
        return None


def _problem(
    kind: type[pydantic.BaseModel],
    doc: document.Document,
    path: locate.Path,
    raw: object,
    error: pydantic_core.ErrorDetails,
) -> errors.Problem:
    code, message = _words(kind, error)
    return doc.problem(code, message, (*path, *_keys(raw, error["loc"])))


def _keys(raw: object, loc: tuple[int | str, ...]) -> locate.Path:
    """Return pydantic's place as a key path: without the tags of its unions."""
    path: locate.Path = ()
    here: Any = raw
    for part in loc:
        members: dict[Any, Any] = here if isinstance(here, dict) else {}
        if isinstance(here, list):
            members = dict(enumerate(here))
        if part in members:  # else it is the tag of a union, or a key that is missing
            path = (*path, part)
            here = members[part]
    return path


def _words(kind: type[pydantic.BaseModel], error: pydantic_core.ErrorDetails) -> tuple[str, str]:
    """Return our code and sentence for one of pydantic's complaints."""
    what = error["type"]
    given = error.get("input")
    context = error.get("ctx", {})
    if what == "extra_forbidden":
        return "unknown-key", unknown_key(str(error["loc"][-1]), _keys_of(kind, error["loc"][:-1]))
    if what == "missing":
        return "missing-key", f'the key "{error["loc"][-1]}" is missing'
    if error["loc"][-2:] == ("gpus", "other"):
        return "invalid-value", f'must be "all" or a list like [0, 1], and is {document.quote(given)}'
    if what == "literal_error":
        words = [word.strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(", ")]
        near = nearest(given, words) if isinstance(given, str) else None
        hint = f'; did you mean "{near}"?' if near and near != given else ""
        return "invalid-value", f"{document.quote(given)} is not valid here; use {listing(words)}{hint}"
    if what in _LIMITS:
        name, words_of = _LIMITS[what]
        return "invalid-value", f"must be {words_of} {context[name]:g}, and is {document.quote(given)}"
    if what == "string_pattern_mismatch" and "listen" in error["loc"]:
        return (
            "invalid-value",
            f"{document.quote(given)} is no address to listen on, like 127.0.0.1:19400 or unix:/path",
        )
    if what == "string_pattern_mismatch":
        return "model-key", f"{document.quote(given)} is not a GPU model key like a100.40gb"
    if what in ("too_short", "string_too_short"):
        return "invalid-value", "must not be empty"
    if what == "finite_number":
        return "invalid-value", f"must be a finite number, and is {document.quote(given)}"
    if what in _TYPES:
        return "wrong-type", f"must be {_TYPES[what]}, and is {document.quote(given)}"
    # Rare ones (half a character of JSON, say) in pydantic's own words.
    return "invalid-value", f"{document.quote(given)} is not valid here: {error['msg']}"


def _keys_of(kind: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid in the table at `loc` below a `kind`."""
    for name in reversed(loc):
        below = _TABLES.get(str(name))
        if below is not None:
            kind = below
            break
    return [field.alias or name for name, field in kind.model_fields.items()]


_TABLES: dict[str, type[pydantic.BaseModel]] = {
    "layout": model.LayoutTable,
    "instances": model.InstanceTable,
    "after-change": model.AfterChangeTable,
    "mig-parted": model.MigPartedTable,
}
