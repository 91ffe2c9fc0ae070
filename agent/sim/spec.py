"""What a simulated node is made of, before anything has happened on it: a name or a file becomes a `Node`.

A node file is TOML (all keys optional but a type or at least one GPU):

    name = "lab"
    instance-type = "p4d.24xlarge"    # gives the GPUs when no [[gpu]] is written
    root = true                       # false: this process may not change GPUs
    driver-version = "590.48.01"      # also decides which functions the library exports
    missing-functions = ["nvmlDeviceGetTemperatureV"]
    persistenced = true               # nvidia-persistenced runs: it holds the GPUs against a reset
    scheduler = "none"                # none | kubelet | ecs: whose agent is active
    profiles-need-mig = false         # profiles are told only while MIG is on
    reset = "possible"                # or "impossible"
    load = "idle"                     # or "busy": a process on every instance (and on GPUs without MIG)
    seed = 0                          # of everything that moves

    [latency]                         # seconds a call takes; outside all locks
    read = 0.0002
    change = 0.02                     # create-gi, destroy-gi, create-ci, destroy-ci, set-mode override it
    create-gi = 0.15
    pcie-throughput = 0.02

    [[gpu]]
    model = "a100.40gb"               # a settings key, or a table id like "h100-pcie-80gb"
    count = 2
    mode-change = "pending"           # pending | in-use | immediate (parts that need a reset)
    gi-id-map = "A"                   # A | B, else drawn from the GPU's UUID
    uuid = "GPU-…"                    # only with count = 1

    [[fault]]                         # as `gpunode simulate fault` takes them
    call = "nvmlDeviceCreateGpuInstanceWithPlacement"
    action = "fail"                   # fail | delay | hang
    code = 999
    gpu = 3
    skip = 2                          # let so many pass first
    times = 1
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from agent import errors
from agent.sim import tables

DRIVER = "590.48.01"
NAMESPACE = uuid.UUID("5d1d4a52-9f0e-5c0b-8d1f-0c6d6f8f1b7a")
MODE_CHANGES = ("pending", "in-use", "immediate")
LATENCIES = ("read", "change", "create-gi", "destroy-gi", "create-ci", "destroy-ci", "set-mode", "pcie-throughput")
_DRIVER_OF_MAJOR = {590: DRIVER, 595: "595.71.05"}
_CUDA_OF_MAJOR = {
    595: 13020,
    590: 13010,
    580: 13000,
    575: 12090,
    570: 12080,
    565: 12070,
    560: 12060,
    555: 12050,
    550: 12040,
}
_MAX_GPUS = 128


class SimulationError(errors.GpunodeError):
    """The simulated node asked for does not exist or cannot be; exit code 2."""

    exit_code = errors.EXIT_USAGE


class UnpublishedError(SimulationError):
    """The node exists, and what it is made of is not published: right to ask for, and not possible
    here; exit code 4."""

    exit_code = errors.EXIT_BLOCKED


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: `model` is a table id, `pci_bus_id` in NVML's long form (00000000:10:1C.0)."""

    model: str
    uuid: str
    pci_bus_id: str
    serial: str
    mode_change: str
    gi_id_map: str


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A whole node; equal specs give equal nodes, UUIDs included."""

    name: str
    instance_type: str | None
    architecture: str
    gpus: tuple[Gpu, ...]
    driver_version: str = DRIVER
    nvml_version: str = f"13.{DRIVER}"
    cuda_version: int = 13010
    driver_kind: str = "open"
    root: bool = True
    persistenced: bool = False
    scheduler: str = "none"
    profiles_need_mig: bool = False
    reset_possible: bool = True
    load: str = "idle"
    seed: int = 0
    missing_functions: tuple[str, ...] = ()
    latency: tuple[tuple[str, float], ...] = (("pcie-throughput", 0.02),)
    faults: tuple[tuple[tuple[str, object], ...], ...] = ()

    @property
    def driver_major(self) -> int:
        """The driver's branch: 590 of 590.48.01."""
        return int(self.driver_version.split(".")[0])

    def digest(self) -> str:
        """Return what tells this node from another in a state file."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(text: str, /) -> Node:
    """Return the node that `text` names: an EC2 type, `MODEL[:COUNT]`, or the path of a node file.

    Raises SimulationError, naming the nearest names.
    """
    kind = tables.instance_types().get(text)
    if kind is not None:
        return _of_instance_type(kind)
    model, colon, count = text.partition(":")
    found = _model_id(model)
    if found is not None:
        if colon and not (count.isascii() and count.isdigit() and 0 < int(count) <= _MAX_GPUS):
            raise SimulationError(
                f"cannot simulate {text}: the count behind the colon is a number from 1 to {_MAX_GPUS}"
            )
        return _build(text, [{"model": model, "count": int(count) if colon else 1}], {})
    path = Path(text)
    if path.is_file():
        return read_file(path)
    if path.suffix == ".toml" or "/" in text:
        what = "it is no file" if path.exists() else "there is no such node file"
        raise SimulationError(f"cannot simulate {text}: {what}")
    raise SimulationError(f"cannot simulate {text}: {_suggest(model)}")


def _suggest(text: str) -> str:
    begun = [name for name in known_names() if text and name.startswith(text)]
    import difflib

    near = begun[:3] or difflib.get_close_matches(text, known_names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `gpunode simulate` lists them"
    return f"no EC2 type, GPU model or node file is called so{hint}"


def known_names() -> tuple[str, ...]:
    """Return every name `read` understands: EC2 types, then model keys, then table ids."""
    models = tables.model_ids()
    keys = dict.fromkeys(tables.model(identifier).model_key for identifier in models)
    return (*tables.instance_types(), *keys, *models)


def _model_id(name: str) -> str | None:
    if name in tables.model_ids():
        return name
    of_key = tables.models_of_key(name)
    return of_key[0] if of_key else None


def _of_instance_type(kind: tables.InstanceType) -> Node:
    if kind.count is None:
        raise UnpublishedError(
            f"cannot simulate {kind.name}: how many GPUs it has is not published; "
            f"write {tables.model(kind.model).model_key}:4 or a node file with the count"
        )
    return _build(
        kind.name, [{"model": kind.model, "count": kind.count}], {"instance-type": kind.name, "persistenced": True}
    )


_NODE_KEYS = {
    "name": str,
    "instance-type": str,
    "root": bool,
    "driver-version": str,
    "missing-functions": list,
    "persistenced": bool,
    "scheduler": str,
    "profiles-need-mig": bool,
    "reset": str,
    "load": str,
    "seed": int,
    "latency": dict,
    "gpu": list,
    "fault": list,
}
_GPU_KEYS = {"model": str, "count": int, "mode-change": str, "gi-id-map": str, "uuid": str}
_FAULT_KEYS = {"call": str, "action": str, "code": int, "seconds": float, "gpu": int, "skip": int, "times": int}


def read_file(path: Path, /) -> Node:
    """Return the node that a node file describes. Raises SimulationError with the file's name."""
    try:
        with path.open("rb") as file:
            document = tomli.load(file)
    except OSError as error:
        raise SimulationError(f"cannot read the node file {path}: {error.strerror}") from error
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SimulationError(f"cannot read the node file {path}: {error}") from error
    try:
        return _of_document(document, default_name=path.stem)
    except SimulationError as error:
        raise SimulationError(f"{path}: {error}") from error


def _of_document(document: Mapping[str, Any], *, default_name: str) -> Node:
    _check(document, _NODE_KEYS, "the node file")
    options = dict(document)
    rows = options.pop("gpu", None)
    name = options.pop("name", default_name)
    kind = None
    if "instance-type" in options:
        kind = tables.instance_types().get(options["instance-type"])
        if kind is None:
            raise SimulationError(f"instance-type {options['instance-type']}: {_suggest(options['instance-type'])}")
    if rows is None:
        if kind is None or kind.count is None:
            raise SimulationError("there are no GPUs: write instance-type of a known count, or [[gpu]] tables")
        rows = [{"model": kind.model, "count": kind.count}]
    for row in rows:
        _check(row, _GPU_KEYS, "[[gpu]]")
        if "model" not in row:
            raise SimulationError('[[gpu]]: say which, as model = "a100.40gb"')
    return _build(name, rows, options)


def _check(table: object, keys: Mapping[str, type], where: str) -> None:
    if not isinstance(table, dict):
        raise SimulationError(f"{where}: write a table")
    for key, value in table.items():
        if key not in keys:
            import difflib

            near = difflib.get_close_matches(key, keys, n=1)
            raise SimulationError(f"{where}: there is no key {key}" + (f"; did you mean {near[0]}?" if near else ""))
        wanted = keys[key]
        fits = isinstance(value, (int, float) if wanted is float else wanted) and (
            wanted is bool or not isinstance(value, bool)
        )
        if not fits:
            raise SimulationError(f"{where}: {key} takes {wanted.__name__}, not {value!r}")


def _one_of(value: str, choices: Sequence[str], key: str) -> str:
    if value not in choices:
        raise SimulationError(f'{key} is one of {", ".join(choices)}, not "{value}"')
    return value


def _build(name: str, rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Node:
    kind = tables.instance_types().get(str(options.get("instance-type", "")))
    gpus: list[Gpu] = []
    total = 0
    for row in rows:
        count = row.get("count", 1)
        total += count
        if not 0 < count <= _MAX_GPUS or total > _MAX_GPUS:
            raise SimulationError(f"a node has 1 to {_MAX_GPUS} GPUs")
    for row in rows:
        identifier = _model_id(row["model"])
        if identifier is None:
            raise SimulationError(f"model {row['model']}: {_suggest(row['model'])}")
        count = row.get("count", 1)
        if "uuid" in row and count != 1:
            raise SimulationError("uuid is for one GPU: write a [[gpu]] table of its own for it")
        for _ in range(count):
            gpus.append(_gpu(name, len(gpus), identifier, row))
    if len({gpu.uuid for gpu in gpus}) != len(gpus):
        raise SimulationError("two GPUs have the same uuid")
    fallback = _DRIVER_OF_MAJOR.get((kind.driver_min_major if kind else None) or 590, DRIVER)
    if any(tables.model(gpu.model).id.startswith("rtxpro4500") for gpu in gpus):
        fallback = _DRIVER_OF_MAJOR[595]
    driver = options.get("driver-version", fallback)
    major = driver.split(".")[0]
    if not (major.isascii() and major.isdigit()):
        raise SimulationError(f'driver-version looks like "{DRIVER}", not "{driver}"')
    cuda = next((c for m, c in sorted(_CUDA_OF_MAJOR.items(), reverse=True) if int(major) >= m), 12020)
    latency = {"pcie-throughput": 0.02, **options.get("latency", {})}
    _check(latency, dict.fromkeys(LATENCIES, float), "[latency]")
    faults = options.get("fault", [])
    for row in faults:
        _check(row, _FAULT_KEYS, "[[fault]]")
    return Node(
        name=name,
        instance_type=kind.name if kind else None,
        architecture=kind.architecture if kind else "amd64",
        gpus=tuple(gpus),
        driver_version=driver,
        nvml_version=f"{cuda // 1000}.{driver}",
        cuda_version=cuda,
        driver_kind=(kind.driver_kind if kind else None) or "open",
        root=options.get("root", True),
        persistenced=options.get("persistenced", False),
        scheduler=_one_of(options.get("scheduler", "none"), ("none", "kubelet", "ecs"), "scheduler"),
        profiles_need_mig=options.get("profiles-need-mig", False),
        reset_possible=_one_of(options.get("reset", "possible"), ("possible", "impossible"), "reset") == "possible",
        load=_one_of(options.get("load", "idle"), ("idle", "busy"), "load"),
        seed=options.get("seed", 0),
        missing_functions=tuple(options.get("missing-functions", ())),
        latency=tuple(sorted((k, float(v)) for k, v in latency.items())),
        faults=tuple(tuple(sorted(row.items())) for row in faults),
    )


def _gpu(node: str, index: int, identifier: str, row: Mapping[str, Any]) -> Gpu:
    model = tables.model(identifier)
    identity = row.get("uuid") or f"GPU-{uuid.uuid5(NAMESPACE, f'{node}/{index}')}"
    draw = hashlib.sha256(identity.encode()).digest()[0] % 2
    letter = _one_of(row.get("gi-id-map", "AB"[draw]), ("A", "B"), "gi-id-map")
    if model.memory_slices == tables.SEVEN_SLICES:
        numbering = f"seven-slice-{letter}"
    else:
        numbering = {4: "a30", 12: "rtxpro6000"}.get(model.memory_slices, "")
    # Addresses as EC2 hands them out: one bus in sixteen, two GPUs a bus, device 1c and 1d.
    bus = 0x10 + 0x10 * (index // 2 % 14) + index // 28
    return Gpu(
        model=identifier,
        uuid=identity,
        pci_bus_id=f"00000000:{bus:02X}:{0x1C + index % 2:02X}.0",
        serial=f"{1560000000000 + int.from_bytes(hashlib.sha256(identity.encode()).digest()[1:5], 'big'):013d}",
        mode_change=_one_of(row.get("mode-change", "pending"), MODE_CHANGES, "mode-change"),
        gi_id_map=numbering,
    )
