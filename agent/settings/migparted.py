"""mig-parted's v1 documents: a label's entries, with mig-parted's meaning and fewer silences.

Entries apply in order, and each GPU that matches both `device-filter` and `devices` gets what the
entry says; where several match, the last one counts. Stricter than mig-parted, which is silent:
a `device-filter` that cannot be read, an index that no GPU has, an empty `devices` and duplicate
keys are errors, and every profile is checked against the GPU before anything is touched.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from agent import errors
from agent.settings import document, locate, model, tables, yaml

_KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")
_FILTER = re.compile(r"(?P<device>0x[0-9a-fA-F]{1,8})(?::(?P<subsystem>0x[0-9a-fA-F]{1,8}))?")
_VENDOR = 0x10DE
_CONFIGS: locate.Path = ("mig-configs",)


def split(argument: str) -> tuple[Path, str | None]:
    """Return file and label of `FILE[:LABEL]`. A file whose own name has a colon is found as it is."""
    if ":" not in argument or Path(argument).exists():
        return Path(argument), None
    file, _, label = argument.rpartition(":")
    return Path(file), label or None


def load(
    path: Path, *, label: str | None, source: str, asked: model.Origin, problems: list[errors.Problem]
) -> model.MigPartedDeclaration | None:
    """Return what a label of a document declares, or None with what is wrong in `problems`.

    `asked` is where the document was named. Without a label the only one there is is taken.
    """
    name = document.shown(path)
    try:
        data = document.read(path)
        if data is None:
            message = f"the mig-parted document {name} does not exist"
            problems.append(_at(asked, "not-found", message, name))
            return None
        doc = parse(data, name, source)
    except document.Unreadable as cause:
        problems.append(cause.problem)
        return None
    return read(doc, label=label, asked=asked, problems=problems)


@functools.lru_cache(maxsize=4)
def parse(data: bytes, name: str, source: str) -> document.Document:
    """Parse a document, YAML or JSON; the same bytes are parsed once, as YAML takes its time.

    Raises document.Unreadable.
    """
    if data.lstrip()[:1] == b"{":
        try:
            return document.parse_json(data, name=name, source=source)
        except document.Unreadable as cause:
            if cause.problem.code != "syntax" or name.endswith(".json"):
                raise
    return yaml.parse(data, name=name, source=source)


def read(
    doc: document.Document, *, label: str | None, asked: model.Origin, problems: list[errors.Problem]
) -> model.MigPartedDeclaration | None:
    """Return what a label of a parsed document declares, or None with what is wrong in `problems`.

    The labels that are not selected are checked too, as mig-parted does.
    """
    before = sum(p.is_error for p in problems)
    _header(doc, problems)
    raw = doc.data.get("mig-configs")
    configs: dict[str, tuple[model.MigPartedEntry, ...]] = {}
    if "mig-configs" not in doc.data:
        problems.append(doc.problem("missing-key", 'the key "mig-configs" is missing', ()))
    elif not isinstance(raw, Mapping) or not raw:
        problems.append(doc.problem("wrong-type", "must hold at least one label with its entries", _CONFIGS))
    else:
        for name, entries in raw.items():
            configs[name] = _entries(doc, (*_CONFIGS, name), entries, problems)
    chosen = _choose(doc, configs, label, asked, problems)
    if chosen is None or sum(p.is_error for p in problems) > before:
        return None
    return model.MigPartedDeclaration(chosen, configs[chosen], doc.origin((*_CONFIGS, chosen)))


def _header(doc: document.Document, problems: list[errors.Problem]) -> None:
    for key in doc.data:
        if key not in ("version", "mig-configs"):
            problems.append(doc.problem("unknown-key", tables.unknown_key(key, ("version", "mig-configs")), (key,)))
    version = doc.data.get("version")
    if "version" not in doc.data:
        problems.append(doc.problem("missing-key", 'the key "version" is missing (it must be v1)', ()))
    elif version != "v1":
        message = f"{document.quote(version)} is not valid here; gpunode reads version v1"
        problems.append(doc.problem("invalid-value", message, ("version",)))


def _choose(
    doc: document.Document,
    configs: Mapping[str, object],
    label: str | None,
    asked: model.Origin,
    problems: list[errors.Problem],
) -> str | None:
    """Return the label to use, or None with the reason in `problems`."""
    if not configs or label in configs:
        return label if label in configs else None
    if label is None and len(configs) == 1:
        return next(iter(configs))
    names = ", ".join(document.quote(name).strip('"') for name in list(configs)[:20])
    if label is None:
        message = f"has several labels, so one must be named (FILE:LABEL): {names}"
        problems.append(errors.Problem("error", "label", message, file=doc.name))
        return None
    near = tables.nearest(label, configs)
    hint = f'did you mean "{near}"? There are' if near else "there are"
    message = f"there is no label {document.quote(label)} in {doc.name}; {hint} {names}"
    problems.append(_at(asked, "label", message, doc.name))
    return None


def _at(asked: model.Origin, code: str, message: str, name: str) -> errors.Problem:
    """Return a problem with how a document was asked for."""
    return errors.Problem("error", code, message, file=asked.file or name, line=asked.line, key=asked.key)


def _entries(
    doc: document.Document, path: locate.Path, raw: object, problems: list[errors.Problem]
) -> tuple[model.MigPartedEntry, ...]:
    if not isinstance(raw, list) or not raw:
        problems.append(doc.problem("wrong-type", "must be a list with at least one entry", path))
        return ()
    found = [_entry(doc, (*path, number), entry, problems) for number, entry in enumerate(raw)]
    return tuple(entry for entry in found if entry is not None)


def _entry(
    doc: document.Document, path: locate.Path, raw: object, problems: list[errors.Problem]
) -> model.MigPartedEntry | None:
    if not isinstance(raw, Mapping):
        message = f"must be a mapping with devices and mig-enabled, and is {document.quote(raw)}"
        problems.append(doc.problem("wrong-type", message, path))
        return None
    before = sum(p.is_error for p in problems)
    for key in raw:
        if key not in _KEYS:
            problems.append(doc.problem("unknown-key", tables.unknown_key(key, _KEYS), (*path, key)))
    filters = _filters(doc, (*path, "device-filter"), raw.get("device-filter", []), problems)
    devices = _devices(doc, path, raw, problems)
    enabled = raw.get("mig-enabled")
    if "mig-enabled" not in raw:
        problems.append(doc.problem("missing-key", 'the key "mig-enabled" is missing', path))
    elif not isinstance(enabled, bool):
        message = f"must be true or false, and is {document.quote(enabled)}"
        problems.append(doc.problem("wrong-type", message, (*path, "mig-enabled")))
    instances = _instances(doc, path, raw, enabled, problems)
    if devices is None or not isinstance(enabled, bool) or sum(p.is_error for p in problems) > before:
        return None
    selectors: tuple[model.Origin, ...] = ()
    if devices != "all":
        selectors = tuple(doc.origin((*path, "devices", number)) for number in range(len(devices)))
    return model.MigPartedEntry(
        devices=devices,
        mig=enabled,
        origin=doc.origin(path),
        filters=filters,
        selectors=selectors,
        instances=instances,
    )


def _devices(
    doc: document.Document, path: locate.Path, raw: Mapping[str, object], problems: list[errors.Problem]
) -> Literal["all"] | tuple[int, ...] | None:
    at = (*path, "devices")
    if "devices" not in raw:
        problems.append(doc.problem("missing-key", 'the key "devices" is missing', path))
        return None
    value = raw["devices"]
    if value == "all":
        return "all"
    if not isinstance(value, list):
        hint = f"[{value}]" if type(value) is int and value >= 0 else "[0, 1]"
        message = f'must be "all" or a list like {hint}, and is {document.quote(value)}'
        problems.append(doc.problem("wrong-type", message, at))
        return None
    if not value:
        problems.append(doc.problem("selector", "names no GPU: the list is empty", at))
    found = []
    for number, index in enumerate(value):
        if type(index) is not int or index < 0:
            message = f"must be the index of a GPU (a whole number from 0), and is {document.quote(index)}"
            problems.append(doc.problem("wrong-type", message, (*at, number)))
        else:
            found.append(index)
    return tuple(found)


def _filters(
    doc: document.Document, path: locate.Path, raw: object, problems: list[errors.Problem]
) -> tuple[model.DeviceFilter, ...]:
    """Read `device-filter`: one text or a list of them, each `0x20B010DE`, with `:0x…` for the subsystem."""
    if isinstance(raw, list):
        members = [((*path, number), member) for number, member in enumerate(raw)]
    else:
        members = [(path, raw)]
    found = []
    for at, member in members:
        if not isinstance(member, str):
            hint = f'; write it in quotes: "0x{member:08X}"' if type(member) is int and 0 < member < 2**32 else ""
            message = f'must be text like "0x20B010DE", and is {document.quote(member)}{hint}'
            problems.append(doc.problem("wrong-type", message, at))
            continue
        match = _FILTER.fullmatch(member)
        if match is None:
            message = f"{document.quote(member)} is no device filter like 0x20B010DE (PCI device, then vendor 10DE)"
            problems.append(doc.problem("device-filter", message, at))
            continue
        device = int(match["device"], 16)
        if device & 0xFFFF != _VENDOR:
            message = f"{document.quote(member)} matches no NVIDIA GPU: its last four digits are the vendor, 10DE"
            problems.append(doc.problem("device-filter", message, at))
            continue
        subsystem = match["subsystem"]
        found.append(model.DeviceFilter(device, None if subsystem is None else int(subsystem, 16)))
    return tuple(found)


def _instances(
    doc: document.Document,
    path: locate.Path,
    raw: Mapping[str, object],
    enabled: object,
    problems: list[errors.Problem],
) -> tuple[model.WantedInstance, ...]:
    at = (*path, "mig-devices")
    value = raw.get("mig-devices")
    if value is None:
        if enabled is True:
            message = 'the key "mig-devices" is missing ({} means MIG on without instances)'
            problems.append(doc.problem("missing-key", message, path))
        return ()
    if not isinstance(value, Mapping):
        message = f"must be a mapping of profiles to counts, and is {document.quote(value)}"
        problems.append(doc.problem("wrong-type", message, at))
        return ()
    if value and enabled is False:
        problems.append(doc.problem("instances-without-mig", "has instances although mig-enabled is false", at))
    found = []
    good = True
    for name, count in value.items():
        profile = tables.parse_profile(doc, (*at, name), name, problems)
        if type(count) is not int or not 0 <= count <= model.MANY:
            message = f"must be a whole number from 0 to {model.MANY}, and is {document.quote(count)}"
            problems.append(doc.problem("wrong-type", message, (*at, name)))
            good = False
        elif profile is not None and count > 0:
            found.append(model.WantedInstance(profile, doc.origin((*at, name)), count=count))
    if value and good and not any(value.values()):
        problems.append(doc.problem("invalid-value", "all counts are 0; write {} for MIG on without instances", at))
    return tuple(found)
