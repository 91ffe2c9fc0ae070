"""Read one GPU into an `agent.mig.node.Gpu`: mode, offers, instances, and who has processes on them.

The GPU-instance calls are the authority: MIG device handles do not show an instance without compute
instance, and are asked only for the UUIDs. UUIDs are name-based (the same GPU, GI and CI give the
same one again), so each is asked once a process.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from agent import errors, log
from agent.mig import node as nodes
from agent.nvml import calls, catalog, models

T = TypeVar("T")
U = TypeVar("U")

_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
}
_RESETLESS_FIELD = 184
_QUERYABLE_FIELD = 199
_WHOLE = 0xFFFFFFFF
_MOST_MIG_DEVICES = 64
"""Indexes are asked until the driver knows no further one; this only bounds a driver that never says so."""
_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
_LISTS_WITH_MIG_OFF = 550
"""Driver branch from which profiles are told while MIG is off, where the driver itself does not say."""

Names = Callable[[int], str]
"""Gives the command name of a pid."""


@dataclasses.dataclass(slots=True)
class Card:
    """A GPU as the session knows it: its handle and the facts that do not change.

    `resetless` and `queryable` are what the driver says of mode changes without a reset, and of profiles
    while MIG is off; None where it does not say.
    """

    handle: Any
    uuid: str
    pci_bus_id: str
    name: str
    model: str
    pci_device_id: int
    architecture: str
    minor: int | None
    memory_bytes: int
    resetless: bool | None
    queryable: bool | None
    driver: str
    mig_uuids: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    made: dict[nodes.Placement, int] = dataclasses.field(default_factory=dict)
    """Ids of GPU instances made here, to find them again without asking for all."""

    def kind(self, *, mig: bool) -> catalog.Kind:
        """Return what makes two GPUs identical for the catalog."""
        return (self.name, self.pci_device_id, self.memory_bytes, self.driver, mig)


def card(handle: Any, driver: str) -> Card:
    """Read the identity of the GPU behind `handle`. Raises CallError."""
    uuid = str(calls.call("nvmlDeviceGetUUID", handle))
    pci = calls.call("nvmlDeviceGetPciInfo", handle)
    name = _or(lambda: str(calls.call("nvmlDeviceGetName", handle)), "")
    memory = _or(lambda: int(calls.call("nvmlDeviceGetMemoryInfo", handle).total), 0)
    device = int(pci.pciDeviceId)
    number = _or(lambda: int(calls.call("nvmlDeviceGetArchitecture", handle)), 0)
    resetless, queryable = _capabilities(handle)
    return Card(
        handle=handle,
        uuid=uuid,
        pci_bus_id=_decoded(pci.busId),
        name=name,
        model=models.key(device, name=name, memory_bytes=memory),
        pci_device_id=device,
        architecture=_ARCHITECTURES.get(number, ""),
        minor=_or(lambda: int(calls.call("nvmlDeviceGetMinorNumber", handle)), None),
        memory_bytes=memory,
        resetless=resetless,
        queryable=queryable,
        driver=driver,
    )


def pci_address(handle: Any) -> str:
    """Return the PCI address of the GPU behind `handle` as NVML writes it."""
    return _decoded(calls.call("nvmlDeviceGetPciInfo", handle).busId)


def _decoded(text: Any) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _or(ask: Callable[[], T], otherwise: U) -> T | U:
    """Return what `ask` brings, `otherwise` where the GPU does not offer it."""
    try:
        return ask()
    except (errors.NotSupported, errors.NoPermission):
        return otherwise


def _capabilities(handle: Any) -> tuple[bool | None, bool | None]:
    """Return what the driver answers to the two fields, None for one that it does not know."""
    try:
        values = calls.call("nvmlDeviceGetFieldValues", handle, [_RESETLESS_FIELD, _QUERYABLE_FIELD])
    except errors.NotSupported:
        return None, None
    resetless, queryable = (bool(v.value.uiVal) if int(v.nvmlReturn) == 0 else None for v in values)
    return resetless, queryable


def blank(known: Card, index: int, state: nodes.GpuState, problem: str) -> nodes.Gpu:
    """Return a GPU of which only the identity is known."""
    return nodes.Gpu(
        index=index,
        uuid=known.uuid,
        pci_bus_id=known.pci_bus_id,
        name=known.name,
        model=known.model,
        state=state,
        problem=problem,
        architecture=known.architecture,
        pci_device_id=known.pci_device_id,
        minor=known.minor,
        memory_bytes=known.memory_bytes,
    )


def observe(known: Card, index: int, offers: catalog.Catalog, names: Names) -> nodes.Gpu:
    """Read the GPU. One that is lost or answers nonsense comes back marked so. Raises InvalidArgument
    and Unready, which say that the handle is dead, and NoPermission where instances are told to root
    only."""
    try:
        return _observe(known, index, offers, names)
    except (errors.InvalidArgument, errors.Unready, errors.NoPermission):
        raise
    except errors.Lost as cause:
        return blank(known, index, nodes.GpuState.LOST, str(cause))
    except errors.CallError as cause:
        return blank(known, index, nodes.GpuState.ERROR, str(cause))


def _observe(known: Card, index: int, offers: catalog.Catalog, names: Names) -> nodes.Gpu:
    gpu = blank(known, index, nodes.GpuState.OK, "")
    try:
        current, pending = calls.call("nvmlDeviceGetMigMode", known.handle)
    except errors.NotSupported:
        holders = {key: tuple(found) for key, found in _holders(known.handle, names).items()}
        return dataclasses.replace(gpu, problem=None, holders=tuple(h for found in holders.values() for h in found))
    mode = nodes.ModeState(bool(current), bool(pending))
    kind = known.kind(mig=mode.current)
    unknown: str | None = None
    try:
        told = offers.offers(known.handle, kind, known.model)
        unknown = _geometry_unknown(known, told, mode)
    except errors.NoPermission:
        if mode.current:
            raise
        told = ()
        unknown = f"the driver tells the MIG profiles of {known.name} to root only"
    using = _holders(known.handle, names)
    there: tuple[nodes.GpuInstance, ...] = ()
    if mode.current:
        there = tuple(instances(known, kind, told, offers, using))
        told = offers.offers(known.handle, kind, known.model)  # compute profiles may just have been learnt
    placed = {(i.id, c.id) for i in there for c in i.compute} | {(i.id, None) for i in there}
    rest = tuple(h for key, found in using.items() if key not in placed for h in found)
    return dataclasses.replace(
        gpu,
        problem=None,
        mode=mode,
        resetless=known.resetless,
        geometry_unknown=unknown,
        offers=told,
        instances=there,
        holders=rest,
    )


def _geometry_unknown(known: Card, told: tuple[nodes.ProfileOffer, ...], mode: nodes.ModeState) -> str | None:
    if told:
        return None
    if not mode.current and not _tells_with_mig_off(known):
        return None  # such a driver tells its profiles only with MIG on
    return f"the driver tells no MIG profiles of {known.name}; the geometry of this part is not published"


def _tells_with_mig_off(known: Card) -> bool:
    if known.queryable is not None:
        return known.queryable
    branch = known.driver.partition(".")[0]
    return not branch.isdigit() or int(branch) >= _LISTS_WITH_MIG_OFF


def _holders(handle: Any, names: Names) -> dict[tuple[int | None, int | None], list[nodes.Holder]]:
    """Return processes by (GPU instance, compute instance), (None, None) being the whole GPU.

    A process that both computes and draws is told once.
    """
    found: dict[tuple[int | None, int | None], list[nodes.Holder]] = {}
    seen: set[tuple[int, int | None, int | None]] = set()
    for call in _PROCESSES:
        try:
            processes = calls.call(call, handle)
        except (errors.NotSupported, errors.NoPermission):
            continue
        for process in processes:
            gi, ci = instance_id(process.gpuInstanceId), instance_id(process.computeInstanceId)
            pid = int(process.pid)
            if (pid, gi, ci) in seen:
                continue
            seen.add((pid, gi, ci))
            found.setdefault((gi, ci), []).append(nodes.Holder(kind="process", name=names(pid), pid=pid))
    return found


def instance_id(number: Any) -> int | None:
    """Return the id of a GPU or compute instance, None where NVML says that there is none."""
    return None if number is None or int(number) == _WHOLE else int(number)


def handles(handle: Any, offer: nodes.ProfileOffer) -> list[Any]:
    """Return NVML's handles of the GPU instances of one profile."""
    return _list("nvmlDeviceGetGpuInstances", handle, int(offer.id), offer.max_instances, pynvml.c_nvmlGpuInstance_t)


def compute_handles(instance: Any, offer: nodes.ComputeOffer) -> list[Any]:
    """Return NVML's handles of the compute instances of one profile in a GPU instance."""
    return _list(
        "nvmlGpuInstanceGetComputeInstances",
        instance,
        int(offer.id),
        offer.max_instances,
        pynvml.c_nvmlComputeInstance_t,
    )


def _list(call: str, parent: Any, profile_id: int, room: int, entry: type[Any]) -> list[Any]:
    # The count is only told, never obeyed: a buffer too small is overrun by the C side.
    buffer = (entry * max(room, 1))()
    count = ctypes.c_uint(max(room, 1))
    calls.call(call, parent, profile_id, buffer, ctypes.byref(count))
    return [buffer[i] for i in range(count.value)]


def instances(
    known: Card,
    kind: catalog.Kind,
    told: tuple[nodes.ProfileOffer, ...],
    offers: catalog.Catalog,
    using: dict[tuple[int | None, int | None], list[nodes.Holder]],
) -> list[nodes.GpuInstance]:
    """Read the GPU instances with their compute instances, by placement. `told` are the GPU's offers,
    `using` who has processes, by (GPU instance, compute instance). Raises CallError."""
    found = []
    for offer in told:
        for handle in handles(known.handle, offer):
            info = calls.call("nvmlGpuInstanceGetInfo", handle)
            number = int(info.id)
            found.append(
                nodes.GpuInstance(
                    id=number,
                    profile=offer.profile,
                    profile_id=offer.id,
                    placement=nodes.Placement(int(info.placement.start), int(info.placement.size)),
                    memory_bytes=offer.memory_bytes,
                    compute=tuple(_compute(handle, number, kind, offer, offers, using)),
                    holders=tuple(using.get((number, None), ())),
                )
            )
    _learn_uuids(known, {i.id: {c.id for c in i.compute} for i in found if i.compute})
    return [
        dataclasses.replace(
            i, compute=tuple(dataclasses.replace(c, uuid=known.mig_uuids.get((i.id, c.id))) for c in i.compute)
        )
        for i in sorted(found, key=lambda i: (i.placement, i.id))
    ]


def _compute(
    handle: Any,
    number: int,
    kind: catalog.Kind,
    offer: nodes.ProfileOffer,
    offers: catalog.Catalog,
    using: dict[tuple[int | None, int | None], list[nodes.Holder]],
) -> list[nodes.ComputeInstance]:
    found: list[nodes.ComputeInstance] = []
    # The default one first: it fills the GPU instance, and then there is nothing more to ask.
    told = offers.compute_offers(kind, offer, handle)
    for profile in sorted(told, key=lambda c: (c.multiprocessors != offer.multiprocessors, c.index)):
        if sum(c.slices for c in found) >= offer.slices:
            break
        for compute in compute_handles(handle, profile):
            info = calls.call("nvmlComputeInstanceGetInfo_v2", compute)
            found.append(
                nodes.ComputeInstance(
                    id=int(info.id),
                    profile=profile.profile,
                    profile_id=profile.id,
                    uuid=None,
                    multiprocessors=profile.multiprocessors,
                    slices=profile.slices,
                    placement=nodes.Placement(int(info.placement.start), int(info.placement.size)),
                    holders=tuple(using.get((number, int(info.id)), ())),
                )
            )
    return sorted(found, key=lambda c: c.id)


def _learn_uuids(known: Card, wanted: dict[int, set[int]]) -> None:
    """Learn the UUIDs of the MIG devices of `wanted` (compute ids by GPU instance) that are not known."""
    missing = {(gi, ci) for gi, cis in wanted.items() for ci in cis} - known.mig_uuids.keys()
    for index in range(_MOST_MIG_DEVICES):
        if not missing:
            return
        try:
            device = calls.call("nvmlDeviceGetMigDeviceHandleByIndex", known.handle, index)
        except errors.NotFound:
            continue  # indexes may have holes
        except (errors.InvalidArgument, errors.NotSupported):
            break
        gi = int(calls.call("nvmlDeviceGetGpuInstanceId", device))
        cis = wanted.get(gi, set())
        only = next(iter(cis)) if len(cis) == 1 else None
        key = (gi, only if only is not None else int(calls.call("nvmlDeviceGetComputeInstanceId", device)))
        if key in missing:
            known.mig_uuids[key] = str(calls.call("nvmlDeviceGetUUID", device))
            missing.discard(key)
    log.debug("the driver shows no MIG device of some compute instances", gpu=known.uuid, which=sorted(missing))
