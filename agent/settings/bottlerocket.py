"""Bottlerocket's own way to ask for MIG: `settings.kubelet-device-plugins.nvidia`.

The same table comes from three places: user data as people write it (TOML), the host's API over its
Unix socket (JSON), and `nvidia-migmanager.toml`, which the host renders from it. Keys that we do
not know are ignored with a debug line, as Bottlerocket adds some with every release.

The API is asked with a small client of our own over a Unix socket (stdlib only: loading the
settings is synchronous, and aiohttp would cost every start its import). It is bounded in time and
size, and asks for one answer on one connection.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent import errors, log, records
from agent.mig import profile as profiles
from agent.settings import document, locate, model, tables

PREFIX = "kubelet-device-plugins.nvidia"
SOCKETS = ("run/api.sock", ".bottlerocket/rootfs/run/api.sock")
MANAGER_FILES = (
    "etc/nvidia-migmanager/nvidia-migmanager.toml",
    ".bottlerocket/rootfs/etc/nvidia-migmanager/nvidia-migmanager.toml",
)
TIMEOUT = 2.0
"""Seconds for the whole answer of the API, which sits on the same host."""
_TABLE: locate.Path = ("kubelet-device-plugins", "nvidia")

_KNOWN = {
    "enabled": bool,
    "pass-device-specs": None,
    "device-id-strategy": None,
    "device-list-strategy": None,
    "device-sharing-strategy": str,
    "time-slicing": None,
    "mps": None,
    "device-partitioning-strategy": str,
    "mig": dict,
}
_STRATEGIES = ("none", "mig")
_SHARING = ("none", "time-slicing", "mps")
_KEY = re.compile(model.GPU_MODEL)
_COUNT = re.compile(r"[1-9][0-9]?")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,9})")


@records.dataclass(frozen=True, slots=True)
class Table:
    """What one or more documents say, before it is decided what that means. None: not said."""

    strategy: str | None = None
    enabled: bool | None = None
    sharing: str | None = None
    choices: tuple[model.ProfileChoice, ...] = ()
    origins: Mapping[str, model.Origin] = dataclasses.field(default_factory=dict)

    def over(self, lower: Table) -> Table:
        """Return this table laid over another: what is said here wins, profiles key by key."""
        choices = {choice.key: choice for choice in (*lower.choices, *self.choices)}
        return Table(
            strategy=lower.strategy if self.strategy is None else self.strategy,
            enabled=lower.enabled if self.enabled is None else self.enabled,
            sharing=lower.sharing if self.sharing is None else self.sharing,
            choices=tuple(choices.values()),
            origins={**lower.origins, **self.origins},
        )


def read_user_data(doc: document.Document, problems: list[errors.Problem]) -> Table | None:
    """Return what the `[settings…]` tables of a document say about MIG, None when they do not."""
    return _find(doc, ("settings", *_TABLE), problems, strict=True)


def read_manager_file(doc: document.Document, problems: list[errors.Problem]) -> Table:
    """Return what `nvidia-migmanager.toml` says; an empty file is valid and means: no MIG."""
    raw = {key: value for key, value in doc.data.items() if key != "profile"}
    origins = {}
    strategy = _text(doc, raw, (), "device-partitioning-strategy", problems)
    if strategy is not None:
        origins["strategy"] = doc.origin(("device-partitioning-strategy",))
    for key in raw:
        if key != "device-partitioning-strategy":
            log.debug("key of the MIG manager ignored", file=doc.name, key=key)
    choices = _choices(doc, ("profile",), doc.data.get("profile"), problems, strict=False)
    return Table(strategy=strategy, choices=choices, origins=origins)


def read_api(doc: document.Document, problems: list[errors.Problem]) -> Table | None:
    """Return what an answer of the API says; both of its shapes are understood."""
    base: locate.Path = ("settings",) if "settings" in doc.data else ()
    return _find(doc, (*base, *_TABLE), problems, strict=False)


def declare(table: Table, problems: list[errors.Problem], *, from_host: bool) -> model.BottlerocketDeclaration | None:
    """Return the layout that a table declares, None when it declares none; say what is odd."""

    def warn(code: str, message: str, origin: model.Origin | None) -> None:
        at = origin or model.Origin("")
        problems.append(errors.Problem("warning", code, message, file=at.file, line=at.line, key=at.key))

    if table.strategy != "mig":
        if table.choices and not from_host:
            message = 'mig.profile is given, but device-partitioning-strategy is not "mig": nothing is partitioned'
            warn("profile-without-mig", message, table.choices[0].origin)
        return None
    if table.enabled is False:
        message = (
            "enabled = false empties the configuration of Bottlerocket's MIG manager, so "
            'device-partitioning-strategy = "mig" has no effect: nothing is partitioned'
        )
        warn("disabled-with-mig", message, table.origins.get("enabled"))
        return None
    if table.sharing == "mps":
        message = "MPS together with MIG: Bottlerocket's device plugin does not start with both, and offers no GPU"
        warn("sharing-with-mig", message, table.origins.get("sharing"))
    elif table.sharing == "time-slicing":
        message = "time-slicing together with MIG: several pods will share each MIG device, without isolation in it"
        warn("sharing-with-mig", message, table.origins.get("sharing"))
    return model.BottlerocketDeclaration(table.choices, table.origins["strategy"], from_host=from_host)


def view(table: Table | None, source: str) -> model.BottlerocketView:
    """Return a host's table as the question "whose GPUs are these" needs it."""
    if table is None:
        return model.BottlerocketView(source)
    return model.BottlerocketView(
        source,
        strategy=table.strategy or "none",
        enabled=table.enabled is not False,
        sharing=table.sharing or "none",
        profiles=tuple((c.key, str(c.profile) if c.count is None else str(c.count)) for c in table.choices),
    )


def _find(doc: document.Document, path: locate.Path, problems: list[errors.Problem], *, strict: bool) -> Table | None:
    """Return the table at `path`. `strict` is for documents of people, where a slip is an error."""
    here: object = doc.data
    for number, key in enumerate(path):
        if not isinstance(here, Mapping):
            problems.append(doc.problem("wrong-type", f"must be a table, and is {document.quote(here)}", path[:number]))
            return None
        if key not in here:
            near = [k for k in here if isinstance(k, str) and k != key and tables.alike(k, str(key))]
            if strict and near:
                message = f'{document.quote(near[0])} is ignored; did you mean "{key}"?'
                problems.append(doc.problem("unknown-key", message, (*path[:number], near[0]), severity="warning"))
            return None
        here = here[key]
    if not isinstance(here, Mapping):
        problems.append(doc.problem("wrong-type", f"must be a table, and is {document.quote(here)}", path))
        return None
    return _table(doc, path, here, problems, strict=strict)


def _table(
    doc: document.Document,
    path: locate.Path,
    raw: Mapping[str, object],
    problems: list[errors.Problem],
    *,
    strict: bool,
) -> Table:
    for key in raw:
        if key not in _KNOWN:
            log.debug("key of Bottlerocket ignored", file=doc.name, key=key)
            near = next((known for known in _KNOWN if tables.alike(key, known)), None)
            if strict and near is not None:
                message = f'{document.quote(key)} is ignored; did you mean "{near}"?'
                problems.append(doc.problem("unknown-key", message, (*path, key), severity="warning"))
    enabled = raw.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        message = f"must be true or false, and is {document.quote(enabled)}"
        problems.append(doc.problem("wrong-type", message, (*path, "enabled")))
        enabled = None
    strategy = _text(doc, raw, path, "device-partitioning-strategy", problems)
    sharing = _text(doc, raw, path, "device-sharing-strategy", problems)
    for name, value, valid in (
        ("device-partitioning-strategy", strategy, _STRATEGIES),
        ("device-sharing-strategy", sharing, _SHARING),
    ):
        if value is not None and value not in valid:
            near = tables.nearest(value, valid)
            message = f"{document.quote(value)} is not valid here; use {tables.listing(valid)}"
            message += f'; did you mean "{near}"?' if near else ""
            severity = "error" if strict else "warning"
            problems.append(doc.problem("invalid-value", message, (*path, name), severity=severity))
    choices: tuple[model.ProfileChoice, ...] = ()
    mig = raw.get("mig")
    if isinstance(mig, Mapping):
        choices = _choices(doc, (*path, "mig", "profile"), mig.get("profile"), problems, strict=strict)
    elif mig is not None:
        problems.append(doc.problem("wrong-type", f"must be a table, and is {document.quote(mig)}", (*path, "mig")))
    return Table(
        strategy=strategy,
        enabled=enabled,
        sharing=sharing,
        choices=choices,
        origins={
            name: doc.origin((*path, key))
            for name, key in (
                ("strategy", "device-partitioning-strategy"),
                ("enabled", "enabled"),
                ("sharing", "device-sharing-strategy"),
            )
            if key in raw
        },
    )


def _text(
    doc: document.Document, raw: Mapping[str, object], path: locate.Path, key: str, problems: list[errors.Problem]
) -> str | None:
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return value
    problems.append(doc.problem("wrong-type", f"must be text in quotes, and is {document.quote(value)}", (*path, key)))
    return None


def _choices(
    doc: document.Document, path: locate.Path, raw: object, problems: list[errors.Problem], *, strict: bool
) -> tuple[model.ProfileChoice, ...]:
    """Read `mig.profile`: GPU model to profile or count."""
    if raw is None:
        return ()
    if not isinstance(raw, Mapping):
        problems.append(doc.problem("wrong-type", f"must be a table, and is {document.quote(raw)}", path))
        return ()
    found = []
    for key, value in raw.items():
        at = (*path, key)
        if _KEY.fullmatch(key) is None:
            hint = ""
            if isinstance(value, Mapping):
                hint = '; keys with a dot need quotes: "a100.40gb"'
            elif _KEY.fullmatch(key.lower()):
                hint = f'; did you mean "{key.lower()}"?'
            message = f"{document.quote(key)} is not a GPU model key like a100.40gb{hint}"
            problems.append(doc.problem("model-key", message, at, severity="error" if strict else "warning"))
            continue
        choice = _choice(key, value, doc.origin(at))
        if isinstance(choice, str):
            problems.append(doc.problem("profile-syntax", choice, at))
        else:
            found.append(choice)
    return tuple(found)


def _choice(key: str, value: object, origin: model.Origin) -> model.ProfileChoice | str:
    """Return a line of `mig.profile`, or the sentence that says what is wrong with it."""
    if not isinstance(value, str):
        hint = f'; write the count in quotes: "{value}"' if type(value) is int and 0 < value < 100 else ""
        return f"must be text in quotes (a profile like 1g.10gb, or a count), and is {document.quote(value)}{hint}"
    if _COUNT.fullmatch(value):
        return model.ProfileChoice(key, None, int(value), origin)
    try:
        profile = profiles.parse(value)
    except profiles.ProfileSyntaxError:
        return f"{document.quote(value)} is neither a profile like 1g.10gb nor a count from 1"
    if profile.compute_slices is not None or profile.attributes or profile.without:
        return (
            f"{document.quote(value)} cannot be asked for here: Bottlerocket takes plain profiles and counts only; "
            "write a [[gpunode.layout]] for it"
        )
    return model.ProfileChoice(key, profile, None, origin)


# --- the API ----------------------------------------------------------------------------------------


def find(root: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of `names` that exists under `root`, be it readable or not."""
    for name in names:
        path = root / name
        if os.path.lexists(path):
            return path
    return None


def ask(path: Path, *, timeout: float = TIMEOUT, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Return the API's answer about our table: the body of a 200. Raises document.Unreadable."""
    name = called(path)

    def fail(message: str) -> document.Unreadable:
        return document.Unreadable(errors.Problem("error", "bottlerocket-api", message, file=name))

    try:
        raw = _exchange(path, f"/settings?prefix={PREFIX}", timeout=timeout, clock=clock)
    except TimeoutError as cause:
        raise fail(f"cannot read the host's settings: no answer within {timeout:g} s") from cause
    except OSError as cause:
        raise fail(f"cannot read the host's settings: {cause.strerror or cause}") from cause
    if len(raw) > document.LIMIT:
        raise fail("cannot read the host's settings: the answer is larger than 1 MiB")
    try:
        response = http.client.HTTPResponse(_Answer(raw))  # type: ignore[arg-type]  # it only calls makefile
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError, OSError) as cause:
        raise fail("cannot read the host's settings: the answer is no HTTP, or was cut off") from cause
    if response.status != http.HTTPStatus.OK:
        said = document.quote(body[:200].decode("utf-8", "replace").strip())
        raise fail(f"cannot read the host's settings: the API answered {response.status} {said}")
    return body


def called(path: Path) -> str:
    """Return how messages name the API behind a socket."""
    return f"Bottlerocket API {document.shown(path)}"


class _Answer:
    """Bytes that http.client may read as if from a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _exchange(path: Path, target: str, *, timeout: float, clock: Callable[[], float]) -> bytes:
    """Send one GET and return all bytes of the answer, bounded in time and size."""
    end = clock() + timeout

    def left() -> float:
        remaining = end - clock()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    # A socket's path may have 107 bytes; through its directory's descriptor it always fits.
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(left())
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
            connection.settimeout(left())
            connection.sendall(request.encode("ascii"))
            raw = b""
            while len(raw) <= document.LIMIT and not _complete(raw):
                connection.settimeout(left())
                part = connection.recv(65536)
                if not part:
                    break
                raw += part
            return raw
    finally:
        os.close(directory)


def _complete(raw: bytes) -> bool:
    """Whether an answer of told length is all there, so that nobody waits for the end of the connection."""
    head, gap, body = raw.partition(b"\r\n\r\n")
    told = _LENGTH.search(head) if gap else None
    return told is not None and len(body) >= int(told[1])
