"""Decide a ResourceClaim on this node's devices: selectors, counts and constraints, solved exactly.

For every combination of values that the matchAttribute constraints may take, the question is one
of matching units of requests to distinct devices, which augmenting paths answer. A
distinctAttribute constraint is met by search, bounded so that it ends.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.workload import cel, read

CLASSES = {"gpu.nvidia.com": "gpu", "mig.nvidia.com": "mig", "vfio.gpu.nvidia.com": "vfio"}
"""NVIDIA's device classes and the `type` each selects."""
BUDGET = 200_000
"""Steps of the search with distinctAttribute before it gives up and says so."""
COMBINATIONS = 512
"""Combinations of alternatives that are tried before the same."""


class _TooHard(Exception):
    """A search used up its steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A device as the DRA driver publishes it; attribute names as in `cel.Selector.matches`."""

    name: str
    attributes: Mapping[str, Any]
    capacity: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Whether the claim can be allocated, on which devices (names), and why not. `unreadable` marks
    an expression that is not CEL at all; `change` says what to do about a refusal."""

    fits: bool
    devices: tuple[str, ...] = ()
    reason: str = ""
    line: int | None = None
    unreadable: bool = False
    change: str = ""


def decide(claim: read.Claim, devices: Sequence[Device]) -> Decision:
    """Decide `claim` on the free `devices`; of alternatives the first that can be had, as the scheduler
    tries them. Pure."""
    options = [request.alternatives or (request,) for request in claim.requests]
    tried = itertools.product(*options)
    first: Decision | None = None
    known: dict[read.Request, list[int] | Decision] = {}  # selectors are evaluated once, not once a combination
    for chosen in itertools.islice(tried, COMBINATIONS):
        try:
            decision = _decide(dataclasses.replace(claim, requests=chosen), devices, known)
        except _TooHard:
            decision = Decision(
                fits=False,
                line=claim.line,
                reason=f"it cannot be decided in {BUDGET} steps of search: its constraints leave too many ways",
            )
        if decision.fits or decision.unreadable:
            return decision
        first = first or decision
    assert first is not None
    if next(tried, None) is not None:
        reason = f"{first.reason}; nor does any of the first {COMBINATIONS} combinations of alternatives"
    elif any(len(option) > 1 for option in options):
        reason = f"{first.reason}; nor can any alternative be had"
    else:
        return first
    return dataclasses.replace(first, reason=reason)


def _decide(claim: read.Claim, devices: Sequence[Device], known: dict[read.Request, list[int] | Decision]) -> Decision:
    candidates: list[list[int]] = []
    for request in claim.requests:
        if request not in known:
            known[request] = _candidates(request, devices)
        found = known[request]
        if isinstance(found, Decision):
            return found
        wanted = len(found) if request.count is None else request.count
        if not found or len(found) < wanted:
            return _too_few(request, found, devices)
        candidates.append(found)
    units: list[int] = []  # for each unit of device wanted, the index of its request
    for index, request in enumerate(claim.requests):
        units += [index] * (len(candidates[index]) if request.count is None else request.count)
    constraints = [c for c in claim.constraints if _concerned(c, claim)]
    matches = [c for c in constraints if not c.distinct]
    distinct = [c for c in constraints if c.distinct]
    values = [_values(c, claim, candidates, devices) for c in matches]
    for constraint, possible in zip(matches, values, strict=True):
        if not possible:
            return _apart(claim, constraint, candidates, devices)
    for chosen in itertools.product(*values):
        narrowed = _narrow(claim, candidates, devices, list(zip(matches, chosen, strict=True)))
        if any(not rest for rest in narrowed):
            continue
        answer = _assign(units, narrowed) if not distinct else _search(claim, units, narrowed, devices, distinct)
        if answer is not None:
            return Decision(fits=True, devices=tuple(devices[i].name for i in answer))
    if matches:
        return _apart(claim, matches[0], candidates, devices)
    if distinct:
        return Decision(
            fits=False,
            line=distinct[0].line,
            reason=f"there are not enough devices that differ in {distinct[0].attribute}",
        )
    return Decision(
        fits=False,
        line=claim.line,
        reason=f"its requests want {len(units)} devices and share {len({i for c in candidates for i in c})} that match",
    )


def _attribute(device: Device, qualified: str) -> Any:
    """Return a device's attribute by its qualified name ("gpu.nvidia.com/parentUUID"), None without it."""
    domain, _, bare = qualified.rpartition("/")
    if domain == cel.DRIVER and bare in device.attributes:
        return device.attributes[bare]
    return device.attributes.get(qualified)


def _candidates(request: read.Request, devices: Sequence[Device]) -> list[int] | Decision:
    kind = CLASSES.get(request.device_class)
    if kind is None:
        return Decision(
            fits=False,
            line=request.line,
            reason=(
                f'device class "{request.device_class}" is none of NVIDIA\'s ({", ".join(CLASSES)}), '
                "so it cannot be judged here"
            ),
        )
    found = [i for i, d in enumerate(devices) if d.attributes.get("type") == kind]
    for expression, line in request.selectors:
        try:
            selector = cel.Selector(expression)
        except cel.SelectorSyntaxError as cause:
            return Decision(fits=False, line=line, reason=str(cause), unreadable=True)
        kept = []
        for index in found:
            try:
                if selector.matches(devices[index].attributes, devices[index].capacity):
                    kept.append(index)
            except cel.SelectorSyntaxError as cause:
                return Decision(fits=False, line=line, reason=str(cause), unreadable=True)
            except cel.SelectorError as cause:
                return Decision(
                    fits=False,
                    line=line,
                    reason=f"the selector of request {request.name} fails on {devices[index].name}: {cause}",
                )
        found = kept
    return found


def _too_few(request: read.Request, found: list[int], devices: Sequence[Device]) -> Decision:
    kind = CLASSES[request.device_class]
    noun = {"mig": "MIG device", "gpu": "whole GPU"}.get(kind, f"{kind} device")
    there = _census(devices, kind)
    profile = next(
        (m[1] for e, _ in request.selectors if (m := re.search(r"profile\s*==\s*['\"]([^'\"]+)['\"]", e))), None
    )
    which = f" with profile {profile}" if profile else " that matches its selectors" if request.selectors else ""
    line = request.selectors[0][1] if request.selectors else request.line
    if not found:
        reason = f"no {noun}{which}"
    else:
        wanted = "all" if request.count is None else str(request.count)
        have = f"1 {noun}{which} is" if len(found) == 1 else f"{len(found)} {noun}s{which} are"
        reason = f"request {request.name} wants {wanted} and {have} free"
    change = f"ask for what is free, or split the GPUs so that there is a {profile}" if profile else ""
    if found and request.count is not None:
        change = f"ask for at most {len(found)}"
    return Decision(fits=False, line=line, reason=f"{reason} (free on this node: {there})", change=change)


def _census(devices: Sequence[Device], kind: str) -> str:
    counts = collections.Counter(
        str(d.attributes.get("profile", "whole GPU")) for d in devices if d.attributes.get("type") == kind
    )
    if not counts:
        return f"no device of type {kind}"
    return ", ".join(f"{n} x {name}" for name, n in sorted(counts.items()))


def _concerned(constraint: read.Constraint, claim: read.Claim) -> list[int]:
    # A constraint on a request is one on whichever of its alternatives is taken.
    wanted = constraint.requests
    return [
        i for i, r in enumerate(claim.requests) if not wanted or r.name in wanted or r.name.partition("/")[0] in wanted
    ]


def _values(
    constraint: read.Constraint, claim: read.Claim, candidates: list[list[int]], devices: Sequence[Device]
) -> list[Any]:
    """Return the values of the attribute that every concerned request could take."""
    common: list[Any] | None = None
    for index in _concerned(constraint, claim):
        here = dict.fromkeys(_attribute(devices[d], constraint.attribute) for d in candidates[index])
        here.pop(None, None)
        common = list(here) if common is None else [v for v in common if v in here]
    return common or []


def _narrow(
    claim: read.Claim,
    candidates: list[list[int]],
    devices: Sequence[Device],
    chosen: list[tuple[read.Constraint, Any]],
) -> list[list[int]]:
    narrowed = [list(c) for c in candidates]
    for constraint, value in chosen:
        for index in _concerned(constraint, claim):
            narrowed[index] = [d for d in narrowed[index] if _attribute(devices[d], constraint.attribute) == value]
    return narrowed


def _assign(units: list[int], candidates: list[list[int]]) -> list[int] | None:
    """Match every unit to a device of its own; None when that cannot be."""
    taken: dict[int, int] = {}

    def place(unit: int, tried: set[int]) -> bool:
        for device in candidates[units[unit]]:
            if device in tried:
                continue
            tried.add(device)
            if device not in taken or place(taken[device], tried):
                taken[device] = unit
                return True
        return False

    if len(units) > len({d for c in candidates for d in c}):
        return None
    for unit in range(len(units)):
        if not place(unit, set()):
            return None
    by_unit = {unit: device for device, unit in taken.items()}
    return [by_unit[unit] for unit in range(len(units))]


def _search(
    claim: read.Claim,
    units: list[int],
    candidates: list[list[int]],
    devices: Sequence[Device],
    distinct: list[read.Constraint],
) -> list[int] | None:
    order = sorted(range(len(units)), key=lambda u: len(candidates[units[u]]))
    chosen: dict[int, int] = {}
    used: list[set[Any]] = [set() for _ in distinct]
    concerned = [set(_concerned(c, claim)) for c in distinct]
    budget = BUDGET

    def go(position: int) -> bool:
        nonlocal budget
        if position == len(order):
            return True
        unit = order[position]
        for device in candidates[units[unit]]:
            budget -= 1
            if budget < 0:
                raise _TooHard
            if device in chosen.values():
                continue
            marks = []
            for number, constraint in enumerate(distinct):
                if units[unit] in concerned[number]:
                    value = _attribute(devices[device], constraint.attribute)
                    if value is None or value in used[number]:
                        break
                    marks.append((number, value))
            else:
                chosen[unit] = device
                for number, value in marks:
                    used[number].add(value)
                if go(position + 1):
                    return True
                del chosen[unit]
                for number, value in marks:
                    used[number].discard(value)
        return False

    return [chosen[u] for u in range(len(units))] if go(0) else None


def _no_value(
    claim: read.Claim, constraint: read.Constraint, candidates: list[list[int]], devices: Sequence[Device]
) -> str:
    """Say why no value of the attribute serves all requests: what each value could give."""
    names = [claim.requests[i].name for i in _concerned(constraint, claim)]
    offers: dict[Any, list[int]] = {}
    for position, index in enumerate(_concerned(constraint, claim)):
        for device in candidates[index]:
            value = _attribute(devices[device], constraint.attribute)
            if value is not None:
                offers.setdefault(value, [0] * len(names))[position] += 1
    if not offers:
        return f"no device publishes {constraint.attribute}"
    best = max(offers.items(), key=lambda item: sum(min(n, 1) for n in item[1]))
    have = ", ".join(f"{n} for {name}" for name, n in zip(names, best[1], strict=True))
    return (
        f"no single value of {constraint.attribute} has devices for {' and '.join(names)} together; "
        f"the best, {best[0]}, has {have} (before sharing)"
    )


def _apart(
    claim: read.Claim, constraint: read.Constraint, candidates: list[list[int]], devices: Sequence[Device]
) -> Decision:
    change = "remove the constraint, or give one GPU all that is asked for together"
    if not constraint.attribute.endswith("/parentUUID"):
        change = "remove the constraint, or ask for devices that agree in it"
    return Decision(
        fits=False, line=constraint.line, reason=_no_value(claim, constraint, candidates, devices), change=change
    )
