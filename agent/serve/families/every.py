"""All families, in the order in which they are served."""

from __future__ import annotations

from agent.serve.families import activity, agent, allocation, faults, gpu, layout, links, memory, mig, power, schedulers
from agent.serve.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *agent.FAMILIES,
    *layout.FAMILIES,
    *gpu.FAMILIES,
    *memory.FAMILIES,
    *activity.FAMILIES,
    *power.FAMILIES,
    *links.FAMILIES,
    *faults.FAMILIES,
    *mig.FAMILIES,
    *allocation.FAMILIES,
    *schedulers.FAMILIES,
)
