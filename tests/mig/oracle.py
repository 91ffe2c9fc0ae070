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
