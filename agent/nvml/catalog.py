"""Which profiles a GPU offers and where they may lie, asked of the driver once and kept.

The tables do not change while the mode lasts and are the same on identical GPUs, so a node of
eight asks once. Compute profiles are told only on a living GPU instance: they are learnt when one
is seen, and remembered for all GPUs of that kind.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pynvml

from agent import errors, log
from agent.mig import node as nodes
from agent.mig import profile as profiles
from agent.nvml import calls, models

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_INSUFFICIENT_SIZE = 7
_ROOM = 64
_LAST_INDEX = 64
"""Selectors are asked until the driver knows no further one; this only bounds a driver that never says so."""

Kind = tuple[str, int, int, str, bool]
"""What makes two GPUs identical here: name, PCI id, memory, driver version, whether MIG is on."""


PATIENCE = 1.0
"""Seconds a lane waits for another that is asking the same; a GPU that hangs must not hold up the rest."""


class Catalog:
    """Offers by kind of GPU, shared by all lanes. While one lane asks, the others wait a moment for its
    answer rather than ask the same."""

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._turn = threading.Condition()
        self._asking: set[object] = set()
        self._offers: dict[Kind, tuple[nodes.ProfileOffer, ...]] = {}
        self._compute: dict[tuple[Kind, nodes.ProfileId], tuple[nodes.ComputeOffer, ...]] = {}

    def offers(self, handle: Any, kind: Kind, model: str) -> tuple[nodes.ProfileOffer, ...]:
        """Return what a GPU of this kind offers, with what is learnt of compute profiles. () where the
        driver tells nothing (MIG off on an old one, and never seen on). Raises CallError for anything
        but "not supported"."""
        told = self._once(self._offers, kind, lambda: tuple(_ask(handle, kind, model)))
        mig_on = (*kind[:4], True)
        with self._turn:
            if not told and not kind[4]:
                told = self._offers.get(mig_on, ())
            learnt = {offer.id: self._compute.get((mig_on, offer.id)) for offer in told}
        return tuple(dataclasses.replace(offer, compute=learnt[offer.id]) for offer in told)

    def compute_offers(self, kind: Kind, offer: nodes.ProfileOffer, instance: Any) -> tuple[nodes.ComputeOffer, ...]:
        """Return the compute profiles of a GPU-instance profile, asking the living `instance` once."""
        return self._once(self._compute, (kind, offer.id), lambda: tuple(_ask_compute(instance, offer)))

    def _once(self, known: dict[K, tuple[V, ...]], key: K, ask: Callable[[], tuple[V, ...]]) -> tuple[V, ...]:
        until = time.monotonic() + self._patience
        with self._turn:
            while key not in known and key in self._asking:
                if not self._turn.wait(until - time.monotonic()):
                    break
            if key in known:
                return known[key]
            self._asking.add(key)
        try:
            found = ask()
        finally:
            with self._turn:
                self._asking.discard(key)
                self._turn.notify_all()
        with self._turn:
            return known.setdefault(key, found)


def _ask(handle: Any, kind: Kind, model: str) -> list[nodes.ProfileOffer]:
    offers: list[nodes.ProfileOffer] = []
    for index, (info, told) in _each(lambda index: _profile_info(handle, index)):
        profile = _name(told, int(info.sliceCount), int(info.memorySizeMB), kind[2], index)
        placements = _placements(handle, int(info.id))
        if profile is None or not placements:
            log.warning("a profile of the driver is not understood and left out", index=index, name=told)
            continue
        offers.append(
            nodes.ProfileOffer(
                profile=profile,
                index=nodes.ProfileIndex(index),
                id=nodes.ProfileId(int(info.id)),
                slices=int(info.sliceCount),
                memory_bytes=int(info.memorySizeMB) * 2**20,
                multiprocessors=int(info.multiprocessorCount),
                max_instances=int(info.instanceCount),
                placements=placements,
                engines=nodes.Engines(
                    copy=int(info.copyEngineCount),
                    decoder=int(info.decoderCount),
                    encoder=int(info.encoderCount),
                    jpeg=int(info.jpegCount),
                    ofa=int(info.ofaCount),
                ),
                aliases=models.aliases(model, profile),
            )
        )
    return offers


def _each(ask: Callable[[int], T], *, expected: Callable[[int], bool] = lambda _: True) -> Iterator[tuple[int, T]]:
    """Ask for selector after selector until the driver knows no further one.

    "Invalid argument" is also what a dead handle gets: the first selector is always a valid one. The
    end, and a profile that is not supported, are believed when told twice: a table with a hole or cut
    short would hide instances from everybody, for as long as this process lives. `expected` tells
    whether a profile could be there at all; that it is not is else believed at once.
    """
    refused = False
    index = 0
    while index < _LAST_INDEX:
        try:
            answer = ask(index)
        except errors.InvalidArgument:
            if index == 0:
                raise
            if refused:
                return
            refused = True
            continue
        except errors.NotSupported:
            if not refused and expected(index):
                refused = True
                continue
        else:
            yield index, answer
        refused = False
        index += 1


def _profile_info(handle: Any, index: int) -> tuple[Any, str]:
    """Return (info, the driver's own name or ""). Older drivers have only the form without a name."""
    try:
        info = calls.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, index, 2)
    except errors.NotSupported as cause:
        if cause.code != 13:
            raise
        return calls.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, index, 1), ""
    return info, _own_name(info)


def _own_name(info: Any) -> str:
    name = getattr(info, "name", "")
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    return text.strip().removeprefix("MIG ").strip()


# What the selectors say about attributes, for drivers that do not tell the name.
_PLUS = {7: "me", 8: "me", 10: "gfx", 11: "gfx", 12: "gfx", 17: "gfx", 15: "me.all", 16: "me.all"}
_MINUS = {13: "me", 14: "me"}


def _name(told: str, slices: int, memory_mib: int, total_bytes: int, index: int) -> profiles.Profile | None:
    if told:
        try:
            return profiles.parse(told)
        except profiles.ProfileSyntaxError:
            log.debug("the driver's own profile name is not understood", name=told)
    if slices < 1 or total_bytes < 1:
        return None
    return profiles.Profile(
        gpu_slices=slices,
        memory_gb=profiles.name_gb(memory_mib, total_bytes),
        attributes=(_PLUS[index],) if index in _PLUS else (),
        without=(_MINUS[index],) if index in _MINUS else (),
    )


def _placements(handle: Any, profile_id: int) -> tuple[nodes.Placement, ...]:
    return _placements_by(
        "nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile_id, pynvml.c_nvmlGpuInstancePlacement_t
    )


def _placements_by(call: str, handle: Any, profile_id: int, entry: type[Any]) -> tuple[nodes.Placement, ...]:
    """Ask for all placements with room for more than any part has; ask again should that not do."""
    count = ctypes.c_uint(_ROOM)
    buffer = (entry * _ROOM)()
    try:
        calls.call(call, handle, profile_id, buffer, ctypes.byref(count))
    except errors.CallError as cause:
        if cause.code != _INSUFFICIENT_SIZE:
            raise
        buffer = (entry * count.value)()
        calls.call(call, handle, profile_id, buffer, ctypes.byref(count))
    found = {nodes.Placement(int(p.start), int(p.size)) for p in buffer[: count.value]}
    return tuple(sorted(found))


_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6}
"""Compute slices that the selectors of compute profiles stand for; later ones are not known."""


def _ask_compute(instance: Any, offer: nodes.ProfileOffer) -> list[nodes.ComputeOffer]:
    found: list[nodes.ComputeOffer] = []
    fits = _each(
        lambda index: _compute_info(instance, index), expected=lambda index: _SLICES.get(index, 1) <= offer.slices
    )
    for index, (info, told) in fits:
        slices = int(info.sliceCount)
        profile = _compute_name(told, slices, int(info.multiprocessorCount), offer)
        found.append(
            nodes.ComputeOffer(
                profile=profile,
                index=nodes.ProfileIndex(index),
                id=nodes.ProfileId(int(info.id)),
                slices=slices,
                multiprocessors=int(info.multiprocessorCount),
                max_instances=int(info.instanceCount),
                placements=_compute_placements(instance, int(info.id)),
            )
        )
    return found


def _compute_info(instance: Any, index: int) -> tuple[Any, str]:
    try:
        info = calls.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, index, 0, 2)
    except errors.NotSupported as cause:
        if cause.code != 13:
            raise
        return calls.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, index, 0, 1), ""
    return info, _own_name(info)


def _compute_name(told: str, slices: int, multiprocessors: int, offer: nodes.ProfileOffer) -> profiles.Profile:
    """Name a compute profile. The whole instance's is the one with all its SMs: on Hopper and later a
    double-memory 1g has a smaller one of as many slices (1c.1g.20gb, 16 of 26 SMs)."""
    if told:
        try:
            named = profiles.parse(told)
            if named.gpu_instance == offer.profile:
                return named
        except profiles.ProfileSyntaxError:
            pass
    if multiprocessors >= offer.multiprocessors or (slices == offer.slices and slices > 1):
        return offer.profile
    return offer.profile.part(slices)


def _compute_placements(instance: Any, profile_id: int) -> tuple[nodes.Placement, ...] | None:
    try:
        return _placements_by(
            "nvmlGpuInstanceGetComputeInstancePossiblePlacements",
            instance,
            profile_id,
            pynvml.c_nvmlComputeInstancePlacement_t,
        )
    except errors.NotSupported:
        return None  # before 535
