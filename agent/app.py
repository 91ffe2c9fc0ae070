"""The wiring that every verb and the daemon share: which GPUs, which machine, which settings.

`async with app.open(options) as node:` gives real GPUs on this host, or a simulated node that
stands below pynvml; everything behind it is the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from agent import errors, log, measures, records, threads
from agent.host import ec2, files, holders, hooks, identity, kill, owner, pci, real
from agent.host import facts as hosts
from agent.host import machine as machines
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import gpus as nvml_gpus
from agent.nvml import session as sessions
from agent.reconcile import cycle, snapshot
from agent.settings import model, source, watch

RESET_AGAIN = 1.0
"""Seconds before a GPU reset that somebody was in the way of is tried again."""
FRESH = 1.0
"""Seconds for which a look at the node is as good as a new one."""
NO_DRIVER_HINT = (
    "run it with --simulate p4d.24xlarge to try gpunode on a node that is not there (`gpunode simulate` lists them)"
)


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked, whatever the verb."""

    settings: tuple[Path, ...] = ()
    mig_config: str | None = None
    simulate: str | None = None
    sim_state: Path | None = None
    sim_host: str = "private"
    output: str = "table"
    verbose: bool = False
    yes: bool = False
    force: bool = False
    listen: tuple[str, ...] = ()
    wait: float | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    stdout: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    stderr: TextIO = dataclasses.field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.time


@records.dataclass(frozen=True, slots=True)
class Planned:
    """What would be done: the node as it is, the layout wanted, and the plan between them."""

    state: nodes.NodeState
    layout: layouts.Layout
    plan: plans.Plan
    problems: tuple[errors.Problem, ...]
    ownership: cycle.Ownership


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """The node a verb works on. `settings` is None exactly when `settings_error` is set."""

    options: Options
    machine: machines.Machine
    gpus: nvml_gpus.NvmlGpus
    request: source.Request
    settings: model.Settings | None
    settings_error: errors.SettingsError | None
    around: cycle.Surroundings
    instance: Instance
    simulated: str | None = None
    simulation: object | None = None
    lock: files.Lock | None = None
    seen: tuple[float, cycle.Look] | None = None

    def require_settings(self) -> model.Settings:
        """Return the settings, or raise what is wrong with them."""
        if self.settings is None:
            assert self.settings_error is not None
            raise self.settings_error
        return self.settings


@dataclasses.dataclass(slots=True)
class Instance:
    """What is known of the EC2 instance. It only grows: `identify` may fill in what files did not tell."""

    machine: machines.Machine
    at_boot: int
    """GPUs on the bus at the start: a card that falls off it later must not lower what is expected."""
    known: identity.Identity

    def expected(self) -> int | None:
        """Return how many GPUs there should be: the larger of the bus at the start and the type's."""
        kind = ec2.instance_type(self.known.instance_type)
        return max(self.at_boot, 0 if kind is None or kind.gpus is None else kind.gpus) or None


class _HostAroundSimulation(real.RealMachine):
    """This host, with simulated GPUs in it: units and reboot are real, a GPU reset is the simulator's."""

    def __init__(self, simulated: machines.Machine, root: Path) -> None:
        super().__init__(root)
        self.simulated = simulated.simulated
        self._simulated_machine = simulated

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        self._simulated_machine.reset_gpus(pci_bus_ids)


@contextlib.asynccontextmanager
async def open(options: Options) -> AsyncIterator[Node]:  # noqa: A001  # reads as app.open, like a file
    """Open the node that the options name: this host, or a simulated one. Touches no GPU yet.

    Raises UsageError-like errors for a simulated node that does not exist. Settings errors are kept
    in the result, as `status` and `run` go on without good settings.
    """
    machine: machines.Machine
    library: object | None = None
    simulation = None
    if options.simulate is not None:
        from agent.sim import node as simulated_nodes  # the simulator is loaded only when asked for

        simulation = simulated_nodes.open_node(options.simulate, state=options.sim_state)
        library = simulation.library
        machine = simulation.machine
        if options.sim_host == "real":
            machine = _HostAroundSimulation(simulation.machine, real.host_root(options.environ))
    else:
        machine = real.RealMachine(real.host_root(options.environ))
    session = sessions.Session(library, root=machine.root)
    gpus = nvml_gpus.NvmlGpus(session, machine=machine)
    request = source.Request(
        root=real.settings_root(machine),
        files=options.settings,
        mig_config=options.mig_config,
        environ=options.environ,
        flags={"listen": options.listen} if options.listen else {},
    )
    load = watch.Keeper(lambda: source.load(request))
    settings: model.Settings | None = None
    settings_error: errors.SettingsError | None = None
    try:
        settings = load()
    except errors.SettingsError as cause:
        settings_error = cause
    instance = Instance(machine, len(pci.gpus(machine)), identity.from_files(machine))
    node = Node(
        options=options,
        machine=machine,
        gpus=gpus,
        request=request,
        settings=settings,
        settings_error=settings_error,
        around=_surroundings(options, machine, gpus, load, instance),
        instance=instance,
        simulated=machine.simulated,
        simulation=simulation,
    )
    try:
        yield node
    finally:
        if node.lock is not None:
            node.lock.release()
        await gpus.close()
        if simulation is not None:
            simulation.close()


def _surroundings(
    options: Options,
    machine: machines.Machine,
    gpus: nvml_gpus.NvmlGpus,
    load: watch.Keeper,
    instance: Instance,
) -> cycle.Surroundings:
    """Hand everything a cycle works with to it."""

    async def with_holders(node: nodes.NodeState) -> nodes.NodeState:
        if node.instance_type is None:
            node = dataclasses.replace(node, instance_type=instance.known.instance_type)
        return await threads.run(lambda: holders.merge(node, machine, own_pid=os.getpid()), name="holders")

    return cycle.Surroundings(
        gpus=gpus,
        machine=machine,
        load=load,
        clock=options.clock,
        holders=with_holders,
        ownership=lambda settings, node, layout: _ownership(machine, settings, node, layout),
        hindrance=lambda: _hindrance(options, machine),
        machine_id=lambda: real.machine_id(machine),
        any_hung=lambda: gpus.any_hung,
        expected=instance.expected,
        facts=lambda node: hosts.gather(machine, node),
        changed=lambda settings: _after_change(options, machine, settings),
        force=options.force,
        reset_again=RESET_AGAIN,
    )


async def _after_change(
    options: Options, machine: machines.Machine, settings: model.Settings
) -> tuple[snapshot.Reason, ...]:
    """Run the operator's commands after a change; those that failed are reasons to tell."""
    commands = [hooks.Command(hook.command, hook.timeout_seconds) for hook in settings.after_change]
    if not commands:
        return ()
    systemctl = hooks.by_unit(machine, options.environ)
    failed = await threads.run(
        lambda: hooks.after_change(machine, commands, environ=options.environ, systemctl=systemctl), name="after-change"
    )
    return tuple(
        snapshot.Reason("after-change-failed", f"the after-change command {f.command} failed: {f.why}") for f in failed
    )


def _ownership(
    machine: machines.Machine, settings: model.Settings, node: nodes.NodeState, layout: layouts.Layout
) -> cycle.Ownership:
    wants_mig = any(gpu.mig for gpu in layout.gpus)
    found = owner.decide(owner.gather(machine, settings, node, wants_mig=wants_mig))
    return cycle.Ownership(
        owner=found.owner, may_write=found.may_write, code=found.code, why=found.why, takeover=found.takeover
    )


def _hindrance(options: Options, machine: machines.Machine) -> tuple[str, str] | None:
    """Return (code, sentence) of what forbids every change on this machine now, or None."""
    switch = kill.reason(machine, options.environ)
    if switch is not None:
        return ("kill-switch", switch)
    if not machine.is_root():
        return ("not-root", "changing MIG needs root; run gpunode as root to apply a layout")
    return None


def take_lock(node: Node) -> None:
    """Take the one lock of this host, so that no other gpunode writes. Raises BlockedError when
    another holds it; it is released when this process ends, however it ends."""
    if node.lock is None:
        node.lock = files.Lock.take(node.machine.path("/run/gpunode/lock"))


async def start_left_units(node: Node) -> None:
    """Start what an earlier run stopped for a reset and, having died, never started again. For whoever has
    the lock."""
    if isinstance(node.machine, real.RealMachine):
        try:
            await threads.run(node.machine.start_left_units, name="left-units")
        except errors.GpunodeError as cause:
            log.error("units stopped by an earlier run stay stopped", cause=cause)


async def identify(node: Node) -> bool:
    """Find out which EC2 instance this is where files do not tell it, asking the metadata service for a
    few seconds; return whether the type is known now and was not before. For the daemon's background
    alone: nothing waits for it, and nothing but checks uses it."""
    before = node.instance.known
    node.instance.known = await identity.identify(node.machine, environ=node.options.environ)
    return before.instance_type is None and node.instance.known.instance_type is not None


async def observe(node: Node) -> nodes.NodeState:
    """Return the node as it is, holders included. Raises DriverError."""
    try:
        return await node.around.holders(await node.gpus.observe())
    except errors.DriverError as cause:
        raise _with_hint(node, cause) from cause


def _with_hint(node: Node, cause: errors.DriverError) -> errors.DriverError:
    return cause if node.simulated else errors.DriverError(f"{cause}; {NO_DRIVER_HINT}")


async def plan(node: Node) -> Planned:
    """Return what would be done. Raises DriverError or SettingsError; never acts."""
    settings = node.require_settings()
    try:
        seen = await cycle.look(node.around, settings)
    except errors.DriverError as cause:
        raise _with_hint(node, cause) from cause
    node.seen = (time.monotonic(), seen)
    return Planned(
        state=seen.node, layout=seen.layout, plan=seen.plan, problems=seen.problems, ownership=seen.ownership
    )


async def apply(node: Node, *, stop: Callable[[], bool], progress: Callable[[str], None]) -> snapshot.Snapshot:
    """Run one enforcement cycle that may act, under the lock of this host."""
    take_lock(node)
    await start_left_units(node)
    around = dataclasses.replace(node.around, progress=progress)
    # The plan just shown is carried out as it was shown; one that was pondered over is made anew.
    fresh = node.seen[1] if node.seen is not None and time.monotonic() - node.seen[0] < FRESH else None
    return await cycle.run_cycle(around, intent=cycle.Intent.APPLY, trigger="apply", stop=stop, seen=fresh)


async def look(node: Node) -> snapshot.Snapshot:
    """Return the snapshot of a cycle that only looks: bad settings or a missing driver are in it."""
    return await cycle.run_cycle(node.around, intent=cycle.Intent.LOOK, trigger="look")


async def sample(node: Node, *, gap: float = 0.12) -> measures.Sample:
    """Visit every GPU, twice where activity is to be measured (GPM needs two samples 100 ms apart)."""
    gpus = []
    uuids = node.gpus.known()
    for uuid in uuids:
        gpus.append(await node.gpus.measure(uuid, slow=True))
    if any(gpu.up for gpu in gpus):
        await asyncio.sleep(gap)
        gpus = [await node.gpus.measure(uuid, slow=False) for uuid in uuids]
    versions = node.gpus.versions()
    return measures.Sample(
        taken=node.options.clock(),
        generation=0,
        nvml_up=versions is not None,
        gpus=tuple(gpus),
        driver_version=None if versions is None else versions.driver,
        nvml_version=None if versions is None else versions.nvml,
        cuda_version=None if versions is None else versions.cuda,
    )
