"""Stands where `pynvml.nvmlLib` stands: an object with NVML's C functions, taking ctypes arguments.

Each attribute is a plain Python function made from `agent.sim.prototypes`: it checks its arguments,
looks up what a handle stands for, lets faults and latency happen outside every lock, and calls the
body under the GPU's lock. A function that the simulated driver does not have is an AttributeError,
which pynvml turns into FUNCTION_NOT_FOUND. State of the session (handles, event sets, GPM samples)
lives here and dies at the last nvmlShutdown, as in C.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from agent.sim import calls, codes, faults, machine, prototypes, state, workload

On = prototypes.On
_FIRST_ADDRESS = 0x7F5100000000
_EPOCH_STEP = 0x100000000
_HANDLE_OF = {
    On.GPU: prototypes.DEVICE,
    On.MIG: prototypes.DEVICE,
    On.EITHER: prototypes.DEVICE,
    On.GPU_INSTANCE: prototypes.GPU_INSTANCE,
    On.COMPUTE_INSTANCE: prototypes.COMPUTE_INSTANCE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a handle stands for. A MIG device is known by its index only, so its handle follows what
    that index becomes; instances are known by id and serial, so theirs go stale."""

    kind: str
    gpu: machine.Gpu
    mig_index: int = -1
    instance: int = -1
    instance_serial: int = -1
    compute: int = -1
    compute_serial: int = -1


@dataclasses.dataclass(slots=True)
class EventSet:
    """An event set: what each GPU is watched for, and the last event handed out."""

    masks: dict[int, int] = dataclasses.field(default_factory=dict)
    after: int = 0


@dataclasses.dataclass(slots=True)
class GpmSample:
    """A GPM sample: when, and of what, it was taken."""

    gpu: int = -1
    instance: int | None = None
    serial: int = -1
    taken: float = 0.0


class Library:
    """The simulated libnvidia-ml of one machine."""

    def __init__(self, node: machine.Machine, orders: faults.Faults) -> None:
        self.machine = node
        self.figures = workload.Figures(node)
        self._faults = orders
        self._mutex = threading.RLock()
        self._opened = 0
        self._epoch = 0
        self._token = ""
        self._boots = 0
        self._next_address = _FIRST_ADDRESS
        self._targets: dict[int, Target] = {}
        self._addresses: dict[Target, int] = {}
        self.event_sets: dict[int, EventSet] = {}
        self.samples: dict[int, GpmSample] = {}
        self._counters: dict[str, itertools.count[int]] = {}
        self._latency = dict(node.spec.latency)
        self._missing = frozenset(node.spec.missing_functions)
        calls.load()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_"):
            raise AttributeError(name)
        prototype = prototypes.PROTOTYPES.get(name)
        if prototype is None or name in self._missing or self.machine.spec.driver_major < prototype.since:
            raise AttributeError(f"undefined symbol: {name}")
        made = self._function(prototype)
        with self._mutex:
            return self.__dict__.setdefault(name, made)  # type: ignore[no-any-return]  # what was made first stays

    def calls(self) -> dict[str, int]:
        """Return how often each function was called in this process."""
        return {
            name: int(repr(counter)[6:-1]) for name, counter in self._counters.items() if repr(counter) != "count(0)"
        }

    def latency_of(self, name: str) -> float:
        """Return the seconds that calls of this class take."""
        fallback = "read" if name == "pcie-throughput" else "change"
        found = self._latency.get(name)
        return found if found is not None else self._latency.get("read" if name == "read" else fallback, 0.0)

    def _function(self, prototype: prototypes.Prototype) -> Callable[..., int]:
        name = prototype.name
        converters = prototype.arguments
        on = prototype.on
        take_handle = _HANDLE_OF.get(on)
        expected = len(converters) + (take_handle is not None)
        body = prototype.body
        unlocked = prototype.unlocked
        seconds = self.latency_of(prototype.latency)
        counter = self._counters.setdefault(name, itertools.count())
        refresh = self.machine.store.refresh
        kept = self.machine.store
        orders = self._faults

        def function(*arguments: Any) -> int:
            next(counter)
            if len(arguments) != expected:
                raise prototypes.Misuse(f"{name} takes {expected} arguments, not {len(arguments)}")
            try:
                refresh()
                target: Target | None = None
                if take_handle is None:
                    values = [convert(value) for convert, value in zip(converters, arguments, strict=True)]
                    if not self._opened and not prototype.uninitialised:
                        return codes.UNINITIALIZED
                else:
                    address = take_handle(arguments[0])
                    values = [convert(value) for convert, value in zip(converters, arguments[1:], strict=True)]
                    if not self._opened or self._boots != kept.node.boots:
                        return codes.UNINITIALIZED
                    target = self._targets.get(address)
                    if target is None:
                        return codes.INVALID_ARGUMENT
                if kept.node.faults:
                    code = orders.meet(name, None if target is None else target.gpu.index)
                    if code:
                        return code
                if seconds:
                    time.sleep(seconds)
                if target is None:
                    return body(self, *values) or 0
                gpu = target.gpu
                if gpu.state.lost:
                    return codes.GPU_IS_LOST
                if unlocked:
                    return body(self, *self._meant(prototype, target), *values) or 0
                with gpu.lock:
                    code = body(self, *self._meant(prototype, target), *values) or 0
                if kept.node.faults:
                    orders.stall(name, gpu.index)
                return code
            except codes.Refused as refused:
                return refused.code

        function.__name__ = name
        return function

    def _meant(self, prototype: prototypes.Prototype, target: Target) -> tuple[Any, ...]:
        """Return what the body gets for its handle; raise Refused where it is of another kind or stale."""
        on = prototype.on
        kind = target.kind
        gpu = target.gpu
        if kind == "gpu":
            if on is On.GPU:
                return (gpu,)
            if on is On.EITHER:
                return (gpu, None, None)
            raise codes.Refused(codes.INVALID_ARGUMENT if on is not On.MIG else codes.NOT_SUPPORTED)
        if kind == "mig":
            if on is On.GPU:
                raise codes.Refused(prototype.on_mig)
            if on is not On.MIG and on is not On.EITHER:
                raise codes.Refused(codes.INVALID_ARGUMENT)
            found = self.machine.mig_device(gpu, target.mig_index)
            if found is None:
                raise codes.Refused(codes.INVALID_ARGUMENT)
            return (gpu, *found)
        instance = gpu.state.instances.get(target.instance)
        if instance is None or instance.serial != target.instance_serial:
            raise codes.Refused(codes.INVALID_ARGUMENT)
        if kind == "gi" and on is On.GPU_INSTANCE:
            return (gpu, instance)
        if kind == "ci" and on is On.COMPUTE_INSTANCE:
            compute = instance.compute.get(target.compute)
            if compute is not None and compute.serial == target.compute_serial:
                return (gpu, instance, compute)
        raise codes.Refused(codes.INVALID_ARGUMENT)

    # --- session

    def open(self) -> None:
        """Count one nvmlInit; the first takes the driver open."""
        with self._mutex:
            if self.machine.closed:
                raise codes.Refused(codes.DRIVER_NOT_LOADED)
            if self._opened and self._boots != self.machine.store.node.boots:
                self._end()  # the node has been rebooted under this process
            if not self._opened:
                self._epoch += 1
                self._next_address = _FIRST_ADDRESS + self._epoch * _EPOCH_STEP
                self._boots = self.machine.store.node.boots
                self._token = uuid.uuid4().hex
                self.machine.open_session(self._token)
            self._opened += 1

    def shut(self) -> None:
        """Count one nvmlShutdown; the last lets go of the driver. One too many is a success, as in C."""
        with self._mutex:
            if self._opened:
                self._opened -= 1
                if not self._opened:
                    self._end()

    def _end(self) -> None:
        self._opened = 0
        self._targets.clear()
        self._addresses.clear()
        self.event_sets.clear()
        self.samples.clear()
        self.machine.close_session(self._token)
        with self.machine.happened:
            self.machine.happened.notify_all()

    def close(self) -> None:
        """End the session whatever its count: the process is done with the node."""
        with self._mutex:
            if self._opened:
                self._end()

    @property
    def session(self) -> int:
        """A number that changes when handles die; 0 while closed."""
        return self._epoch if self._opened and self._boots == self.machine.store.node.boots else 0

    # --- handles

    def meet_faults_of(self, gpu: machine.Gpu, name: str) -> int:
        """Let a call that finds out its GPU by itself meet the orders for that GPU; return the code to
        fail with, or 0."""
        return self._faults.meet(name, gpu.index, only_of_gpu=True) if self.machine.store.node.faults else 0

    def new_address(self) -> int:
        """Return an address that no handle of this session has had."""
        with self._mutex:
            self._next_address += 0x40
            return self._next_address

    def address(self, target: Target) -> int:
        """Return the handle of `target`: the same each time it is asked for within a session."""
        found = self._addresses.get(target)
        if found is None:
            with self._mutex:
                found = self._addresses.get(target)
                if found is None:
                    found = self.new_address()
                    self._addresses[target] = found
                    self._targets[found] = target
        return found

    def gpu_address(self, gpu: machine.Gpu) -> int:
        """Return the handle of a GPU."""
        return self.address(Target("gpu", gpu))

    def mig_address(self, gpu: machine.Gpu, index: int) -> int:
        """Return the handle of a GPU's MIG device of this index."""
        return self.address(Target("mig", gpu, mig_index=index))

    def instance_address(self, gpu: machine.Gpu, instance: state.GpuInstance) -> int:
        """Return the handle of a GPU instance."""
        return self.address(Target("gi", gpu, instance=instance.id, instance_serial=instance.serial))

    def compute_address(self, gpu: machine.Gpu, instance: state.GpuInstance, compute: state.ComputeInstance) -> int:
        """Return the handle of a compute instance."""
        return self.address(
            Target(
                "ci",
                gpu,
                instance=instance.id,
                instance_serial=instance.serial,
                compute=compute.id,
                compute_serial=compute.serial,
            )
        )

    def gpu_of(self, address: int) -> machine.Gpu:
        """Return the GPU whose own handle this is; raise Refused for any other."""
        target = self._targets.get(address)
        if target is None or target.kind != "gpu":
            raise codes.Refused(codes.INVALID_ARGUMENT)
        return target.gpu

    def now(self) -> float:
        """The node's time in Unix seconds."""
        return self.machine.clock()


def char_array(value: str, size: int) -> bytes:
    """Return text as it fits a char field of a structure."""
    return value.encode()[: size - 1]
