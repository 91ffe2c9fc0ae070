"""One GPU's figures in one visit of its lane, with as few calls as they take.

The fast group is read each visit; the slow one (ECC, limits, links, rows) when asked for, and kept
between. Facts that do not change, capacities and the list of instances are read once a generation: it
ends when the handle is new, when MIG mode or instances differ, and when somebody says `forget`. What
a GPU does not offer is remembered for the generation, logged once, and absent. PCIe throughput is
never asked (20 ms a call); its byte counters come with the field values.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pynvml

from agent import errors, log, measures
from agent.mig import node as nodes
from agent.nvml import calls, catalog, gpm, observe

_ABSENT_CODES = frozenset({2, 3, 4, 13, 22, 24, 25, 26})
"""What says "not here" rather than "not now": NVML has several ways of it."""

# Field ids of nvmlDeviceGetFieldValues.
_POWER, _ENERGY, _MEMORY_TEMPERATURE, _REPLAYS = 185, 83, 82, 94
_PCIE_SENT, _PCIE_RECEIVED = 197, 198
_NVLINK_SENT, _NVLINK_RECEIVED = 138, 139
_RECOVERY = 230
_ROWS_CORRECTABLE, _ROWS_UNCORRECTABLE, _ROWS_PENDING, _ROWS_FAILED = 142, 143, 144, 145
_ALL_LINKS = 0xFFFFFFFF
_HELD_BACK = {
    74: "sw_power_cap",
    75: "thermal",
    76: "sync_boost",
    77: "board_limit",
    78: "low_utilization",
    79: "reliability",
    269: "sw_thermal_slowdown",
    270: "hw_thermal_slowdown",
    271: "hw_power_brake_slowdown",
}
_FAST_FIELDS = (
    _POWER,
    _ENERGY,
    _MEMORY_TEMPERATURE,
    _REPLAYS,
    _PCIE_SENT,
    _PCIE_RECEIVED,
    _NVLINK_SENT,
    _NVLINK_RECEIVED,
    _RECOVERY,
    *_HELD_BACK,
)
_SLOW_FIELDS = (_ROWS_CORRECTABLE, _ROWS_UNCORRECTABLE, _ROWS_PENDING, _ROWS_FAILED)
_PER_LINK = frozenset({_NVLINK_SENT, _NVLINK_RECEIVED})
_VALUE_OF_TYPE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_DOMAINS = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}
_RECOVERIES = {
    0: "none",
    1: "gpu-reset",
    2: "node-reboot",
    3: "drain-p2p",
    4: "drain-and-reset",
    5: "recover-imex-domain",
    6: "bus-reset",
    7: "system-reboot",
}
_FABRIC = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
_AVAILABILITIES = ("max", "high", "partial", "low", "none")
_MAX_LINKS = 18
_SRAM, _DRAM = 7, 2
_LOST = (errors.Lost, errors.Unready)


@dataclasses.dataclass(slots=True)
class _State:
    """What is kept of one GPU between visits, and dropped with its generation."""

    card: observe.Card
    unsupported: set[str] = dataclasses.field(default_factory=set)
    windows: gpm.Windows | None = None
    looked_for_gpm: bool = False
    topology: _Topology | None = None
    slow: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    static: Mapping[str, Any] | None = None


@dataclasses.dataclass(slots=True)
class _Topology:
    """MIG mode and instances as of one look. `devices` is a MIG device handle of each GPU instance."""

    mode: nodes.ModeState | None
    instances: tuple[nodes.GpuInstance, ...] = ()
    offers: Mapping[nodes.ProfileId, nodes.ProfileOffer] = dataclasses.field(default_factory=dict)
    devices: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    creatable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ecc: dict[int, int] = dataclasses.field(default_factory=dict)

    def shape(self) -> object:
        """What makes two topologies the same for measuring."""
        return self.mode, tuple(
            (i.id, i.profile_id, i.placement, tuple((c.id, c.profile_id) for c in i.compute)) for i in self.instances
        )


class _Gone(Exception):
    """An instance is no longer there: the topology is to be read again."""


class Meter:
    """Visits GPUs. `visit` and `release` of a GPU run in its lane; `forget` may come from any thread."""

    def __init__(
        self,
        offers: catalog.Catalog,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._offers = offers
        self._clock = clock
        self._monotonic = monotonic
        self._states: dict[str, _State] = {}
        self._doubted: set[str] = set()
        self._lock = threading.Lock()

    def forget(self, uuid: str) -> None:
        """Begin a new generation of this GPU with its next visit."""
        with self._lock:
            self._doubted.add(uuid)

    def release(self, uuid: str | None = None) -> None:
        """Free what is kept in the driver for one GPU, or for all."""
        for key in [uuid] if uuid is not None else list(self._states):
            state = self._states.pop(key, None)
            if state is not None and state.windows is not None:
                state.windows.free()

    def visit(self, card: observe.Card, index: int, *, slow: bool) -> measures.GpuSample:
        """Measure one GPU. Raises Lost, Unready, or InvalidArgument for a dead handle."""
        state = self._state(card)
        mode = self._mode(state)
        topology = state.topology
        if topology is None or slow or topology.mode != mode:
            topology = self._study(state, mode)
        try:
            return self._measure(state, topology, index, slow=slow)
        except _Gone:
            state.topology = None
            topology = self._study(state, mode)
        try:
            return self._measure(state, topology, index, slow=slow)
        except _Gone as cause:
            raise errors.CallError(
                f"cannot measure GPU {card.uuid}: its instances change while they are read",
                call="nvmlDeviceGetGpuInstanceById",
                code=6,
                gpu=card.uuid,
            ) from cause

    def _state(self, card: observe.Card) -> _State:
        with self._lock:
            doubted = card.uuid in self._doubted
            self._doubted.discard(card.uuid)
        state = self._states.get(card.uuid)
        if state is None or state.card.handle is not card.handle:
            # Samples of an older session died with it: they must not be freed in this one.
            state = self._states[card.uuid] = _State(card)
        elif doubted:
            if state.windows is not None:
                state.windows.free()
            state = self._states[card.uuid] = _State(card)
        return state

    # --- once a generation

    def _mode(self, state: _State) -> nodes.ModeState | None:
        try:
            current, pending = calls.call("nvmlDeviceGetMigMode", state.card.handle)
        except errors.NotSupported:
            return None
        return nodes.ModeState(bool(current), bool(pending))

    def _study(self, state: _State, mode: nodes.ModeState | None) -> _Topology:
        """Read which instances there are, and what else lasts as long as they do."""
        card = state.card
        before = state.topology
        if mode is None or not mode.current:
            now = _Topology(mode)
        else:
            kind = card.kind(mig=True)
            told = self._offers.offers(card.handle, kind, card.model)
            try:
                instances = observe.instances(card, kind, told, self._offers, {})
            except errors.NoPermission:
                instances = []  # without root only whole-GPU figures are to be had
                told = ()
            by_id = {offer.id: offer for offer in told}
            now = _Topology(mode, tuple(instances), by_id)
        if before is not None and before.shape() == now.shape():
            return before
        if before is not None:
            # What a GPU does not tell may depend on mode and instances.
            state.unsupported.clear()
            state.static = None
            state.slow = {}
            if state.windows is not None:
                state.windows.free()
        if now.instances:
            now.devices = self._devices(state, {i.id for i in now.instances if i.compute})
        if now.mode is not None and now.mode.current:
            now.creatable = self._creatable(state, now)
        state.topology = now
        return now

    def _devices(self, state: _State, wanted: set[int]) -> dict[int, Any]:
        """Return one MIG device handle for each of the GPU instances `wanted`."""
        found: dict[int, Any] = {}
        count = self._ask(state, "mig-device-count", "nvmlDeviceGetMaxMigDeviceCount", state.card.handle) or 0
        for index in range(int(count)):
            if wanted <= found.keys():
                break
            try:
                device = calls.call("nvmlDeviceGetMigDeviceHandleByIndex", state.card.handle, index)
                found.setdefault(int(calls.call("nvmlDeviceGetGpuInstanceId", device)), device)
            except (errors.NotFound, errors.InvalidArgument):
                continue
        return found

    def _creatable(self, state: _State, topology: _Topology) -> dict[str, int]:
        found: dict[str, int] = {}
        for offer in topology.offers.values():
            left = self._ask(
                state,
                f"capacity-{offer.id}",
                "nvmlDeviceGetGpuInstanceRemainingCapacity",
                state.card.handle,
                int(offer.id),
            )
            if left is not None:
                found[str(offer.profile)] = int(left)
        return found

    def _static(self, state: _State) -> Mapping[str, Any]:
        """Return what lasts a generation."""
        if state.static is None:
            handle = state.card.handle
            limits = {
                word: self._ask(state, f"threshold-{word}", "nvmlDeviceGetTemperatureThreshold", handle, which)
                for word, which in (("slowdown", 1), ("shutdown", 0))
            }
            tops = {
                word: self._ask(state, f"top-{word}", "nvmlDeviceGetMaxClockInfo", handle, n)
                for n, word in _DOMAINS.items()
            }
            mode = None if state.topology is None else state.topology.mode
            most = None
            if mode is not None and mode.current:  # with MIG off the driver says 0, which is no maximum
                most = self._ask(state, "mig-most", "nvmlDeviceGetMaxMigDeviceCount", handle)
            state.static = {
                "vbios_version": self._ask(state, "vbios", "nvmlDeviceGetVbiosVersion", handle),
                "temperature_limits": {word: float(value) for word, value in limits.items() if value is not None},
                "clocks_max": {word: value * 1e6 for word, value in tops.items() if value is not None},
                "mig_instances_max": most,
            }
        return state.static

    # --- each visit

    def _measure(self, state: _State, topology: _Topology, index: int, *, slow: bool) -> measures.GpuSample:
        card = state.card
        static = self._static(state)
        fields = self._fields(state, _FAST_FIELDS)
        if slow or not state.slow:
            state.slow = self._slow(state, topology)
        running = self._processes(state)
        bar1 = self._ask(state, "bar1", "nvmlDeviceGetBAR1MemoryInfo", card.handle)
        mode = topology.mode
        pstate = self._ask(state, "pstate", "nvmlDeviceGetPerformanceState", card.handle)
        return measures.GpuSample(
            index=index,
            uuid=card.uuid,
            pci_bus_id=card.pci_bus_id,
            name=card.name,
            up=True,
            taken=self._clock(),
            minor=card.minor,
            architecture=card.architecture.lower() or None,
            memory=self._memory(state, card.handle, "memory"),
            bar1_total=None if bar1 is None else int(bar1.bar1Total),
            bar1_used=None if bar1 is None else int(bar1.bar1Used),
            utilization=self._utilization(state),
            activity=self._activity(state, None),
            power_watts=self._power(state, fields),
            energy_joules=self._energy(state, fields),
            temperatures=self._temperatures(state, fields),
            clocks=self._clocks(state),
            performance_state=pstate if pstate is None or 0 <= pstate < 16 else None,
            clock_events=self._clock_events(state),
            clock_event_seconds={word: fields[number] / 1e9 for number, word in _HELD_BACK.items() if number in fields},
            pcie_replays=self._replays(state, fields),
            pcie_transmit_bytes=_whole(fields.get(_PCIE_SENT)),
            pcie_receive_bytes=_whole(fields.get(_PCIE_RECEIVED)),
            nvlink_transmit_bytes=_kib(fields.get(_NVLINK_SENT)),
            nvlink_receive_bytes=_kib(fields.get(_NVLINK_RECEIVED)),
            recovery_action=_RECOVERIES.get(int(fields[_RECOVERY])) if _RECOVERY in fields else None,
            fabric_state=self._fabric(state, slow=slow),
            processes=None if running is None else len({pid for pids in running.values() for pid in pids}),
            mig_enabled=None if mode is None else mode.current,
            mig_pending=None if mode is None else mode.pending,
            creatable=topology.creatable,
            instances=tuple(self._instance(state, topology, one, running, slow=slow) for one in topology.instances),
            **static,
            **{name: value for name, value in state.slow.items() if name != "fabric_state"},
        )

    def _instance(
        self,
        state: _State,
        topology: _Topology,
        one: nodes.GpuInstance,
        running: Mapping[tuple[int | None, int | None], set[int]] | None,
        *,
        slow: bool,
    ) -> measures.InstanceSample:
        device = topology.devices.get(one.id)
        activity = self._activity(state, one.id)
        if state.windows is None:
            # Whoever can take a sample of an instance knows that it is there; else ask.
            try:
                calls.call("nvmlDeviceGetGpuInstanceById", state.card.handle, one.id)
            except (errors.NotFound, errors.InvalidArgument) as cause:
                raise _Gone from cause
            except _LOST:
                raise
            except errors.CallError:
                pass  # no answer is no proof that it has gone
        memory = bar1 = None
        if device is not None:
            memory = self._memory(state, device, "instance-memory")
            bar1 = self._ask(state, "instance-bar1", "nvmlDeviceGetBAR1MemoryInfo", device)
            if slow or one.id not in topology.ecc:
                count = self._ask(state, "instance-ecc", "nvmlDeviceGetMemoryErrorCounter", device, 1, 0, _SRAM)
                if count is not None:
                    topology.ecc[one.id] = int(count)
        offer = topology.offers.get(one.profile_id)
        return measures.InstanceSample(
            id=one.id,
            profile=str(one.profile),
            start=one.placement.start,
            size=one.placement.size,
            first_seen=self._clock(),
            memory=memory,
            bar1_total=None if bar1 is None else int(bar1.bar1Total),
            bar1_used=None if bar1 is None else int(bar1.bar1Used),
            activity=activity,
            memory_slices=one.placement.size,
            engines={} if offer is None else _engines(offer.engines),
            ecc_sram_uncorrected=topology.ecc.get(one.id),
            compute=tuple(
                measures.ComputeSample(
                    id=compute.id,
                    uuid=compute.uuid,
                    profile=str(compute.profile),
                    multiprocessors=compute.multiprocessors,
                    slices=compute.slices,
                    processes=None if running is None else len(running.get((one.id, compute.id), ())),
                )
                for compute in one.compute
            ),
        )

    def _activity(self, state: _State, instance: int | None) -> measures.Activity | None:
        if not state.looked_for_gpm:
            state.looked_for_gpm = True
            if gpm.supported(state.card.handle):
                state.windows = gpm.Windows(state.card.handle, clock=self._monotonic)
        if state.windows is None:
            return None
        try:
            return state.windows.activity(instance)
        except _LOST:
            raise
        except (errors.InvalidArgument, errors.NotFound) as cause:
            if instance is not None:
                raise _Gone from cause
            return None
        except errors.CallError as cause:
            log.debug("no activity figures", gpu=state.card.uuid, gpu_instance=instance, cause=cause)
            return None

    def _memory(self, state: _State, handle: Any, what: str) -> measures.Memory | None:
        found = self._ask(state, f"{what}-v2", "nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
        if found is not None:
            return measures.Memory(int(found.total), int(found.used), int(found.free), int(found.reserved))
        if f"{what}-v2" not in state.unsupported:
            return None
        found = self._ask(state, what, "nvmlDeviceGetMemoryInfo", handle)
        return None if found is None else measures.Memory(int(found.total), int(found.used), int(found.free))

    def _utilization(self, state: _State) -> dict[str, float]:
        handle = state.card.handle
        found: dict[str, float] = {}
        rates = self._ask(state, "utilization", "nvmlDeviceGetUtilizationRates", handle)
        if rates is not None:
            found |= {"gpu": int(rates.gpu) / 100, "memory": int(rates.memory) / 100}
        for word, call in (
            ("encoder", "nvmlDeviceGetEncoderUtilization"),
            ("decoder", "nvmlDeviceGetDecoderUtilization"),
        ):
            answer = self._ask(state, word, call, handle)
            if answer is not None:
                found[word] = int(answer[0]) / 100
        return found

    def _power(self, state: _State, fields: Mapping[int, float]) -> float | None:
        if _POWER in fields:
            return fields[_POWER] / 1000
        value = self._ask(state, "power", "nvmlDeviceGetPowerUsage", state.card.handle)
        return None if value is None else value / 1000

    def _energy(self, state: _State, fields: Mapping[int, float]) -> float | None:
        if _ENERGY in fields:
            return fields[_ENERGY] / 1000
        value = self._ask(state, "energy", "nvmlDeviceGetTotalEnergyConsumption", state.card.handle)
        return None if value is None else value / 1000

    def _replays(self, state: _State, fields: Mapping[int, float]) -> int | None:
        if _REPLAYS in fields:
            return int(fields[_REPLAYS])
        value = self._ask(state, "replays", "nvmlDeviceGetPcieReplayCounter", state.card.handle)
        return None if value is None else int(value)

    def _temperatures(self, state: _State, fields: Mapping[int, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        # The newer form came with 590; the older one goes with CUDA 14.
        core = self._ask(state, "temperature-v", "nvmlDeviceGetTemperatureV", state.card.handle, 0)
        if core is None and "temperature-v" in state.unsupported:
            core = self._ask(state, "temperature", "nvmlDeviceGetTemperature", state.card.handle, 0)
        if core is not None:
            found["core"] = float(core)
        if _MEMORY_TEMPERATURE in fields:
            found["memory"] = float(fields[_MEMORY_TEMPERATURE])
        return found

    def _clocks(self, state: _State) -> dict[str, float]:
        found = {}
        for number, word in _DOMAINS.items():
            value = self._ask(state, f"clock-{word}", "nvmlDeviceGetClockInfo", state.card.handle, number)
            if value is not None:
                found[word] = value * 1e6
        return found

    def _clock_events(self, state: _State) -> dict[str, bool]:
        bits = self._ask(state, "reasons", "nvmlDeviceGetCurrentClocksEventReasons", state.card.handle)
        if bits is None and "reasons" in state.unsupported:
            bits = self._ask(state, "reasons-old", "nvmlDeviceGetCurrentClocksThrottleReasons", state.card.handle)
        return {} if bits is None else {word: bool(int(bits) & bit) for bit, word in _REASONS.items()}

    def _processes(self, state: _State) -> dict[tuple[int | None, int | None], set[int]] | None:
        """Return pids by (GPU instance, compute instance). One question answers for all instances."""
        found = self._ask(state, "processes", "nvmlDeviceGetComputeRunningProcesses_v3", state.card.handle)
        if found is None:
            return None
        running: dict[tuple[int | None, int | None], set[int]] = collections.defaultdict(set)
        for process in found:
            on = observe.instance_id(process.gpuInstanceId), observe.instance_id(process.computeInstanceId)
            running[on].add(int(process.pid))
        return running

    # --- now and then

    def _slow(self, state: _State, topology: _Topology) -> dict[str, Any]:
        handle = state.card.handle
        limit = self._ask(state, "limit", "nvmlDeviceGetEnforcedPowerLimit", handle)
        ecc: dict[tuple[str, str, str], int] = {}
        for severity, a in (("corrected", 0), ("uncorrected", 1)):
            for lifetime, b in (("volatile", 0), ("aggregate", 1)):
                for memory, c in (("dram", _DRAM), ("sram", _SRAM)):
                    key = f"ecc-{severity}-{memory}-{lifetime}"
                    count = self._ask(state, key, "nvmlDeviceGetMemoryErrorCounter", handle, a, b, c)
                    if count is not None:
                        ecc[severity, memory, lifetime] = int(count)
        rows: dict[int, float] = {}
        if not topology.instances:
            # With instances some drivers refuse and others tell nothing: the table says absent.
            rows = self._fields(state, _SLOW_FIELDS)
        banks = self._ask(state, "histogram", "nvmlDeviceGetRowRemapperHistogram", handle)
        return {
            "power_limit_watts": None if limit is None else limit / 1000,
            "ecc": ecc,
            "remapped_rows": {
                word: int(rows[number])
                for word, number in (("correctable", _ROWS_CORRECTABLE), ("uncorrectable", _ROWS_UNCORRECTABLE))
                if number in rows
            },
            "remap_pending": bool(rows[_ROWS_PENDING]) if _ROWS_PENDING in rows else None,
            "remap_failed": bool(rows[_ROWS_FAILED]) if _ROWS_FAILED in rows else None,
            "remap_banks": {} if banks is None else {word: int(getattr(banks, word)) for word in _AVAILABILITIES},
            "pcie_link_generation": self._ask(state, "pcie-generation", "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_link_width": self._ask(state, "pcie-width", "nvmlDeviceGetCurrPcieLinkWidth", handle),
            "nvlinks_active": self._links(state),
            "fabric_state": self._ask_fabric(state),
            "persistence": self._persistence(state),
        }

    def _persistence(self, state: _State) -> bool | None:
        """Return whether the driver keeps the GPU initialised without clients."""
        mode = self._ask(state, "persistence", "nvmlDeviceGetPersistenceMode", state.card.handle)
        return None if mode is None else bool(mode)

    def _links(self, state: _State) -> int | None:
        """Count NVLinks that are up; the first link that the GPU does not have ends the count."""
        active = None
        for link in range(_MAX_LINKS):
            up = self._ask(state, f"nvlink-{link}", "nvmlDeviceGetNvLinkState", state.card.handle, link)
            if up is None:
                break
            active = (active or 0) + int(bool(up))
        return active

    def _fabric(self, state: _State, *, slow: bool) -> str | None:
        """Return the fabric's state; while it is on its way it is asked each visit, as readiness waits for it."""
        word: str | None = state.slow.get("fabric_state")
        if not slow and word in ("not-started", "in-progress", "failed"):
            word = self._ask_fabric(state)
            state.slow = {**state.slow, "fabric_state": word}
        return word

    def _ask_fabric(self, state: _State) -> str | None:
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        info.version = pynvml.nvmlGpuFabricInfo_v2
        if self._ask(state, "fabric", "nvmlDeviceGetGpuFabricInfoV", state.card.handle, ctypes.byref(info)) is None:
            return None
        word = _FABRIC.get(int(info.state))
        # Completed says that the registration has ended; how it ended is told beside it.
        return "failed" if word == "completed" and int(info.status) else word

    # --- asking

    def _fields(self, state: _State, wanted: Iterable[int]) -> dict[int, float]:
        """Ask for many fields in one call; return those that have a value."""
        ask = [number for number in wanted if f"field-{number}" not in state.unsupported]
        if not ask or "fields" in state.unsupported:
            return {}
        answers = self._ask(
            state,
            "fields",
            "nvmlDeviceGetFieldValues",
            state.card.handle,
            [(number, _ALL_LINKS if number in _PER_LINK else 0) for number in ask],
        )
        found: dict[int, float] = {}
        for number, answer in zip(ask, answers or (), strict=False):
            code = int(answer.nvmlReturn)
            if code in _ABSENT_CODES:
                self._absent(state, f"field-{number}", code)
            elif code == 0:
                found[number] = getattr(answer.value, _VALUE_OF_TYPE.get(int(answer.valueType), "ullVal"))
        return found

    def _ask(self, state: _State, key: str, call: str, *args: Any) -> Any:
        """Call and return the answer, None where there is none. Raises Lost and Unready only."""
        if key in state.unsupported:
            return None
        try:
            return calls.call(call, *args)
        except _LOST:
            raise
        except errors.CallError as cause:
            if cause.code in _ABSENT_CODES:
                self._absent(state, key, cause.code)
            else:
                log.debug("a figure is missing this time", gpu=state.card.uuid, figure=key, cause=cause)
            return None

    def _absent(self, state: _State, key: str, code: int) -> None:
        state.unsupported.add(key)
        log.debug("a figure is not to be had of this GPU", gpu=state.card.uuid, figure=key, code=code)


def _engines(engines: nodes.Engines) -> dict[str, int]:
    counts = {
        "copy": engines.copy,
        "decoder": engines.decoder,
        "encoder": engines.encoder,
        "jpeg": engines.jpeg,
        "ofa": engines.ofa,
    }
    return {word: count for word, count in counts.items() if count is not None}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _kib(value: float | None) -> int | None:
    return None if value is None else int(value) * 1024
