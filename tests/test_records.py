"""Records are held against `dataclasses`: whatever one of both can do, the other does alike."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from agent import records


@records.dataclass(frozen=True, slots=True)
class Pair:
    """Two, one of them not needed."""

    left: int
    right: str = "r"


@records.dataclass(frozen=True, slots=True)
class One:
    value: object


@records.dataclass(frozen=True, slots=True)
class Nothing:
    """No field at all."""


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """By name only; `note` does not count, and the class has something of its own."""

    kind: ClassVar[str] = "named"
    size: int = 3
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    note: str = dataclasses.field(default="", compare=False)
    needed: tuple[Pair, ...]

    @property
    def doubled(self) -> int:
        return self.size * 2


@records.dataclass(frozen=True, slots=True)
class Worded:
    """Says itself its own way."""

    value: int
    late: int = dataclasses.field(default=0, kw_only=True)

    def __repr__(self) -> str:
        return f"<{self.value}>"


def twin(made: type[Any]) -> type[Any]:
    """The same class as the library makes it."""
    own = {
        name: made.__dict__[name] for name in ("__annotations__", "__doc__", "kind", "doubled") if name in made.__dict__
    }
    if made is Worded:
        own["__repr__"] = made.__dict__["__repr__"]
    for field in dataclasses.fields(made):
        if (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
            or field.kw_only
        ):
            given: dict[str, Any] = {"compare": field.compare}
            for name in ("default", "default_factory"):
                if getattr(field, name) is not dataclasses.MISSING:
                    given[name] = getattr(field, name)
            if made is not Named:
                given["kw_only"] = field.kw_only
            own[field.name] = dataclasses.field(**given)
    plain = type(made.__name__, (), own | {"__module__": __name__, "__qualname__": made.__qualname__})
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=made is Named)(plain)


CASES = [
    (Pair, [((1,), {}), ((1, "r"), {}), ((1, "x"), {}), ((), {"left": 2}), ((2,), {"right": "x"})]),
    (One, [((1,), {}), ((float("nan"),), {}), (("x",), {})]),
    (Nothing, [((), {})]),
    (
        Named,
        [
            ((), {"needed": ()}),
            ((), {"needed": (), "note": "n"}),
            ((), {"needed": (), "size": 4, "parts": {"a": 1}}),
        ],
    ),
    (Worded, [((1,), {}), ((1,), {"late": 2})]),
]
each = pytest.mark.parametrize(("made", "arguments"), CASES, ids=lambda case: getattr(case, "__name__", ""))


@each
def test_a_record_is_what_the_library_makes(made: type[Any], arguments: list[Any]) -> None:
    other = twin(made)
    ours = [made(*args, **named) for args, named in arguments]
    theirs = [other(*args, **named) for args, named in arguments]
    assert [repr(a) for a in ours] == [repr(b) for b in theirs]
    assert [[a == b for b in ours] for a in ours] == [[a == b for b in theirs] for a in theirs]
    assert [dataclasses.asdict(a) for a in ours[-1:]] == [dataclasses.asdict(b) for b in theirs[-1:]]
    assert made.__match_args__ == other.__match_args__
    assert made.__slots__ == other.__slots__
    assert [f.name for f in dataclasses.fields(made)] == [f.name for f in dataclasses.fields(other)]
    assert list(inspect.signature(made).parameters) == list(inspect.signature(other).parameters)
    assert [p.kind for p in inspect.signature(made).parameters.values()] == [
        p.kind for p in inspect.signature(other).parameters.values()
    ]


@each
def test_a_record_is_frozen_and_copied(made: type[Any], arguments: list[Any]) -> None:
    for args, named in arguments:
        record = made(*args, **named)
        for again in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
            assert repr(again) == repr(record)
        assert dataclasses.replace(record) == record
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.anything = 1
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, field.name, 1)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(record, field.name)


def test_equal_records_have_one_hash_and_unequal_kinds_are_unequal() -> None:
    assert len({Pair(1), Pair(1, "r"), Pair(2)}) == 2
    assert hash(Pair(1)) == hash((1, "r"))
    others: tuple[object, ...] = ((1, "r"), One(1), twin(Pair)(1))
    assert all(other != Pair(1) for other in others)
    with pytest.raises(TypeError):
        hash(One([]))


def test_each_record_has_its_own_default() -> None:
    first, second = Named(needed=()), Named(needed=())
    assert first.parts == second.parts
    assert first.parts is not second.parts
    assert Named.kind == "named"
    assert first.doubled == 6


def test_a_record_matches() -> None:
    match Pair(1, "x"):
        case Pair(left, right=word):
            assert (left, word) == (1, "x")


@pytest.mark.parametrize("call", [((), {}), ((1, "r", 2), {}), ((1,), {"wrong": 2})])
def test_wrong_arguments_are_refused(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    with pytest.raises(TypeError):
        Pair(*call[0], **call[1])
    with pytest.raises(TypeError):
        Named(*call[0], **call[1])


def test_there_are_only_frozen_ones() -> None:
    with pytest.raises(TypeError, match="frozen"):
        records.dataclass(frozen=False, slots=True)


def test_no_docstring_costs_no_signature() -> None:
    assert One.__doc__ == "One"


def test_a_start_compiles_one_function_a_record() -> None:
    code = (
        "import builtins, dataclasses; runs = []; real = builtins.exec\n"
        "def counted(*args): runs.append(args); return real(*args)\n"
        "builtins.exec = counted\n"
        "from agent import records\n"
        "runs.clear()\n"
        "@records.dataclass(frozen=True, slots=True)\n"
        "class Two:\n"
        "    a: int\n"
        "    b: int = 0\n"
        "print(len(runs))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"
