"""The web configuration file in the format of Prometheus's exporter-toolkit: TLS, users, headers.

Keys are strict, as there: an unknown one is an error, not a listener less guarded than believed.
The file and the certificates it names may be replaced while running; `Web.refresh()` takes them up.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import dataclasses
import hashlib
import os
import re
import ssl
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from agent import errors, log, records, threads

_TLS = {
    "cert", "cert_file", "key", "key_file", "client_ca", "client_ca_file", "client_auth_type", "client_allowed_sans",
    "min_version", "max_version", "cipher_suites", "prefer_server_cipher_suites", "curve_preferences",
}  # fmt: skip
_HTTP = {"http2", "headers"}
_RATE = {"interval", "burst"}
_TOP = {"tls_server_config", "http_server_config", "basic_auth_users", "rate_limit"}
_HEADERS = {
    "Content-Security-Policy": None,
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": None,
    "Strict-Transport-Security": None,
}
_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_LARGEST = 1 << 20
_REMEMBERED = 128
_WAITING = 16
"""How many password checks may wait for their turn before further ones are turned away."""
_UNKNOWN_USER = "$2b$10$6n5k3U9Q3uoEYuOzaXMULOd3mZdujQETeOkg54FUmHNkXKwvc52Tm"
"""Compared for users that do not exist, so that they take as long as those that do."""


@records.dataclass(frozen=True, slots=True)
class _Document:
    """What a web configuration file says, checked."""

    tls: Mapping[str, object] | None
    users: Mapping[str, str]
    headers: Mapping[str, str]
    rate: tuple[float, int] | None


class _Trouble:
    """Collects what is wrong with a file, with line and key."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self.problems: list[errors.Problem] = []

    def add(self, message: str, *, key: str | None = None, line: int | None = None, code: str = "web-config") -> None:
        self.problems.append(errors.Problem("error", code, message, file=self._file, key=key, line=line))

    def stop(self) -> None:
        if self.problems:
            raise errors.SettingsError(tuple(self.problems))


def _read(file: Path) -> _Document:
    """Read and check a file. Raises SettingsError with everything that is wrong."""
    trouble = _Trouble(file)
    try:
        with file.open("rb") as stream:
            text = stream.read(_LARGEST + 1)
    except OSError as cause:
        trouble.add(f"cannot read the web configuration: {cause.strerror or cause}")
        trouble.stop()
        raise AssertionError from cause
    if len(text) > _LARGEST:
        trouble.add("the web configuration is larger than 1 MiB")
        trouble.stop()
    top = _parse(text, trouble)
    trouble.stop()
    _keys(top, _TOP, "", trouble)
    tls = _section(top, "tls_server_config", _TLS, trouble)
    http = _section(top, "http_server_config", _HTTP, trouble) or {}
    rate = _section(top, "rate_limit", _RATE, trouble)
    headers = _headers(http, trouble)
    users = _users(top, trouble)
    limit = None if rate is None else _rate(rate, trouble)
    trouble.stop()
    return _Document(tls=tls, users=users, headers=headers, rate=limit)


def _parse(text: bytes, trouble: _Trouble) -> Mapping[str, object]:
    from ruamel import yaml  # loaded only where such a file is used
    from ruamel.yaml import error

    reader = yaml.YAML(typ="rt", pure=True)
    try:
        found = reader.load(text.decode())
    except UnicodeDecodeError:
        trouble.add("the web configuration is not UTF-8")
        return {}
    except error.MarkedYAMLError as cause:
        mark = cause.problem_mark
        trouble.add(f"not valid YAML: {cause.problem}", line=None if mark is None else mark.line + 1)
        return {}
    except error.YAMLError as cause:
        trouble.add(f"not valid YAML: {cause}")
        return {}
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        trouble.add("the web configuration is not a table of keys")
        return {}
    return found


def _line(table: Mapping[str, object], key: str) -> int | None:
    """Return the line of a key (1-based) where the YAML reader noted it."""
    marks = getattr(table, "lc", None)
    try:
        return None if marks is None else int(marks.key(key)[0]) + 1
    except (KeyError, TypeError):
        return None


def _keys(table: Mapping[str, object], known: set[str], under: str, trouble: _Trouble) -> None:
    for key in table:
        if key not in known:
            text = f"unknown key (known here: {', '.join(sorted(known))})"
            trouble.add(text, key=f"{under}{key}", line=_line(table, key), code="unknown-key")


def _section(top: Mapping[str, object], name: str, known: set[str], trouble: _Trouble) -> Mapping[str, object] | None:
    found = top.get(name)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        trouble.add("must be a table of keys", key=name, line=_line(top, name))
        return None
    _keys(found, known, f"{name}.", trouble)
    return found


def _headers(http: Mapping[str, object], trouble: _Trouble) -> dict[str, str]:
    found = http.get("headers")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        trouble.add("must be a table of headers", key="http_server_config.headers", line=_line(http, "headers"))
        return {}
    headers = {}
    for name, value in found.items():
        key = f"http_server_config.headers.{name}"
        if name not in _HEADERS:
            trouble.add(f"only these headers can be set: {', '.join(_HEADERS)}", key=key, line=_line(found, name))
            continue
        allowed = _HEADERS[name]
        text = str(value)
        if text and allowed is not None and text.lower() not in allowed:
            trouble.add(f"must be one of {', '.join(allowed)}", key=key, line=_line(found, name))
        elif any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
            trouble.add("must be one line of plain text", key=key, line=_line(found, name))
        elif text:
            headers[name] = text
    return headers


def _users(top: Mapping[str, object], trouble: _Trouble) -> dict[str, str]:
    found = top.get("basic_auth_users")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        trouble.add(
            "must be a table of user = bcrypt hash", key="basic_auth_users", line=_line(top, "basic_auth_users")
        )
        return {}
    users = {}
    for name, hashed in found.items():
        if not isinstance(hashed, str) or re.fullmatch(r"\$2[abxy]?\$\d\d\$[./A-Za-z0-9]{53}", hashed) is None:
            # Never the value itself: it may be a password written here by mistake.
            text = "is no bcrypt hash (make one with: htpasswd -nBC 10 USER)"
            trouble.add(text, key=f"basic_auth_users.{name}", line=_line(found, name))
        else:
            users[str(name)] = hashed
    return users


def _rate(rate: Mapping[str, object], trouble: _Trouble) -> tuple[float, int] | None:
    interval, burst = rate.get("interval", "0s"), rate.get("burst", 1)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(interval))
    if match is None:
        trouble.add('must be a duration like "100ms" or "1s"', key="rate_limit.interval", line=_line(rate, "interval"))
        return None
    if not isinstance(burst, int) or isinstance(burst, bool) or burst < 1:
        trouble.add("must be a whole number from 1", key="rate_limit.burst", line=_line(rate, "burst"))
        return None
    seconds = float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]
    return (seconds, burst) if seconds > 0 else None


def _path(base: Path, value: object) -> Path:
    """Return a path in the file, relative ones against the file's folder."""
    return base.parent / str(value)


class _Tls:
    """The TLS side: one context for all listeners, its certificate replaced in place."""

    def __init__(self, file: Path, table: Mapping[str, object]) -> None:
        self._file = file
        self._table = table
        self.sans: tuple[str, ...] = ()
        self.requires_client = False
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._configure(_Trouble(file))

    def _configure(self, trouble: _Trouble) -> None:
        table, context = self._table, self.context

        def complain(message: str, key: str) -> None:
            trouble.add(message, key=f"tls_server_config.{key}", line=_line(table, key))

        for name in ("cert", "key", "client_ca"):
            if table.get(name) is not None and table.get(f"{name}_file") is not None:
                complain(f"{name} and {name}_file exclude each other", name)
        for name in ("cert", "key"):
            if table.get(name) is None and table.get(f"{name}_file") is None:
                complain(f"TLS needs {name} or {name}_file", f"{name}_file")
        limits = (("min_version", "minimum_version", "TLS12"), ("max_version", "maximum_version", "TLS13"))
        for name, attribute, default in limits:
            word = str(table.get(name, default))
            if word not in _VERSIONS:
                complain(f"must be one of {', '.join(_VERSIONS)}", name)
            else:
                setattr(context, attribute, _VERSIONS[word])
        self._client(complain)
        self._ciphers(complain)
        trouble.stop()
        self.load(complain)
        trouble.stop()

    def _client(self, complain: Callable[[str, str], None]) -> None:
        table = self._table
        policy = str(table.get("client_auth_type") or "NoClientCert")
        has_ca = table.get("client_ca") is not None or table.get("client_ca_file") is not None
        if policy in ("RequestClientCert", "RequireAnyClientCert"):
            complain(
                f"{policy} asks for certificates without checking them, which gpunode does not do", "client_auth_type"
            )
        elif policy not in _CLIENT_AUTH:
            complain(f"must be one of {', '.join(_CLIENT_AUTH)}", "client_auth_type")
        elif has_ca and policy == "NoClientCert":
            complain("a client CA is given and nothing says to check clients by it", "client_auth_type")
        elif policy != "NoClientCert" and not has_ca:
            complain(f"{policy} needs client_ca or client_ca_file", "client_auth_type")
        else:
            self.context.verify_mode = _CLIENT_AUTH[policy]
            self.requires_client = policy == "RequireAndVerifyClientCert"
        sans = table.get("client_allowed_sans") or []
        if not isinstance(sans, list) or not all(isinstance(san, str) for san in sans):
            complain("must be a list of names", "client_allowed_sans")
        elif sans and policy != "RequireAndVerifyClientCert":
            complain("needs client_auth_type: RequireAndVerifyClientCert", "client_allowed_sans")
        else:
            self.sans = tuple(sans)

    def _ciphers(self, complain: Callable[[str, str], None]) -> None:
        suites = self._table.get("cipher_suites") or []
        if not isinstance(suites, list):
            complain("must be a list of cipher suites", "cipher_suites")
        elif suites:
            names = [_openssl_name(str(suite)) for suite in suites]
            # TLS 1.3 suites are not settable in OpenSSL's list, and always on.
            names = [name for name in names if not name.startswith("TLS_")]
            try:
                if names:
                    self.context.set_ciphers(":".join(names))
            except ssl.SSLError:
                complain(f"this OpenSSL knows none of them: {', '.join(map(str, suites))}", "cipher_suites")
        if self._table.get("prefer_server_cipher_suites", True):
            self.context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
        curves = self._table.get("curve_preferences") or []
        if not isinstance(curves, list) or len(curves) > 1 or any(curve not in _CURVES for curve in curves):
            complain(
                f"must be a list of one of {', '.join(_CURVES)} (Python's TLS can be told only one)",
                "curve_preferences",
            )
        elif curves:
            self.context.set_ecdh_curve(_CURVES[str(curves[0])])

    def load(self, complain: Callable[[str, str], None]) -> None:
        """Load certificate, key and client CA into the context; new connections use them."""
        table = self._table
        with _material(self._file, table, "cert") as cert, _material(self._file, table, "key") as key:
            try:
                self.context.load_cert_chain(cert.name, key.name, password=_no_password)
            except (OSError, ValueError) as cause:  # ssl.SSLError is an OSError
                complain(
                    f"cannot load certificate and key: {_words(cause)}",
                    "cert_file" if table.get("cert_file") else "cert",
                )
        if table.get("client_ca") is None and table.get("client_ca_file") is None:
            return
        with _material(self._file, table, "client_ca") as authority:
            try:
                self.context.load_verify_locations(authority.name)
            except OSError as cause:
                key_name = "client_ca_file" if table.get("client_ca_file") else "client_ca"
                complain(f"cannot load the client CA: {_words(cause)}", key_name)

    def files(self) -> Iterator[Path]:
        """The files this came from."""
        for name in ("cert_file", "key_file", "client_ca_file"):
            if self._table.get(name) is not None:
                yield _path(self._file, self._table[name])


def _no_password() -> bytes:
    raise ValueError("the key is encrypted, and there is nobody to ask for its passphrase")


def _words(cause: Exception) -> str:
    return str(getattr(cause, "strerror", None) or cause)


@dataclasses.dataclass(slots=True)
class _Material:
    """A PEM file by name: the operator's own, or one in memory for text written into the document."""

    name: str
    descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def _material(file: Path, table: Mapping[str, object], name: str) -> _Material:
    inline = table.get(name)
    if inline is None:
        return _Material(str(_path(file, table.get(f"{name}_file"))))
    descriptor = os.memfd_create(name)
    os.write(descriptor, str(inline).encode())
    return _Material(f"/proc/self/fd/{descriptor}", descriptor)


def _openssl_name(suite: str) -> str:
    """Return OpenSSL's name of a cipher suite that is named as Go and IANA do."""
    if "_WITH_" not in suite:
        return suite
    key, cipher = suite.removeprefix("TLS_").split("_WITH_")
    words = cipher.replace("AES_128", "AES128").replace("AES_256", "AES256")
    words = words.replace("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305")
    words = words.replace("_CBC_", "_").replace("_", "-")
    return words if key == "RSA" else f"{key.replace('_', '-')}-{words}"


class Web:
    """A web configuration in force. Made by `load`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._document = _read(file)
        self._tls = None if self._document.tls is None else _Tls(file, self._document.tls)
        self._bcrypt = _bcrypt(file) if self._document.users else None
        self._seen = self._stamp()
        self._good: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tokens = 0.0 if self._document.rate is None else float(self._document.rate[1])
        self._refilled: float | None = None

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for listeners, None where there is no TLS."""
        return None if self._tls is None else self._tls.context

    @property
    def guarded(self) -> bool:
        """Whether requests come encrypted and from somebody known (by password or certificate)."""
        return self._tls is not None and (bool(self._document.users) or self._tls.requires_client)

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to put on every response."""
        return self._document.headers

    @property
    def asks_password(self) -> bool:
        """Whether requests must carry a user and password."""
        return bool(self._document.users)

    def allows_certificate(self, certificate: Mapping[str, object] | None) -> bool:
        """Whether a client with this certificate (as `getpeercert` gives it) is among the names allowed."""
        if self._tls is None or not self._tls.sans:
            return True
        names = () if certificate is None else certificate.get("subjectAltName", ())
        return any(name in self._tls.sans for _, name in names)  # type: ignore[attr-defined]

    def admits(self, now: float) -> bool:
        """Whether the rate limit lets one more request through. `now` is monotonic, in seconds."""
        if self._document.rate is None:
            return True
        interval, burst = self._document.rate
        if self._refilled is not None:
            self._tokens = min(float(burst), self._tokens + (now - self._refilled) / interval)
        self._refilled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    async def knows(self, authorization: str | None) -> bool | None:
        """Whether an Authorization header is right; None when too many checks wait already.

        A hash takes about 70 ms of CPU: one is computed at a time, off the event loop, and answers
        that were right are remembered (as a digest).
        """
        if authorization is None or self._bcrypt is None:
            return False
        user, password = _credentials(authorization)
        if user is None:
            return False
        hashed = self._document.users.get(user)
        mark = hashlib.sha256(f"{user}\0{hashed}\0".encode() + password).hexdigest()
        if mark in self._good:
            self._good.move_to_end(mark)
            return True
        if self._waiting >= _WAITING:
            return None
        self._waiting += 1
        try:
            async with self._turn:
                right = await threads.run(lambda: self._compare(hashed, password), name="password")
        finally:
            self._waiting -= 1
        if right:
            self._good[mark] = None
            while len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)
        return right

    def _compare(self, hashed: str | None, password: bytes) -> bool:
        assert self._bcrypt is not None
        against = hashed or _UNKNOWN_USER
        if against.startswith(("$2y$", "$2x$")):
            against = "$2b$" + against[4:]  # htpasswd's name of the same thing
        # bcrypt sees 72 bytes at most; newer releases of the library refuse longer ones instead.
        return bool(self._bcrypt.checkpw(password[:72], against.encode())) and hashed is not None

    def _stamp(self) -> tuple[object, ...]:
        """Return what changes when one of the files does."""
        found: list[object] = []
        for file in (self._file, *(() if self._tls is None else self._tls.files())):
            try:
                status = file.stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)

    def refresh(self) -> None:
        """Take up changed files. What cannot be used is logged, and the last good files stay in force.

        A change of listening itself (TLS added or removed) needs a restart, and is said so.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            document = _read(self._file)
            if (document.tls is None) is not (self._tls is None):
                log.error(
                    "TLS was added to or removed from the web configuration; that needs a restart", file=self._file
                )
                return
            if document.tls is not None and self._tls is not None:
                fresh = _Tls(self._file, document.tls)  # tried apart, so that a bad one spoils nothing
                if dict(document.tls) != dict(self._document.tls or {}):
                    log.warning("TLS options changed; they hold for all connections after a restart", file=self._file)
                self._tls.load(lambda message, key: log.error(message, key=key))
                self._tls.sans = fresh.sans
            if document.users:
                self._bcrypt = _bcrypt(self._file)
            self._document = document
            self._good.clear()
            log.info("web configuration taken up", file=self._file)
        except errors.SettingsError as cause:
            log.error("the web configuration cannot be used; the last good one stays in force", cause=cause)


def _credentials(authorization: str) -> tuple[str | None, bytes]:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None, b""
    try:
        user, colon, password = base64.b64decode(token.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else (None, b"")
    except (binascii.Error, ValueError):
        return None, b""


def _bcrypt(file: Path) -> types.ModuleType:
    try:
        import bcrypt  # an extra: only who sets passwords needs it
    except ImportError:
        message = "passwords need the Python package bcrypt, which is not installed (pip install bcrypt)"
        raise errors.SettingsError(
            (errors.Problem("error", "web-config", message, file=str(file), key="basic_auth_users"),)
        ) from None
    return bcrypt


def load(file: Path) -> Web:
    """Read a web configuration file. Raises SettingsError with file, line and key of everything wrong."""
    return Web(file)
