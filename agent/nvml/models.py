"""Which settings key a GPU goes by (`a100.40gb`), from its PCI id and memory; the table is models.toml."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import tomli

from agent import records
from agent.mig import profile as profiles

_TABLE = Path(__file__).with_name("models.toml")
_VENDOR = 0x10DE
_BRANDS = frozenset({"nvidia", "tesla", "quadro", "geforce", "graphics", "device"})
_SIZE = re.compile(r"[0-9]+gb?", re.ASCII)
_FORMS = frozenset(
    {
        "pcie",
        "sxm",
        "sxm2",
        "sxm3",
        "sxm4",
        "sxm5",
        "sxm6",
        "nvl",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "server",
        "edition",
    }
)


@records.dataclass(frozen=True, slots=True)
class _Part:
    key: str
    memory_mib: int | None
    bottlerocket: str | None


@records.dataclass(frozen=True, slots=True)
class _Table:
    parts: Mapping[int, tuple[_Part, ...]]
    aliases: Mapping[str, Mapping[str, tuple[str, ...]]]


@functools.cache
def _table() -> _Table:
    with _TABLE.open("rb") as file:
        document = tomli.load(file)
    parts: dict[int, tuple[_Part, ...]] = {}
    for row in document["part"]:
        part = _Part(row["key"], row.get("memory-mib"), row.get("bottlerocket"))
        parts[row["pci"]] = (*parts.get(row["pci"], ()), part)
    aliases = {
        key: {name: tuple(others) for name, others in names.items()} for key, names in document["aliases"].items()
    }
    return _Table(parts, aliases)


def device_of(pci_device_id: int) -> int:
    """Return the 16-bit device id of what NVML tells: device in the upper half, vendor in the lower."""
    return pci_device_id >> 16 if pci_device_id & 0xFFFF == _VENDOR else pci_device_id & 0xFFFF


def key(pci_device_id: int, *, name: str, memory_bytes: int) -> str:
    """Return the settings key of a GPU: from the table, else made from its name and its whole GiB."""
    part = _part(device_of(pci_device_id), memory_bytes)
    return part.key if part is not None else _derived(name, memory_bytes)


def bottlerocket_key(pci_device_id: int) -> str | None:
    """Return the key under which Bottlerocket looks for a GPU of this PCI id, None when it knows none."""
    for part in _table().parts.get(device_of(pci_device_id), ()):
        if part.bottlerocket is not None:
            return part.bottlerocket
    return None


def aliases(model: str, profile: profiles.Profile) -> tuple[profiles.Profile, ...]:
    """Return other names that tools or older drivers print for a profile of this model."""
    others = _table().aliases.get(model, {}).get(str(profile), ())
    return tuple(profiles.parse(name) for name in others)


def _part(device: int, memory_bytes: int) -> _Part | None:
    parts = _table().parts.get(device, ())
    if len(parts) < 2:
        return parts[0] if parts else None

    def distance(part: _Part) -> int:
        size = part.memory_mib or int(part.key.rpartition(".")[2].removesuffix("gb")) * 1024
        return abs(size - memory_bytes // 2**20)

    return min(parts, key=distance)


def _derived(name: str, memory_bytes: int) -> str:
    words = [word for word in re.split(r"[\s/_-]+", name.lower()) if word and word not in _BRANDS]
    words = [word for word in words if not _SIZE.fullmatch(word) and word not in _FORMS]
    family = re.sub(r"[^a-z0-9-]", "", "".join(words)) or "gpu"
    return f"{family}.{-(-memory_bytes // 2**30)}gb"
