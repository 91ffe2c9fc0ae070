"""Where keys stand in a document."""

from __future__ import annotations

import json

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from agent.settings import locate

TOML = '''# a comment with [brackets] = "and quotes"
title = "x"
a.b."c.d" = 1

[one]
text = """
[not] = 'a table'
"""
raw = \'\'\'
it's [
\'\'\'
list = [1, "two", [3, 4],
  # five
  { six = 6, seven = { eight = 8 } },
]

[one.two]
'quo ted' = true

[[many]]
x = 1
[many.sub]
y = 2
[[many]]
x = 3
[[many.deep]]
z = 4
[[many.deep]]
z = 5
'''


def test_every_key_and_member_of_a_toml_text_is_found() -> None:
    found = {path: (place.line, place.column) for path, place in locate.toml(TOML).items()}
    assert found[("title",)] == (2, 1)
    assert found[("a", "b", "c.d")] == (3, 5)
    assert found[("one",)] == (5, 1)
    assert found[("one", "raw")] == (9, 1)
    assert found[("one", "list")] == (12, 1)
    assert found[("one", "list", 1)] == (12, 12)
    assert found[("one", "list", 2, 1)] == (12, 23)
    assert found[("one", "list", 3, "six")] == (14, 5)
    assert found[("one", "list", 3, "seven", "eight")] == (14, 24)
    assert found[("one", "two", "quo ted")] == (18, 1)
    assert found[("many", 0, "x")] == (21, 1)
    assert found[("many", 0, "sub", "y")] == (23, 1)
    assert found[("many", 1, "x")] == (25, 1)
    assert found[("many", 1, "deep", 1, "z")] == (29, 1)


def paths(value: object, base: locate.Path = ()) -> set[locate.Path]:
    if isinstance(value, dict):
        found = {(*base, key) for key in value}
        return found.union(*(paths(child, (*base, key)) for key, child in value.items()))
    if isinstance(value, list):
        found = {(*base, number) for number in range(len(value))}
        return found.union(*(paths(child, (*base, number)) for number, child in enumerate(value)))
    return set()


def test_nothing_is_found_that_the_parser_does_not_know_and_nothing_is_missed() -> None:
    assert set(locate.toml(TOML)) == paths(tomli.loads(TOML))


values = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.sampled_from([None, 1]))
def test_every_key_of_a_random_json_text_is_found(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    found = locate.json_text(text)
    assert set(found) == paths(value)
    lines = text.split("\n")
    for path, place in found.items():
        here = lines[place.line - 1][place.column - 1 :]
        if isinstance(path[-1], str):
            assert here.startswith(json.dumps(path[-1]))


@pytest.mark.parametrize(
    ("text", "depth"),
    [("", 0), ("a = 1", 0), ("a = [[1], {b = [2]}]", 3), ("a = \"[[[\"  # [[[[\nb = '{{{'", 0), ("]]][", 0)],
)
def test_depth_counts_brackets_outside_of_texts(text: str, depth: int) -> None:
    assert locate.depth(text) == depth


@pytest.mark.parametrize(
    "text", ["[a", "[", "a", "a =", "a = [", "a = {b", 'a = "x', "=", '"\\e" = 1', "a = [1,", "a.= 1"]
)
def test_broken_texts_end(text: str) -> None:
    locate.toml(text)
    locate.json_text(text)


def test_a_key_with_an_escape_that_json_lacks() -> None:
    assert ("\\e",) in locate.toml('"\\e" = 1')
