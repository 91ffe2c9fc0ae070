"""Measure one GPU in one visit: what moves each time, what rarely moves once in a while.

Facts that do not change while the instances stay (names, limits, handles of MIG devices, engines)
are read once a topology. What the GPU answered "not supported" to is not asked again until the
topology changes, and is absent from the sample. Calls that fail otherwise leave their value absent
this time. A GPU that is lost, or a hung call, ends the visit.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from agent import errors, log, measures
from agent.mig import node as nodes
from agent.nvml import calls, catalog, gpm, observe

T = TypeVar("T")

_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}
_THRESHOLDS = {"shutdown": 0, "slowdown": 1}
_EVENTS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
_SECONDS_FIELDS = {74: "power", 75: "thermal", 76: "sync_boost", 77: "board_limit", 78: "low_utilization", 79: "reliability"}
_FAST_FIELDS = (82, 185, 83, 94, 197, 198, 142, 143, 144, 145, 230, *_SECONDS_FIELDS)
_RECOVERY = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex_domain"}
_FABRIC = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_ECC = {
    ("corrected", "dram", "volatile"): (0, 0, 2),
    ("corrected", "sram", "volatile"): (0, 0, 7),
    ("uncorrected", "dram", "volatile"): (1, 0, 2),
    ("uncorrected", "sram", "volatile"): (1, 0, 7),
    ("corrected", "dram", "aggregate"): (0, 1, 2),
    ("corrected", "sram", "aggregate"): (0, 1, 7),
    ("uncorrected", "dram", "aggregate"): (1, 1, 2),
    ("uncorrected", "sram", "aggregate"): (1, 1, 7),
}
_WRAP = 2**32


@dataclasses.dataclass(slots=True)
class _Device:
    """A compute instance as a MIG device: handle and what does not change."""

    handle: Any
    sample: measures.ComputeSample
    memory_slices: int
    engines: dict[str, int]


@dataclasses.dataclass(slots=True)
class _Instance:
    """A GPU instance. BAR1 and ECC are of the slow group: kept from the last time they were read."""

    gpu_instance: nodes.GpuInstance
    devices: list[_Device]
    first_seen: float
    bar1: Any = None
    ecc: int | None = None


@dataclasses.dataclass(slots=True)
class _Known:
    """What is kept of a GPU from one visit to the next."""

    handle: Any
    shape: object = None
    instances: list[_Instance] = dataclasses.field(default_factory=list)
    absent: set[str] = dataclasses.field(default_factory=set)
    slow: dict[str, Any] = dataclasses.field(default_factory=dict)
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    folded: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    seen: dict[tuple[int, str, tuple[tuple[int, str], ...]], float] = dataclasses.field(default_factory=dict)


class Meter:
    """Measures GPUs. One GPU's state is touched by its lane alone."""

    def __init__(self, offers: catalog.Catalog, *, clock: Callable[[], float]) -> None:
        self._offers = offers
        self._clock = clock
        self._windows = gpm.Windows()
        self._known: dict[str, _Known] = {}
        self._dirty: collections.Counter[str] = collections.Counter()

    def forget(self, uuid: str) -> None:
        """Note that the instances of a GPU are changing: read them anew at the next visit."""
        self._dirty[uuid] += 1

    def release(self) -> None:
        """Free what belongs to the library session, which is about to close."""
        self._windows.release()
        for known in self._known.values():
            known.handle = None
            known.shape = None

    def visit(self, card: observe.Card, index: int, *, slow: bool) -> measures.GpuSample:
        """Read one GPU. Raises Lost, InvalidArgument, Unready; all else leaves a value absent."""
        try:
            return self._visit(card, index, slow=slow)
        except errors.InvalidArgument:
            # A MIG device's handle went stale: somebody changed the instances. Read them anew, once.
            self.forget(card.uuid)
            return self._visit(card, index, slow=slow)

    def _visit(self, card: observe.Card, index: int, *, slow: bool) -> measures.GpuSample:
        known = self._known.get(card.uuid)
        if known is None or known.handle is not card.handle:
            # Counters and first sights outlive the session; all else is read anew.
            old = known
            known = self._known[card.uuid] = _Known(handle=card.handle)
            if old is not None:
                known.seen, known.folded = old.seen, old.folded
        ask = _Asking(known)
        now = self._clock()
        mode = ask("mode", lambda: calls.call("nvmlDeviceGetMigMode", card.handle))
        mig = bool(mode and mode[0])
        self._topology(card, known, mig=mig, now=now)
        if slow or not known.slow:
            known.slow = self._slow(card, ask, mig=mig)
            for instance in known.instances:
                _slow_instance(instance, ask)
        if not known.static:
            known.static = self._static(card, ask)
        fields = self._fields(card, known)
        memory = ask("memory", lambda: _memory(card.handle))
        bar1 = ask("bar1", lambda: calls.call("nvmlDeviceGetBAR1MemoryInfo", card.handle))
        power = fields.get(185) or ask("power", lambda: int(calls.call("nvmlDeviceGetPowerUsage", card.handle)))
        temperatures: dict[str, float] = {}
        core = ask("temperature", lambda: float(calls.call("nvmlDeviceGetTemperature", card.handle, 0)))
        if core is not None:
            temperatures["core"] = core
        if fields.get(82):
            temperatures["memory"] = float(fields[82])
        clocks = {}
        for domain, number in _CLOCKS.items():
            clock = ask(f"clock-{domain}", lambda n=number: float(calls.call("nvmlDeviceGetClockInfo", card.handle, n)))  # type: ignore[misc]
            if clock is not None:
                clocks[domain] = clock * 1e6
        reasons = ask("reasons", lambda: int(calls.call("nvmlDeviceGetCurrentClocksEventReasons", card.handle)))
        utilization: dict[str, float] = {}
        if not mig:
            rates = ask("utilization", lambda: calls.call("nvmlDeviceGetUtilizationRates", card.handle))
            if rates is not None:
                utilization = {"gpu": rates.gpu / 100.0, "memory": rates.memory / 100.0}
        processes = ask("processes", lambda: calls.call("nvmlDeviceGetComputeRunningProcesses", card.handle))
        by_compute: collections.Counter[tuple[int, int]] = collections.Counter()
        for process in processes or ():
            by_compute[(int(process.gpuInstanceId or 0), int(process.computeInstanceId or 0))] += 1
        supported = self._windows.supported(card.uuid, card.handle)
        activity = ask("activity", lambda: self._windows.activity(card.uuid, card.handle, None)) if supported else None
        recovery = fields.get(230)
        return measures.GpuSample(
            index=index,
            uuid=card.uuid,
            pci_bus_id=card.pci_bus_id,
            name=card.name,
            up=True,
            taken=now,
            minor=card.minor,
            architecture=card.architecture or None,
            memory=memory,
            bar1_total=None if bar1 is None else int(bar1.bar1Total),
            bar1_used=None if bar1 is None else int(bar1.bar1Used),
            utilization=utilization,
            activity=activity,
            power_watts=None if power is None else power / 1000.0,
            energy_joules=None if fields.get(83) is None else fields[83] / 1000.0,
            temperatures=temperatures,
            clocks=clocks,
            clock_events={} if reasons is None else {name: bool(reasons & bit) for name, bit in _EVENTS.items()},
            clock_event_seconds={name: fields[n] / 1e9 for n, name in _SECONDS_FIELDS.items() if fields.get(n) is not None},
            pcie_replays=fields.get(94),
            pcie_transmit_bytes=_fold(known, 197, fields.get(197)),
            pcie_receive_bytes=_fold(known, 198, fields.get(198)),
            remapped_rows={cause: fields[n] for n, cause in ((142, "correctable"), (143, "uncorrectable")) if fields.get(n) is not None},
            remap_pending=None if fields.get(144) is None else bool(fields[144]),
            remap_failed=None if fields.get(145) is None else bool(fields[145]),
            recovery_action=None if recovery is None else _RECOVERY.get(int(recovery), f"unknown_{recovery}"),
            processes=None if processes is None else len({int(p.pid) for p in processes}),
            mig_enabled=None if mode is None else mig,
            mig_pending=None if mode is None else bool(mode[1]),
            instances=tuple(self._instance(card, i, ask, by_compute, counted=processes is not None) for i in known.instances),
            **known.slow,
            **known.static,
        )

    def _topology(self, card: observe.Card, known: _Known, *, mig: bool, now: float) -> None:
        """Read the instances anew where something may have changed: the mode, a change of our own or an
        event (`forget`), a handle that went stale, or a new session."""
        dirty = self._dirty[card.uuid]
        if known.shape == (mig, dirty):
            return
        gpu = observe.observe(card, 0, self._offers, lambda _: "") if mig else None
        if gpu is not None and gpu.state is not nodes.GpuState.OK:
            raise errors.CallError(gpu.problem or "", call="observe", code=999, gpu=card.uuid)
        instances = gpu.instances if gpu is not None else ()
        self._windows.drop(card.uuid)
        known.absent.clear()
        known.slow.clear()
        known.static.clear()
        layout = {(i.id, str(i.profile), tuple((c.id, str(c.profile)) for c in i.compute)) for i in instances}
        # An instance that was away for a moment is a new one, though it has the same ids and UUIDs.
        known.seen = {key: known.seen.get(key, now) for key in layout}
        handles = _devices(card) if instances else {}
        known.instances = [
            _Instance(
                gpu_instance=i,
                devices=[d for c in i.compute if (d := _device(c, handles.get((i.id, c.id)))) is not None],
                first_seen=known.seen[(i.id, str(i.profile), tuple((c.id, str(c.profile)) for c in i.compute))],
            )
            for i in instances
        ]
        known.shape = (mig, dirty)

    def _slow(self, card: observe.Card, ask: _Asking, *, mig: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        limit = ask("limit", lambda: int(calls.call("nvmlDeviceGetEnforcedPowerLimit", card.handle)))
        found["power_limit_watts"] = None if limit is None else limit / 1000.0
        found["performance_state"] = ask("pstate", lambda: int(calls.call("nvmlDeviceGetPerformanceState", card.handle)))
        found["pcie_link_generation"] = ask("pcie-gen", lambda: int(calls.call("nvmlDeviceGetCurrPcieLinkGeneration", card.handle)))
        found["pcie_link_width"] = ask("pcie-width", lambda: int(calls.call("nvmlDeviceGetCurrPcieLinkWidth", card.handle)))
        ecc = {}
        for key, (severity, lifetime, place) in _ECC.items():
            value = ask(
                f"ecc-{key}",
                lambda s=severity, life=lifetime, p=place: int(  # type: ignore[misc]
                    calls.call("nvmlDeviceGetMemoryErrorCounter", card.handle, s, life, p)
                ),
            )
            if value is not None:
                ecc[key] = value
        found["ecc"] = ecc
        histogram = ask("rows", lambda: calls.call("nvmlDeviceGetRowRemapperHistogram", card.handle))
        found["remap_banks"] = (
            {}
            if histogram is None
            else {name: int(getattr(histogram, name)) for name in ("max", "high", "partial", "low", "none")}
        )
        fabric = ask("fabric", lambda: _fabric(card.handle))
        found["fabric_state"] = None if fabric in (None, "not_supported") else fabric
        creatable = {}
        if mig:
            for offer in self._offers.offers(card.handle, card.kind(mig=True), card.model):
                left = ask(
                    f"capacity-{offer.id}",
                    lambda o=offer: int(calls.call("nvmlDeviceGetGpuInstanceRemainingCapacity", card.handle, int(o.id))),  # type: ignore[misc]
                )
                if left is not None:
                    creatable[str(offer.profile)] = left
        found["creatable"] = creatable
        return found

    def _static(self, card: observe.Card, ask: _Asking) -> dict[str, Any]:
        maxima = {}
        for domain, number in _CLOCKS.items():
            clock = ask(f"max-{domain}", lambda n=number: float(calls.call("nvmlDeviceGetMaxClockInfo", card.handle, n)))  # type: ignore[misc]
            if clock is not None:
                maxima[domain] = clock * 1e6
        limits = {}
        for name, number in _THRESHOLDS.items():
            limit = ask(
                f"threshold-{name}",
                lambda n=number: float(calls.call("nvmlDeviceGetTemperatureThreshold", card.handle, n)),  # type: ignore[misc]
            )
            if limit is not None:
                limits[name] = limit
        return {
            "vbios_version": ask("vbios", lambda: str(calls.call("nvmlDeviceGetVbiosVersion", card.handle))),
            "mig_instances_max": ask("mig-max", lambda: int(calls.call("nvmlDeviceGetMaxMigDeviceCount", card.handle))),
            "clocks_max": maxima,
            "temperature_limits": limits,
        }

    def _fields(self, card: observe.Card, known: _Known) -> dict[int, int]:
        """Read all field values in one call; those not supported are not asked again."""
        wanted = [n for n in _FAST_FIELDS if f"field-{n}" not in known.absent]
        if not wanted:
            return {}
        try:
            values = calls.call("nvmlDeviceGetFieldValues", card.handle, wanted)
        except errors.NotSupported:
            known.absent.update(f"field-{n}" for n in wanted)
            return {}
        found = {}
        for number, value in zip(wanted, values, strict=True):
            code = int(value.nvmlReturn)
            if code in (2, 3, 13, 26):
                known.absent.add(f"field-{number}")
            elif code == 0:
                found[number] = _number(value)
        return found

    def _instance(
        self,
        card: observe.Card,
        instance: _Instance,
        ask: _Asking,
        processes: collections.Counter[tuple[int, int]],
        *,
        counted: bool,
    ) -> measures.InstanceSample:
        gi = instance.gpu_instance
        first = instance.devices[0] if instance.devices else None
        memory = None if first is None else ask(f"memory-{gi.id}", lambda: _memory(first.handle))
        activity = None
        if self._windows.supported(card.uuid, card.handle):
            activity = ask(f"activity-{gi.id}", lambda: self._windows.activity(card.uuid, card.handle, gi.id))
        return measures.InstanceSample(
            id=gi.id,
            profile=str(gi.profile),
            start=gi.placement.start,
            size=gi.placement.size,
            first_seen=instance.first_seen,
            memory=memory,
            bar1_total=None if instance.bar1 is None else int(instance.bar1.bar1Total),
            bar1_used=None if instance.bar1 is None else int(instance.bar1.bar1Used),
            activity=activity,
            memory_slices=gi.placement.size,
            engines=first.engines if first is not None else {},
            ecc_sram_uncorrected=instance.ecc,
            compute=tuple(
                dataclasses.replace(d.sample, processes=processes[(gi.id, d.sample.id)] if counted else None)
                for d in instance.devices
            ),
        )


class _Asking:
    """Asks for a value by a name under which "not supported" is remembered."""

    def __init__(self, known: _Known) -> None:
        self._absent = known.absent

    def __call__(self, name: str, job: Callable[[], T]) -> T | None:
        if name in self._absent:
            return None
        try:
            return job()
        except errors.NotSupported as cause:
            self._absent.add(name)
            log.debug("not offered", what=name, gpu=cause.gpu)
            return None
        except (errors.Lost, errors.InvalidArgument, errors.Unready):
            raise
        except errors.CallError as cause:
            log.debug("not answered this time", what=name, cause=cause)
            return None


def _slow_instance(instance: _Instance, ask: _Asking) -> None:
    if not instance.devices:
        return
    handle, number = instance.devices[0].handle, instance.gpu_instance.id
    instance.bar1 = ask(f"bar1-{number}", lambda: calls.call("nvmlDeviceGetBAR1MemoryInfo", handle))
    instance.ecc = ask(f"ecc-{number}", lambda: int(calls.call("nvmlDeviceGetMemoryErrorCounter", handle, 1, 0, 7)))


def _memory(handle: Any) -> measures.Memory:
    try:
        info = calls.call("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    except errors.NotSupported as cause:
        if cause.code != 13:
            raise
        info = calls.call("nvmlDeviceGetMemoryInfo", handle)
        return measures.Memory(total=int(info.total), used=int(info.used), free=int(info.free))
    return measures.Memory(total=int(info.total), used=int(info.used), free=int(info.free), reserved=int(info.reserved))


def _fabric(handle: Any) -> str | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    calls.call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    return _FABRIC.get(int(info.state))


def _number(value: Any) -> int:
    kind = int(value.valueType)
    held = value.value
    return int((held.dVal, held.uiVal, held.ulVal, held.ullVal, held.sllVal, held.siVal, held.usVal)[min(kind, 6)])


def _fold(known: _Known, field: int, raw: int | None) -> int | None:
    """Return a counter that does not wrap, of one that may wrap at 32 bits."""
    if raw is None:
        return None
    last, base = known.folded.get(field, (raw, 0))
    if raw < last and last < _WRAP:
        base += _WRAP
    known.folded[field] = (raw, base)
    return base + raw


def _devices(card: observe.Card) -> dict[tuple[int, int], Any]:
    """Return handles of the MIG devices by (GPU instance, compute instance)."""
    found = {}
    for index in range(int(calls.call("nvmlDeviceGetMaxMigDeviceCount", card.handle))):
        try:
            handle = calls.call("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, index)
        except errors.NotFound:
            continue
        except errors.InvalidArgument:
            break
        key = (int(calls.call("nvmlDeviceGetGpuInstanceId", handle)), int(calls.call("nvmlDeviceGetComputeInstanceId", handle)))
        found[key] = handle
    return found


def _device(compute: nodes.ComputeInstance, handle: Any) -> _Device | None:
    if handle is None:
        return None
    attributes = calls.call("nvmlDeviceGetAttributes", handle)
    return _Device(
        handle=handle,
        sample=measures.ComputeSample(
            id=compute.id,
            uuid=compute.uuid,
            profile=str(compute.profile),
            multiprocessors=int(attributes.multiprocessorCount),
            slices=int(attributes.computeInstanceSliceCount),
        ),
        memory_slices=int(attributes.gpuInstanceSliceCount),
        engines={
            "copy": int(attributes.sharedCopyEngineCount),
            "decoder": int(attributes.sharedDecoderCount),
            "encoder": int(attributes.sharedEncoderCount),
            "jpeg": int(attributes.sharedJpegCount),
            "ofa": int(attributes.sharedOfaCount),
        },
    )
