"""The daemon: order of start and stop, signals, and how it ends when a driver call hangs.

Start: serve first (health answers while the driver is awaited), then one enforcement cycle, then
sampling, then READY. Stop: nothing new, the step at hand ends, at most 3 s, and `os._exit` when a
thread is still inside the driver, because such a thread would keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from agent import app, errors, log, measures, memory, threads
from agent.host import holders, journal, notify
from agent.host import listen as inherited
from agent.mig import plan as plans
from agent.reconcile import loop, snapshot
from agent.sample import kernel
from agent.sample import loop as sampling
from agent.serve import board as boards
from agent.serve import server
from agent.settings import source, watch

DEFAULT_LISTEN = ("127.0.0.1:19400",)
STOP_WITHIN = 1.8
"""Seconds until the process ends whatever hangs; the promise is 3."""
DRIVER_WAIT = 180.0
"""Seconds READY is held back for a driver that is not there yet."""
REBOOT_WAIT = 300.0
"""Seconds READY is held back for a reboot that was requested."""
SETTLE_BY = 30.0
"""Seconds after which memory is collected as usual though the first cycle has not ended."""
GIVE_UP = 600.0
"""Seconds after which READY is said though the first cycle has not ended: nothing holds the kubelet for ever."""
AT_START = ("listen", "web_config_file", "dcgm_metrics")
"""Settings of the sockets, which are opened once; all others are in force from the next cycle on."""
DRIVER_CHANGED = "GPUNODE_DRIVER_CHANGED"
"""Set in the environment of a daemon that started itself anew on another driver: it observes only."""


class Daemon:
    """One run of the daemon on one node. When it has ended, `again` tells whether the driver has become
    another one: this process cannot take another library, and has to start itself anew."""

    def __init__(self, node: app.Node) -> None:
        self._node = node
        self._board = boards.Board()
        self._notify = notify.from_environment(node.options.environ)
        self._first = asyncio.Event()
        self._ready_by = time.monotonic() + (0.0 if node.simulated else DRIVER_WAIT)
        self._reboot_by: float | None = None
        self._give_up = time.monotonic() + GIVE_UP
        self._phase = snapshot.Phase.STARTING
        self._ready = False
        self._doors: tuple[object, ...] | None = None
        self.again = False
        self.handed: tuple[int, ...] = ()
        self._sampler = sampling.Sampler(
            node.gpus,
            clock=node.options.clock,
            interval=node.settings.sample_interval if node.settings else 5.0,
            publish=self._board.publish_sample,
            initializations=lambda: node.gpus.initializations,
            events_up=lambda: node.gpus.event_watch_up,
            kernel_log=kernel.KernelLog(node.machine, clock=node.options.clock),
        )
        self._around = dataclasses.replace(
            node.around,
            pause=self._sampler.pause,
            resume=self._resume,
            progress=lambda what: log.info("working", what=what),
            announce=self._announce,
            keep_history=True,
            settle=watch.STILL,
            hindrance=self._hindrance,
        )
        self.loop = loop.Loop(
            self._around,
            on_cycle=self._on_cycle,
            fingerprint=lambda: source.fingerprint(node.request),
            jitter=random.random,
        )

    def _hindrance(self) -> tuple[str, str] | None:
        """What forbids every change now. The lock is asked for again each time: its holder may have ended."""
        if self._node.options.environ.get(DRIVER_CHANGED):
            words = "the driver has changed under the running daemon, which observes only until it is started again"
            return ("driver-changed", words)
        try:
            app.take_lock(self._node)
        except errors.GpunodeError as cause:
            return ("lock", str(cause))
        return self._node.around.hindrance()

    async def _resume(self) -> None:
        await self._sampler.resume()

    def _announce(self, state: snapshot.Snapshot) -> None:
        self._sampler.changing()
        self._board.publish_snapshot(state)
        self._notify.status(f"applying: {state.plan.steps} steps")

    async def _on_cycle(self, result: snapshot.Snapshot) -> None:
        self._board.publish_snapshot(result)
        for uuid, steps in result.outcome.done if result.outcome else ():
            for step in steps:
                if isinstance(step, plans.CreateGpuInstance | plans.DestroyGpuInstance):
                    self._sampler.remade(uuid, step.placement.start, result.started)
        self._sampler.topology_changed(result.generation)
        self._take_up()
        log.info(
            "cycle",
            phase=result.phase.value,
            trigger=result.trigger,
            seconds=f"{result.duration:.3f}",
            steps=sum(len(steps) for _, steps in result.outcome.done) if result.outcome else 0,
        )
        for reason in result.reasons:
            log.warning("not as wanted", code=reason.code, reason=reason.message, gpu=reason.gpu)
        self._notify.status(_sentence(result))
        self._phase = result.phase
        self._first.set()
        self._settle_ready()

    def _take_up(self) -> None:
        """Take up what of the settings in force concerns the daemon itself; say what waits for a start."""
        settings = self._around.memory.settings
        if settings is None:
            return
        self._sampler.every(settings.sample_interval)
        doors = tuple(getattr(settings, key) for key in AT_START)
        if self._doors is not None and doors != self._doors:
            changed = [key.replace("_", "-") for key, a, b in zip(AT_START, self._doors, doors, strict=True) if a != b]
            log.warning("changed settings that take effect at the next start of gpunode", keys=", ".join(changed))
        self._doors = doors

    def _settle_ready(self) -> None:
        """Say READY once, unless it is still worth waiting for the driver or for a reboot."""
        now = time.monotonic()
        if self._phase is snapshot.Phase.REBOOT_PENDING and self._reboot_by is None:
            self._reboot_by = now + REBOOT_WAIT
        if self._ready or (not self._first.is_set() and now < self._give_up):
            return
        if self._phase is snapshot.Phase.WAITING and now < self._ready_by:
            return
        if self._phase is snapshot.Phase.REBOOT_PENDING and self._reboot_by is not None and now < self._reboot_by:
            return
        self._ready = True
        self._notify.ready()
        log.info("started", phase=self._phase.value)  # what systemd calls ready, well or not: the phase says which

    def _on_event(self, event: measures.Event) -> None:
        if event.kind == "mig-config-change":
            self.loop.wake("mig-config-change")
        elif event.kind == "xid":
            self.loop.wake("xid")

    async def _heartbeat(self, serving: server.Server) -> None:
        """Note that the event loop turns, and tell systemd. Its first turn after the start puts the memory in order."""
        settled, settle_by = False, time.monotonic() + SETTLE_BY
        while True:
            if not settled and (self._first.is_set() or time.monotonic() > settle_by):
                await serving.prepare()  # so that what it loads is set apart as well
                memory.settle()
                settled = True
            self._board.loop_turned = self._node.options.clock()
            self._notify.watchdog()
            if not self._ready:
                self._notify.extend_timeout(30)
            self._settle_ready()
            if self._node.gpus.driver_changed():
                log.warning("the driver is another one now; starting anew, to observe only")
                self.again = True
                return
            await asyncio.sleep(1.0)

    async def _identify(self) -> None:
        """Find out which instance this is, beside everything else; look again once that is known."""
        if await app.identify(self._node):
            log.info("this instance is known now", type=self._node.instance.known.instance_type)
            self.loop.wake("identity")

    async def _sample(self) -> None:
        await self._first.wait()
        await self._sampler.run()

    async def _ask_schedulers(self) -> None:
        """Learn on the sampler's clock which pods or tasks have which device."""
        await self._first.wait()
        while True:
            seen = None if self._board.snapshot is None else self._board.snapshot.node
            if seen is None or seen.serving is None:
                self._board.publish_given(None)
            else:
                machine = self._node.machine
                given = await threads.run(functools.partial(holders.given, seen, machine), name="allocations")
                self._board.publish_given(given)
            await asyncio.sleep(self._sampler.interval)

    async def run(self) -> int:
        """Serve, enforce and measure until a signal; return the exit code."""
        node = self._node
        events = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def stop(name: str) -> None:
            if stopped.is_set():
                return
            log.info("stopping", signal=name)
            self._notify.stopping()
            self.loop.stop()
            stopped.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            events.add_signal_handler(number, stop, number.name)
        events.add_signal_handler(signal.SIGHUP, self.loop.wake, "reload")
        self._board.loop_turned = node.options.clock()
        self._board.publish_snapshot(
            snapshot.Snapshot(phase=snapshot.Phase.STARTING, simulated=node.simulated, started=node.options.clock())
        )
        try:
            app.take_lock(node)
        except errors.GpunodeError as cause:
            log.error("this gpunode only observes for now", cause=cause)
        else:
            await app.start_left_units(node)
        settings = node.settings
        addresses = node.options.listen or (settings.listen if settings and settings.listen else DEFAULT_LISTEN)
        sockets = inherited.sockets(dict(node.options.environ), pid=os.getpid())
        # The server closes what it was given; these are kept for a start anew.
        self.handed = tuple(os.dup(handed.fileno()) for handed in sockets)
        serving = await server.start(
            self._board,
            listen=addresses,
            sockets=sockets,
            web_config=settings.web_config_file if settings else None,
            clock=node.options.clock,
            dcgm=settings.dcgm_metrics if settings else False,
        )
        for address in serving.addresses:
            log.info("serving", address=address, simulated=node.simulated)
        tasks = [
            asyncio.create_task(self._heartbeat(serving), name="heartbeat"),
            asyncio.create_task(self.loop.run(), name="reconcile"),
            asyncio.create_task(self._sample(), name="sample"),
            asyncio.create_task(self._ask_schedulers(), name="allocations"),
        ]
        identifying = asyncio.create_task(self._identify(), name="identify")
        ended = asyncio.create_task(stopped.wait(), name="stop")
        node.gpus.on_returned = lambda _: self.loop.wake("call-returned")
        unwatch = node.gpus.watch(self._on_event)
        try:
            done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            unwatch()
        code = errors.EXIT_OK
        for task in done:
            if task is not ended and not task.cancelled() and task.exception() is not None:
                log.error("a part of the daemon failed", part=task.get_name(), cause=repr(task.exception()))
                code = errors.EXIT_FAILED
        self.loop.stop()
        await self._wind_down(tasks, serving)
        ended.cancel()
        identifying.cancel()
        return code

    async def _wind_down(self, tasks: list[asyncio.Task[None]], serving: server.Server) -> None:
        """End all parts, within the promised time; the step at hand may end first."""
        reconcile = tasks[1]
        await asyncio.wait([reconcile], timeout=STOP_WITHIN * 0.6)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WITHIN * 0.2):
                await serving.close()
        await asyncio.wait(tasks, timeout=STOP_WITHIN * 0.2)


def _sentence(result: snapshot.Snapshot) -> str:
    words = result.phase.value
    if result.simulated:
        words += f" (simulated {result.simulated})"
    if result.reasons:
        words += f": {result.reasons[0].message}"
    return words


async def _main(options: app.Options) -> int:
    async with app.open(options) as node:
        if node.simulated:
            log.info("this node is simulated", node=node.simulated)
        running = Daemon(node)
        code = await running.run()
        if running.again:
            start_anew(options.environ, running.handed)
        if node.gpus.any_hung:
            log.warning("ending although a driver call has not come back", gpus=" ".join(node.gpus.hung()))
            end(code)
        return code


def start_anew(
    environ: Mapping[str, str],
    handed: Sequence[int] = (),
    *,
    become: Callable[[str, list[str], dict[str, str]], object] = os.execve,
) -> None:
    """Become a fresh daemon of the same command line that only observes. `handed` are copies of the
    sockets that systemd gave us; they are put where the next one looks for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, descriptor in enumerate(handed, inherited.FIRST):
        os.dup2(descriptor, number, inheritable=True)
    become(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, DRIVER_CHANGED: "1"})


def end(code: int) -> None:
    """End the process now, without waiting for threads that are inside the driver."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(options: app.Options) -> int:
    """Run the daemon until a signal. Returns the exit code; raises GpunodeError when it cannot start."""
    log.setup(verbose=options.verbose)
    journal.install(options.environ)
    return asyncio.run(_main(options))
