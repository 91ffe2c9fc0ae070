"""Brute force over the simulated driver: what a GPU can hold, found by trying, and the least change by comparing all.

It imports nothing of the core that it judges, and asks only NVML.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.sim import node as simulated

# By name: the stubs in typings/ list only what the product calls.
pynvml: Any = importlib.import_module("pynvml")
Multiset = tuple[int, ...]
"""Profile ids, sorted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """A place that the driver names for a profile."""

    profile_id: int
    start: int
    size: int


@contextlib.contextmanager
def mig_gpu(model: str, directory: Path) -> Iterator[tuple[simulated.SimulatedNode, Any]]:
    """Open a simulated node with one GPU of `model`, MIG on; yields the node and the NVML handle."""
    file = directory / f"{model}.toml"
    file.write_text(f'name = "{model}"\npersistenced = false\n[[gpu]]\nmodel = "{model}"\nmode-change = "immediate"\n')
    node = simulated.open_node(str(file))
    before = pynvml.nvmlLib
    pynvml.nvmlLib = node.library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceSetMigMode(handle, 1) == 0
        yield node, handle
        pynvml.nvmlShutdown()
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
        node.close()


def profile_infos(handle: Any) -> list[Any]:
    """Return the driver's description of every profile that this GPU offers."""
    found = []
    for selector in itertools.count():
        try:
            found.append((selector, pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, selector, version=2)))
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:
            return found
    raise AssertionError


def placements(handle: Any, profile_id: int) -> list[tuple[int, int]]:
    """Return every (start, size) that the driver names for a profile."""
    count = ctypes.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, array, ctypes.byref(count))
    return [(one.start, one.size) for one in array[: count.value]]


def spots(handle: Any) -> tuple[Spot, ...]:
    """Return every place of every profile."""
    return tuple(
        Spot(info.id, start, size) for _, info in profile_infos(handle) for start, size in placements(handle, info.id)
    )


def create(handle: Any, spot: Spot) -> Any:
    """Make a GPU instance there; None when the driver has no room."""
    place = pynvml.c_nvmlGpuInstancePlacement_t(spot.start, spot.size)
    try:
        return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, spot.profile_id, ctypes.byref(place))
    except pynvml.NVMLError_InsufficientResources:
        return None


def remaining(handle: Any, profile_id: int) -> int:
    """Return how many more instances of a profile the driver says it could make."""
    return int(pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile_id))


@dataclasses.dataclass(frozen=True, slots=True)
class Layouts:
    """Every placed layout that the driver accepts, as masks over `spots`, by multiset of profiles."""

    spots: tuple[Spot, ...]
    by_multiset: dict[Multiset, tuple[int, ...]]

    @property
    def all(self) -> tuple[int, ...]:
        """Every placed layout."""
        return tuple(mask for masks in self.by_multiset.values() for mask in masks)

    def of(self, mask: int) -> tuple[Spot, ...]:
        """Return the places of a layout."""
        return tuple(spot for number, spot in enumerate(self.spots) if mask >> number & 1)

    def most_kept(self, mask: int, multiset: Multiset) -> int:
        """Return how many instances of the layout `mask` can stay on the way to `multiset`."""
        return max((mask & other).bit_count() for other in self.by_multiset[multiset])


def layouts(handle: Any) -> Layouts:
    """Find every placed layout by making and destroying instances."""
    all_spots = spots(handle)
    found: dict[Multiset, list[int]] = collections.defaultdict(list)

    def walk(first: int, mask: int, held: tuple[int, ...]) -> None:
        found[tuple(sorted(held))].append(mask)
        for number in range(first, len(all_spots)):
            made = create(handle, all_spots[number])
            if made is not None:
                walk(number + 1, mask | 1 << number, (*held, all_spots[number].profile_id))
                pynvml.nvmlGpuInstanceDestroy(made)

    walk(0, 0, ())
    return Layouts(all_spots, {multiset: tuple(masks) for multiset, masks in found.items()})


def multisets(profile_ids: list[int], size: int) -> Iterator[Multiset]:
    """Return every multiset of at most `size` profiles."""
    for count in range(size + 1):
        yield from itertools.combinations_with_replacement(sorted(profile_ids), count)


Split = tuple[int, ...]
"""Compute-instance profile ids, sorted."""
PlacedSplit = frozenset[tuple[int, int]]
"""Compute instances in one GPU instance, each (profile id, start)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splits:
    """Every way to fill an instance of one profile with compute instances, as the driver accepts them, by what
    they are. `default` is the compute instance that has all SMs; `slices` and `names` tell of each."""

    default: int
    slices: dict[int, int]
    names: dict[int, str]
    placed: dict[Split, tuple[PlacedSplit, ...]]

    def most_kept(self, present: PlacedSplit, busy: PlacedSplit, split: Split) -> int:
        """Return how many compute instances can stay on the way to `split`, -1 when a busy one could not."""
        return max((len(present & other) for other in self.placed[split] if busy <= other), default=-1)


def create_compute(instance: Any, profile_id: int, start: int, size: int) -> Any:
    """Make a compute instance there; None when the driver has no room."""
    place = pynvml.c_nvmlComputeInstancePlacement_t(start, size)
    try:
        return pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile_id, ctypes.byref(place))
    except pynvml.NVMLError_InsufficientResources:
        return None


def splits(handle: Any) -> dict[int, Splits]:
    """Find every filling of every profile by making and destroying compute instances."""
    found = {}
    for _, info in profile_infos(handle):
        start, size = placements(handle, info.id)[0]
        instance = create(handle, Spot(info.id, start, size))
        found[info.id] = _splits_of(instance, info)
        pynvml.nvmlGpuInstanceDestroy(instance)
    return found


def _splits_of(instance: Any, info: Any) -> Splits:
    told = []
    for selector in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            told.append(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, selector, 0, version=2))
        except pynvml.NVMLError_NotSupported:
            continue
    spots = []
    for one in told:
        count = ctypes.c_uint(0)
        pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, one.id, None, ctypes.byref(count))
        array = (pynvml.c_nvmlComputeInstancePlacement_t * count.value)()
        pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, one.id, array, ctypes.byref(count))
        spots += [(one.id, place.start, place.size) for place in array[: count.value]]
    placed: dict[Split, list[PlacedSplit]] = collections.defaultdict(list)

    def walk(first: int, held: tuple[tuple[int, int], ...]) -> None:
        placed[tuple(sorted(number for number, _ in held))].append(frozenset(held))
        for position in range(first, len(spots)):
            number, start, size = spots[position]
            made = create_compute(instance, number, start, size)
            if made is not None:
                walk(position + 1, (*held, (number, start)))
                pynvml.nvmlComputeInstanceDestroy(made)

    walk(0, ())
    return Splits(
        default=next(one.id for one in told if one.multiprocessorCount == info.multiprocessorCount),
        slices={one.id: one.sliceCount for one in told},
        names={one.id: one.name.removeprefix("MIG ") for one in told},
        placed={split: tuple(ways) for split, ways in placed.items()},
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """An existing GPU instance: its place, its compute instances, those of them in use, and whether it is itself."""

    spot: Spot
    compute: PlacedSplit
    busy: PlacedSplit = frozenset()
    in_use: bool = False

    @property
    def untouchable(self) -> bool:
        """Whether it may not be destroyed."""
        return self.in_use or bool(self.busy)


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A wanted GPU instance: profile, compute instances, and its start or -1."""

    profile_id: int
    split: Split
    start: int = -1


def least_change(
    all_layouts: Layouts, all_splits: dict[int, Splits], held: tuple[Held, ...], wishes: tuple[Wish, ...]
) -> tuple[int, int] | None:
    """Return the most GPU instances, and with them the most compute instances, that can stay on the way from `held`
    to `wishes`, over all layouts and all ways to deal them out; None where something in use would have to go."""
    there = {one.spot: one for one in held}
    busy = {one.spot for one in held if one.untouchable}
    multiset = tuple(sorted(wish.profile_id for wish in wishes))
    by_profile: dict[int, list[Wish]] = collections.defaultdict(list)
    for wish in wishes:
        by_profile[wish.profile_id].append(wish)
    best: tuple[int, int] | None = None
    for mask in all_layouts.by_multiset[multiset]:
        places = all_layouts.of(mask)
        if not busy <= set(places):
            continue
        kept = cis = 0
        for profile_id, alike in by_profile.items():
            spots_here = [spot for spot in places if spot.profile_id == profile_id]
            kept += sum(spot in there for spot in spots_here)
            most = -1
            for deal in set(itertools.permutations(alike)):
                total = 0
                for wish, spot in zip(deal, spots_here, strict=True):
                    one = there.get(spot)
                    if wish.start not in (-1, spot.start):
                        break
                    if one is not None:
                        must = one.compute if one.in_use else one.busy
                        stay = all_splits[profile_id].most_kept(one.compute, must, wish.split)
                        if stay < 0:
                            break
                        total += stay
                else:
                    most = max(most, total)
            if most < 0:
                break
            cis += most
        else:
            if best is None or (kept, cis) > best:
                best = (kept, cis)
    return best
