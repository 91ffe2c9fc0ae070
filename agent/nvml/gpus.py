"""The GPUs of this machine, as reconcile and the sampler are handed them: lanes, session, handles.

Cards are taken anew whenever the session was opened again, and after a stale handle. A GPU whose
lane is hung is told as hung without a call. What was known of a GPU is remembered, so that one that
fell off the bus still has its name and place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agent import errors, log, measures, threads
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import calls, catalog, lanes, measure, perform, session
from agent.nvml import events as watching
from agent.nvml import observe as reading

NODE = "node"
_DISPLAY = ("0x0300", "0x0302")


class Machine(Protocol):
    """The part of the host that is needed here."""

    simulated: str | None

    def path(self, absolute: str) -> Path:
        """Where the host's file lies."""

    def instance_type(self) -> str | None:
        """The EC2 type."""

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        """Reset exactly these."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """All GPUs of one look: cards that answer, in the order of their addresses, and lost ones."""

    cards: tuple[reading.Card, ...]
    lost: tuple[tuple[str, str], ...]
    epoch: int


class NvmlGpus:
    """See the module. `read_deadline` and `change_deadline` bound one NVML call, in seconds."""

    def __init__(
        self,
        opened: session.Session,
        *,
        machine: Machine,
        read_deadline: float = 30.0,
        change_deadline: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = opened
        self._machine = machine
        self._read = read_deadline
        self._change = change_deadline
        self._clock = clock
        self._catalog = catalog.Catalog()
        self._lanes = lanes.Lanes(on_returned=self._returned)
        self._found: _Found | None = None
        self._remembered: dict[str, reading.Card] = {}
        self._last: dict[str, nodes.Gpu] = {}
        self._meter = measure.Meter(self._catalog, clock=clock)
        self._events: watching.Watch | None = None
        self._delivering: list[Callable[[measures.Event], None]] = []
        self._stale = False
        self.on_returned: Callable[[str], None] = lambda _: None

    # --- what is wanted of it by reconcile

    async def observe(self) -> nodes.NodeState:
        """Read all GPUs side by side; see `agent.reconcile.gpus.Gpus`."""
        found = await self._cards()
        gpus = await asyncio.gather(*(self._observe(card, index) for index, card in self._ranked(found)))
        if any(gpu is None for gpu in gpus):
            # A stale handle: take all of them anew, once.
            self._found = None
            found = await self._cards(anew=True)
            gpus = await asyncio.gather(*(self._observe(card, index) for index, card in self._ranked(found)))
        told = [gpu for gpu in gpus if gpu is not None]
        told += [self._lost(index, bus, why) for index, (bus, why) in self._ranked_lost(found)]
        versions = self._session.versions
        for gpu in told:
            old = self._last.get(gpu.uuid)
            if old is not None and [(i.id, i.compute) for i in old.instances] != [(i.id, i.compute) for i in gpu.instances]:
                self._meter.forget(gpu.uuid)
        self._last = {gpu.uuid: gpu for gpu in told}
        return nodes.NodeState(
            gpus=tuple(sorted(told, key=lambda g: g.index)),
            driver_version=versions.driver if versions else "",
            nvml_version=versions.nvml if versions else "",
            cuda_version=versions.cuda if versions else "",
            simulated=self._machine.simulated,
            instance_type=self._machine.instance_type(),
        )

    async def observe_gpu(self, uuid: str) -> nodes.Gpu:
        """Read one GPU afresh."""
        found = await self._cards()
        for _ in range(2):
            for index, card in self._ranked(found):
                if card.uuid == uuid:
                    gpu = await self._observe(card, index)
                    if gpu is not None:
                        self._last[uuid] = gpu
                        return gpu
            found = await self._cards(anew=True)
        raise errors.NotFound(f"cannot find GPU {uuid}: the driver no longer shows it", call="observe", code=6, gpu=uuid)

    async def perform(self, uuid: str, step: plans.Step) -> None:
        """Do one step and verify it."""
        card = await self._card(uuid)
        self._meter.forget(uuid)
        await self._lanes.run(
            uuid, lambda: perform.perform(card, step, self._catalog), deadline=self._change, gpu=uuid
        )

    async def release(self) -> None:
        """Close the session, so that a reset is not refused for our own sake."""
        if self._lanes.hung():
            raise errors.BlockedError("cannot let go of the driver: a call to it has not come back")
        await self._stop_events()
        await self._lanes.run(NODE, self._close, deadline=self._read)

    async def retake(self) -> None:
        """Open the session again; handles are taken when next needed."""
        self._found = None
        await self._lanes.run(NODE, self._session.open, deadline=self._read)
        self._start_events()

    async def reset(self, uuids: Sequence[str]) -> None:
        """Reset exactly these GPUs."""
        buses = [self._remembered[uuid].pci_bus_id for uuid in uuids]
        await threads.run(lambda: self._machine.reset_gpus(buses), name="reset")

    # --- what is wanted of it by the sampler

    def known(self) -> tuple[str, ...]:
        """UUIDs of the GPUs by index, as of the last look."""
        if self._last:
            return tuple(g.uuid for g in sorted(self._last.values(), key=lambda g: g.index))
        found = self._found
        return tuple(card.uuid for card in found.cards) if found else ()

    def versions(self) -> measures.Versions | None:
        """Versions of driver and library; None while there is none."""
        return self._session.versions

    @property
    def initializations(self) -> int:
        """How often the library was initialised."""
        return self._session.initializations

    async def measure(self, uuid: str, *, slow: bool) -> measures.GpuSample:
        """Visit one GPU once."""
        known = self._remembered.get(uuid)
        last = self._last.get(uuid)
        index = last.index if last is not None else 0
        hung = self._lanes.hung_call(uuid)
        if hung is not None:
            return self._down(uuid, index, f"{hung[0]} has not come back for {hung[1]:.0f} s")
        try:
            card = await self._card(uuid)
            return await self._lanes.run(
                uuid, lambda: self._meter.visit(card, index, slow=slow), deadline=self._read, gpu=uuid
            )
        except (errors.InvalidArgument, errors.Unready) as cause:
            self._stale = True
            return self._down(uuid, index, str(cause))
        except errors.GpunodeError as cause:
            log.debug("a GPU was not measured", gpu=uuid, cause=cause, known=known is not None)
            return self._down(uuid, index, str(cause))

    def watch(self, deliver: Callable[[measures.Event], None]) -> Callable[[], None]:
        """Deliver every NVML event (from the events thread); returns a stop function."""
        self._delivering.append(deliver)
        self._start_events()

        def stop() -> None:
            if deliver in self._delivering:
                self._delivering.remove(deliver)

        return stop

    # --- its own state

    @property
    def any_hung(self) -> bool:
        """Whether a driver call has not come back."""
        return bool(self._lanes.hung())

    def hung(self) -> tuple[str, ...]:
        """UUIDs of GPUs (or "node") whose driver call has not come back."""
        return self._lanes.hung()

    def calls(self) -> dict[str, int]:
        """Calls per NVML function since the process began."""
        return dict(calls.counts)

    @property
    def event_watch_up(self) -> bool:
        """Whether events are being waited for."""
        return self._events is not None and self._events.up

    async def close(self) -> None:
        """Let go of the driver, unless a call to it hangs."""
        await self._stop_events()
        if not self._lanes.hung() and self._session.is_open:
            try:
                async with asyncio.timeout(1.0):
                    await self._lanes.run(NODE, self._close, deadline=0.9)
            except (TimeoutError, errors.GpunodeError):
                pass  # the process is ending anyway
        self._lanes.close()

    def _close(self) -> None:
        self._meter.release()
        self._session.close()

    def _returned(self, key: str) -> None:
        self._found = None
        self.on_returned(key)

    # --- cards

    async def _cards(self, *, anew: bool = False) -> _Found:
        if NODE in self._lanes.hung():
            raise errors.DriverError("the NVIDIA driver cannot be used: a call to it has not come back")
        if anew or self._stale:
            self._found = None
            self._stale = False
        if self._found is not None and self._found.epoch == self._session.epoch and self._session.is_open:
            return self._found
        hung = set(self._lanes.hung())
        try:
            found = await self._lanes.run(NODE, lambda: self._take(hung), deadline=self._read)
        except errors.Hung as cause:
            raise errors.DriverError(f"the NVIDIA driver cannot be used: {cause}") from cause
        self._found = found
        for card in found.cards:
            old = self._remembered.get(card.uuid)
            if old is not None:
                card.mig_uuids.update(old.mig_uuids)
            self._remembered[card.uuid] = card
        self._start_events()
        return found

    def _take(self, hung: set[str]) -> _Found:
        """Open the session if need be and take every handle. In the node's lane.

        A GPU with a hung call is not touched: what was known of it is used.
        """
        self._session.open()
        versions = self._session.versions
        driver = versions.driver if versions else ""
        try:
            count = int(calls.call("nvmlDeviceGetCount"))
        except errors.Unready:
            # The driver went away under an open session; try once from the start.
            self._session.close()
            self._session.open()
            count = int(calls.call("nvmlDeviceGetCount"))
        cards = [card for uuid, card in self._remembered.items() if uuid in hung]
        kept = {address(card.pci_bus_id) for card in cards}
        problems: list[str] = []
        for index in range(count):
            try:
                handle = calls.call("nvmlDeviceGetHandleByIndex", index)
                if kept and address(reading.bus_id(handle)) in kept:
                    continue
                cards.append(reading.card(handle, driver))
            except errors.CallError as cause:
                problems.append(str(cause))
        there = {address(card.pci_bus_id) for card in cards}
        lost = [
            (bus, problems.pop(0) if problems else "it is on the bus, and the driver does not show it")
            for bus in self._on_bus()
            if bus not in there
        ]
        told = {bus for bus, _ in lost}
        for card in self._remembered.values():
            bus = address(card.pci_bus_id)
            if bus not in there and bus not in told:
                lost.append((bus, "it has left the bus"))
        lost += [(f"unknown-{number}", problem) for number, problem in enumerate(problems)]
        return _Found(tuple(sorted(cards, key=lambda c: address(c.pci_bus_id))), tuple(lost), self._session.epoch)

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

    def _ranks(self, found: _Found) -> dict[str, int]:
        buses = sorted({address(c.pci_bus_id) for c in found.cards} | {bus for bus, _ in found.lost})
        return {bus: rank for rank, bus in enumerate(buses)}

    def _ranked(self, found: _Found) -> list[tuple[int, reading.Card]]:
        ranks = self._ranks(found)
        return [(ranks[address(card.pci_bus_id)], card) for card in found.cards]

    def _ranked_lost(self, found: _Found) -> list[tuple[int, tuple[str, str]]]:
        ranks = self._ranks(found)
        return [(ranks[bus], (bus, why)) for bus, why in found.lost]

    async def _card(self, uuid: str) -> reading.Card:
        found = await self._cards()
        for card in found.cards:
            if card.uuid == uuid:
                return card
        raise errors.Lost(f"cannot reach GPU {uuid}: the driver no longer shows it", call="handle", code=15, gpu=uuid)

    async def _observe(self, card: reading.Card, index: int) -> nodes.Gpu | None:
        """Read one GPU; None says that its handle is dead."""
        try:
            return await self._lanes.run(
                card.uuid,
                lambda: reading.observe(card, index, self._catalog, self._name),
                deadline=self._read,
                gpu=card.uuid,
            )
        except errors.Hung as cause:
            return reading.blank(card, index, nodes.GpuState.HUNG, str(cause))
        except (errors.InvalidArgument, errors.Unready) as cause:
            if self._stale:
                return reading.blank(card, index, nodes.GpuState.ERROR, str(cause))
            return None

    def _lost(self, index: int, bus: str, why: str) -> nodes.Gpu:
        for card in self._remembered.values():
            if address(card.pci_bus_id) == bus:
                return reading.blank(card, index, nodes.GpuState.LOST, why)
        return nodes.Gpu(
            index=index, uuid=f"unknown-{bus}", pci_bus_id=bus, name="", model="", state=nodes.GpuState.LOST, problem=why
        )

    def _name(self, pid: int) -> str:
        try:
            return self._machine.path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "?"
        except OSError:
            return "?"

    def _down(self, uuid: str, index: int, problem: str) -> measures.GpuSample:
        card = self._remembered.get(uuid)
        return measures.GpuSample(
            index=index,
            uuid=uuid,
            pci_bus_id=card.pci_bus_id if card else "",
            name=card.name if card else "",
            up=False,
            taken=self._clock(),
            minor=card.minor if card else None,
            architecture=card.architecture or None if card else None,
            problem=problem,
        )

    # --- events

    def _start_events(self) -> None:
        if not self._delivering or not self._session.is_open or self._found is None:
            return
        if self._events is not None and self._events.epoch == self._session.epoch:
            return
        cards = [(card.handle, card.uuid) for card in self._found.cards if card.uuid not in self._lanes.hung()]
        self._events = watching.Watch(cards, self._deliver, epoch=self._session.epoch)
        self._events.start()

    def _deliver(self, event: measures.Event) -> None:
        if event.kind == "mig-config-change":
            self._meter.forget(event.uuid)
        for deliver in list(self._delivering):
            deliver(event)

    async def _stop_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            await threads.run(lambda: events.stop(1.0), name="events-stop")


def address(bus_id: str) -> str:
    """Return a PCI address in sysfs's form: NVML writes an eight-digit domain and upper case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus_id.lower()

