"""gpunode's own tables: `[gpunode]` with its options, layouts and the mig-parted reference.

Unknown keys are refused here, with the nearest word that exists. The same file may hold Bottlerocket's
tables, which `agent.settings.bottlerocket` reads; all others are left to whoever they are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from agent import errors
from agent.settings import bottlerocket, document, locate, migparted, model, tables

_GPUNODE: locate.Path = ("gpunode",)


@dataclasses.dataclass(slots=True)
class Part:
    """What one document says: options by field name with their origins, and what it declares.

    `reads` are other files it refers to. `said` is whether it says anything to us at all.
    """

    name: str
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    origins: dict[str, model.Origin] = dataclasses.field(default_factory=dict)
    layouts: tuple[model.LayoutEntry, ...] = ()
    bottlerocket: bottlerocket.Table | None = None
    mig_parted: model.MigPartedDeclaration | None = None
    reads: list[Path] = dataclasses.field(default_factory=list)
    said: bool = False


def read(doc: document.Document, problems: list[errors.Problem], *, root: Path = Path("/")) -> Part:
    """Return what a document says. Absolute names of other files are looked up below `root`."""
    part = Part(doc.name)
    known = [key for key in ("gpunode", "settings") if key in doc.data]
    for key in doc.data:
        near = next((k for k in ("gpunode", "settings") if tables.alike(str(key), k)), None)
        if near is not None:
            message = f'unknown table {document.quote(key)}; did you mean "{near}"?'
            problems.append(doc.problem("unknown-key", message, (key,)))
            known.append(near)
    if doc.data and not known:
        message = "has neither a [gpunode] nor a [settings] table, so it says nothing to gpunode"
        problems.append(errors.Problem("warning", "nothing-said", message, file=doc.name))
    part.said = bool(known)
    if "settings" in doc.data:
        part.bottlerocket = bottlerocket.read_user_data(doc, problems)
    if "gpunode" in doc.data:
        _gpunode(doc, doc.data["gpunode"], part, problems, root)
    return part


def _gpunode(doc: document.Document, raw: object, part: Part, problems: list[errors.Problem], root: Path) -> None:
    table = tables.check(model.GpunodeTable, doc, _GPUNODE, raw, problems)
    if table is None:
        return
    for field in model.OPTIONS:
        if field in table.model_fields_set:
            part.options[field] = option(field, getattr(table, field), base=_base(doc, root))
            key = field.replace("_", "-")
            part.origins[key] = doc.origin((*_GPUNODE, key))
    part.layouts = tuple(
        entry
        for number, layout in enumerate(table.layout)
        if (entry := _layout(doc, (*_GPUNODE, "layout", number), layout, problems)) is not None
    )
    if table.mig_parted is not None:
        at = (*_GPUNODE, "mig-parted")
        path = _base(doc, root) / table.mig_parted.file
        if Path(table.mig_parted.file).is_absolute():
            path = root / table.mig_parted.file.lstrip("/")
        part.reads.append(path)
        part.mig_parted = migparted.load(
            path, label=table.mig_parted.config, source=doc.source, problems=problems, asked=doc.origin(at)
        )


def _base(doc: document.Document, root: Path) -> Path:
    """Return the directory that relative names in a document start from."""
    return root if doc.path is None else doc.path.parent


def option(field: str, value: object, *, base: Path) -> object:
    """Return a checked value of an option as `Settings` holds it."""
    if field == "web_config_file":
        return None if value is None else base / str(value)
    if field == "after_change":
        assert isinstance(value, list)
        return tuple(model.AfterChange(tuple(v.command), float(v.timeout_seconds)) for v in value)
    if isinstance(value, list):
        return tuple(dict.fromkeys(value))
    return float(value) if type(value) is int else value


def _layout(
    doc: document.Document, path: locate.Path, table: model.LayoutTable, problems: list[errors.Problem]
) -> model.LayoutEntry | None:
    """Return one layout, or None with what is wrong in `problems`."""
    before = sum(p.is_error for p in problems)
    if (table.gpus is None) == (table.model is None):
        message = 'names no GPU: give gpus = "all", gpus = [0, 1] or model = "a100.40gb"'
        if table.gpus is not None:
            message = "names GPUs twice: give either gpus or model"
        problems.append(doc.problem("selector", message, path))
    mig = table.mig is not False
    if not mig and table.instances:
        problems.append(
            doc.problem("instances-without-mig", "has instances although mig = false", (*path, "instances"))
        )
    if mig and table.instances is None:
        message = "says nothing to do: give instances, or mig = false (instances = {} is MIG on without instances)"
        if table.mig is None:
            problems.append(doc.problem("missing-key", message, path))
    gpus: Literal["all"] | tuple[int | str, ...] | None = None
    selectors: tuple[model.Origin, ...] = ()
    if isinstance(table.gpus, list):
        gpus = tuple(table.gpus)
        places = [(*path, "gpus", number) for number in range(len(gpus))]
        selectors = tuple(doc.origin(place) for place in places)
        for gpu, place in zip(gpus, places, strict=True):
            if isinstance(gpu, str) and not is_address(gpu):
                message = f"{document.quote(gpu)} names no GPU: give an index, a UUID like GPU-… or a PCI address"
                if gpu.startswith("MIG-"):
                    message = f"{document.quote(gpu)} is a MIG device; name the GPU that it is on"
                problems.append(doc.problem("selector", message, place))
    else:
        gpus = table.gpus
    wanted = _instances(doc, (*path, "instances"), table.instances, problems)
    if sum(p.is_error for p in problems) > before:
        return None
    return model.LayoutEntry(
        mig=mig,
        origin=doc.origin(path),
        gpus=gpus,
        selectors=selectors,
        model=table.model,
        instances=wanted,
    )


def is_address(text: str) -> bool:
    """Whether a text is a GPU's UUID or a PCI address (the domain may be left out)."""
    return model.GPU_UUID.fullmatch(text) is not None or model.PCI_ADDRESS.fullmatch(text) is not None


def _instances(
    doc: document.Document,
    path: locate.Path,
    raw: Mapping[str, int] | list[model.InstanceTable] | None,
    problems: list[errors.Problem],
) -> tuple[model.WantedInstance, ...]:
    found = []
    if isinstance(raw, list):
        for number, table in enumerate(raw):
            at = (*path, number)
            profile = tables.parse_profile(doc, (*at, "profile"), table.profile, problems)
            parts = tuple(
                parsed
                for n, text in enumerate(table.compute or ())
                if (parsed := tables.parse_profile(doc, (*at, "compute", n), text, problems)) is not None
            )
            if profile is None:
                continue
            if not profile.is_gpu_instance:
                message = (
                    f'{profile} is a compute instance; write profile = "{profile.gpu_instance}" '
                    f'with compute = ["{profile}"]'
                )
                problems.append(doc.problem("profile-kind", message, (*at, "profile")))
            for n, part in enumerate(parts):
                if part.gpu_instance != profile:
                    message = f"{part} is no part of a {profile}; its parts are named like {profile.part(1)}"
                    problems.append(doc.problem("profile-kind", message, (*at, "compute", n)))
            found.append(model.WantedInstance(profile, doc.origin(at), start=table.start, compute=parts))
    else:
        for text, count in (raw or {}).items():
            profile = tables.parse_profile(doc, (*path, text), text, problems)
            if profile is not None and count > 0:
                found.append(model.WantedInstance(profile, doc.origin((*path, text)), count=count))
    return tuple(found)
