"""What is known of an EC2 type without asking anybody: its GPUs, and which drivers they take.

The table is the simulator's (made by packaging/generate_tables.py); only the one row that is asked for is
parsed, so that the daemon does not pay for all of them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import tomli

from agent import records

_TABLE = Path(__file__).resolve().parents[1] / "sim" / "instances.toml"


@records.dataclass(frozen=True, slots=True)
class InstanceType:
    """An EC2 type with NVIDIA GPUs. None is "not published", never a guess.

    `gpus` is what NVML enumerates before MIG, `fraction` the part of a GPU each is (1.0: whole),
    `memory_mib` a GPU's memory as the EC2 API has it (it mixes units: compare with 10 % tolerance).
    """

    name: str
    family: str
    gpus: int | None
    fraction: float
    mig_capable: bool
    memory_mib: int | None
    driver_kind: str | None
    driver_min_major: int | None
    driver_excluded_majors: tuple[int, ...]


@functools.lru_cache(maxsize=4)
def instance_type(name: str | None) -> InstanceType | None:
    """Return what is known of a type; None for one that is not in the table, or for None."""
    if name is None:
        return None
    for block in _TABLE.read_text(encoding="utf-8").split("[[instance_types]]"):
        if re.search(rf'^name = "{re.escape(name)}"$', block, re.MULTILINE):
            row = tomli.loads(block)
            return InstanceType(
                name=name,
                family=row["family"],
                gpus=row.get("count"),
                fraction=row["fraction"],
                mig_capable=row["mig_capable"],
                memory_mib=row.get("api_memory_mib"),
                driver_kind=row.get("driver_kind"),
                driver_min_major=row.get("driver_min_major"),
                driver_excluded_majors=tuple(row["driver_excluded_majors"]),
            )
    return None
