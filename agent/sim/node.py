"""A whole simulated node: library, GPUs and host, and the hands that load, break, reset and reboot it.

node = open_node("p4d.24xlarge", state=Path("S"))
pynvml.nvmlLib = node.library
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent.sim import faults, host, library, prototypes, spec, state, store
from agent.sim import machine as machines

SimulationError = spec.SimulationError
Fault = state.Fault


class SimulatedNode:
    """See the module. Everything it does is kept in the state file, when it has one, at once."""

    def __init__(
        self, about: spec.Node, kept: store.Store, *, directory: Path | None, clock: Callable[[], float]
    ) -> None:
        self._store = kept
        self._machine = machines.Machine(about, kept, clock=clock)
        self._faults = faults.Faults(self._machine)
        self._library = library.Library(self._machine, self._faults)
        self._host = host.SimulatedMachine(self._machine, directory)

    @property
    def name(self) -> str:
        """What the node was called: "p4d.24xlarge"."""
        return self._machine.spec.name

    @property
    def instance_type(self) -> str | None:
        """The EC2 type it stands for, else None."""
        return self._machine.spec.instance_type

    @property
    def library(self) -> library.Library:
        """What to put at `pynvml.nvmlLib`."""
        return self._library

    @property
    def machine(self) -> host.SimulatedMachine:
        """The host around the GPUs."""
        return self._host

    @property
    def driver(self) -> machines.Machine:
        """The driver in plain Python, below the C names: for oracles and tests."""
        return self._machine

    def close(self) -> None:
        """Let go of everything; calls that hang come back."""
        self._machine.closed = True
        with self._machine.happened:
            self._machine.happened.notify_all()
        self._library.close()
        self._host.close()
        self._store.close()

    # --- counting

    def library_calls(self) -> dict[str, int]:
        """Return how often each C function was called in this process."""
        return self._library.calls()

    def mutating_calls(self) -> dict[str, int]:
        """Return the same for the functions that change partitioning or settings."""
        return {name: n for name, n in self.library_calls().items() if prototypes.PROTOTYPES[name].mutates}

    @property
    def mutations(self) -> int:
        """How many mutating calls have taken effect on this node, in any process; kept in the state file."""
        self._store.refresh()
        return self._store.node.mutations

    # --- what happens to a node

    def reboot(self) -> None:
        """Reboot: open sessions die, instances and processes go, MIG mode stays where the part keeps it."""
        self._machine.reboot()

    @property
    def reboot_requested(self) -> str | None:
        """Why a reboot was asked for and has not happened yet, else None."""
        self._store.refresh()
        return self._store.node.reboot_requested

    def reset(self, pci_bus_ids: Sequence[str] = ()) -> None:
        """Reset these GPUs, all without any. Raises errors.ResetRefused naming who holds them."""
        self._host.reset_gpus(pci_bus_ids or [gpu.spec.pci_bus_id for gpu in self._machine.gpus])

    def reset_holders(self) -> tuple[str, ...]:
        """Return in words who would keep a reset from happening now."""
        return self._machine.reset_holders(self._machine.gpus)

    def allow_reset(self, possible: bool) -> None:
        """Make resets possible or impossible from now on."""
        with self._store.change() as node:
            node.reset_possible = possible

    def set_unit(self, unit: str, active: bool) -> None:
        """Start or stop a unit of the host (kubelet.service, ecs.service, nvidia-persistenced.service)."""
        with self._store.change() as node:
            node.units[unit] = active

    # --- workload

    def start_process(
        self,
        gpu: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
        name: str = "python3",
        memory_mib: int = 1024,
        activity: float = 0.6,
        kind: str = "compute",
        pid: int | None = None,
        tied: bool = False,
    ) -> int:
        """Start a process on a GPU (or on an instance of it); return its pid.

        In MIG mode it needs the instance; without `compute_instance` it takes the first one there.
        `tied` ends it with the calling process. Raises SimulationError where a real one could not start.
        """
        if kind not in ("compute", "graphics", "mps"):
            raise SimulationError(f"a process is compute, graphics or mps, not {kind}")
        if not 0 <= activity <= 1:
            raise SimulationError(f"activity is from 0 to 1, not {activity}")
        target = self._gpu(gpu)
        with target.lock, self._store.change() as node:
            now = node.gpus[gpu]
            if now.lost:
                raise SimulationError(f"cannot start a process on GPU {gpu}: it has fallen off the bus")
            instance, compute = self._place(target, now, gpu_instance, compute_instance)
            room = target.model if instance is None else target.profile(now.instances[instance].profile)
            if not 0 <= memory_mib <= room.memory_mib:
                raise SimulationError(f"a process here allocates 0 to {room.memory_mib} MiB, not {memory_mib}")
            number = 50000 + node.next_serial() if pid is None else pid
            now.processes.append(
                state.Process(
                    pid=number,
                    name=name,
                    gpu_instance=instance,
                    compute_instance=compute,
                    memory_mib=memory_mib,
                    activity=activity,
                    started=self._machine.clock(),
                    kind=kind,
                    owner=_owner() if tied else None,
                )
            )
        return number

    def hold(
        self,
        gpu: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
        name: str = "dcgm-exporter",
        pid: int | None = None,
        tied: bool = False,
    ) -> int:
        """Let somebody keep a device file (of an instance: its capability file) open; return its pid."""
        target = self._gpu(gpu)
        with target.lock, self._store.change() as node:
            now = node.gpus[gpu]
            if gpu_instance is not None:
                there = now.instances.get(gpu_instance)
                if there is None or (compute_instance is not None and compute_instance not in there.compute):
                    raise SimulationError(f"cannot hold an instance of GPU {gpu}: there is no such instance")
            number = 50000 + node.next_serial() if pid is None else pid
            now.holders.append(state.Holder(number, name, gpu_instance, compute_instance, _owner() if tied else None))
        return number

    def stop_process(self, pid: int | None = None, *, gpu: int | None = None) -> int:
        """End processes and holders: the one of this pid, those of a GPU, or all. Return how many."""
        ended = 0
        with self._machine.locked(self._machine.gpus), self._store.change() as node:
            for target in self._machine.gpus:
                if gpu is not None and target.index != gpu:
                    continue
                now = node.gpus[target.index]
                for process in [p for p in now.processes if pid in (None, p.pid)]:
                    self._machine.end_process(target, process)
                    ended += 1
                before = len(now.holders)
                now.holders = [h for h in now.holders if pid not in (None, h.pid)]
                ended += before - len(now.holders)
        return ended

    def processes(self) -> tuple[Mapping[str, object], ...]:
        """Return processes and holders: `pid`, `name`, `gpu`, `gpu_instance`, `compute_instance`, `kind`."""
        self._store.refresh()
        found: list[Mapping[str, object]] = []
        for index, gpu in enumerate(self._store.node.gpus):
            for user in state.users(gpu):
                found.append(
                    {
                        "pid": user.pid,
                        "name": user.name,
                        "gpu": index,
                        "gpu_instance": user.gpu_instance,
                        "compute_instance": user.compute_instance,
                        "kind": user.kind if isinstance(user, state.Process) else "open-file",
                    }
                )
        return tuple(found)

    def _gpu(self, index: int) -> machines.Gpu:
        if not 0 <= index < len(self._machine.gpus):
            raise SimulationError(f"there is no GPU {index} on {self.name}: it has {len(self._machine.gpus)}")
        return self._machine.gpus[index]

    @staticmethod
    def _place(
        gpu: machines.Gpu, now: state.Gpu, instance: int | None, compute: int | None
    ) -> tuple[int | None, int | None]:
        if not now.mig:
            if instance is not None or compute is not None:
                raise SimulationError(f"GPU {gpu.index} has MIG off: it has no instances to start a process on")
            return None, None
        if instance is None:
            raise SimulationError(f"GPU {gpu.index} has MIG on: say which GPU instance the process runs on")
        there = now.instances.get(instance)
        if there is None or not there.compute:
            ids = ", ".join(str(i.id) for i in now.instances.values() if i.compute) or "none"
            raise SimulationError(
                f"GPU {gpu.index} has no compute instance in a GPU instance {instance} (those with one: {ids})"
            )
        if compute is None:
            compute = min(there.compute)
        if compute not in there.compute:
            raise SimulationError(f"GPU instance {instance} of GPU {gpu.index} has no compute instance {compute}")
        return instance, compute

    # --- faults

    @property
    def faults(self) -> faults.Faults:
        """Orders that calls fail, are slow or hang."""
        return self._faults

    def fail(self, call: str, code: int = 999, *, gpu: int | None = None, skip: int = 0, times: int = 1) -> int:
        """Let the call after `skip` others fail with `code`, `times` times (0: always); return the order."""
        return self._faults.order(call, "fail", code=code, gpu=gpu, skip=skip, times=times)

    def delay(self, call: str, seconds: float, *, gpu: int | None = None, skip: int = 0, times: int = 0) -> int:
        """Let calls take longer; return the order."""
        return self._faults.order(call, "delay", seconds=seconds, gpu=gpu, skip=skip, times=times)

    def hang(self, call: str, *, gpu: int | None = None, code: int = 0, skip: int = 0, times: int = 1) -> int:
        """Let a call hang until `release`: then it completes, or fails with `code`; return the order."""
        return self._faults.order(call, "hang", code=code, gpu=gpu, skip=skip, times=times)

    def stall(self, call: str, *, gpu: int | None = None, skip: int = 0, times: int = 1) -> int:
        """Let a call on a GPU have its effect and not come back until `release`; return the order."""
        return self._faults.order(call, "stall", gpu=gpu, skip=skip, times=times)

    def release(self, order: int | None = None) -> None:
        """Withdraw an order (all without a number); what hangs on it goes on."""
        self._faults.release(order)

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus: XID 79, and every call to it says that it is lost, until a reboot."""
        target = self._gpu(gpu)
        with target.lock, self._store.change() as node:
            node.gpus[gpu].lost = True
        self.xid(gpu, 79)

    def unplug(self, gpu: int, *, gone: bool = True) -> None:
        """Take a GPU off the bus, or (`gone` False) put it back, which the driver sees at the next reboot."""
        target = self._gpu(gpu)
        with target.lock, self._store.change() as node:
            node.gpus[gpu].gone = gone
            node.gpus[gpu].lost = True

    def xid(self, gpu: int, code: int, *, gpu_instance: int | None = None, compute_instance: int | None = None) -> None:
        """Report an XID error: to event sets and in the kernel's log."""
        target = self._gpu(gpu)
        none = 0xFFFFFFFF
        with self._store.change() as node:
            node.emit(
                gpu,
                machines.XID,
                code,
                instance=none if gpu_instance is None else gpu_instance,
                compute=none if compute_instance is None else compute_instance,
            )
            address = host.normal_address(target.spec.pci_bus_id).partition(".")[0]
            stamp = int(1e6 * max(0.0, self._machine.clock() - node.booted))
            part = "" if gpu_instance is None else f" GPU-I:{gpu_instance:02d}"
            part += "" if compute_instance is None else f" GPU-CI:{compute_instance:02d}"
            words = f"NVRM: Xid (PCI:{address}{part}): {code}, pid='<unknown>', name=<unknown>"
            node.kernel_log.append(f"4,{node.event_number},{stamp},-;{words}")
            del node.kernel_log[:-200]
        with self._machine.happened:
            self._machine.happened.notify_all()

    def damage(
        self,
        gpu: int,
        *,
        ecc: Mapping[str, int] | None = None,
        remapped_correctable: int = 0,
        remapped_uncorrectable: int = 0,
        remap_pending: bool | None = None,
        remap_failed: bool | None = None,
        replays: int = 0,
    ) -> None:
        """Add memory errors: `ecc` by "corrected|uncorrected/sram|dram" (counted volatile and aggregate),
        remapped rows, PCIe replays."""
        target = self._gpu(gpu)
        with target.lock, self._store.change() as node:
            now = node.gpus[gpu]
            for key, count in (ecc or {}).items():
                severity, _, memory = key.partition("/")
                if severity not in ("corrected", "uncorrected") or memory not in ("sram", "dram"):
                    raise SimulationError(f"ECC errors are corrected|uncorrected/sram|dram, not {key}")
                for lifetime in ("volatile", "aggregate"):
                    name = f"{key}/{lifetime}"
                    now.ecc[name] = now.ecc.get(name, 0) + count
            now.remapped_correctable += remapped_correctable
            now.remapped_uncorrectable += remapped_uncorrectable
            now.replays += replays
            if remap_pending is not None:
                now.remap_pending = remap_pending
            if remap_failed is not None:
                now.remap_failed = remap_failed


def _owner() -> tuple[int, int]:
    return os.getpid(), machines.start_of(os.getpid()) or 0


def open_node(spec_text: str, *, state: Path | None = None, clock: Callable[[], float] = time.time) -> SimulatedNode:
    """Open the simulated node that `spec_text` names: an EC2 type, `MODEL[:COUNT]`, or a node file.

    With `state` it lives in that file, shared with other processes; else in this process alone. Raises
    SimulationError for an unknown name, a bad file, or a state file of another node.
    """
    about = spec.read(spec_text)
    return open_spec(about, state=state, clock=clock)


def open_spec(about: spec.Node, *, state: Path | None = None, clock: Callable[[], float] = time.time) -> SimulatedNode:
    """Open the node of a spec made in code; see `open_node`."""
    fresh = machines.fresh(about, clock())
    kept: store.Store
    if state is None:
        kept = store.MemoryStore(fresh)
        directory = None
    else:
        kept = store.FileStore(state, name=about.name, digest=about.digest(), fresh=lambda: fresh)
        directory = state.with_name(state.name + ".root")
    node = SimulatedNode(about, kept, directory=directory, clock=clock)
    if kept.node is fresh:
        node.driver.start_load()
    return node
