"""Whether wanted instances fit a GPU, and when they do not: what runs out, a map, and what would fit.

The planner and the settings ask here. The search itself is in `agent.mig.search`; this file turns
specs into what it works on, and its refusals into sentences.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from agent.mig import compute as cis
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import profile as profiles
from agent.mig import search


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Kind:
    """A sort of wanted instance: number of its offer, the compute kinds in it (sorted), its fixed
    start (-1 when free). Equal kinds are interchangeable."""

    offer: int
    compute: tuple[int, ...]
    start: int = -1


class Refusal(Exception):
    """The wanted instances cannot be on this kind of GPU at all; `str()` is the sentence."""


@functools.lru_cache(maxsize=64)
def geometry_of(offers: tuple[nodes.ProfileOffer, ...]) -> search.Geometry:
    """Return the prepared geometry of a GPU's offers."""
    return search.Geometry(offers)


def kinds(geometry: search.Geometry, instances: Sequence[layouts.InstanceSpec], where: str) -> tuple[Kind, ...]:
    """Return the kind of every spec, in their order. Raises Refusal when one names what this GPU
    (`where` in words) does not offer, or a split or start that its profile cannot have."""
    found = []
    for spec in instances:
        kind = _kind(geometry, spec)
        if isinstance(kind, str):
            raise Refusal(f"cannot place {spec.profile} on {where}: {kind}")
        found.append(kind)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _kind(geometry: search.Geometry, spec: layouts.InstanceSpec) -> Kind | str:
    """Return the kind of a spec, or why this geometry does not have it."""
    number = geometry.number(spec.profile)
    if number is None:
        return f"it offers {', '.join(str(offer.profile) for offer in geometry.offers) or 'no profile'}"
    offer = geometry.offers[number]
    if not offer.placements:
        return "the driver tells no place for it"
    for part in spec.compute:
        if part.gpu_instance != spec.profile:
            return f"{part} is a part of {part.gpu_instance}, not of it"
    base = geometry.base_multiprocessors
    split = tuple(cis.kind_of(offer, part, base_multiprocessors=base) for part in spec.compute) or (cis.WHOLE,)
    problem = cis.problem(offer, split)
    if problem is not None:
        return problem
    if spec.start is not None and all(place.start != spec.start for place in offer.placements):
        starts = ", ".join(str(place.start) for place in sorted(offer.placements))
        return f"no place of it starts at memory slice {spec.start} (they start at {starts})"
    return Kind(number, tuple(sorted(split)), -1 if spec.start is None else spec.start)


def groups_of(geometry: search.Geometry, wanted: Iterable[Kind]) -> tuple[tuple[Kind, search.Group], ...]:
    """Return the wanted kinds with their counts and places on an empty GPU, in a fixed order."""
    return tuple(
        (
            kind,
            search.Group(
                count,
                tuple(
                    search.Option(start, mask)
                    for start, mask in geometry.places[kind.offer]
                    if kind.start in (-1, start)
                ),
            ),
        )
        for kind, count in sorted(collections.Counter(wanted).items())
    )


def count_by_offer(wanted: Iterable[Kind]) -> Mapping[int, int]:
    """Return how many instances of each offer are wanted."""
    return collections.Counter(kind.offer for kind in wanted)


def fits_empty(gpu: nodes.Gpu, instances: Sequence[layouts.InstanceSpec]) -> str | None:
    """Return None when an empty GPU of this kind can hold `instances`, else the sentence that says
    which resource runs out, how the slices lie, and what is the nearest that fits."""
    geometry = geometry_of(gpu.offers)
    where = name_of(gpu)
    try:
        return refusal(geometry, kinds(geometry, instances, where), where)
    except Refusal as cause:
        return str(cause)


def refusal(geometry: search.Geometry, wanted: tuple[Kind, ...], where: str) -> str | None:
    """Return why an empty GPU (`where` in words) cannot hold `wanted`, None when it can."""
    shortage = _shortage(geometry, tuple(sorted(wanted)))
    return None if shortage is None else _too_much(geometry, wanted, shortage, where)


@functools.lru_cache(maxsize=1024)
def _shortage(geometry: search.Geometry, wanted: tuple[Kind, ...]) -> search.Shortage | None:
    """Return what runs out on an empty GPU, places included."""
    shortage = geometry.shortage(count_by_offer(wanted))
    if shortage is not None:
        return shortage
    if search.arrange(geometry, [group for _, group in groups_of(geometry, wanted)], {}) is not None:
        return None
    return search.Shortage("memory slices", "no places that do not overlap")


def remaining(gpu: nodes.Gpu, profile: profiles.Profile) -> int:
    """Return how many more instances of `profile` can be made beside what is on the GPU now.

    0 for a profile that it does not offer. Instances of unknown profiles take their place only.
    """
    geometry = geometry_of(gpu.offers)
    number = geometry.number(profile)
    if number is None:
        return 0
    used = 0
    counts: collections.Counter[int] = collections.Counter()
    for instance in gpu.instances:
        used |= ((1 << instance.placement.size) - 1) << instance.placement.start
        there = geometry.number(instance.profile)
        if there is not None:
            counts[there] += 1
    free = 0
    # Places of one profile are aligned to its size, so each free one counts.
    for _, mask in geometry.places[number]:
        counts[number] += 1
        if not mask & used:
            if geometry.shortage(counts) is not None:
                break
            free += 1
            used |= mask
        else:
            counts[number] -= 1
    return free


def slice_map(geometry: search.Geometry, placed: Iterable[tuple[str, int, int]]) -> str:
    """Draw (label, start, size) entries to scale on one line: `slices 0-7 |3g.20gb|1g.5gb|free   |`.

    A cell is the widest step that all places share, so an RTX PRO 6000 shows 4 cells and not 12.
    """
    entries = sorted(placed, key=lambda entry: entry[1])
    places = [place for offer in geometry.offers for place in offer.placements]
    edges = {edge for place in places for edge in (place.start, place.end)}
    step = math.gcd(*edges) or 1
    filled: list[tuple[str, int]] = []
    at = 0
    for label, start, size in [*entries, ("", geometry.slots, 0)]:
        if start > at:
            filled.append(("free", start - at))
        if size:
            filled.append((label, size))
        at = start + size
    # A cell of n steps is n * width wide and swallows the n - 1 bars between its steps.
    width = max((-(-(len(label) + 1) * step // size) - 1 for label, size in filled), default=4)
    width = max(width, 1)
    return (
        f"slices 0-{geometry.slots - 1} |"
        + "|".join(label.ljust(size // step * (width + 1) - 1) for label, size in filled)
        + "|"
    )


def names(geometry: search.Geometry, wanted: Iterable[Kind]) -> str:
    """Return wanted instances in words: "2 x 3g.20gb and 1g.5gb", largest first."""
    counts = count_by_offer(wanted)
    order = sorted(counts, key=lambda n: (-geometry.offers[n].size, -geometry.offers[n].slices, n))
    words = [(f"{counts[n]} x " if counts[n] > 1 else "") + str(geometry.offers[n].profile) for n in order]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def name_of(gpu: nodes.Gpu) -> str:
    """Return a GPU in the words of a refusal: "GPU 0 (a100.40gb)"."""
    return f"GPU {gpu.index} ({gpu.model})" if gpu.model else f"GPU {gpu.index}"


def _too_much(geometry: search.Geometry, wanted: tuple[Kind, ...], shortage: search.Shortage, where: str) -> str:
    text = f"cannot place {names(geometry, wanted)} on {where}: {shortage.resource} ran out ({shortage.detail})"
    part, rest = _as_far_as_possible(geometry, wanted)
    if part:
        drawn = slice_map(geometry, part)
        text += f"; {drawn} leaves no room for {names(geometry, rest)}"
    near = nearest(geometry, wanted)
    if near:
        text += f"; the nearest layout that fits is {near}"
    return text


def _as_far_as_possible(
    geometry: search.Geometry, wanted: tuple[Kind, ...]
) -> tuple[list[tuple[str, int, int]], list[Kind]]:
    """Return the largest instances that fit together, placed, and the others."""
    order = sorted(wanted, key=lambda k: (-geometry.offers[k.offer].size, -geometry.offers[k.offer].slices, k))
    chosen: list[Kind] = []
    rest: list[Kind] = []
    placed: list[tuple[str, int, int]] = []
    failed: set[Kind] = set()
    for kind in order:
        # What had no room has none later either; without this, a count of thousands would take long.
        found = None if kind in failed else _place(geometry, [*chosen, kind])
        if found is None:
            failed.add(kind)
            rest.append(kind)
        else:
            chosen, placed = [*chosen, kind], found
    return placed, rest


def _place(geometry: search.Geometry, wanted: Sequence[Kind]) -> list[tuple[str, int, int]] | None:
    if geometry.shortage(count_by_offer(wanted)) is not None:
        return None
    groups = groups_of(geometry, wanted)
    found = search.arrange(geometry, [group for _, group in groups], {})
    if found is None:
        return None
    return [
        (str(geometry.offers[kind.offer].profile), option.start, geometry.offers[kind.offer].size)
        for (kind, _), options in zip(groups, found.places, strict=True)
        for option in options
    ]


def nearest(geometry: search.Geometry, wanted: Sequence[Kind]) -> str:
    """Return in words the layout nearest to `wanted` that an empty GPU can hold, "" when none is.

    Near means: every instance is a wanted one or a smaller one in its stead; the fewest slices
    (memory and compute) are lost; then the fewest instances differ.
    """
    free = [dataclasses.replace(kind, start=-1) for kind in wanted]
    if any(kind.start >= 0 for kind in wanted):
        placed = _place(geometry, free)
        if placed is not None:
            return ", ".join(f"{label} at {start}" for label, start, _ in sorted(placed, key=lambda entry: entry[1]))
    goal = count_by_offer(wanted)
    sizes = [(offer.size, offer.slices) for offer in geometry.offers]
    order = sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True)
    total = sum(sum(sizes[number]) * count for number, count in goal.items())
    best: tuple[int, int, tuple[int, ...]] | None = None
    for slices, holding, counts in _holdings(geometry):
        lost = total - slices
        if best is not None and lost > best[0]:
            break
        changed = sum(max(0, count - counts[number]) for number, count in goal.items())
        score = (lost, changed, holding)
        if best is None or score < best:
            # More of a size than a GPU has slices serve nobody.
            less = [sizes[n] for n in order for _ in range(min(geometry.slots, goal[n] - counts[n]))]
            more = [sizes[number] for number in order for _ in range(counts[number] - goal[number])]
            if _within(more, less):
                best = score
    if best is None or not best[2]:
        return ""
    return names(geometry, [Kind(number, ()) for number in best[2]])


def _within(small: Sequence[tuple[int, int]], large: Sequence[tuple[int, int]]) -> bool:
    """Whether each of `small` can stand in for another one of `large`, being no larger."""
    if not small:
        return True
    size, slices = small[0]
    for index, (memory, compute) in enumerate(large):
        if size <= memory and slices <= compute and _within(small[1:], (*large[:index], *large[index + 1 :])):
            return True
    return False


@functools.lru_cache(maxsize=16)
def _holdings(geometry: search.Geometry) -> tuple[tuple[int, tuple[int, ...], Mapping[int, int]], ...]:
    """Return every multiset of offers that an empty GPU can hold, those with the most slices (memory
    and compute) first: their slices, the offers' numbers sorted, and the same counted."""

    def walk(first: int, chosen: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        yield chosen
        for number in range(first, len(geometry.offers)):
            more = (*chosen, number)
            if _shortage(geometry, tuple(Kind(n, ()) for n in more)) is None:
                yield from walk(number, more)

    found = []
    for holding in walk(0, ()):
        slices = sum(geometry.offers[number].size + geometry.offers[number].slices for number in holding)
        found.append((slices, holding, collections.Counter(holding)))
    return tuple(sorted(found, key=lambda entry: -entry[0]))
