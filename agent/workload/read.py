"""Read Pods, pod templates, ResourceClaims and ECS task definitions, with the line of everything.

YAML goes through ruamel.yaml, which knows lines and refuses duplicate keys. JSON is first read by
the standard library, which is strict; its lines come from the YAML reader, as JSON is YAML.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from agent import errors

LIMIT = 1024 * 1024
POD_KINDS = (
    "Pod",
    "PodTemplate",
    "Deployment",
    "ReplicaSet",
    "ReplicationController",
    "StatefulSet",
    "DaemonSet",
    "Job",
    "CronJob",
)
CLAIM_KINDS = ("ResourceClaim", "ResourceClaimTemplate")


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A container's wish for `count` of an extended resource, and the line that says it."""

    container: str
    resource: str
    count: int
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimRef:
    """A pod's reference to a claim or a template by name."""

    name: str
    target: str
    template: bool
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod, or the pods a controller makes: `replicas` of them on the cluster, each asking `asks`."""

    file: str
    kind: str
    name: str
    asks: tuple[Ask, ...]
    claims: tuple[ClaimRef, ...] = ()
    init_asks: tuple[Ask, ...] = ()
    replicas: int = 1
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a claim: `count` devices of a class (None: all that match), by CEL selectors.

    With `alternatives` (named REQUEST/NAME) it asks for the first of them that can be had instead.
    """

    name: str
    device_class: str
    count: int | None
    selectors: tuple[tuple[str, int | None], ...]
    line: int | None = None
    alternatives: tuple[Request, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """All devices of `requests` (() = of every request) must agree in, or all differ in, `attribute`."""

    requests: tuple[str, ...]
    attribute: str
    distinct: bool = False
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim, or what a template makes of itself for each pod."""

    file: str
    kind: str
    name: str
    requests: tuple[Request, ...]
    constraints: tuple[Constraint, ...] = ()
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuValue:
    """A container's ECS GPU requirement as it is written: "2", "0.25" or "ALL"."""

    container: str
    value: str
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A container's part of a GPU by MPS: `memory_mib` of it, at most `percent` of its SMs."""

    container: str
    memory_mib: int
    percent: int | None = None
    line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """An ECS task definition: every GPU requirement of its containers."""

    file: str
    name: str
    values: tuple[GpuValue, ...]
    managed_instances: bool = False
    fargate: bool = False
    shares: tuple[Share, ...] = ()
    line: int | None = None
    kind: str = "TaskDefinition"


Workload = Pod | Claim | Task


class _Bad(Exception):
    """Something in a document is not as it must be; becomes a Problem with the file's name."""

    def __init__(self, message: str, line: int | None, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.key = key


def read(text: str, *, file: str) -> tuple[Workload, ...]:
    """Return the workloads in a document (YAML with several documents, or JSON), in order.

    Raises SettingsError naming file, line and what is valid. Kinds that ask for nothing here
    (Service, ConfigMap …) are passed over; a document with no workload at all is an error.
    """
    found: list[Workload] = []
    problems: list[errors.Problem] = []
    seen_kinds: list[str] = []
    try:
        for document in _documents(text):
            try:
                for item in _items(document):
                    workload = _workload(item, file)
                    if workload is None:
                        seen_kinds.append(str(item.get("kind", "a document without kind")))
                    else:
                        found.append(workload)
            except _Bad as bad:
                problems.append(errors.Problem("error", "workload", bad.message, file=file, line=bad.line, key=bad.key))
    except _Bad as bad:
        problems.append(errors.Problem("error", "workload-syntax", bad.message, file=file, line=bad.line, key=bad.key))
    if not problems and not found:
        what = f"it holds only {', '.join(sorted(set(seen_kinds)))}" if seen_kinds else "it is empty"
        problems.append(
            errors.Problem(
                "error",
                "workload-none",
                f"there is no workload in it: {what} (a Pod, a {'/'.join(POD_KINDS[3:])}, a ResourceClaim, "
                "a ResourceClaimTemplate or an ECS task definition is expected)",
                file=file,
            )
        )
    if problems:
        raise errors.SettingsError(tuple(problems))
    return tuple(found)


def _documents(text: str) -> Iterator[Any]:
    if "\x00" in text:
        raise _Bad("it holds a NUL byte, so it is no text", text[: text.index("\x00")].count("\n") + 1)
    stripped = text.lstrip("\ufeff \t\r\n")
    if stripped.startswith(("{", "[")) and not _is_flow_yaml(text):
        _check_json(text)
    yield from _load_yaml(text)


def _is_flow_yaml(text: str) -> bool:
    """Whether a text in braces is YAML's flow style (unquoted keys) and not JSON."""
    head = text.lstrip("\ufeff \t\r\n")[1:].lstrip()
    return bool(re.match(r"[A-Za-z_]", head)) and not head.startswith(("true", "false", "null"))


def _check_json(text: str) -> None:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise _Bad(f'the key "{name}" is given twice in one object', _line_of_second(text, name), name)
        return dict(pairs)

    try:
        json.loads(text, object_pairs_hook=no_twins)
    except json.JSONDecodeError as cause:
        line, what = cause.lineno, cause.msg
        # Before 3.13 a trailing comma is reported at what follows it; people look for the comma.
        before = text[: cause.pos].rstrip()
        if before.endswith(",") and text[cause.pos : cause.pos + 1] in ("}", "]"):
            line, what = before.count("\n") + 1, "the comma at the end of the last entry is not allowed"
        elif text[cause.pos : cause.pos + 1] == "," and "trailing comma" in cause.msg:
            what = "the comma at the end of the last entry is not allowed"
        raise _Bad(f"not valid JSON: {what}", line) from cause
    except RecursionError as cause:
        raise _Bad("not readable: it is nested too deeply", None) from cause


def _line_of_second(text: str, name: str) -> int | None:
    spots = [m.start() for m in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    return text[: spots[1]].count("\n") + 1 if len(spots) > 1 else None


def _load_yaml(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML  # takes its time to import, and only this verb needs it
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    reader = YAML(typ="rt", pure=True)
    try:
        yield from reader.load_all(text)
    except MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        words = " ".join(str(cause.problem or cause.context or "not valid YAML").split())
        raise _Bad(f"not valid YAML: {words}", mark.line + 1 if mark is not None else None) from cause
    except (YAMLError, ValueError, TypeError) as cause:
        raise _Bad(f"not valid YAML: {' '.join(str(cause).split())}", None) from cause
    except RecursionError as cause:
        raise _Bad("not readable: it is nested too deeply", None) from cause


def _items(document: Any) -> Iterator[Any]:
    if document is None:
        return
    if not isinstance(document, dict):
        raise _Bad("a workload is a mapping (kind: Pod …), not a " + _kind_of(document), 1)
    if str(document.get("kind", "")) == "List" and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _items(item)
    elif isinstance(document.get("taskDefinition"), dict):
        yield document["taskDefinition"]
    else:
        yield document


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "list"
    if value is None:
        return "null"
    return "mapping" if isinstance(value, dict) else type(value).__name__


def _line(container: Any, key: object) -> int | None:
    """Return the 1-based line of a key of a mapping or an index of a list, None when not known."""
    try:
        marks: Any = container.lc
        return int((marks.item(key) if isinstance(container, list) else marks.key(key))[0]) + 1
    except (AttributeError, KeyError, TypeError, IndexError):
        return None


def _own_line(container: Any) -> int | None:
    try:
        return int(container.lc.line) + 1
    except (AttributeError, TypeError):
        return None


def _get(parent: Any, key: str, kind: type, path: str, *, needed: bool = False) -> Any:
    """Return `parent[key]` if it is of `kind`; None when absent (an error when `needed`)."""
    value = parent.get(key)
    if value is None:
        if needed:
            raise _Bad(f"{path}.{key} is missing", _own_line(parent), f"{path}.{key}")
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {dict: "mapping", list: "list", str: "string", int: "number"}
        raise _Bad(
            f"{path}.{key} must be a {names[kind]}, not a {_kind_of(value)}", _line(parent, key), f"{path}.{key}"
        )
    return value


def _workload(item: Any, file: str) -> Workload | None:
    if "containerDefinitions" in item:
        return _task(item, file)
    kind = str(item.get("kind", ""))
    if kind in POD_KINDS:
        return _pod(item, kind, file)
    if kind in CLAIM_KINDS:
        return _claim(item, kind, file)
    return None


def _name(item: Any) -> str:
    metadata = item.get("metadata")
    if isinstance(metadata, dict):
        return str(metadata.get("name") or metadata.get("generateName") or "unnamed")
    return "unnamed"


def _pod(item: Any, kind: str, file: str) -> Pod:
    spec, path, replicas = item, kind, 1
    outer = _get(item, "spec", dict, kind, needed=kind != "PodTemplate")
    if kind == "Pod":
        spec, path = outer, "spec"
    elif kind == "PodTemplate":
        template = _get(item, "template", dict, kind, needed=True)
        spec, path = _get(template, "spec", dict, "template", needed=True), "template.spec"
    else:
        if kind == "CronJob":
            job = _get(outer, "jobTemplate", dict, "spec", needed=True)
            outer = _get(job, "spec", dict, "spec.jobTemplate", needed=True)
        template = _get(outer, "template", dict, "spec", needed=True)
        spec, path = _get(template, "spec", dict, "spec.template", needed=True), "spec.template.spec"
        if kind in ("Job", "CronJob"):
            replicas = _get(outer, "parallelism", int, "spec") or 1
        elif kind != "DaemonSet":
            count = _get(outer, "replicas", int, "spec")
            replicas = 1 if count is None else count
    containers = _get(spec, "containers", list, path, needed=True)
    refs = tuple(_claim_refs(_get(spec, "resourceClaims", list, path) or [], f"{path}.resourceClaims"))
    _check_claims(containers, f"{path}.containers", {ref.name for ref in refs})
    return Pod(
        file=file,
        kind=kind,
        name=_name(item),
        asks=tuple(_asks(containers, f"{path}.containers")),
        init_asks=tuple(_asks(_get(spec, "initContainers", list, path) or [], f"{path}.initContainers")),
        claims=refs,
        replicas=replicas,
        line=_own_line(item),
    )


def _asks(containers: Any, path: str) -> Iterator[Ask]:
    for index, container in enumerate(containers):
        where = f"{path}[{index}]"
        if not isinstance(container, dict):
            raise _Bad(f"{where} must be a mapping, not a {_kind_of(container)}", _line(containers, index), where)
        name = str(container.get("name", f"#{index}"))
        resources = _get(container, "resources", dict, where) or {}
        limits = _get(resources, "limits", dict, f"{where}.resources") or {}
        requests = _get(resources, "requests", dict, f"{where}.resources") or {}
        for key in dict.fromkeys([*limits, *requests]):
            resource = str(key)
            if not resource.startswith("nvidia.com/"):
                continue
            holder, word = (limits, "limits") if key in limits else (requests, "requests")
            count = _count(holder[key], f"{where}.resources.{word}.{resource}", _line(holder, key))
            if key not in limits:
                raise _Bad(
                    f"{resource} is an extended resource and must stand in limits, not only in requests",
                    _line(requests, key),
                    f"{where}.resources.requests.{resource}",
                )
            if (
                key in requests
                and _count(requests[key], f"{where}.resources.requests.{resource}", _line(requests, key)) != count
            ):
                raise _Bad(
                    f"{resource}: requests and limits of an extended resource must be equal",
                    _line(requests, key),
                    f"{where}.resources.requests.{resource}",
                )
            yield Ask(container=name, resource=resource, count=count, line=_line(holder, key))


def _check_claims(containers: Any, path: str, known: set[str]) -> None:
    """Every claim that a container names must be one of the pod's."""
    for index, container in enumerate(containers):
        resources = container.get("resources") if isinstance(container, dict) else None
        claims = resources.get("claims") if isinstance(resources, dict) else None
        for number, claim in enumerate(claims if isinstance(claims, list) else ()):
            where = f"{path}[{index}].resources.claims[{number}]"
            name = claim.get("name") if isinstance(claim, dict) else None
            if not isinstance(name, str):
                raise _Bad(f"{where} needs the name of one of the pod's resourceClaims", _line(claims, number), where)
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise _Bad(
                    f'{where} names "{name}", which is no resourceClaim of this pod ({there})',
                    _line(claims, number),
                    where,
                )


def _count(value: Any, path: str, line: int | None) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]+", text):
        raise _Bad(f"{path} must be a whole number of devices, not {value!r}", line, path)
    return int(text)


def _claim_refs(refs: Any, path: str) -> Iterator[ClaimRef]:
    for index, ref in enumerate(refs):
        where = f"{path}[{index}]"
        if not isinstance(ref, dict):
            raise _Bad(f"{where} must be a mapping, not a {_kind_of(ref)}", _line(refs, index), where)
        claim, template = ref.get("resourceClaimName"), ref.get("resourceClaimTemplateName")
        if (claim is None) == (template is None):
            raise _Bad(
                f"{where} needs either resourceClaimName or resourceClaimTemplateName", _line(refs, index), where
            )
        yield ClaimRef(
            name=str(ref.get("name", f"#{index}")),
            target=str(claim if claim is not None else template),
            template=claim is None,
            line=_line(refs, index),
        )


def _claim(item: Any, kind: str, file: str) -> Claim:
    spec = _get(item, "spec", dict, kind, needed=True)
    path = "spec"
    if kind == "ResourceClaimTemplate":
        spec, path = _get(spec, "spec", dict, "spec", needed=True), "spec.spec"
    devices = _get(spec, "devices", dict, path, needed=True)
    path += ".devices"
    requests = []
    listed = _get(devices, "requests", list, path, needed=True)
    for index, request in enumerate(listed):
        requests.append(_request(request, listed, index, path))
    names = {r.name for r in requests} | {a.name for r in requests for a in r.alternatives}
    constraints = []
    for index, constraint in enumerate(_get(devices, "constraints", list, path) or []):
        where = f"{path}.constraints[{index}]"
        if not isinstance(constraint, dict):
            raise _Bad(f"{where} must be a mapping, not a {_kind_of(constraint)}", None, where)
        match = _get(constraint, "matchAttribute", str, where)
        distinct = _get(constraint, "distinctAttribute", str, where)
        if (match is None) == (distinct is None):
            raise _Bad(f"{where} needs either matchAttribute or distinctAttribute", _own_line(constraint), where)
        concerned = tuple(str(r) for r in _get(constraint, "requests", list, where) or [])
        for name in concerned:
            if name not in names:
                raise _Bad(
                    f'{where}.requests names "{name}", which is no request of this claim ({", ".join(sorted(names))})',
                    _line(constraint, "requests"),
                    f"{where}.requests",
                )
        attribute = match if match is not None else distinct
        if "/" not in attribute:
            raise _Bad(
                f'{where}: "{attribute}" must be qualified by its domain, like gpu.nvidia.com/parentUUID',
                _line(constraint, "matchAttribute") or _own_line(constraint),
                where,
            )
        constraints.append(
            Constraint(
                requests=concerned,
                attribute=attribute,
                distinct=match is None,
                line=_line(constraint, "matchAttribute" if match is not None else "distinctAttribute"),
            )
        )
    return Claim(
        file=file,
        kind=kind,
        name=_name(item),
        requests=tuple(requests),
        constraints=tuple(constraints),
        line=_own_line(item),
    )


def _request(request: Any, listed: Any, index: int, path: str) -> Request:
    where = f"{path}.requests[{index}]"
    if not isinstance(request, dict):
        raise _Bad(f"{where} must be a mapping, not a {_kind_of(request)}", _line(listed, index), where)
    name = str(_get(request, "name", str, where, needed=True))
    exact = request.get("exactly")
    if exact is None and "firstAvailable" in request:
        listed = _get(request, "firstAvailable", list, where, needed=True)
        where += ".firstAvailable"
        if not listed:
            raise _Bad(f"{where} lists no alternative", _line(request, "firstAvailable"), where)
        alternatives = []
        for number, one in enumerate(listed):
            here = f"{where}[{number}]"
            if not isinstance(one, dict):
                raise _Bad(f"{here} must be a mapping, not a {_kind_of(one)}", _line(listed, number), here)
            inner = str(_get(one, "name", str, here, needed=True))
            alternatives.append(_exact(one, f"{name}/{inner}", here))
        return dataclasses.replace(alternatives[0], name=name, alternatives=tuple(alternatives))
    if exact is None and "deviceClassName" in request:
        exact = request  # resource.k8s.io/v1beta1, where it stood one level up
    if not isinstance(exact, dict):
        raise _Bad(f"{where} needs exactly: {{deviceClassName: …}}", _own_line(request), where)
    return _exact(exact, name, f"{where}.exactly" if exact is not request else where)


def _exact(exact: Any, name: str, where: str) -> Request:
    device_class = str(_get(exact, "deviceClassName", str, where, needed=True))
    mode = _get(exact, "allocationMode", str, where) or "ExactCount"
    if mode not in ("ExactCount", "All"):
        raise _Bad(
            f'{where}.allocationMode must be ExactCount or All, not "{mode}"', _line(exact, "allocationMode"), where
        )
    count = _get(exact, "count", int, where)
    if count is not None and count < 1:
        raise _Bad(f"{where}.count must be at least 1, not {count}", _line(exact, "count"), f"{where}.count")
    selectors = []
    for number, selector in enumerate(_get(exact, "selectors", list, where) or []):
        here = f"{where}.selectors[{number}]"
        cel = _get(selector, "cel", dict, here, needed=True) if isinstance(selector, dict) else None
        if cel is None:
            raise _Bad(f"{here} must be a mapping with cel", None, here)
        expression = str(_get(cel, "expression", str, f"{here}.cel", needed=True))
        selectors.append((expression, _line(cel, "expression")))
    return Request(
        name=name,
        device_class=device_class,
        count=None if mode == "All" else (1 if count is None else count),
        selectors=tuple(selectors),
        line=_own_line(exact),
    )


def _task(item: Any, file: str) -> Task:
    containers = _get(item, "containerDefinitions", list, "task", needed=True)
    values: list[GpuValue] = []
    shares: list[Share] = []
    for index, container in enumerate(containers):
        where = f"containerDefinitions[{index}]"
        if not isinstance(container, dict):
            raise _Bad(f"{where} must be a mapping, not a {_kind_of(container)}", _line(containers, index), where)
        name = str(container.get("name", f"#{index}"))
        requirements = _get(container, "resourceRequirements", list, where) or []
        for number, requirement in enumerate(requirements):
            here = f"{where}.resourceRequirements[{number}]"
            if not isinstance(requirement, dict):
                raise _Bad(f"{here} must be a mapping, not a {_kind_of(requirement)}", None, here)
            kind = _get(requirement, "type", str, here, needed=True)
            if kind != "GPU":
                if kind.upper() == "GPU":
                    raise _Bad(f'{here}.type must be "GPU", not "{kind}"', _line(requirement, "type"), f"{here}.type")
                continue  # InferenceAccelerator and others ask nothing of a GPU node
            if "sharingStrategy" in requirement:
                shares.append(_share(requirement, name, here))
                continue
            if "value" not in requirement:
                raise _Bad(f"{here}.value is missing", _own_line(requirement), f"{here}.value")
            value, line = requirement["value"], _line(requirement, "value")
            if not isinstance(value, str):
                raise _Bad(
                    f'{here}.value must be a string like "1", "0.25" or "ALL", '
                    f"not the {_kind_of(value)} {json.dumps(value, default=str)}",
                    line,
                    f"{here}.value",
                )
            if not _gpu_value_ok(value):
                raise _Bad(
                    f'{here}.value "{value}" is no whole number from 1, no decimal below 1 like "0.25", and not "ALL"',
                    line,
                    f"{here}.value",
                )
            values.append(GpuValue(container=name, value=value, line=line))
    compatibilities = [str(c) for c in _get(item, "requiresCompatibilities", list, "task") or []]
    return Task(
        file=file,
        name=str(item.get("family", "unnamed")),
        values=tuple(values),
        managed_instances="MANAGED_INSTANCES" in compatibilities,
        fargate="FARGATE" in compatibilities,
        shares=tuple(shares),
        line=_own_line(item),
    )


def _share(requirement: Any, container: str, where: str) -> Share:
    if "value" in requirement:
        raise _Bad(
            f"{where} has both value and sharingStrategy: a container gets whole GPUs or shares one",
            _line(requirement, "value"),
            f"{where}.value",
        )
    strategy = _get(requirement, "sharingStrategy", dict, where, needed=True)
    where += ".sharingStrategy"
    mps = _get(strategy, "nvidiaMps", dict, where, needed=True)
    where += ".nvidiaMps"
    memory = _get(mps, "memory", int, where, needed=True)
    percent = _get(mps, "maxComputePercent", int, where)
    if memory < 1:
        raise _Bad(f"{where}.memory must be at least 1 MiB, not {memory}", _line(mps, "memory"), f"{where}.memory")
    if percent is not None and not 1 <= percent <= 100:
        raise _Bad(
            f"{where}.maxComputePercent must be 1 to 100, not {percent}",
            _line(mps, "maxComputePercent"),
            f"{where}.maxComputePercent",
        )
    return Share(container, memory, percent, _line(requirement, "sharingStrategy"))


def _gpu_value_ok(value: str) -> bool:
    if value == "ALL":
        return True
    if re.fullmatch(r"[1-9][0-9]{0,3}", value):
        return True
    return re.fullmatch(r"0?\.[0-9]{1,6}", value) is not None and float(value) > 0
