"""Compute instances: which ones a GPU instance shall have, which stay, and where new ones go.

A kind of compute instance is a number here: 0 is the whole one, over all SMs of its GPU instance,
c > 0 the one with c compute slices. The two differ even where c is all slices there are: on Hopper
`1c.1g.20gb` has 16 SMs and `1g.20gb` 26. So the whole one is known by its SM count, not its slices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from agent import records
from agent.mig import node as nodes
from agent.mig import profile as profiles

WHOLE = 0


@records.dataclass(frozen=True, slots=True)
class Present:
    """A compute instance that is there. `start` is None where the driver does not tell it."""

    kind: int
    start: int | None
    busy: bool = False


@records.dataclass(frozen=True, slots=True)
class New:
    """A compute instance to make. `start` is None where the driver may choose."""

    kind: int
    start: int | None


@records.dataclass(frozen=True, slots=True)
class Settled:
    """How a GPU instance gets its compute instances: numbers of those that stay, and new ones in the
    order in which they can be made (largest first, as a `2c` of a `3g` goes only to 0)."""

    kept: tuple[int, ...]
    new: tuple[New, ...]


def kind_of(offer: nodes.ProfileOffer, profile: profiles.Profile, *, base_multiprocessors: int = 0) -> int:
    """Return the kind that `profile` names in an instance of `offer`.

    `base_multiprocessors` is the SM count of the GPU's plain one-slice instance: where the driver
    has not told the compute profiles yet, it shows whether a one-slice instance has SMs that its
    small compute instance leaves out.
    """
    slices = profile.compute_slices
    if slices is None:
        return WHOLE
    if slices < offer.slices:
        return slices
    if offer.compute is None:
        return slices if offer.slices == 1 and offer.multiprocessors > base_multiprocessors > 0 else WHOLE
    # Both names told means two compute instances; one alone is the whole one under either name.
    told = {compute.profile for compute in offer.compute}
    return slices if profile in told and offer.profile in told else WHOLE


def kind_present(offer: nodes.ProfileOffer, instance: nodes.ComputeInstance) -> int:
    """Return the kind of an existing compute instance in an instance of `offer`."""
    if offer.compute is not None:
        return kind_of(offer, instance.profile)
    slices = instance.profile.compute_slices
    if slices is None or (slices >= offer.slices and instance.multiprocessors == offer.multiprocessors):
        return WHOLE
    return slices


def name_of(offer: nodes.ProfileOffer, kind: int) -> profiles.Profile:
    """Return the profile that names a kind: the GPU instance's own for the whole one."""
    return offer.profile if kind == WHOLE else offer.profile.part(kind)


def starts_of(offer: nodes.ProfileOffer, kind: int) -> tuple[int, ...]:
    """Return the compute slices at which a kind may start; () when the offer does not have it.

    As the driver told, else by the rule that its printouts follow: a start is a multiple of the
    width rounded up to a power of two, and a proper part is at most half of the next even width.
    """
    if kind == WHOLE:
        return (0,)
    if offer.compute is not None:
        for told in offer.compute:
            if told.profile == offer.profile.part(kind):
                if told.placements is not None:
                    return tuple(sorted(p.start for p in told.placements))
                return _by_rule(offer.slices, kind)[: told.max_instances]
        return ()
    if 2 * kind > offer.slices + 1 and kind != offer.slices:
        return ()
    return _by_rule(offer.slices, kind)


def _by_rule(slices: int, kind: int) -> tuple[int, ...]:
    step = 1 << (kind - 1).bit_length()
    return tuple(range(0, slices - kind + 1, step))


def settle(offer: nodes.ProfileOffer, wanted: Sequence[int], present: Sequence[Present]) -> Settled | None:
    """Return how an instance of `offer` gets exactly the kinds `wanted`, keeping as many as can stay
    and every busy one; None when that cannot be."""
    kinds = tuple(sorted(set(wanted)))
    table = tuple((kind, offer.slices if kind == WHOLE else kind, starts_of(offer, kind)) for kind in kinds)
    return _settle(table, tuple(sorted(wanted)), tuple(present))


@functools.lru_cache(maxsize=4096)
def _settle(
    table: tuple[tuple[int, int, tuple[int, ...]], ...], wanted: tuple[int, ...], present: tuple[Present, ...]
) -> Settled | None:
    widths = {kind: width for kind, width, _ in table}
    starts = {kind: places for kind, _, places in table}
    busy = {number for number, there in enumerate(present) if there.busy}
    usable = [number for number, there in enumerate(present) if there.kind in widths]
    for size in range(len(usable), -1, -1):
        for kept in itertools.combinations(usable, size):
            if not busy <= set(kept):
                continue
            missing = list(wanted)
            try:
                for number in kept:
                    missing.remove(present[number].kind)
            except ValueError:
                continue
            new = _place(missing, widths, starts, [present[number] for number in kept])
            if new is not None:
                return Settled(kept=kept, new=new)
    return None


def _place(
    missing: list[int], widths: dict[int, int], starts: dict[int, tuple[int, ...]], kept: list[Present]
) -> tuple[New, ...] | None:
    """Place `missing` around `kept`, largest first; None when there is no room."""
    used = 0
    for there in kept:
        if there.start is not None:
            used |= ((1 << widths[there.kind]) - 1) << there.start
    order = sorted(missing, key=lambda kind: (-widths[kind], kind))
    if any(there.start is None for there in kept):
        # Nobody knows where the kept ones lie, so only what fits anywhere is sure to fit: single
        # slices. A busy one has to stay all the same; then the driver has the last word.
        if any(widths[kind] > 1 for kind in order) and not any(there.busy for there in kept):
            return None
        return tuple(New(kind, None) for kind in order)

    def walk(position: int, used: int) -> tuple[New, ...] | None:
        if position == len(order):
            return ()
        kind = order[position]
        for start in starts[kind]:
            mask = ((1 << widths[kind]) - 1) << start
            if not mask & used:
                rest = walk(position + 1, used | mask)
                if rest is not None:
                    return (New(kind, None if kind == WHOLE else start), *rest)
        return None

    return walk(0, used)


def problem(offer: nodes.ProfileOffer, wanted: Sequence[int]) -> str | None:
    """Return why an empty instance of `offer` cannot be split into `wanted`, None when it can."""
    names = ", ".join(str(name_of(offer, kind)) for kind in wanted)
    for kind in wanted:
        if not starts_of(offer, kind):
            offered = [name_of(offer, k) for k in range(offer.slices + 1) if starts_of(offer, k)]
            return (
                f"cannot split {offer.profile} into {names}: it has no {name_of(offer, kind)} "
                f"(it has {', '.join(str(name) for name in offered)})"
            )
    if settle(offer, wanted, ()) is not None:
        return None
    total = sum(offer.slices if kind == WHOLE else kind for kind in wanted)
    fitting: list[int] = []
    for kind in sorted(wanted, key=lambda k: -(offer.slices if k == WHOLE else k)):
        if settle(offer, (*fitting, kind), ()) is not None:
            fitting.append(kind)
    best = ", ".join(str(name_of(offer, kind)) for kind in fitting)
    cause = "compute slices ran out" if total > offer.slices else "compute slices do not line up"
    return (
        f"cannot split {offer.profile} into {names}: {cause} ({total} wanted, {offer.slices} there); "
        f"the nearest split that fits is {best}"
    )
