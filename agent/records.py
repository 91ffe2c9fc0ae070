"""Frozen dataclasses that are cheap to make: the daemon makes some 130 classes at each start.

`@records.dataclass(frozen=True, slots=True)` is `dataclasses.dataclass` of the same arguments to whoever reads, checks
or uses the class: fields, `replace`, `asdict`, matching, equality, hash, repr, copies. The library compiles six
functions for each such class, 0.4 ms of CPU; here it is told to make none, `__init__` alone is compiled, and the others
are closures over the fields. The classes are for values, so nothing may inherit from them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414  # exported: type checkers know all about this one
else:

    def dataclass(
        *, frozen: Literal[True], slots: Literal[True], kw_only: bool = False
    ) -> Callable[[type[Any]], type[Any]]:
        """Return what makes a class a frozen dataclass with slots; there are no others here."""
        if not (frozen and slots):
            raise TypeError("records are frozen and have slots; take dataclasses.dataclass for anything else")

        def make(plain: type[Any]) -> type[Any]:
            if plain.__doc__ is None:
                plain.__doc__ = plain.__name__  # else the library makes one from the signature, for half of all costs
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(plain)
            fields = dataclasses.fields(made)
            methods = [_init(made, fields), *_compare(made, fields), *_frozen(fields), _repr(made, fields)]
            for method in methods:
                if method.__name__ not in plain.__dict__:
                    method.__qualname__ = f"{plain.__qualname__}.{method.__name__}"
                    method.__module__ = plain.__module__
                    setattr(made, method.__name__, method)
            return made

        return make


def _init(made: type[Any], fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    """Return `__init__`. It stores by the slots themselves, as `__setattr__` refuses."""
    names: dict[str, Any] = {"_absent": dataclasses.MISSING}
    takes: tuple[list[str], list[str]] = ([], [])
    stores = []
    for field in fields:
        name, value = field.name, field.name
        names[f"_store_{name}"] = made.__dict__[name].__set__
        if field.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default
            takes[bool(field.kw_only)].append(f"{name}=_default_{name}")
        elif field.default_factory is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default_factory
            takes[bool(field.kw_only)].append(f"{name}=_absent")
            value = f"_default_{name}() if {name} is _absent else {name}"
        else:
            takes[bool(field.kw_only)].append(name)
        stores.append(f" _store_{name}(self, {value})")
    arguments = ["self", *takes[0], *(["*", *takes[1]] if takes[1] else [])]
    text = f"def __init__({', '.join(arguments)}):\n" + ("\n".join(stores) or " pass")
    exec(text, names)  # noqa: S102  # made of field names alone, as the library does it
    found: Callable[..., None] = names["__init__"]
    return found


def _compare(made: type[Any], fields: tuple[dataclasses.Field[Any], ...]) -> tuple[Callable[..., Any], ...]:
    """Return `__eq__` and `__hash__` over the fields that count."""
    counted = [field.name for field in fields if field.compare]
    values: Callable[[Any], Any]
    if len(counted) > 1:
        values = operator.attrgetter(*counted)
    else:

        def values(of: Any) -> tuple[Any, ...]:
            return tuple(getattr(of, name) for name in counted)

    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        if other.__class__ is not made:
            return NotImplemented
        return bool(values(self) == values(other))

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    return __eq__, __hash__


def _frozen(fields: tuple[dataclasses.Field[Any], ...]) -> tuple[Callable[..., Any], ...]:
    """Return what refuses every change, and what lets a copy be made nevertheless."""
    names = [field.name for field in fields]

    def __setattr__(self: Any, name: str, value: object) -> None:  # noqa: N807, ARG001
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807, ARG001
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self: Any) -> list[Any]:  # noqa: N807
        return [getattr(self, name) for name in names]

    def __setstate__(self: Any, state: list[Any]) -> None:  # noqa: N807
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return __setattr__, __delattr__, __getstate__, __setstate__


def _repr(made: type[Any], fields: tuple[dataclasses.Field[Any], ...]) -> Callable[[Any], str]:
    shown = [field.name for field in fields if field.repr]

    def __repr__(self: Any) -> str:  # noqa: N807
        return f"{made.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    return __repr__
