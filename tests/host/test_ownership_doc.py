"""docs/ownership.md is the list that `agent.host.owner` goes through: line by line, and nothing left out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from agent.host import owner

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "ownership.md").read_text()
NONE = owner.Signals()
ON_BOTTLEROCKET = dataclasses.replace(NONE, bottlerocket=True)
# For each line a host to which it applies, and no line above it.
LINES = [
    dataclasses.replace(NONE, setting="mig-manager"),
    dataclasses.replace(NONE, auto_mode=True),
    dataclasses.replace(NONE, dra_dynamic=True),
    dataclasses.replace(NONE, dra_remembered=True),
    dataclasses.replace(NONE, mig_manager="process x"),
    dataclasses.replace(NONE, mig_manager_remembered=True),
    dataclasses.replace(ON_BOTTLEROCKET, host_problem="500"),
    dataclasses.replace(ON_BOTTLEROCKET, host_strategy="mig"),
    dataclasses.replace(ON_BOTTLEROCKET, host_strategy="mig", host_enabled=False, ampere=True),
    dataclasses.replace(ON_BOTTLEROCKET, host_strategy="none", migmanager_busy="it is at work"),
    dataclasses.replace(NONE, ecs="x"),
    NONE,
]
DECIDING = [field.name for field in dataclasses.fields(owner.Signals)]


def rows() -> list[list[str]]:
    table = [line for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def test_the_list_is_numbered_and_complete() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, len(LINES) + 1))


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_is_what_is_decided(number: int) -> None:
    found = owner.decide(LINES[number])
    _, _, _, who, code, does, takeover = rows()[number]
    assert code == found.code
    assert who == (found.owner if found.code != "owner-set" else "that one")
    assert (does == "writes") == found.may_write
    if found.takeover is not None:
        assert takeover == found.takeover
    taken = owner.decide(dataclasses.replace(LINES[number], setting="gpunode"))
    always = "always" in does or code in ("owner-unknown", "migmanager-busy", "ecs-no-mig")
    assert taken.may_write != always, "what `owner = gpunode` changes"


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_wins_over_those_below_it(number: int) -> None:
    """Together with all that would make the lines below apply, it is still this one that decides."""
    mine = LINES[number]
    both = mine
    for lower in LINES[number + 1 :]:
        for name in DECIDING:
            if getattr(both, name) == getattr(NONE, name):
                both = dataclasses.replace(both, **{name: getattr(lower, name)})
    if number == 7:  # enabled = false is what sets the line below apart from this one
        both = dataclasses.replace(both, host_enabled=True)
    if number == 9:
        both = dataclasses.replace(both, ampere=False)
    assert owner.decide(both).code == owner.decide(mine).code


def test_every_code_and_place_is_named() -> None:
    source = Path(owner.__file__).read_text()
    codes = set(re.findall(r'"((?:owner|ecs|migmanager)-[a-z-]+)"', source))
    assert codes - {row[4] for row in rows()} == set()
    places = [
        owner.MEMORY,
        owner.MIGMANAGER_FILE,
        owner.MIGMANAGER_MARKER,
        owner.DRA_CHECKPOINT,
        owner.MIG_MANAGER_FOLDER,
        *re.findall(r'"(/(?:etc|usr|lib|run|var)/[\w./-]+)"', source),
    ]
    for place in places:
        assert place in TEXT, place
    for label in re.findall(r'"([a-z.]+\.com/[a-z.-]+=[a-z]*)"', source):
        assert label in TEXT, label


def test_the_docstring_tells_the_same_owners_in_the_same_order() -> None:
    assert owner.__doc__ is not None
    told = re.findall(r"  (that one|AWS|dra-dynamic|mig-manager|unknown|migmanager|nobody|gpunode)  +", owner.__doc__)
    assert [word.lower() for word in told] == [row[3].lower() for row in rows()]
