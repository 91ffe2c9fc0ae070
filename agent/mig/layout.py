"""What is wanted: which GPU is split, into which instances. Made by `agent.settings.resolve`."""

from __future__ import annotations

from agent import records
from agent.mig import profile as profiles


@records.dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One wanted GPU instance. `profile` is exactly one of the GPU's offers.

    `compute` lists the compute instances wanted in it, () meaning one over the whole instance.
    `start` fixes the first memory slice, None leaves it to the planner.
    """

    profile: profiles.Profile
    compute: tuple[profiles.Profile, ...] = ()
    start: int | None = None


@records.dataclass(frozen=True, slots=True)
class GpuLayout:
    """What one GPU shall be. `mig` False means MIG off and no instances. `origin` says where that
    was declared, for people."""

    uuid: str
    mig: bool
    instances: tuple[InstanceSpec, ...] = ()
    origin: str = ""


@records.dataclass(frozen=True, slots=True)
class Layout:
    """What the node shall be: only the GPUs that somebody declared something for."""

    gpus: tuple[GpuLayout, ...] = ()

    def gpu(self, uuid: str) -> GpuLayout | None:
        """Return what is wanted of the GPU with this UUID, or None when nothing is."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        return None
