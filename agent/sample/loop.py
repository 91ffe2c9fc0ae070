"""The sampler: visits every GPU on its own clock and publishes what they said.

GPUs are visited one after another, because eight lanes of Python at once cost three times the CPU
in fights for the interpreter; a GPU that takes longer than a moment does not hold up the next. A
scrape never gets here: it reads what was published.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from agent import errors, log, measures, threads
from agent.sample import counters, kernel, source, xid

HEAD_START = 0.05
"""Seconds a GPU's visit may take before the next GPU is visited beside it."""
SLOW_EVERY = 60.0
"""Seconds between two visits of a GPU that bring the slow groups too."""
PATIENCE = 60.0
"""Seconds after which a visit that has not ended makes its GPU one that does not answer. The lanes
judge single calls much earlier; this is for a visit of many calls each slow but not overdue."""
UNPLACED = 100
"""Lines of the kernel log that are kept for cards that have not told their address yet."""
PAUSE_LIMIT = 30.0
"""Seconds `pause` waits for visits under way: as long as a read may take before it counts as hung."""


@dataclasses.dataclass(slots=True)
class _Card:
    """What the sampler knows of one GPU between visits."""

    uuid: str
    slow_due: float
    slow_step: float
    visit: asyncio.Task[None] | None = None
    started: float = 0.0
    last: measures.GpuSample | None = None

    @property
    def out(self) -> bool:
        return self.visit is not None and not self.visit.done()


@dataclasses.dataclass(slots=True)
class _Round:
    """What the visits since the last sample add up to, for one collector."""

    success: bool = True
    duration: float = 0.0
    visits: int = 0


class Sampler:
    """Measures the GPUs of `source` each `interval` seconds and hands samples to `publish`.

    `clock` gives Unix seconds, `monotonic` seconds for durations. `initializations()` is how often
    the driver's session was opened; `events_up()` whether the watch that was begun still waits.
    `kernel_log` tells XIDs that the driver does not. Use from the event loop's thread; `publish` is
    called there.
    """

    def __init__(
        self,
        source: source.Source,
        *,
        clock: Callable[[], float],
        interval: float,
        publish: Callable[[measures.Sample], None],
        monotonic: Callable[[], float] = time.monotonic,
        initializations: Callable[[], int] = lambda: 0,
        events_up: Callable[[], bool] = lambda: True,
        kernel_log: kernel.KernelLog | None = None,
        head_start: float = HEAD_START,
        patience: float = PATIENCE,
    ) -> None:
        self._source = source
        self._clock = clock
        self._interval = interval
        self._publish = publish
        self._monotonic = monotonic
        self._initializations = initializations
        self._events_up = events_up
        self._kernel_log = kernel_log
        self._unplaced: list[kernel.Line] = []
        self._head_start = head_start
        self._patience = patience
        self._cards: dict[str, _Card] = {}
        self._generation = 0
        self._paused = 0
        self._changing = False
        self._stirred = False
        self._wake = asyncio.Event()
        self._unwatch: Callable[[], None] | None = None
        self._collectors: dict[str, measures.Collector] = {}
        self._rounds: dict[str, _Round] = {}
        self._folded = counters.Folded()
        self.xids = xid.Ledger()
        self._first_seen = counters.FirstSeen(clock, self.xids.forget)

    @property
    def interval(self) -> float:
        """Seconds between samples."""
        return self._interval

    def every(self, interval: float) -> None:
        """Sample each `interval` seconds from now on."""
        if interval != self._interval:
            self._interval = interval
            self._wake.set()

    async def run(self) -> None:
        """Sample until cancelled."""
        try:
            while True:
                started = self._monotonic()
                if not self._paused:
                    await self.cycle()
                await self._sleep(started)
        finally:
            self._stop_watching()
            for card in self._cards.values():
                if card.visit is not None:
                    card.visit.cancel()

    async def cycle(self) -> measures.Sample:
        """Visit every GPU once, publish the sample and return it. Raises nothing that a GPU causes."""
        versions = self._source.versions()
        self._watch(versions)
        if versions is not None:
            await self._round()
        await self._read_kernel_log()
        sample = self._sample(versions)
        self._publish(sample)
        return sample

    async def pause(self) -> None:
        """Visit no GPU until `resume`; returns when no visit is under way, except one that hangs."""
        self._paused += 1
        self._stop_watching()
        visits = [card.visit for card in self._cards.values() if card.visit is not None and card.out]
        if visits:
            _, late = await asyncio.wait(visits, timeout=PAUSE_LIMIT)
            if late:
                names = " ".join(card.uuid for card in self._cards.values() if card.visit in late)
                log.warning("a visit has not ended although sampling pauses", gpus=names)

    async def resume(self) -> None:
        """Go on sampling, at once."""
        self._paused = max(0, self._paused - 1)
        if not self._paused:
            self._look_anew()

    def changing(self) -> None:
        """Note that gpunode itself changes instances until `topology_changed`: what events tell of that does
        not wake the sampler meanwhile, as each visit would keep a GPU's next step waiting."""
        self._changing = True

    def topology_changed(self, generation: int) -> None:
        """Note the generation that figures belong to from now on; sample at once when it is a new one, or
        when events told of changes since `changing`."""
        stirred, self._changing, self._stirred = self._stirred, False, False
        if generation != self._generation or stirred:
            self._generation = generation
            self._look_anew()

    def remade(self, uuid: str, start: int, since: float) -> None:
        """Note that an instance was made or removed at a place of a GPU, at `since` (Unix seconds) or later.
        Events tell of that too, but not while sampling is paused."""
        self._first_seen.renew(uuid, start, since)

    def record(self, name: str, collector: measures.Collector) -> None:
        """Show how a collector that is not the sampler's own went (pods, the kernel's log)."""
        self._collectors[name] = collector

    def _look_anew(self) -> None:
        for card in self._cards.values():
            card.slow_due = self._monotonic()
        self._wake.set()

    async def _sleep(self, started: float) -> None:
        """Wait until the next round is due, or somebody wants one sooner."""
        left = started + self._interval - self._monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _round(self) -> None:
        """Visit the GPUs in turn; give those that take longer a little time at the end."""
        late: list[asyncio.Task[None]] = []
        uuids = self._source.known()
        for gone in self._cards.keys() - set(uuids):
            if not self._cards[gone].out:
                del self._cards[gone]
        for rank, uuid in enumerate(uuids):
            if self._paused:
                return
            card = self._cards.get(uuid)
            if card is None:
                # The first visit brings everything; after that the slow ones are spread over the minute.
                step = SLOW_EVERY * (rank + 1) / len(uuids)
                card = self._cards[uuid] = _Card(uuid=uuid, slow_due=self._monotonic(), slow_step=step)
            if card.out:
                continue
            card.started = self._monotonic()
            card.visit = asyncio.create_task(self._visit(card), name=f"visit-{uuid}")
            await asyncio.wait({card.visit}, timeout=self._head_start)
            if card.out:
                late.append(card.visit)
        if late:
            await asyncio.wait(late, timeout=min(1.0, self._interval / 4))

    async def _visit(self, card: _Card) -> None:
        """Visit one GPU and keep what it said."""
        generation = self._generation
        slow = card.started >= card.slow_due
        try:
            seen = await self._source.measure(card.uuid, slow=slow)
        except errors.GpunodeError as cause:
            seen = self._silent(card, str(cause))
        except Exception as cause:  # noqa: BLE001  # one GPU's surprise must not end the measuring of all
            seen = self._silent(card, f"cannot measure GPU {card.uuid}: {cause!r}")
        if seen.problem is not None and (card.last is None or card.last.problem != seen.problem):
            log.warning("a GPU is not measured", gpu=card.uuid, problem=seen.problem)
        took = self._monotonic() - card.started
        self._note("gpu", success=seen.up, duration=took)
        if slow:
            self._note("gpu-slow", success=seen.up, duration=took)
            if seen.up and generation == self._generation:
                card.slow_due = card.started + card.slow_step
                card.slow_step = SLOW_EVERY
        card.last = self._first_seen.date(self._folded.pcie(seen))

    def _silent(self, card: _Card, problem: str) -> measures.GpuSample:
        """Return the sample of a GPU that said nothing: identity as far as known, and why."""
        last = card.last
        rank = list(self._cards).index(card.uuid)
        return measures.GpuSample(
            index=rank if last is None else last.index,
            uuid=card.uuid,
            pci_bus_id="" if last is None else last.pci_bus_id,
            name="" if last is None else last.name,
            up=False,
            taken=self._clock(),
            minor=None if last is None else last.minor,
            architecture=None if last is None else last.architecture,
            vbios_version=None if last is None else last.vbios_version,
            problem=problem,
        )

    def _note(self, name: str, *, success: bool, duration: float) -> None:
        entry = self._rounds.setdefault(name, _Round())
        entry.visits += 1
        entry.success = entry.success and success
        entry.duration += duration

    def _sample(self, versions: measures.Versions | None) -> measures.Sample:
        now = self._clock()
        gpus = []
        for card in self._cards.values():
            waited = self._monotonic() - card.started
            if card.out and waited > self._patience:
                gpus.append(self._silent(card, f"its visit has not ended after {waited:.0f} s"))
                self._note("gpu", success=False, duration=0.0)
            elif card.last is not None:
                gpus.append(card.last)
        for name, entry in self._rounds.items():
            before = self._collectors.get(name)
            last = now if entry.success else None if before is None else before.last_success
            self._collectors[name] = measures.Collector(entry.success, entry.duration, last)
        self._rounds.clear()
        self.xids.settle(now)
        if versions is None:
            gpus = []
        return measures.Sample(
            taken=now,
            generation=self._generation,
            nvml_up=versions is not None,
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
            driver_version=None if versions is None else versions.driver,
            nvml_version=None if versions is None else versions.nvml,
            cuda_version=None if versions is None else versions.cuda,
            nvml_initializations=self._initializations(),
            collectors=dict(self._collectors),
            event_watch_up=None if versions is None else self._unwatch is not None and self._events_up(),
            xid_errors=self.xids.errors(
                (card.uuid for card in self._cards.values()),
                ((gpu.uuid, i.id, c.id) for gpu in gpus for i in gpu.instances for c in i.compute),
            ),
            xid_last=self.xids.last(),
        )

    def _watch(self, versions: measures.Versions | None) -> None:
        """Wait for events while there is a driver; a driver that refuses is asked again next time."""
        if versions is None:
            self._stop_watching()
            return
        if self._unwatch is not None:
            return
        loop = asyncio.get_running_loop()

        def deliver(event: measures.Event) -> None:
            try:
                loop.call_soon_threadsafe(self._heard, event)
            except RuntimeError:
                pass  # the event loop has ended; nobody counts any more

        try:
            self._unwatch = self._source.watch(deliver)
        except errors.GpunodeError as cause:
            log.debug("GPU events cannot be watched", cause=cause)

    async def _read_kernel_log(self) -> None:
        """Note XIDs that the kernel logged about GPUs that are known here."""
        started = self._monotonic()
        addresses = {
            _address(card.last.pci_bus_id): card.uuid
            for card in self._cards.values()
            if card.last is not None and card.last.pci_bus_id
        }
        if self._kernel_log is None or not addresses:
            return
        before = self._collectors.get("kernel-log")
        last = None if before is None else before.last_success
        try:
            lines = await threads.run(self._kernel_log.read, name="kernel-log")
        except (OSError, errors.GpunodeError) as cause:
            log.warning("cannot read the kernel log", cause=cause)
            self._collectors["kernel-log"] = measures.Collector(False, self._monotonic() - started, last)
            return
        if lines is None:
            log.info("there is no kernel log to read here; XIDs come from the driver alone")
            self._kernel_log = None
            return
        waiting, self._unplaced = self._unplaced, []
        for line in (*waiting, *lines):
            uuid = addresses.get(line.address)
            if uuid is None and len(addresses) < len(self._cards):
                # A card that has not answered yet may be the one, and that it does not may be why.
                self._unplaced = [*self._unplaced, line][-UNPLACED:]
                continue
            if uuid is None:
                log.warning("XID of a GPU that is not known", address=line.address, xid=line.xid)
                continue
            if line.known:
                self.xids.known(
                    uuid,
                    line.xid,
                    when=line.when,
                    gpu_instance_id=line.gpu_instance_id,
                    compute_instance_id=line.compute_instance_id,
                )
                continue
            self.xids.kernel(
                uuid,
                line.xid,
                when=line.when,
                gpu_instance_id=line.gpu_instance_id,
                compute_instance_id=line.compute_instance_id,
                heard=self._clock(),
                doubt=line.doubt,
            )
        self._collectors["kernel-log"] = measures.Collector(True, self._monotonic() - started, self._clock())

    def _stop_watching(self) -> None:
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def _heard(self, event: measures.Event) -> None:
        if event.kind == "xid" and event.xid is not None:
            self.xids.event(
                event.uuid,
                event.xid,
                when=self._clock(),
                gpu_instance_id=event.gpu_instance_id,
                compute_instance_id=event.compute_instance_id,
            )
            log.warning("XID", gpu=event.uuid, xid=event.xid, gpu_instance=event.gpu_instance_id)
        elif event.kind == "mig-config-change":
            if event.gpu_instance_id is not None and event.compute_instance_id is None:
                self._first_seen.forget(event.uuid, event.gpu_instance_id)
            if self._changing:
                self._stirred = True
            else:
                self._look_anew()


def _address(bus_id: str) -> str:
    """Return a PCI address as the kernel writes it; NVML has an eight-digit domain and capitals."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
