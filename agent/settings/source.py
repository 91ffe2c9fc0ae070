"""The chain of sources: what each says, which of them wins, and where every value came from.

Lowest first: defaults, the Bottlerocket host (its API, else the file of its MIG manager), user data
(EC2's part if enabled, then this container's), the configuration files, environment, flags. Per key
the later wins; the layout as a whole is one key. `--settings` files replace all but environment
and flags. A source that is there and cannot be read is an error, never "nothing declared".
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agent import errors, log, records
from agent.settings import bottlerocket, document, migparted, model, tables, toml, userdata, watch

CONFIG_FILE = "etc/gpunode/config.toml"
CONFIG_DIRECTORY = "etc/gpunode/config.d"
ENVIRONMENT = "GPUNODE_"
TOLD = 100
"""How many problems are told at most."""

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LISTS = ("mode_change", "release_before_reset", "listen")
_NUMBERS = ("sample_interval", "period")
_FLAGS = ("live_mode_change", "allow_mig_on_ecs", "dcgm_metrics", "ec2_user_data")
_FROM_ENVIRONMENT = tuple(field for field in model.OPTIONS if field != "after_change")


@dataclasses.dataclass(slots=True)
class Seen:
    """Files that the last load read because another file names them; `fingerprint` watches them too."""

    files: tuple[Path, ...] = ()


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where to look.

    `root` is the directory under which the host's files lie. `files` are those of `--settings`,
    `mig_config` is FILE[:LABEL]; both are names as this process sees them. `flags` are options by
    field name. `bottlerocket_socket` replaces the API's well-known sockets. `timeout` is in seconds.
    """

    root: Path = Path("/")
    files: tuple[Path, ...] = ()
    mig_config: str | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, object] = dataclasses.field(default_factory=dict)
    bottlerocket_socket: Path | None = None
    timeout: float = bottlerocket.TIMEOUT
    seen: Seen = dataclasses.field(default_factory=Seen, compare=False)


@dataclasses.dataclass(slots=True)
class _Layer:
    """What one source says, all its documents together."""

    sources: list[str] = dataclasses.field(default_factory=list)
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    origins: dict[str, model.Origin] = dataclasses.field(default_factory=dict)
    declaration: model.Declaration | None = None


def load(request: Request) -> model.Settings:
    """Return the settings, merged from all sources. Raises SettingsError with everything found."""
    problems: list[errors.Problem] = []
    reads: list[Path] = []
    files = settings_files(request)
    view, host = _host(request, problems, counts=not files)
    above = [_environment(request, problems, reads), _flags(request, problems, reads)]
    if files:
        layers = [_documents(request, files, "--settings", problems, reads, must_exist=True), *above]
    else:
        config = _documents(request, _config_files(request, problems), "configuration", problems, reads)
        container = _documents(request, userdata.container_files(request.root), "user data", problems, reads)
        ec2 = _Layer()
        if _enabled((config, *above)):
            ec2 = _ec2(request, problems, reads)
        layers = [host, ec2, container, config, *above]
    request.seen.files = tuple(dict.fromkeys(reads))
    found = tuple(dict.fromkeys(problems))
    if any(problem.is_error for problem in found):
        raise errors.SettingsError(_first(found))
    return _merge(layers, view, found)


def fingerprint(request: Request) -> str:
    """Return a short text that changes whenever `load` could answer otherwise.

    Files are only looked at; the API is asked, as it has no other way to tell that it changed.
    """
    paths = [*settings_files(request), *request.seen.files]
    if request.mig_config is not None:
        paths.append(migparted.split(request.mig_config)[0])
    if not settings_files(request):
        directory = request.root / CONFIG_DIRECTORY
        paths += [request.root / CONFIG_FILE, directory, *_drop_ins(directory, lambda _: None)]
        paths += [*userdata.container_files(request.root), request.root / userdata.EC2_FILE]
    parts = watch.stamps(paths)
    parts += watch.stamps(request.root / name for name in bottlerocket.MANAGER_FILES)
    socket = _socket(request)
    if socket is not None:
        try:
            parts.append(hashlib.sha256(bottlerocket.ask(socket, timeout=request.timeout)).hexdigest())
        except document.Unreadable as cause:
            parts.append(str(cause.problem))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def settings_files(request: Request) -> tuple[Path, ...]:
    """Return the files that replace the file and API sources: of the flag, else of the environment."""
    if request.files:
        return request.files
    named = request.environ.get(ENVIRONMENT + "SETTINGS", "")
    return tuple(Path(name) for name in named.split(os.pathsep) if name)


# --- one source each --------------------------------------------------------------------------------


def _socket(request: Request) -> Path | None:
    if request.bottlerocket_socket is not None:
        return request.bottlerocket_socket if os.path.lexists(request.bottlerocket_socket) else None
    return bottlerocket.find(request.root, bottlerocket.SOCKETS)


def _host(
    request: Request, problems: list[errors.Problem], *, counts: bool
) -> tuple[model.BottlerocketView | None, _Layer]:
    """Return what a Bottlerocket host says about itself, and the layer that follows from it.

    The view is wanted even where `--settings` replaces the layer (not `counts`): whose layout it is
    depends on the host, not on our documents. Then what cannot be read is in the view, as a problem.
    """
    layer = _Layer()
    socket = _socket(request)
    manager = bottlerocket.find(request.root, bottlerocket.MANAGER_FILES)
    if socket is None and manager is None:
        return None, layer
    found: list[errors.Problem] = []
    table: bottlerocket.Table | None = None
    name = ""
    try:
        if socket is not None:
            name = bottlerocket.called(socket)
            answer = bottlerocket.ask(socket, timeout=request.timeout)
            table = bottlerocket.read_api(document.parse_json(answer, name=name, source=name), found)
        else:
            assert manager is not None
            name = document.shown(manager)
            data = document.read(manager) or b""
            table = bottlerocket.read_manager_file(document.parse_toml(data, name=name, source=name), found)
    except document.Unreadable as cause:
        found.append(cause.problem)
    wrong = next((problem for problem in found if problem.is_error), None)
    view = bottlerocket.view(table, name)
    if wrong is not None:
        view = dataclasses.replace(view, problem=str(wrong))
    if counts:
        problems += found
        if table is not None and table != bottlerocket.Table():
            layer.sources.append(name)
            layer.declaration = bottlerocket.declare(table, problems, from_host=True)
    elif wrong is not None:
        problems.append(
            errors.Problem("warning", wrong.code, wrong.message, file=wrong.file, line=wrong.line, key=wrong.key)
        )
    return view, layer


def _documents(
    request: Request,
    paths: Iterable[Path],
    what: str,
    problems: list[errors.Problem],
    reads: list[Path],
    *,
    must_exist: bool = False,
) -> _Layer:
    """Return the layer of files that together are one source."""
    parts = []
    for path in paths:
        name = document.shown(path)
        try:
            data = document.read(path)
            if data is not None:
                parts.append(_part(request, data, name, path, problems))
            elif must_exist:
                problems.append(errors.Problem("error", "not-found", "there is no such file", file=name))
        except document.Unreadable as cause:
            problems.append(cause.problem)
    return _combine(parts, what, problems, reads)


def _part(request: Request, data: bytes, name: str, path: Path, problems: list[errors.Problem]) -> toml.Part:
    """Return what one file says. Its kind goes by its name: TOML unless it is called .yaml or .json."""
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml"):
        doc = migparted.parse(data, name, name)
    elif kind == ".json":
        doc = document.parse_json(data, name=name, source=name, path=path)
    else:
        doc = document.parse_toml(data, name=name, source=name, path=path)
    if "mig-configs" in doc.data or kind in (".yaml", ".yml"):
        declared = migparted.read(doc, label=None, asked=model.Origin(name, name), problems=problems)
        return toml.Part(name, mig_parted=declared, said=True)
    if "kubelet-device-plugins" in doc.data:  # an answer of the API, kept in a file
        return toml.Part(name, bottlerocket=bottlerocket.read_api(doc, problems), said=True)
    return toml.read(doc, problems, root=request.root)


def _config_files(request: Request, problems: list[errors.Problem]) -> tuple[Path, ...]:
    return (request.root / CONFIG_FILE, *_drop_ins(request.root / CONFIG_DIRECTORY, problems.append))


def _drop_ins(directory: Path, complain: Callable[[errors.Problem], None]) -> tuple[Path, ...]:
    """Return the drop-ins, in lexical order; hidden files are those of editors and of mounts."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return ()
    except OSError as cause:
        message = f"cannot read it: {cause.strerror}"
        complain(errors.Problem("error", "unreadable", message, file=document.shown(directory)))
        return ()
    return tuple(directory / name for name in names if name.endswith(".toml") and not name.startswith("."))


def _enabled(layers: Iterable[_Layer]) -> bool:
    """Whether EC2 user data is to be read: the highest layer that says so decides."""
    said = [layer.options["ec2_user_data"] for layer in layers if "ec2_user_data" in layer.options]
    return bool(said and said[-1])


def _ec2(request: Request, problems: list[errors.Problem], reads: list[Path]) -> _Layer:
    path = request.root / userdata.EC2_FILE
    name = f"EC2 user data {document.shown(path)}"
    parts = []
    try:
        data = document.read(path, name=name)
        for content in userdata.own_parts(data or b"", name=name):
            doc = document.parse_toml(content, name=name, source=name)
            parts.append(toml.read(doc, problems, root=request.root))
    except document.Unreadable as cause:
        problems.append(cause.problem)
    return _combine(parts, "user data", problems, reads)


def _environment(request: Request, problems: list[errors.Problem], reads: list[Path]) -> _Layer:
    """Return what `GPUNODE_*` variables say; an empty variable says nothing."""
    layer = _Layer()
    raw: dict[str, object] = {}
    variables = {ENVIRONMENT + field.upper(): field for field in _FROM_ENVIRONMENT}
    for name, text in sorted(request.environ.items()):
        field = variables.get(name)
        if field is not None and text.strip():
            raw[field.replace("_", "-")] = _from_text(field, text.strip())
        elif field is None and name.startswith(ENVIRONMENT):
            near = next((known for known in variables if tables.alike(name.lower(), known.lower())), None)
            if near is not None:
                message = f"the variable {document.quote(name)} says nothing to gpunode; did you mean {near}?"
                problems.append(errors.Problem("warning", "unknown-key", message, key=document.quote(name).strip('"')))
    _take(layer, raw, "environment", lambda key: ENVIRONMENT + key.upper().replace("-", "_"), problems)
    named = request.environ.get(ENVIRONMENT + "MIG_CONFIG")
    if named and request.mig_config is None:
        _take_mig_config(layer, named, model.Origin("environment", key=ENVIRONMENT + "MIG_CONFIG"), problems, reads)
    return layer


def _flags(request: Request, problems: list[errors.Problem], reads: list[Path]) -> _Layer:
    layer = _Layer()
    raw: dict[str, object] = {}
    for field, value in request.flags.items():
        plain = list(value) if isinstance(value, tuple) else value
        raw[field.replace("_", "-")] = str(plain) if isinstance(plain, Path) else plain
    _take(layer, raw, "flags", lambda key: f"--{key}", problems)
    if request.mig_config is not None:
        _take_mig_config(layer, request.mig_config, model.Origin("flags", key="--mig-config"), problems, reads)
    return layer


def _from_text(field: str, text: str) -> object:
    """Return what a variable's text stands for; what it cannot be stays text, for the check to refuse."""
    if field in _LISTS:
        return [] if text == "none" else [word.strip() for word in text.split(",") if word.strip()]
    if field in _FLAGS:
        return _BOOLEANS.get(text.lower(), text)
    if field in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _take(
    layer: _Layer,
    raw: dict[str, object],
    source: str,
    called: Callable[[str], str],
    problems: list[errors.Problem],
) -> None:
    """Put checked options into a layer that is no document."""
    for key, code, message in tables.explain(model.GpunodeTable, raw):
        problems.append(errors.Problem("error", code, message, key=called(key)))
        raw.pop(key, None)
    if not raw:
        return
    table = model.GpunodeTable.model_validate(raw)
    layer.sources.append(source)
    for key in raw:
        field = key.replace("-", "_")
        layer.options[field] = toml.option(field, getattr(table, field), base=Path())
        layer.origins[key] = model.Origin(source, key=called(key))


def _take_mig_config(
    layer: _Layer, argument: str, asked: model.Origin, problems: list[errors.Problem], reads: list[Path]
) -> None:
    path, label = migparted.split(argument)
    reads.append(path)
    layer.declaration = migparted.load(path, label=label, source=document.shown(path), asked=asked, problems=problems)
    layer.sources.append(document.shown(path))


def _first(problems: tuple[errors.Problem, ...]) -> tuple[errors.Problem, ...]:
    """Return the problems that a person will read: a file of something else has thousands."""
    if len(problems) <= TOLD:
        return problems
    shown = sorted(problems, key=lambda problem: not problem.is_error)[:TOLD]
    rest = f"and {len(problems) - TOLD} more like these"
    return (*shown, errors.Problem("error", "too-many", rest, file=shown[-1].file))


# --- all together -----------------------------------------------------------------------------------


def _combine(parts: list[toml.Part], what: str, problems: list[errors.Problem], reads: list[Path]) -> _Layer:
    """Return the documents of one source as a layer: later ones win per key, layouts add up."""
    layer = _Layer()
    table: bottlerocket.Table | None = None
    layouts: tuple[model.LayoutEntry, ...] = ()
    named: model.MigPartedDeclaration | None = None
    for part in parts:
        if part.said:
            layer.sources.append(part.name)
        layer.options.update(part.options)
        layer.origins.update(part.origins)
        layouts += part.layouts
        reads += part.reads
        if part.bottlerocket is not None:
            table = part.bottlerocket if table is None else part.bottlerocket.over(table)
        named = part.mig_parted or named
    declared: list[model.Declaration] = []
    if table is not None:
        uniform = bottlerocket.declare(table, problems, from_host=False)
        declared += [] if uniform is None else [uniform]
    declared += [] if named is None else [named]
    declared += [model.LayoutDeclaration(layouts, layouts[0].origin)] if layouts else []
    if len(declared) > 1:
        first, second = declared[0].origin, declared[1].origin
        message = f"the layout is declared in two ways: here, and at {first}; keep one of them"
        problems.append(
            errors.Problem("error", "two-declarations", message, file=second.file, line=second.line, key=second.key)
        )
    layer.declaration = declared[-1] if declared else None
    log.debug("settings source read", source=what, documents=len(parts))
    return layer


def _merge(
    layers: list[_Layer], view: model.BottlerocketView | None, problems: tuple[errors.Problem, ...]
) -> model.Settings:
    """Lay the layers over the defaults."""
    options: dict[str, object] = {}
    keys = [field.replace("_", "-") for field in model.OPTIONS]
    provenance = dict.fromkeys([*keys, "layout"], model.Origin("default"))
    declaration: model.Declaration | None = None
    sources: list[str] = []
    for layer in layers:
        options.update(layer.options)
        provenance.update(layer.origins)
        sources += layer.sources
        if layer.declaration is not None:
            declaration = layer.declaration
            provenance["layout"] = declaration.origin
    problems += _shared(declaration, view, problems)
    settings = model.Settings(**options)  # type: ignore[arg-type]  # checked by GpunodeTable
    bare = [getattr(settings, field) for field in model.OPTIONS]
    return dataclasses.replace(
        settings,
        declaration=declaration,
        bottlerocket=view,
        provenance=provenance,
        sources=tuple(dict.fromkeys(sources)),
        digest=hashlib.sha256(repr([bare, _without_origins(declaration)]).encode()).hexdigest()[:16],
        problems=problems,
    )


def _shared(
    declaration: model.Declaration | None, view: model.BottlerocketView | None, known: tuple[errors.Problem, ...]
) -> tuple[errors.Problem, ...]:
    """Return a warning when the host shares GPUs in time while a document of ours asks for MIG."""
    code = "sharing-with-mig"
    if declaration is None or view is None or view.sharing not in ("time-slicing", "mps"):
        return ()
    if not isinstance(declaration, model.BottlerocketDeclaration) and not any(e.mig for e in declaration.entries):
        return ()
    if any(problem.code == code for problem in known):
        return ()
    message = f"device-sharing-strategy is {view.sharing} there, together with MIG, which {declaration.origin} asks for"
    return (errors.Problem("warning", code, message, file=view.source),)


def _without_origins(value: object) -> object:
    """Return a declaration as plain values, without where it was written."""
    if isinstance(value, model.Origin):
        return None
    if isinstance(value, tuple):
        return [_without_origins(member) for member in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *(_without_origins(getattr(value, f.name)) for f in dataclasses.fields(value))]
    return value
