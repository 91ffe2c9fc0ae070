"""What was observed: the node, its GPUs, what they offer, and the instances on them.

Built by `agent.nvml.observe` and completed with holders by `agent.reconcile.cycle`; everything is
frozen, so a state can be handed to the planner, the pages and the metrics alike. Sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NewType

from agent import records
from agent.mig import profile as profiles

ProfileIndex = NewType("ProfileIndex", int)
"""NVML's selector, NVML_GPU_INSTANCE_PROFILE_*: the same on every GPU; used to ask."""
ProfileId = NewType("ProfileId", int)
"""The number `nvidia-smi mig -lgip` prints: differs between GPU families; used to create."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Where an instance lies: `start` and `size` in memory slices (of the GPU, or for a compute
    instance in compute slices of its GPU instance)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first slice behind it."""
        return self.start + self.size

    def overlaps(self, other: Placement) -> bool:
        """Whether both claim a slice."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@records.dataclass(frozen=True, slots=True)
class Engines:
    """Media and copy engines of an instance; None where the driver does not tell (no constraint)."""

    copy: int | None = None
    decoder: int | None = None
    encoder: int | None = None
    jpeg: int | None = None
    ofa: int | None = None


@records.dataclass(frozen=True, slots=True)
class ComputeOffer:
    """A compute-instance profile that a GPU instance offers, as the driver told on a live one.

    `name` is what a user writes: `1c.3g.20gb`, or the GPU instance's own name for the default.
    `placements` is None where the driver cannot say (before 535).
    """

    profile: profiles.Profile
    index: ProfileIndex
    id: ProfileId
    slices: int
    multiprocessors: int
    max_instances: int
    placements: tuple[Placement, ...] | None = None


@records.dataclass(frozen=True, slots=True)
class ProfileOffer:
    """A GPU-instance profile that this GPU offers, with every place it may take.

    `compute` is None until a GPU instance of the profile has been seen alive: NVML tells the
    compute profiles of an existing GPU instance only. `engines` come from the profile info.
    `aliases` are other names that tools or older drivers print for it (`7g.79gb`).
    """

    profile: profiles.Profile
    index: ProfileIndex
    id: ProfileId
    slices: int
    memory_bytes: int
    multiprocessors: int
    max_instances: int
    placements: tuple[Placement, ...]
    engines: Engines = Engines()
    compute: tuple[ComputeOffer, ...] | None = None
    aliases: tuple[profiles.Profile, ...] = ()

    @property
    def size(self) -> int:
        """How many memory slices an instance takes."""
        return self.placements[0].size if self.placements else 0


@records.dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who uses a GPU or an instance. `kind` is process, open-file, pod, task or service.

    `name` is a command, pod or service name (never an argument); `hint` says what to do about a
    known one. `task` is the id of an ECS task, whose `name` is its family where that is known.
    """

    kind: str
    name: str
    pid: int | None = None
    container: str | None = None
    pod: str | None = None
    namespace: str | None = None
    hint: str | None = None
    task: str | None = None

    def __str__(self) -> str:
        words = f"{self.kind} {self.name}"
        if self.pid is not None:
            words += f" (pid {self.pid})"
        if self.pod is not None and self.kind != "pod":
            words += f" in pod {self.namespace}/{self.pod}" if self.namespace else f" in pod {self.pod}"
        elif self.container is not None:
            words += f" in container {self.container}"
        return words


@records.dataclass(frozen=True, slots=True)
class ModeState:
    """MIG mode: what is in effect and what the next reset will bring."""

    current: bool
    pending: bool

    @property
    def changing(self) -> bool:
        """Whether a change waits for a reset."""
        return self.current is not self.pending


@records.dataclass(frozen=True, slots=True)
class ComputeInstance:
    """A compute instance: what a workload opens. `placement` counts compute slices of the GPU
    instance; `uuid` is the MIG device's, None where the driver has not made one."""

    id: int
    profile: profiles.Profile
    profile_id: ProfileId
    uuid: str | None
    multiprocessors: int
    slices: int
    placement: Placement | None = None
    holders: tuple[Holder, ...] = ()


@records.dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance with its compute instances (possibly none: then no MIG device handle shows it)."""

    id: int
    profile: profiles.Profile
    profile_id: ProfileId
    placement: Placement
    memory_bytes: int
    compute: tuple[ComputeInstance, ...] = ()
    holders: tuple[Holder, ...] = ()

    @property
    def in_use(self) -> tuple[Holder, ...]:
        """Everybody who holds the instance or one of its compute instances; () when free."""
        return self.holders + tuple(h for ci in self.compute for h in ci.holders)


class GpuState(enum.Enum):
    """Whether a GPU can be worked with; the value is the word shown."""

    OK = "ok"
    LOST = "lost"
    HUNG = "hung"
    ERROR = "error"


@records.dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU. `index` is its rank by PCI address among the GPUs on the bus.

    `mode` is None on a GPU without MIG. `model` is the settings key (`a100.40gb`). `resetless` is
    whether a mode change takes effect without a reset, None when the driver does not tell.
    `geometry_unknown` is a sentence where the part can do MIG but nothing tells its profiles.
    For a lost or hung GPU only identity and `problem` are to be trusted. `openers` have the GPU's
    device file open (monitors, nvidia-persistenced): they do not use it, but make a reset fail.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    model: str
    state: GpuState = GpuState.OK
    problem: str | None = None
    architecture: str = ""
    pci_device_id: int = 0
    pci_subsystem_id: int | None = None
    minor: int | None = None
    memory_bytes: int = 0
    mode: ModeState | None = None
    resetless: bool | None = None
    geometry_unknown: str | None = None
    offers: tuple[ProfileOffer, ...] = ()
    instances: tuple[GpuInstance, ...] = ()
    holders: tuple[Holder, ...] = ()
    openers: tuple[Holder, ...] = ()

    @property
    def mig_capable(self) -> bool:
        """Whether the GPU has a MIG mode at all."""
        return self.mode is not None

    @property
    def memory_slices(self) -> int:
        """How many memory slices the placements of its profiles count (8 on an A100, 12 on an RTX PRO 6000)."""
        return max((p.end for o in self.offers for p in o.placements), default=0)

    @property
    def compute_slices(self) -> int:
        """How many compute slices its largest profile has."""
        return max((o.slices for o in self.offers), default=0)

    def offer(self, profile: profiles.Profile) -> ProfileOffer | None:
        """Return the offer of exactly this GPU-instance profile, or None."""
        for offer in self.offers:
            if offer.profile == profile:
                return offer
        return None

    def offer_by_id(self, profile_id: ProfileId) -> ProfileOffer | None:
        """Return the offer that the driver numbers so, or None."""
        for offer in self.offers:
            if offer.id == profile_id:
                return offer
        return None

    @property
    def in_use(self) -> tuple[Holder, ...]:
        """Everybody who holds the GPU or anything on it."""
        return self.holders + tuple(h for gi in self.instances for h in gi.in_use)


@records.dataclass(frozen=True, slots=True)
class NodeState:
    """The node at one moment. `gpus` are sorted by index.

    `serving` names the scheduler's agent once it is active ("kubelet", "ecs"), else None.
    `allocations_known` is False when that agent is active and its allocations cannot be read: then
    every instance counts as in use. `simulated` is the simulated node's name, else None.
    """

    gpus: tuple[Gpu, ...]
    driver_version: str = ""
    nvml_version: str = ""
    cuda_version: str = ""
    simulated: str | None = None
    instance_type: str | None = None
    serving: str | None = None
    allocations_known: bool = True

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU with this UUID, or None."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        return None
