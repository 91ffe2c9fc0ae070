"""The GPUs of this machine, as reconcile and the sampler are handed them: lanes, session, handles.

A GPU is known by its place on the bus: the bus says which GPUs there are before the driver is asked,
so each GPU's first call already runs in its own lane, and one that hangs or is lost keeps none of the
others waiting. Handles die with the session and are then taken anew; one that went stale is taken
anew once. A GPU that has fallen off keeps its name and place for as long as this process lives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from agent import errors, log, measures, threads
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import calls, catalog, lanes, measure, models, session
from agent.nvml import events as watching
from agent.nvml import observe as reading
from agent.nvml import perform as acting
from agent.nvml.calls import Record

T = TypeVar("T")

NODE = "node"
_DISPLAY = ("0x0300", "0x0302")
_CLOSING = 0.3
"""Seconds that closing may take: a stop is promised within three seconds in all."""


class Machine(Protocol):
    """The part of the host that is needed here."""

    simulated: str | None

    def path(self, absolute: str) -> Path:
        """Where the host's file lies."""

    def instance_type(self) -> str | None:
        """The EC2 type."""

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        """Reset exactly these."""


@dataclasses.dataclass(slots=True)
class _Slot:
    """A place on the bus. `card` is what is known of the GPU in it, with a handle of session `epoch`.

    The lane of this name writes it, everybody reads it. `missing` says why there is no GPU any more.
    """

    bus: str
    index: int = 0
    card: reading.Card | None = None
    epoch: int = 0
    missing: str | None = None
    pci_device_id: int = 0
    name: str = ""
    uuid: str = ""


class NvmlGpus:
    """See the module. `read_deadline` and `change_deadline` bound one NVML call, in seconds; `clock`
    gives Unix time, `wait` passes the seconds between two tries of a destroy that is refused as in use.
    `on_returned` is told (on the event loop) the UUID of a GPU whose overdue call has come back, so
    that it can be observed afresh."""

    def __init__(
        self,
        opened: session.Session,
        *,
        machine: Machine,
        read_deadline: float = 30.0,
        change_deadline: float = 60.0,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session = opened
        self._machine = machine
        self._clock = clock
        self._wait = wait
        self._catalog = catalog.Catalog()
        self._lanes = lanes.Lanes(
            read_deadline=read_deadline, change_deadline=change_deadline, on_returned=self._returned
        )
        self._slots: dict[str, _Slot] = {}
        self._meter = measure.Meter(self._catalog, clock=clock)
        self._events: watching.Watch | None = None
        self._delivering: list[Callable[[measures.Event], None]] = []
        self._released = False
        self.on_returned: Callable[[str], None] = lambda _: None

    # --- what is wanted of it by reconcile

    async def observe(self) -> nodes.NodeState:
        """Read all GPUs side by side; see `agent.reconcile.gpus.Gpus`. Raises DriverError, also where
        MIG instances are told to root only."""
        await self._look()
        slots = sorted(self._slots.values(), key=lambda slot: slot.index)
        denied: list[errors.NoPermission] = []
        gpus = await asyncio.gather(*(self._observe(slot, denied) for slot in slots))
        if denied and not any(gpu.mode is not None and gpu.mode.current for gpu in gpus):
            raise errors.DriverError(f"the MIG instances of this node cannot be read: that needs root ({denied[0]})")
        self._start_events()
        versions = self._session.versions
        return nodes.NodeState(
            gpus=tuple(gpus),
            driver_version=versions.driver if versions else "",
            nvml_version=versions.nvml if versions else "",
            cuda_version=versions.cuda if versions else "",
            simulated=self._machine.simulated,
            instance_type=self._machine.instance_type(),
        )

    async def observe_gpu(self, uuid: str) -> nodes.Gpu:
        """Read one GPU afresh."""
        return await self._observe(await self._slot(uuid))

    async def perform(self, uuid: str, step: plans.Step) -> None:
        """Do one step and verify it."""
        slot = await self._slot(uuid)

        def work(card: reading.Card) -> None:
            try:
                acting.perform(card, step, self._catalog, wait=self._wait)
            finally:
                # Behind the step, not before it: a visit of the sampler may have come in between.
                self._meter.forget(uuid)

        await self._in_lane(slot, work)

    async def release(self) -> None:
        """Let go of the driver, so that a reset is not refused for our own sake; nothing is asked of it
        before `retake`. Raises BlockedError when a call has not come back."""
        if self._lanes.hung():
            raise errors.BlockedError(
                f"cannot let go of the driver: a call on {', '.join(self.hung())} has not come back"
            )
        self._released = True
        try:
            await self._let_go()
        except errors.GpunodeError:
            self._released = False
            raise

    async def retake(self) -> None:
        """Open the session again and take every handle anew. Raises DriverError."""
        self._released = False
        await self._look()
        await asyncio.gather(*(self._observe(slot) for slot in self._slots.values()))
        self._start_events()

    async def reset(self, uuids: Sequence[str]) -> None:
        """Reset exactly these GPUs. Raises ResetRefused."""
        addresses = []
        for uuid in uuids:
            slot = self._by_uuid(uuid)
            if slot is None:
                raise errors.ResetRefused(f"cannot reset GPU {uuid}: its place on the bus is not known")
            addresses.append(slot.card.pci_bus_id if slot.card is not None else slot.bus)
        await threads.run(lambda: self._machine.reset_gpus(addresses), name="reset")

    # --- what is wanted of it by the sampler

    def known(self) -> tuple[str, ...]:
        """UUIDs of the GPUs by index, as of the last look."""
        return tuple(slot.uuid for slot in sorted(self._slots.values(), key=lambda slot: slot.index) if slot.uuid)

    def versions(self) -> measures.Versions | None:
        """Versions of driver and library; None while there is none."""
        return self._session.versions

    @property
    def initializations(self) -> int:
        """How often the library was initialised."""
        return self._session.initializations

    async def measure(self, uuid: str, *, slow: bool) -> measures.GpuSample:
        """Visit one GPU once. One that does not answer comes back with `up` False."""
        slot = self._by_uuid(uuid)
        try:
            if slot is None:
                slot = await self._slot(uuid)
            index = slot.index
            return await self._in_lane(slot, lambda card: self._meter.visit(card, index, slow=slow))
        except errors.GpunodeError as cause:
            log.debug("a GPU was not measured", gpu=uuid, cause=cause)
            return self._down(slot, uuid, str(cause))

    def watch(self, deliver: Callable[[measures.Event], None]) -> Callable[[], None]:
        """Deliver every NVML event (from the events thread); returns a stop function."""
        self._delivering.append(deliver)
        self._start_events()

        def stop() -> None:
            if deliver in self._delivering:
                self._delivering.remove(deliver)
            if not self._delivering and self._events is not None:
                self._events.end()

        return stop

    # --- its own state

    @property
    def any_hung(self) -> bool:
        """Whether a driver call has not come back."""
        return bool(self._lanes.hung())

    def hung(self) -> tuple[str, ...]:
        """UUIDs of GPUs (the PCI address where none is known yet, or "node") whose call has not come back."""
        return tuple(self._named(key) for key in self._lanes.hung())

    def calls(self) -> dict[str, int]:
        """Calls per pynvml function since the process began."""
        return dict(calls.counts)

    def driver_changed(self) -> bool:
        """Whether the driver is another one than this process has loaded: it has to start anew."""
        return self._session.driver_changed()

    @property
    def event_watch_up(self) -> bool:
        """Whether events are being waited for."""
        return self._events is not None and self._events.up

    async def close(self) -> None:
        """Let go of the driver, unless a call to it is out; takes at most a moment."""
        self._released = True
        try:
            async with asyncio.timeout(_CLOSING):
                if not self._lanes.hung():
                    await self._let_go()
        except (TimeoutError, errors.GpunodeError) as cause:
            log.debug("the driver is left to the end of the process", cause=cause)
        self._lanes.close()

    async def _let_go(self) -> None:
        """Stop events, free samples (each GPU's in its lane) and close the session."""
        events, self._events = self._events, None
        if events is not None and not await threads.run(lambda: events.stop(_CLOSING), name="events-stop"):
            raise errors.BlockedError("cannot let go of the driver: the wait for its events has not come back")
        if not self._session.is_open:
            return
        for slot in list(self._slots.values()):
            uuid = slot.uuid
            if slot.card is not None and slot.epoch == self._session.epoch:
                await self._lanes.run(slot.bus, lambda uuid=uuid: self._meter.release(uuid), gpu=uuid)  # type: ignore[misc]
        await self._lanes.run(NODE, self._session.close)

    def _returned(self, key: str) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            slot.epoch = 0  # observed afresh means with a fresh handle
            if slot.uuid:
                self._meter.forget(slot.uuid)
        self.on_returned(self._named(key))

    def _named(self, key: str) -> str:
        slot = self._slots.get(key)
        return slot.uuid or key if slot is not None else key

    # --- which GPUs there are

    async def _look(self) -> None:
        """Bring the slots up to date with bus and driver; opens the session where it is closed."""
        self._refuse_released()
        if NODE in self._lanes.hung():
            raise errors.DriverError("the NVIDIA driver cannot be used: a call to it has not come back")
        try:
            there = await self._lanes.run(NODE, self._there)
        except errors.CallError as cause:
            raise errors.DriverError(f"the NVIDIA driver cannot be used: {cause}") from cause
        for bus in there:
            slot = self._slots.setdefault(bus, _Slot(bus))
            slot.missing = None
        for bus in list(self._slots.keys() - set(there)):
            slot = self._slots[bus]
            if slot.card is None and not slot.uuid:
                del self._slots[bus]
            else:
                slot.missing = "it has left the bus"
        for rank, bus in enumerate(sorted(self._slots)):
            self._slots[bus].index = rank

    def _refuse_released(self) -> None:
        if self._released:
            raise errors.DriverError("the NVIDIA driver is let go of for the moment, as a GPU is being reset")

    def _there(self) -> tuple[str, ...]:
        """Return the addresses of all GPUs. In the node's lane."""
        self._session.open()
        try:
            count = int(calls.call("nvmlDeviceGetCount"))
        except errors.Unready:
            # The driver went away under an open session; try once from the start.
            self._session.close()
            self._session.open()
            count = int(calls.call("nvmlDeviceGetCount"))
        found = set(self._on_bus())
        if count > len(found):
            # A container may not show the bus. Ask the driver then, in this lane for want of another.
            for index in range(count):
                try:
                    found.add(address(reading.pci_address(calls.call("nvmlDeviceGetHandleByIndex", index))))
                except errors.Unready:
                    raise
                except errors.CallError as cause:
                    log.warning("a GPU cannot be reached and its place is not known", number=index, cause=cause)
        return tuple(sorted(found))

    def _on_bus(self) -> list[str]:
        """Addresses of NVIDIA GPUs by sysfs, those bound to another driver left out."""
        found = []
        try:
            devices = sorted(self._machine.path("/sys/bus/pci/devices").iterdir())
        except OSError:
            return []
        for device in devices:
            try:
                vendor = (device / "vendor").read_text().strip()
                kind = (device / "class").read_text().strip()
            except OSError:
                continue
            bound = (device / "driver").resolve().name if (device / "driver").exists() else "nvidia"
            if vendor == "0x10de" and kind[:6] in _DISPLAY and not (device / "physfn").exists() and bound == "nvidia":
                found.append(address(device.name))
        return found

    def _by_uuid(self, uuid: str) -> _Slot | None:
        for slot in self._slots.values():
            if slot.uuid == uuid:
                return slot
        return None

    async def _slot(self, uuid: str) -> _Slot:
        """Return the slot of a GPU; looks for it when it is not known. Raises NotFound."""
        self._refuse_released()
        slot = self._by_uuid(uuid)
        if slot is None:
            await self.observe()
            slot = self._by_uuid(uuid)
        if slot is None:
            raise errors.NotFound(
                f"cannot find GPU {uuid}: there is no such GPU here", call="observe", code=6, gpu=uuid
            )
        return slot

    # --- working on one

    async def _in_lane(self, slot: _Slot, work: Callable[[reading.Card], T]) -> T:
        """Run `work` with the card of a slot in its lane. Raises CallError kinds and DriverError.

        A stale handle is taken anew once, a dead session opened once, unless something was changed.
        """
        self._refuse_released()
        if slot.missing is not None:
            raise errors.Lost(f"cannot reach GPU {slot.uuid}: {slot.missing}", call="handle", code=15, gpu=slot.uuid)
        began = self._session.epoch
        changed = False

        def job() -> T:
            nonlocal changed
            record = calls.attended()
            assert record is not None
            for attempt in range(2):
                try:
                    return work(self._card(slot, record))
                except errors.InvalidArgument:
                    slot.epoch = 0
                    if attempt or record.changed:
                        raise
                finally:
                    changed = record.changed
            raise AssertionError("the loop returns or raises")

        try:
            return await self._lanes.run(slot.bus, job, gpu=slot.uuid or None)
        except errors.Unready:
            if changed:
                raise
        await self._look_again(began)
        return await self._lanes.run(slot.bus, job, gpu=slot.uuid or None)

    async def _look_again(self, epoch: int) -> None:
        """Open a session that has died; others may have done so already."""

        def again() -> None:
            if self._session.epoch == epoch:
                self._session.close()
            self._session.open()

        self._refuse_released()
        await self._lanes.run(NODE, again)

    def _card(self, slot: _Slot, record: Record) -> reading.Card:
        """Return the card of a slot with a living handle. In its lane."""
        card = slot.card
        if card is not None and slot.epoch == self._session.epoch and self._session.is_open:
            return card
        versions = self._session.versions
        epoch = self._session.epoch
        try:
            handle = calls.call("nvmlDeviceGetHandleByPciBusId", slot.bus)
        except (errors.NotFound, errors.InvalidArgument) as cause:
            raise errors.Lost(
                f"cannot reach GPU {slot.uuid or slot.bus}: it is on the bus, and the driver does not show it",
                call=cause.call,
                code=15,
                gpu=slot.uuid or None,
            ) from cause
        fresh = reading.card(handle, versions.driver if versions else "")
        if card is not None and card.uuid == fresh.uuid:
            fresh.mig_uuids.update(card.mig_uuids)
        record.gpu = fresh.uuid
        slot.card, slot.epoch, slot.uuid = fresh, epoch, fresh.uuid
        return fresh

    async def _observe(self, slot: _Slot, denied: list[errors.NoPermission] | None = None) -> nodes.Gpu:
        """Read one GPU; whatever is wrong with it is told in the answer, and a refusal for want of root
        noted in `denied` as well. Raises DriverError only."""
        if slot.missing is not None:
            return self._blank(slot, nodes.GpuState.LOST, slot.missing)
        index = slot.index
        try:
            return await self._in_lane(slot, lambda card: reading.observe(card, index, self._catalog, self._name))
        except errors.NoPermission as cause:
            if denied is not None:
                denied.append(cause)
            return self._blank(slot, nodes.GpuState.ERROR, str(cause))
        except errors.Hung as cause:
            return self._blank(slot, nodes.GpuState.HUNG, str(cause))
        except errors.Lost as cause:
            return self._blank(slot, nodes.GpuState.LOST, str(cause))
        except errors.CallError as cause:
            return self._blank(slot, nodes.GpuState.ERROR, str(cause))

    def _blank(self, slot: _Slot, state: nodes.GpuState, problem: str) -> nodes.Gpu:
        """Return a GPU of which only the identity is known, from what was or the kernel knows."""
        if slot.card is not None:
            return reading.blank(slot.card, slot.index, state, problem)
        self._identify(slot)
        return nodes.Gpu(
            index=slot.index,
            uuid=slot.uuid,
            pci_bus_id=slot.bus,
            name=slot.name,
            model=models.key(slot.pci_device_id, name=slot.name, memory_bytes=0) if slot.pci_device_id else "",
            state=state,
            problem=problem,
            pci_device_id=slot.pci_device_id,
        )

    def _identify(self, slot: _Slot) -> None:
        """Learn of a GPU that the driver library does not show what the kernel shows of it."""
        if slot.uuid:
            return
        try:
            slot.pci_device_id = (
                int(self._machine.path(f"/sys/bus/pci/devices/{slot.bus}/device").read_text(), 16) << 16 | 0x10DE
            )
        except (OSError, ValueError):
            pass
        try:
            text = self._machine.path(f"/proc/driver/nvidia/gpus/{slot.bus}/information").read_text(errors="replace")
        except OSError:
            text = ""
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        slot.name = told.get("Model", "")
        uuid = told.get("GPU UUID", "")
        # The kernel prints question marks while it has not read it.
        slot.uuid = uuid if uuid.startswith("GPU-") and "?" not in uuid else f"unknown-{slot.bus}"

    def _down(self, slot: _Slot | None, uuid: str, problem: str) -> measures.GpuSample:
        card = slot.card if slot is not None else None
        return measures.GpuSample(
            index=slot.index if slot is not None else 0,
            uuid=uuid,
            pci_bus_id=card.pci_bus_id if card else slot.bus if slot is not None else "",
            name=card.name if card else slot.name if slot is not None else "",
            up=False,
            taken=self._clock(),
            minor=card.minor if card else None,
            architecture=card.architecture.lower() or None if card else None,
            problem=problem,
        )

    def _name(self, pid: int) -> str:
        try:
            return self._machine.path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "?"
        except OSError:
            return "?"

    # --- events

    def _start_events(self) -> None:
        if not self._delivering or not self._session.is_open or self._released:
            return
        if self._events is not None and self._events.epoch == self._session.epoch and not self._events.ended:
            return
        hung = self._lanes.hung()
        cards = [
            (slot.card.handle, slot.uuid)
            for slot in self._slots.values()
            if slot.card is not None
            and slot.epoch == self._session.epoch
            and slot.bus not in hung
            and slot.missing is None
        ]
        if cards:
            self._events = watching.Watch(cards, self._deliver, epoch=self._session.epoch)
            self._events.start()

    def _deliver(self, event: measures.Event) -> None:
        if event.kind == "mig-config-change":
            self._meter.forget(event.uuid)
        for deliver in list(self._delivering):
            deliver(event)


def address(bus_id: str) -> str:
    """Return a PCI address in sysfs's form: NVML writes an eight-digit domain and upper case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus_id.lower()
