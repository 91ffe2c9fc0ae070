"""What has to change on one GPU: which instances stay, which go, which come, and where.

Numbers and values only, so that equal GPUs share one answer (it is cached); `agent.mig.plan` turns
the answer into steps and words.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

from agent import records
from agent.mig import compute as cis
from agent.mig import node as nodes
from agent.mig import placement, search


@records.dataclass(frozen=True, slots=True)
class Present:
    """A GPU instance that is there: number of its offer (-1: none of them), its place, whether it
    must not be destroyed, and its compute instances."""

    offer: int
    start: int
    mask: int
    busy: bool
    compute: tuple[cis.Present, ...]


@records.dataclass(frozen=True, slots=True)
class Keep:
    """The existing instance `number` stays as a `kind`; `compute` says what becomes of its compute
    instances."""

    number: int
    kind: placement.Kind
    compute: cis.Settled


@records.dataclass(frozen=True, slots=True)
class New:
    """An instance to make at memory slice `start`, with compute instances in the order to make them."""

    kind: placement.Kind
    start: int
    compute: tuple[cis.New, ...]


@records.dataclass(frozen=True, slots=True)
class Change:
    """The way from what is to what shall be, by numbers of existing instances."""

    keep: tuple[Keep, ...]
    gone: tuple[int, ...]
    new: tuple[New, ...]


def describe(
    geometry: search.Geometry,
    instances: Sequence[nodes.GpuInstance],
    busy: Callable[[Sequence[nodes.Holder]], bool],
) -> tuple[Present, ...]:
    """Return `instances` in their order. `busy` judges holders; a compute instance is busy by its
    own and by those of its GPU instance, a GPU instance by anybody's in it."""
    found = []
    for instance in instances:
        number = geometry.number(instance.profile)
        offer = None if number is None else geometry.offers[number]
        whole = busy(instance.holders)
        inner = tuple(
            cis.Present(
                kind=-1 if offer is None else cis.kind_present(offer, compute),
                start=None if compute.placement is None else compute.placement.start,
                busy=whole or busy(compute.holders),
            )
            for compute in instance.compute
        )
        found.append(
            Present(
                offer=-1 if number is None else number,
                start=instance.placement.start,
                mask=((1 << instance.placement.size) - 1) << instance.placement.start,
                busy=whole or any(compute.busy for compute in inner),
                compute=inner,
            )
        )
    return tuple(found)


@functools.lru_cache(maxsize=512)
def find(
    geometry: search.Geometry, wanted: tuple[placement.Kind, ...], present: tuple[Present, ...], strict: bool
) -> Change | None:
    """Return the least change from `present` to `wanted`; None when there is none.

    With `strict` nothing busy is destroyed. Without, as little as possible of it is: that answer is
    only for telling what is in the way. `wanted` must fit compute slices, engines and counts.
    """
    at = {(there.offer, there.mask): number for number, there in enumerate(present)}
    settled: dict[tuple[int, placement.Kind], cis.Settled] = {}
    groups = []
    kinds = []
    for kind, group in placement.groups_of(geometry, wanted):
        options = []
        for option in group.options:
            number = at.get((kind.offer, option.mask), -1)
            if number < 0:
                options.append(option)
                continue
            answer = _settle(geometry, kind, present[number].compute, strict)
            if answer is not None:
                settled[number, kind] = answer
                options.append(search.Option(option.start, option.mask, number, len(answer.kept)))
        kinds.append(kind)
        groups.append(search.Group(group.count, tuple(options)))
    busy = {number: there.mask for number, there in enumerate(present) if there.busy}
    found = search.arrange(geometry, groups, busy, strict=strict)
    if found is None:
        return None
    keep = []
    new = []
    for kind, places in zip(kinds, found.places, strict=True):
        for place in places:
            if place.present >= 0:
                keep.append(Keep(place.present, kind, settled[place.present, kind]))
            else:
                fresh = cis.settle(geometry.offers[kind.offer], kind.compute, ())
                assert fresh is not None, "placement.kinds lets no other split through"
                new.append(New(kind, place.start, fresh.new))
    staying = {one.number for one in keep}
    return Change(
        keep=tuple(sorted(keep, key=lambda one: present[one.number].start)),
        gone=tuple(number for number in range(len(present)) if number not in staying),
        new=tuple(sorted(new, key=lambda one: (-geometry.offers[one.kind.offer].size, one.start))),
    )


def _settle(
    geometry: search.Geometry, kind: placement.Kind, present: tuple[cis.Present, ...], strict: bool
) -> cis.Settled | None:
    offer = geometry.offers[kind.offer]
    answer = cis.settle(offer, kind.compute, present)
    if answer is None and not strict:
        free = tuple(dataclasses.replace(there, busy=False) for there in present)
        answer = cis.settle(offer, kind.compute, free)
    return answer


def disturbed(change: Change, present: Sequence[Present]) -> tuple[int, ...]:
    """Return the busy instances that `change` would destroy, or whose busy compute instances it would."""
    found = [number for number in change.gone if present[number].busy]
    for one in change.keep:
        compute = present[one.number].compute
        if any(there.busy and number not in one.compute.kept for number, there in enumerate(compute)):
            found.append(one.number)
    return tuple(sorted(found))


def all_wanted(geometry: search.Geometry, wanted: tuple[placement.Kind, ...], present: Sequence[Present]) -> bool:
    """Whether every busy instance is wanted as it is, places of the others apart: then it is not
    unwanted, it only lies in the way."""
    left = collections.Counter(wanted)
    busy = [there for there in present if there.busy]

    def walk(position: int) -> bool:
        if position == len(busy):
            return True
        there = busy[position]
        for kind in [k for k, count in left.items() if count]:
            if kind.offer != there.offer or kind.start not in (-1, there.start):
                continue
            if _settle(geometry, kind, there.compute, True) is None:
                continue
            left[kind] -= 1
            if walk(position + 1):
                return True
            left[kind] += 1
        return False

    return walk(0)
