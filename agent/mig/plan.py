"""From the node as it is to the layout as it shall be: steps, what stays, what is in the way.

`compute()` decides everything before anything is touched: placements are settled by exact search,
instances that match stay, and on each GPU destroys come before creates, so that every prefix of
the steps leaves a legal GPU and planning again from there converges.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import profile as profiles


@dataclasses.dataclass(frozen=True, slots=True)
class SetMigMode:
    """Ask for MIG on or off."""

    kind: ClassVar[str] = "set-mig-mode"
    enabled: bool
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset the GPU so that a pending mode takes effect; skipped when the mode already has."""

    kind: ClassVar[str] = "reset-gpu"
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class DestroyComputeInstance:
    """Remove a compute instance."""

    kind: ClassVar[str] = "destroy-compute-instance"
    gpu_instance_id: int
    id: int
    profile: profiles.Profile
    gpu_instance: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class DestroyGpuInstance:
    """Remove a GPU instance that has no compute instances left."""

    kind: ClassVar[str] = "destroy-gpu-instance"
    id: int
    profile: profiles.Profile
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class CreateGpuInstance:
    """Make a GPU instance at an exact place (its id is known only afterwards)."""

    kind: ClassVar[str] = "create-gpu-instance"
    profile: profiles.Profile
    profile_id: nodes.ProfileId
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class CreateComputeInstance:
    """Make a compute instance in the GPU instance that lies at `gpu_instance`.

    `profile` equal to the GPU instance's own means the default one, over all its SMs. `start` fixes
    the first compute slice, None leaves it to the driver.
    """

    kind: ClassVar[str] = "create-compute-instance"
    gpu_instance: nodes.Placement
    profile: profiles.Profile
    start: int | None = None
    why: str = dataclasses.field(default="", compare=False)


Step = SetMigMode | ResetGpu | DestroyComputeInstance | DestroyGpuInstance | CreateGpuInstance | CreateComputeInstance


class BlockedKind(enum.Enum):
    """Why a GPU gets no steps; the value is the word shown."""

    IN_USE = "in-use"
    MODE_PENDING = "mode-pending"
    UNPLACEABLE = "unplaceable"
    NOT_CAPABLE = "not-capable"
    NOT_OWNER = "not-owner"
    UNKNOWN_GEOMETRY = "unknown-geometry"
    LOST = "lost"
    HUNG = "hung"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing may be done on a GPU although something should be."""

    kind: BlockedKind
    message: str
    holders: tuple[nodes.Holder, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A GPU instance that stays as it is (its compute instances may still change)."""

    id: int
    profile: profiles.Profile
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """One difference between what is wanted and what is: `kind` is mode, missing or extra."""

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPlan:
    """What happens on one GPU. `steps` is () when in sync or blocked; `drift` tells the differences
    either way. `needs` is "reset" or "reboot" when a mode change will wait for one, else None.
    `partial` is set where the rest can be planned only after these steps (profiles are told by the
    driver only with MIG on)."""

    uuid: str
    index: int
    steps: tuple[Step, ...] = ()
    kept: tuple[Kept, ...] = ()
    drift: tuple[Drift, ...] = ()
    blocked: Blocked | None = None
    needs: str | None = None
    partial: bool = False
    managed: bool = True

    @property
    def in_sync(self) -> bool:
        """Whether the GPU already is as wanted."""
        return not self.drift


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What happens on the node: one entry a GPU of the node, `managed` False where nothing is declared."""

    gpus: tuple[GpuPlan, ...] = ()

    @property
    def in_sync(self) -> bool:
        """Whether every GPU already is as wanted."""
        return all(gpu.in_sync for gpu in self.gpus)

    @property
    def blocked(self) -> tuple[GpuPlan, ...]:
        """The GPUs that should change and may not."""
        return tuple(gpu for gpu in self.gpus if gpu.blocked is not None)

    @property
    def steps(self) -> int:
        """How many steps there are on all GPUs."""
        return sum(len(gpu.steps) for gpu in self.gpus)

    def gpu(self, uuid: str) -> GpuPlan | None:
        """Return the plan of the GPU with this UUID, or None."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the plan may do. `reset` and `reboot`: what may follow a mode change that stays pending.
    `force` lifts the allocation check (not the one on processes). `disable_unlisted` turns MIG off
    on GPUs that no layout names, if at least one layout is declared."""

    reset: bool = True
    reboot: bool = False
    force: bool = False
    disable_unlisted: bool = False


def compute(layout: layouts.Layout, node: nodes.NodeState, policy: Policy) -> Plan:
    """Plan the way of every GPU of `node` to `layout`. Pure; see the module's docstring."""
    raise NotImplementedError
