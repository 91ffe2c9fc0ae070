"""How a driver with its GPUs behaves, in plain Python: no ctypes here, `agent.sim.library` puts them on top.

Every method that belongs to one GPU is called with that GPU's lock held; whoever sleeps does so before
taking it. Refusals are `codes.Refused` with NVML's return code. A method that changes something decides
within `change()`, on the newest state, and changes only then: a refusal leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from agent import errors
from agent.sim import codes, spec, store, tables
from agent.sim import state as states

XID = 8
MIG_CONFIG_CHANGE = 0x100
PERSISTENCED = "nvidia-persistenced.service"
GRIDD = "nvidia-gridd.service"
SCHEDULER_UNITS = {"kubelet": "kubelet.service", "ecs": "ecs.service"}
_MEDIA = (1, 2, 3, 4)  # decoder, encoder, JPEG, OFA of the engine counts: a pool; copy engines are shared freely
_POLL = 0.05


class Gpu:
    """One GPU: what it is, and a way to what has happened on it (`state`, newest known)."""

    __slots__ = ("_numbers", "_profiles", "_store", "index", "lock", "model", "spec")

    def __init__(self, index: int, gpu: spec.Gpu, kept: store.Store) -> None:
        self.index = index
        self.spec = gpu
        self.model = tables.model(gpu.model)
        self.lock = threading.RLock()
        self._store = kept
        self._numbers = tables.gi_id_map(gpu.gi_id_map) if gpu.gi_id_map else {}
        self._profiles = {profile.id: profile for profile in self.model.profiles}

    @property
    def state(self) -> states.Gpu:
        """What has happened on it."""
        return self._store.node.gpus[self.index]

    def number_for(self, start: int, size: int, /) -> int:
        """Return the GPU-instance id that this GPU gives to a span of memory slices."""
        return self._numbers[start, size]

    def profile(self, number: int, /) -> tables.Profile:
        """Return the profile with this id. Raises Refused when this GPU has none."""
        profile = self._profiles.get(number)
        if profile is None:
            raise codes.Refused(codes.INVALID_ARGUMENT)
        return profile

    def share(self, process: states.Process, /) -> float:
        """Return which part of the GPU's multiprocessors a process can use, 0..1."""
        if process.gpu_instance is None or not self.model.multiprocessors:
            return 1.0
        instance = self.state.instances.get(process.gpu_instance)
        if instance is None:
            return 0.0
        profile = self.profile(instance.profile)
        sms = profile.multiprocessors
        compute = instance.compute.get(-1 if process.compute_instance is None else process.compute_instance)
        part = profile.compute_profile(compute.profile) if compute is not None else None
        if part is not None:
            sms = part.multiprocessors
        return sms / self.model.multiprocessors

    def mig_uuid(self, instance: int, compute: int, /) -> str:
        """Return the UUID of the MIG device on a GPU and compute instance: the same each time it is made."""
        return f"MIG-{uuid.uuid5(spec.NAMESPACE, f'{self.spec.uuid}/{instance}/{compute}')}"


class Machine:
    """The driver and the GPUs of one node. `clock` gives Unix seconds."""

    def __init__(self, node: spec.Node, kept: store.Store, *, clock: Callable[[], float]) -> None:
        self.spec = node
        self.store = kept
        self.clock = clock
        self.gpus = tuple(Gpu(index, gpu, kept) for index, gpu in enumerate(node.gpus))
        self.happened = threading.Condition()
        self.closed = False

    def there(self) -> tuple[Gpu, ...]:
        """Return the GPUs on the bus, lost ones included: what the driver numbers."""
        return tuple(gpu for gpu in self.gpus if not gpu.state.gone)

    # --- MIG mode

    def need_root(self) -> None:
        """Raise Refused where only root may."""
        if not self.spec.root:
            raise codes.Refused(codes.NO_PERMISSION)

    def set_mig_mode(self, gpu: Gpu, mode: int, /) -> int:
        """Ask for MIG on (1) or off (0); return the activation status, which is no failure of the call."""
        if not gpu.model.mig_capable:
            raise codes.Refused(codes.NOT_SUPPORTED)
        if mode not in (0, 1):
            raise codes.Refused(codes.INVALID_ARGUMENT)
        self.need_root()
        self.prune(gpu)
        wanted = bool(mode)
        with self.change(gpu) as now:
            if wanted is now.pending is now.mig:
                return codes.SUCCESS
            if not wanted and now.mig and now.instances:
                return codes.IN_USE
            busy = bool(now.processes or now.holders)
            if gpu.model.resetless and busy:
                return codes.IN_USE
            now.pending = wanted
            self.count_mutation()
            if wanted is now.mig:  # a pending change is taken back
                return codes.SUCCESS
            if (gpu.model.resetless or gpu.spec.mode_change == "immediate") and not busy:
                now.mig = wanted
                self._note_mig_change(gpu)
                return codes.SUCCESS
        return codes.IN_USE if busy or gpu.spec.mode_change == "in-use" else codes.RESET_REQUIRED

    @contextlib.contextmanager
    def change(self, gpu: Gpu, /) -> Iterator[states.Gpu]:
        """Hand out the newest state of a GPU to be changed by a mutating call; event sets are woken."""
        with self.store.change() as node:
            yield node.gpus[gpu.index]
        with self.happened:
            self.happened.notify_all()

    def count_mutation(self) -> None:
        """Count a mutating call that took effect (within `change`)."""
        self.store.node.mutations += 1

    def _note_mig_change(self, gpu: Gpu, instance: int = codes.NO_ID, compute: int = codes.NO_ID) -> None:
        node = self.store.node
        node.emit(gpu.index, MIG_CONFIG_CHANGE, 0, instance=instance, compute=compute)

    def need_mig(self, gpu: Gpu, /) -> states.Gpu:
        """Return the state of a GPU whose MIG is on and whose geometry is known; raise Refused else."""
        now = gpu.state
        if not gpu.model.geometry_known or not now.mig:
            raise codes.Refused(codes.NOT_SUPPORTED)
        return now

    def need_profiles(self, gpu: Gpu, /) -> None:
        """Raise Refused where this GPU tells no profiles (now)."""
        if not gpu.model.geometry_known or (self.spec.profiles_need_mig and not gpu.state.mig):
            raise codes.Refused(codes.NOT_SUPPORTED)

    # --- GPU instances

    def fits(self, gpu: Gpu, profile: tables.Profile, start: int, /) -> bool:
        """Return whether one more instance of `profile` at `start` has room: memory and compute slices,
        media engines, and how many of the profile there may be."""
        taken = gpu.state.instances.values()
        end = start + profile.size
        if any(gi.start < end and start < gi.start + gi.size for gi in taken):
            return False
        return self._within_pools(gpu, profile, more=1)

    def _within_pools(self, gpu: Gpu, profile: tables.Profile, *, more: int) -> bool:
        others = [gpu.profile(gi.profile) for gi in gpu.state.instances.values()]
        if sum(p is profile for p in others) + more > profile.max_instances:
            return False
        if sum(p.slices for p in others) + more * profile.slices > gpu.model.compute_slices:
            return False
        for engine in _MEDIA:
            pool = gpu.model.engines[engine]
            if pool is None:  # nobody has printed it: no constraint, rather than none there
                continue
            each = profile.engines[engine] or 0
            if each and sum(p.engines[engine] or 0 for p in others) + more * each > pool:
                return False
        return True

    def capacity(self, gpu: Gpu, profile: tables.Profile, /) -> int:
        """Return how many more instances of `profile` could be made now."""
        free_from = 0
        count = 0
        for start in sorted(profile.starts):
            taken = gpu.state.instances.values()
            end = start + profile.size
            clear = start >= free_from and not any(gi.start < end and start < gi.start + gi.size for gi in taken)
            if clear and self._within_pools(gpu, profile, more=count + 1):
                count += 1
                free_from = end
        return count

    def create_gpu_instance(
        self, gpu: Gpu, number: int, /, *, placement: tuple[int, int] | None = None
    ) -> states.GpuInstance:
        """Make a GPU instance of the profile with this id, at (start, size) or where the driver likes."""
        if not gpu.model.mig_capable:
            raise codes.Refused(codes.NOT_SUPPORTED)
        self.need_root()
        with self.change(gpu) as now:
            self.need_mig(gpu)
            start = self._start_for(gpu, gpu.profile(number), placement)
            made = states.GpuInstance(
                id=gpu.number_for(start, gpu.profile(number).size),
                profile=number,
                start=start,
                size=gpu.profile(number).size,
                serial=self.store.node.next_serial(),
            )
            now.instances[made.id] = made
            self.count_mutation()
            self._note_mig_change(gpu, made.id)
        return made

    def _start_for(self, gpu: Gpu, profile: tables.Profile, placement: tuple[int, int] | None) -> int:
        if placement is None:
            order: Sequence[int] = tables.automatic_order(gpu.model.id, profile.id, self.spec.driver_major)
        else:
            start, size = placement
            if start not in profile.starts or size != profile.size:
                raise codes.Refused(codes.INVALID_ARGUMENT)
            order = (start,)
        for start in order:
            if self.fits(gpu, profile, start):
                return start
        raise codes.Refused(codes.INSUFFICIENT_RESOURCES)

    def destroy_gpu_instance(self, gpu: Gpu, instance: states.GpuInstance, /) -> None:
        """Remove a GPU instance that nobody uses and that has no compute instances left."""
        self.need_root()
        self.prune(gpu)
        with self.change(gpu) as now:
            there = _newest(now, instance)
            if there.compute or _held(now, there.id, None):
                raise codes.Refused(codes.IN_USE)
            del now.instances[there.id]
            self.count_mutation()
            self._note_mig_change(gpu, there.id)

    # --- compute instances

    @staticmethod
    def compute_profile(gpu: Gpu, instance: states.GpuInstance, number: int, /) -> tables.ComputeProfile:
        """Return the compute profile of this id in `instance`. Raises Refused when it has none."""
        profile = gpu.profile(instance.profile).compute_profile(number)
        if profile is None:
            raise codes.Refused(codes.NOT_SUPPORTED)
        return profile

    @staticmethod
    def compute_capacity(instance: states.GpuInstance, profile: tables.ComputeProfile, /) -> int:
        """Return how many more compute instances of `profile` could be made in `instance`."""
        free_from = 0
        count = 0
        for start in profile.starts:
            if start >= free_from and _compute_clear(instance, start, profile.slices):
                count += 1
                free_from = start + profile.slices
        there = sum(ci.profile == profile.id for ci in instance.compute.values())
        return max(0, min(count, profile.max_instances - there))

    def create_compute_instance(
        self, gpu: Gpu, instance: states.GpuInstance, number: int, /, *, placement: tuple[int, int] | None = None
    ) -> states.ComputeInstance:
        """Make a compute instance, at (start, size) in compute slices or at the first place free."""
        self.need_root()
        profile = self.compute_profile(gpu, instance, number)
        starts = profile.starts
        if placement is not None:
            start, size = placement
            if start not in starts or size != profile.slices:
                raise codes.Refused(codes.INVALID_ARGUMENT)
            starts = (start,)
        with self.change(gpu) as now:
            kept = _newest(now, instance)
            alike = sum(ci.profile == number for ci in kept.compute.values())
            start = next((s for s in starts if _compute_clear(kept, s, profile.slices)), -1)
            if start < 0 or alike >= profile.max_instances:
                raise codes.Refused(codes.INSUFFICIENT_RESOURCES)
            used = {ci.mig_index for gi in now.instances.values() for ci in gi.compute.values()}
            made = states.ComputeInstance(
                id=_first_free(kept.compute),
                profile=number,
                start=start,
                size=profile.slices,
                mig_index=_first_free(used),
                serial=self.store.node.next_serial(),
            )
            kept.compute[made.id] = made
            self.count_mutation()
            self._note_mig_change(gpu, kept.id, made.id)
            if self.spec.load == "busy":
                self._add_load(gpu, now, kept.id, made.id)
        return made

    def destroy_compute_instance(
        self, gpu: Gpu, instance: states.GpuInstance, compute: states.ComputeInstance, /
    ) -> None:
        """Remove a compute instance that nobody uses."""
        self.need_root()
        self.prune(gpu)
        with self.change(gpu) as now:
            kept = _newest(now, instance)
            there = kept.compute.get(compute.id)
            if there is None or there.serial != compute.serial:
                raise codes.Refused(codes.INVALID_ARGUMENT)
            if _held(now, kept.id, there.id):
                raise codes.Refused(codes.IN_USE)
            del kept.compute[there.id]
            self.count_mutation()
            self._note_mig_change(gpu, kept.id, there.id)

    def mig_device(self, gpu: Gpu, index: int, /) -> tuple[states.GpuInstance, states.ComputeInstance] | None:
        """Return what the MIG device of this index is now, or None."""
        for gi in gpu.state.instances.values():
            for ci in gi.compute.values():
                if ci.mig_index == index:
                    return gi, ci
        return None

    # --- sessions, holders, processes

    def open_session(self, token: str, /) -> None:
        """Note that this process has the driver open."""
        with self.store.change(durable=False) as node:
            node.sessions.append(states.Session(os.getpid(), start_of(os.getpid()) or 0, token))

    def close_session(self, token: str, /) -> None:
        """Note that it has let go."""
        with self.store.change(durable=False) as node:
            node.sessions = [s for s in node.sessions if s.token != token]

    def live_sessions(self) -> list[states.Session]:
        """Return the sessions whose processes still run."""
        return [s for s in self.store.node.sessions if start_of(s.pid) == s.start]

    def prune(self, gpu: Gpu, /) -> None:
        """Drop processes and holders that belong to real processes which have ended."""
        now = gpu.state
        dead = [p for p in states.users(now) if p.owner is not None and start_of(p.owner[0]) != p.owner[1]]
        if not dead:
            return
        with self.store.change() as node:
            kept = node.gpus[gpu.index]
            for process in [p for p in kept.processes if p.owner is not None and start_of(p.owner[0]) != p.owner[1]]:
                self.end_process(gpu, process)
            kept.holders = [h for h in kept.holders if h.owner is None or start_of(h.owner[0]) == h.owner[1]]

    def end_process(self, gpu: Gpu, process: states.Process, /) -> None:
        """Take a process off its GPU (within `store.change`); what it has drawn stays in the energy."""
        now = gpu.state
        now.activity_seconds += gpu.share(process) * process.activity * max(0.0, self.clock() - process.started)
        now.processes.remove(process)

    def _add_load(self, gpu: Gpu, now: states.Gpu, instance: int | None, compute: int | None) -> None:
        if instance is None:
            room = gpu.model.memory_mib
        else:
            room = gpu.profile(now.instances[instance].profile).memory_mib
        now.processes.append(
            states.Process(
                pid=40000 + self.store.node.next_serial(),
                name="simulated-load",
                gpu_instance=instance,
                compute_instance=compute,
                memory_mib=room * 2 // 5,
                activity=0.55,
                started=self.clock(),
            )
        )

    def start_load(self) -> None:
        """Put the load of a busy node on the GPUs that have no MIG; instances get theirs when made."""
        if self.spec.load != "busy":
            return
        with self.store.change() as node:
            for gpu in self.gpus:
                if not node.gpus[gpu.index].mig:
                    self._add_load(gpu, node.gpus[gpu.index], None, None)

    # --- reset and reboot

    def reset_holders(self, gpus: Iterable[Gpu], /) -> tuple[str, ...]:
        """Return in words who keeps these GPUs open: every live session, persistenced, processes, holders."""
        self.store.refresh()
        words = [f"{_command(s.pid)} (pid {s.pid})" for s in self.live_sessions()]
        if self.store.node.units.get(PERSISTENCED):
            words.append("nvidia-persistenced")
        for gpu in gpus:
            self.prune(gpu)
            words += [f"{p.name} (pid {p.pid})" for p in states.users(gpu.state)]
        return tuple(dict.fromkeys(words))

    def reset(self, gpus: Sequence[Gpu], /) -> None:
        """Reset GPUs: instances go, a pending mode takes effect. Raises errors.ResetRefused."""
        which = ", ".join(gpu.spec.pci_bus_id for gpu in gpus)
        with self.locked(gpus):
            if not self.spec.root:
                raise errors.ResetRefused(f"cannot reset GPU {which}: not permitted")
            if not self.store.node.reset_possible:
                raise errors.ResetRefused(f"cannot reset GPU {which}: a reset is not supported on this node")
            lost = ", ".join(gpu.spec.pci_bus_id for gpu in gpus if gpu.state.lost)
            if lost:
                raise errors.ResetRefused(
                    f"cannot reset GPU {which}: {lost} has fallen off the bus, only a reboot helps"
                )
            holders = self.reset_holders(gpus)
            if holders:
                raise errors.ResetRefused(f"cannot reset GPU {which}: in use by {', '.join(holders)}", holders)
            with self.store.change() as node:
                node.resets += 1
                for gpu in gpus:
                    now = node.gpus[gpu.index]
                    changed = bool(now.instances) or now.mig is not now.pending
                    now.mig = now.pending
                    now.instances = {}
                    now.compute_mode = 0
                    now.reset_required = False
                    _activate_remaps(now)
                    if changed:
                        self._note_mig_change(gpu)
        with self.happened:
            self.happened.notify_all()

    @contextlib.contextmanager
    def locked(self, gpus: Iterable[Gpu], /) -> Iterator[None]:
        """Hold the locks of several GPUs, always taken by index."""
        with contextlib.ExitStack() as stack:
            for gpu in sorted(gpus, key=lambda g: g.index):
                stack.enter_context(gpu.lock)
            yield

    def reboot(self) -> None:
        """Start the node anew: a new boot id, no processes, no instances; MIG mode stays on parts that
        keep it in their inforom and goes on the others; lost GPUs are back, those that left the bus are not."""
        with self.locked(self.gpus), self.store.change() as node:
            node.boots += 1
            node.boot_id = boot_id(self.spec, node.boots)
            node.booted = self.clock()
            node.sessions = []
            node.events = []
            node.kernel_log = []
            node.reboot_requested = None
            node.units = initial_units(self.spec)
            for gpu in self.gpus:
                old = node.gpus[gpu.index]
                mode = old.pending if gpu.model.mode_survives_reboot else False
                fresh = states.Gpu(mig=mode, pending=mode, persistence=self.spec.persistenced)
                fresh.remapped_correctable, fresh.remapped_uncorrectable = (
                    old.remapped_correctable,
                    old.remapped_uncorrectable,
                )
                fresh.remap_failed = old.remap_failed
                fresh.ecc = {key: count for key, count in old.ecc.items() if key.endswith("/aggregate")}
                fresh.lost = fresh.gone = old.gone  # no reboot brings back what is not plugged in
                node.gpus[gpu.index] = fresh
        self.start_load()
        with self.happened:
            self.happened.notify_all()

    # --- events

    def wait_event(
        self, after: int, masks: dict[int, int], timeout: float, /, *, ended: Callable[[], bool]
    ) -> states.Event | None:
        """Return the first event behind number `after` that `masks` (GPU index to event bits) ask for,
        or None when `timeout` seconds have passed or `ended` says so. Other processes' events are
        noticed within 50 ms."""
        until = time.monotonic() + timeout
        while True:
            self.store.refresh()
            for event in self.store.node.events:
                if event.number > after and event.kind & masks.get(event.gpu, 0):
                    return event
            left = until - time.monotonic()
            if left <= 0 or ended():
                return None
            with self.happened:
                self.happened.wait(min(_POLL, left))


def _newest(gpu: states.Gpu, instance: states.GpuInstance) -> states.GpuInstance:
    """Return the instance as the newest state has it; another process may have removed it meanwhile."""
    there = gpu.instances.get(instance.id)
    if there is None or there.serial != instance.serial:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    return there


def _held(gpu: states.Gpu, instance: int, compute: int | None) -> bool:
    """Whether anybody is on the GPU instance, or on exactly this compute instance of it."""
    for user in states.users(gpu):
        if user.gpu_instance == instance and (compute is None or user.compute_instance in (compute, None)):
            return True
    return False


def _compute_clear(instance: states.GpuInstance, start: int, size: int) -> bool:
    return not any(ci.start < start + size and start < ci.start + ci.size for ci in instance.compute.values())


def _first_free(used: Iterable[int]) -> int:
    taken = set(used)
    number = 0
    while number in taken:
        number += 1
    return number


def _activate_remaps(gpu: states.Gpu) -> None:
    if gpu.remap_pending and not gpu.remap_failed:
        gpu.remap_pending = False


def start_of(pid: int, /) -> int | None:
    """Return when a real process started (clock ticks since boot), or None when it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "process"


def boot_id(node: spec.Node, boots: int, /) -> str:
    """Return the id of the `boots`-th boot of this node."""
    return str(uuid.uuid5(spec.NAMESPACE, f"{node.name}/boot/{boots}"))


def initial_units(node: spec.Node, /) -> dict[str, bool]:
    """Return the units of a node that has just started, and whether they are active."""
    units = {PERSISTENCED: node.persistenced, "kubelet.service": False, "ecs.service": False}
    if node.scheduler in SCHEDULER_UNITS:
        units[SCHEDULER_UNITS[node.scheduler]] = True
    if any(tables.model(gpu.model).virtual for gpu in node.gpus):
        units[GRIDD] = True  # a slice of a GPU comes with an image that keeps its licence
    return units


def fresh(node: spec.Node, now: float, /) -> states.Node:
    """Return the state of a node that has just started for the first time."""
    made = states.Node(
        name=node.name,
        digest=node.digest(),
        boot_id=boot_id(node, 1),
        booted=now,
        gpus=[states.Gpu(persistence=node.persistenced) for _ in node.gpus],
        units=initial_units(node),
        reset_possible=node.reset_possible,
    )
    for number, row in enumerate(node.faults, 1):
        made.faults.append(states.Fault(id=number, **dict(row)))  # type: ignore[arg-type]  # keys and types checked in spec
    return made
