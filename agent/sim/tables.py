"""The tables of GPUs and EC2 types that the simulator lives by, read from the TOML beside this file.

The tables are made by packaging/generate_tables.py; a key that is missing there is unknown and None here.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import tomli

_HERE = Path(__file__).resolve().parent
SEVEN_SLICES = 8
"""Memory slices of the parts whose compute comes in sevenths (A100, H100, B200 ...)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeProfile:
    """A compute-instance profile within its GPU-instance profile; `starts` count compute slices."""

    name: str
    index: int
    id: int
    slices: int
    starts: tuple[int, ...]
    multiprocessors: int
    max_instances: int
    default: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A GPU-instance profile. `index` is NVML's selector, `id` what nvidia-smi prints; `starts` and
    `size` count memory slices. Engine counts are None where nobody has printed them."""

    name: str
    aliases: tuple[str, ...]
    index: int
    id: int
    slices: int
    starts: tuple[int, ...]
    size: int
    memory_mib: int
    multiprocessors: int
    max_instances: int
    p2p: bool | None
    graphics: bool
    engines: tuple[int | None, int | None, int | None, int | None, int | None]
    compute: tuple[ComputeProfile, ...]
    derived: tuple[str, ...]

    def compute_profile(self, number: int, /) -> ComputeProfile | None:
        """Return the compute profile with this profile id, or None."""
        for profile in self.compute:
            if profile.id == number:
                return profile
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A GPU model. `engines` are those of the whole GPU (copy, decoder, encoder, JPEG, OFA): the pool
    its instances share. `geometry_known` False: it can do MIG, but nobody has published its profiles."""

    id: str
    model_key: str
    title: str
    name: str
    device_id: int
    form_factor: str
    architecture: str
    compute_capability: tuple[int, int]
    memory_mib: int
    multiprocessors: int
    memory_slices: int
    compute_slices: int
    mig_capable: bool
    geometry_known: bool
    resetless: bool
    mode_survives_reboot: bool
    gpm: bool
    virtual: bool
    confidence: str
    derived: tuple[str, ...]
    profiles: tuple[Profile, ...]
    engines: tuple[int | None, int | None, int | None, int | None, int | None]

    def profile(self, number: int, /) -> Profile | None:
        """Return the profile with this profile id, or None."""
        for profile in self.profiles:
            if profile.id == number:
                return profile
        return None

    def profile_by_index(self, index: int, /) -> Profile | None:
        """Return the profile behind NVML's selector, or None."""
        for profile in self.profiles:
            if profile.index == index:
                return profile
        return None

    @property
    def max_mig_devices(self) -> int:
        """How many MIG devices a GPU can have at most."""
        return self.compute_slices


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceType:
    """An EC2 type with NVIDIA GPUs; `count` is None where it is not published."""

    name: str
    family: str
    architecture: str
    model: str
    count: int | None
    fraction: float
    mig_capable: bool
    api_count: int | None
    ecs_values: tuple[str, ...]
    driver_kind: str | None
    driver_min_major: int | None
    driver_excluded_majors: tuple[int, ...]
    notes: tuple[str, ...]


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomli.load(file)


_ENGINES = ("copy_engines", "decoders", "encoders", "jpeg", "ofa")


def _engines(table: dict[str, Any]) -> tuple[int | None, int | None, int | None, int | None, int | None]:
    copy, decoders, encoders, jpeg, ofa = (table.get(key) for key in _ENGINES)
    return (copy, decoders, encoders, jpeg, ofa)


def _compute(table: dict[str, Any]) -> ComputeProfile:
    return ComputeProfile(
        name=table["name"],
        index=table["index"],
        id=table["id"],
        slices=table["slices"],
        starts=tuple(table["starts"]),
        multiprocessors=table["multiprocessors"],
        max_instances=table["max_instances"],
        default=table["default"],
    )


def _profile(table: dict[str, Any]) -> Profile:
    return Profile(
        name=table["name"],
        aliases=tuple(table["aliases"]),
        index=table["index"],
        id=table["id"],
        slices=table["slices"],
        starts=tuple(table["starts"]),
        size=table["size"],
        memory_mib=table["memory_mib"],
        multiprocessors=table["multiprocessors"],
        max_instances=table["max_instances"],
        p2p=table.get("p2p"),
        graphics=table["graphics"],
        engines=_engines(table),
        compute=tuple(_compute(row) for row in table["compute"]),
        derived=tuple(table["derived"]),
    )


@functools.cache
def model(identifier: str, /) -> Model:
    """Return the model with this table id ("a100-40gb"). Raises KeyError when there is none."""
    path = _HERE / "gpus" / f"{identifier}.toml"
    if not path.is_file():
        raise KeyError(identifier)
    table = _load(path)
    profiles = tuple(_profile(row) for row in table.get("profiles", ()))
    whole = max(profiles, key=lambda p: (p.slices, -p.index), default=None)
    major, _, minor = table.get("compute_capability", "0.0").partition(".")
    return Model(
        id=table["id"],
        model_key=table["model_key"],
        title=table["title"],
        name=table["names"][0] if table["names"] else f"NVIDIA {table['title']}",
        device_id=int(table["pci_device_ids"][0], 16) if table["pci_device_ids"] else 0,
        form_factor=table["form_factors"][0] if table["form_factors"] else "",
        architecture=table["architecture"],
        compute_capability=(int(major), int(minor)),
        memory_mib=table.get("memory_mib", 0),
        multiprocessors=table.get("multiprocessors", 0),
        memory_slices=table.get("memory_slices", 0),
        compute_slices=table.get("compute_slices", 0),
        mig_capable=table["mig_capable"],
        geometry_known=table["geometry_known"],
        resetless=table["resetless"],
        mode_survives_reboot=table["mode_survives_reboot"],
        gpm=table["gpm"],
        virtual=table["virtual"],
        confidence=table["confidence"],
        derived=tuple(table["derived"]),
        profiles=profiles,
        engines=whole.engines if whole else (None, None, None, None, None),
    )


@functools.cache
def model_ids() -> tuple[str, ...]:
    """Return the ids of all models, sorted."""
    return tuple(sorted(path.stem for path in (_HERE / "gpus").glob("*.toml")))


@functools.cache
def models_of_key(key: str, /) -> tuple[str, ...]:
    """Return the ids of the models that settings call `key` ("h100.80gb"), the likeliest one first:
    observed before derived, then the SXM or server form that EC2 has."""
    head = key.partition(".")[0]
    near = [i for i in model_ids() if i == head or i.startswith(head + "-")]
    found = [i for i in near if model(i).model_key == key]
    return tuple(
        sorted(found, key=lambda i: (model(i).confidence != "observed", "sxm" not in i and "server" not in i, len(i)))
    )


@functools.cache
def instance_types() -> dict[str, InstanceType]:
    """Return every EC2 type by name, in the order of the facts."""
    found = {}
    for row in _load(_HERE / "instances.toml")["instance_types"]:
        found[row["name"]] = InstanceType(
            name=row["name"],
            family=row["family"],
            architecture=row["architecture"],
            model=row["model"],
            count=row.get("count"),
            fraction=row["fraction"],
            mig_capable=row["mig_capable"],
            api_count=row.get("api_count"),
            ecs_values=tuple(str(v) for v in row.get("ecs_values", ())),
            driver_kind=row.get("driver_kind"),
            driver_min_major=row.get("driver_min_major"),
            driver_excluded_majors=tuple(row["driver_excluded_majors"]),
            notes=tuple(row["notes"]),
        )
    return found


@functools.cache
def _driver() -> dict[str, Any]:
    return _load(_HERE / "driver.toml")


@functools.cache
def gi_id_map(name: str, /) -> dict[tuple[int, int], int]:
    """Return the GPU-instance id for each (start, size) by the map of this name ("seven-slice-A")."""
    for row in _driver()["gi_id_maps"]:
        if row["name"] == name:
            return {(start, size): number for start, size, number in row["spans"]}
    raise KeyError(name)


@functools.cache
def automatic_order(identifier: str, profile: int, driver_major: int, /) -> tuple[int, ...]:
    """Return the starts a driver tries, in its order, when no placement is given."""
    part = model(identifier)
    wanted = part.profile(profile)
    if wanted is None:
        raise KeyError(profile)
    if part.memory_slices == SEVEN_SLICES:
        for row in _driver()["orders"]:
            if (
                row["slices"] == wanted.slices
                and row["size"] == wanted.size
                and driver_major <= row.get("last_driver_major", driver_major)
            ):
                return tuple(row["starts"])
    return tuple(sorted(wanted.starts))
