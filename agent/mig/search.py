"""The exact search: which place each wanted GPU instance takes, and which instances can stay.

Memory slices are bits of an integer, so that overlap is one `&`. What depends on the multiset alone
(compute slices, media engines, counts) is settled by `shortage` before; here only places matter.
The search is a depth-first walk with a bound on what can still be kept. It is exact, and small: a
seven-slice part has 2,319 placed layouts in all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from agent import records
from agent.mig import node as nodes
from agent.mig import profile as profiles

# In this order, because the OFA is what a media profile is known for. Copy engines are shared, not dealt out.
_ENGINES = (
    ("ofa", "OFA"),
    ("jpeg", "JPEG engines"),
    ("decoder", "decoders"),
    ("encoder", "encoders"),
)


@records.dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that runs out: `resource` is "memory slices", "compute slices", "media engines" or
    "max instances", `detail` says how much is wanted and how much there is."""

    resource: str
    detail: str


class Geometry:
    """One GPU kind's offers, prepared for the search. Offers are numbered in the driver's order."""

    def __init__(self, offers: Sequence[nodes.ProfileOffer]) -> None:
        self.offers = tuple(offers)
        self.slots = max((p.end for o in offers for p in o.placements), default=0)
        self.compute_slices = max((o.slices for o in offers), default=0)
        self.places = tuple(
            tuple((p.start, ((1 << p.size) - 1) << p.start) for p in sorted(o.placements)) for o in self.offers
        )
        self._numbers: dict[profiles.Profile, int] = {}
        for number, offer in enumerate(self.offers):
            self._numbers.setdefault(offer.profile, number)
        # What a profile's instances have together when the GPU is full of them is there for certain;
        # the largest such figure is the pool. An unknown count neither adds to a pool nor draws on it.
        self.pools: dict[str, int] = {}
        for name, _ in _ENGINES:
            known = [n * o.max_instances for o in self.offers if (n := getattr(o.engines, name)) is not None]
            if known:
                self.pools[name] = max(known)
        self.base_multiprocessors = min((o.multiprocessors for o in self.offers if o.slices == 1), default=0)
        self._room: dict[int, tuple[int, ...]] = {}

    def number(self, profile: profiles.Profile) -> int | None:
        """Return the number of the offer of exactly this profile, or None."""
        return self._numbers.get(profile)

    def shortage(self, counts: Mapping[int, int]) -> Shortage | None:
        """Return what runs out when an empty GPU shall hold `counts` (offer number to how many),
        places apart; None when nothing does."""
        chosen = [(self.offers[number], count) for number, count in counts.items() if count]
        memory = sum(o.size * n for o, n in chosen)
        if memory > self.slots:
            return Shortage("memory slices", f"{memory} wanted, {self.slots} there")
        compute = sum(o.slices * n for o, n in chosen)
        if compute > self.compute_slices:
            return Shortage("compute slices", f"{compute} wanted, {self.compute_slices} there")
        for name, word in _ENGINES:
            pool = self.pools.get(name)
            if pool is not None:
                drawn = sum((getattr(o.engines, name) or 0) * n for o, n in chosen)
                if drawn > pool:
                    return Shortage("media engines", f"{drawn} {word} wanted, {pool} there")
        for offer, count in chosen:
            if count > offer.max_instances:
                return Shortage("max instances", f"{count} {offer.profile} wanted, at most {offer.max_instances}")
        return None

    def room(self, used: int) -> tuple[int, ...]:
        """Return how good the space is that `used` (a mask of memory slices) leaves; larger is better.

        First the largest free block, a block being a place that an instance can take: its memory
        slices, then the compute slices it can have there. Then the longest run of free slices, then
        how many places are still free, weighted by size. A slice that no profile can use is no block.
        """
        known = self._room.get(used)
        if known is None:
            block = (0, 0)
            places = 0
            for offer, starts in zip(self.offers, self.places, strict=True):
                for _, mask in starts:
                    if not mask & used:
                        block = max(block, (offer.size, offer.slices))
                        places += offer.size
            known = self._room[used] = (*block, longest_run(used, self.slots), places)
        return known


@functools.lru_cache(maxsize=8192)
def longest_run(used: int, slots: int) -> int:
    """Return the length of the longest run of free slices among `slots`."""
    best = run = 0
    for slot in range(slots):
        run = 0 if used >> slot & 1 else run + 1
        best = max(best, run)
    return best


@records.dataclass(frozen=True, slots=True)
class Option:
    """A place that instances of a group may take. `present` is the number of the existing instance
    of the same profile lying exactly there, or -1; `kept` how many compute instances stay with it."""

    start: int
    mask: int
    present: int = -1
    kept: int = 0


@records.dataclass(frozen=True, slots=True)
class Group:
    """Wanted instances that are alike: `count` of them, each on another one of `options` (by start)."""

    count: int
    options: tuple[Option, ...]


@records.dataclass(frozen=True, slots=True)
class Arrangement:
    """The best places: `places[g]` are the options taken by group g. `used` is the mask of all."""

    places: tuple[tuple[Option, ...], ...]
    used: int


def arrange(
    geometry: Geometry, groups: Sequence[Group], busy: Mapping[int, int], *, strict: bool = True
) -> Arrangement | None:
    """Place every group, or return None when that cannot be.

    `busy` maps numbers of existing instances that must not be destroyed to their masks. With
    `strict` all of them stay (as members of groups); without, as many as can. Then, in this order:
    most existing instances stay, most compute instances stay, the space left is the best
    (`Geometry.room`), starts are lowest.
    """
    fixed = 0
    if strict:
        for mask in busy.values():
            fixed |= mask
    order: list[tuple[int, int, tuple[Option, ...]]] = []
    for number, group in enumerate(groups):
        options = tuple(o for o in group.options if not o.mask & fixed or o.present in busy)
        if len(options) < group.count:
            return None
        order.append((number, group.count, options))
    # The most constrained first: few options, then large ones.
    order.sort(key=lambda g: (len(g[2]) - g[1], -max((o.mask.bit_count() for o in g[2]), default=0), g[0]))
    depth = len(order)
    # What the groups from here on can keep at most, for the bound.
    ahead = [0] * (depth + 1)
    for position in range(depth - 1, -1, -1):
        _, count, options = order[position]
        ahead[position] = ahead[position + 1] + min(count, sum(1 for o in options if o.present >= 0))
    best: tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[tuple[Option, ...], ...], int] | None = None
    taken: list[Option] = []

    def walk(position: int, left: int, first: int, used: int, score: tuple[int, int, int]) -> None:
        if left == 0:
            position += 1
            if position == depth:
                finish(used, score)
                return
            left, first = order[position][1], 0
        options = order[position][2]
        # The count of kept instances decides first only where everything busy stays anyway.
        if strict and best is not None:
            possible = min(left, ahead[position] - ahead[position + 1]) + ahead[position + 1]
            if score[1] + possible < best[0][1]:
                return
        for index in range(first, len(options) - left + 1):
            option = options[index]
            if option.mask & used:
                continue
            taken.append(option)
            there = option.present
            gained = (score[0] + (there in busy), score[1] + (there >= 0), score[2] + option.kept)
            walk(position, left - 1, index + 1, used | option.mask, gained)
            taken.pop()

    def finish(used: int, score: tuple[int, int, int]) -> None:
        nonlocal best
        if strict and score[0] < len(busy):
            return
        full = (*score, *geometry.room(used))
        if best is not None and full < best[0]:
            return
        places: list[tuple[Option, ...]] = [()] * depth
        at = 0
        for number, count, _ in order:
            places[number] = tuple(taken[at : at + count])
            at += count
        starts = tuple(tuple(o.start for o in group) for group in places)
        if best is None or full > best[0] or starts < best[1]:
            best = (full, starts, tuple(places), used)

    if depth == 0:
        finish(0, (0, 0, 0))
    else:
        walk(0, order[0][1], 0, 0, (0, 0, 0))
    return None if best is None else Arrangement(places=best[2], used=best[3])
