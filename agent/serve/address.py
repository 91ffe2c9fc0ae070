"""Where to listen: reading addresses, and opening their sockets with errors that name them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path

from agent import errors

BACKLOG = 128


class ListenError(errors.GpunodeError):
    """An address cannot be listened on; the text names it."""


@dataclasses.dataclass(slots=True)
class Listener:
    """An open listening socket. `name` is the address in words, `local` whether only this machine
    reaches it, `path` the file of a Unix socket made here (to be removed), else None."""

    socket: socket.socket
    name: str
    local: bool
    unix: bool
    path: Path | None = None

    def close(self) -> None:
        """Close the socket, and remove its file if it was made here."""
        self.socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


_TCP = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})", re.ASCII)


def split(text: str) -> tuple[str, int] | Path:
    """Read `host:port`, `[::1]:port`, `:port` (every address) or `unix:/path`. Raises UsageError."""
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        if not path.is_absolute():
            raise errors.UsageError(
                f'cannot listen on "{text}": a Unix socket needs an absolute path (unix:/run/gpunode/s)'
            )
        return path
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        like = "127.0.0.1:19400, [::1]:19400 or unix:/path"
        raise errors.UsageError(f'cannot listen on "{text}": that is no address (like {like})')
    return match["v6"] or match["host"], int(match["port"])


def names_this_machine(host: str) -> bool:
    """Whether a Host header is one that only this machine's own names and addresses explain: an IP address,
    localhost or the host name. A name from elsewhere that leads to 127.0.0.1 is none."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::\d+)?", host, re.ASCII)
    if match is None:
        return False
    name = (match[1] or match[2]).lower().removesuffix(".")
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def open_all(texts: tuple[str, ...]) -> list[Listener]:
    """Open every address, or none. Raises UsageError for one that cannot be read, ListenError."""
    where = [(text, split(text)) for text in texts]
    found: list[Listener] = []
    try:
        for text, place in where:
            found += [_unix(place)] if isinstance(place, Path) else _tcp(text, *place)
    except BaseException:
        for listener in found:
            listener.close()
        raise
    return found


def adopt(inherited: socket.socket) -> Listener:
    """Take a listening socket that somebody else opened (systemd)."""
    unix = inherited.family is socket.AF_UNIX
    name = inherited.getsockname()
    words = f"unix:{name}" if unix else f"{_bracketed(name[0])}:{name[1]}"
    return Listener(inherited, words, local=unix or _loopback(name[0]), unix=unix)


def _tcp(text: str, host: str, port: int) -> list[Listener]:
    try:
        # Every address is IPv6 that takes IPv4 too, where the kernel has IPv6.
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # asked for by an empty host
        found = socket.getaddrinfo(host or everywhere, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as cause:
        raise ListenError(f"cannot listen on {text}: {cause.strerror or cause}") from cause
    listeners: list[Listener] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family is socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if not host else 1)
            opened.bind(address)
            opened.listen(BACKLOG)
            opened.setblocking(False)
        except OSError as cause:
            opened.close()
            for listener in listeners:
                listener.close()
            raise ListenError(f"cannot listen on {text}: {_why(cause)}") from cause
        name = opened.getsockname()
        listeners.append(Listener(opened, f"{_bracketed(name[0])}:{name[1]}", local=_loopback(name[0]), unix=False))
    return listeners


def _unix(path: Path) -> Listener:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        before = os.umask(0o117)  # owner and group only, from the first moment
        try:
            opened.bind(str(path))
        finally:
            os.umask(before)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError as cause:
        opened.close()
        why = _why(cause)
        if cause.errno == errno.EADDRINUSE and not path.is_socket():
            why = "something else than a socket is there"
        raise ListenError(f"cannot listen on unix:{path}: {why}") from cause
    return Listener(opened, f"unix:{path}", local=True, unix=True, path=path)


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on any more; anything else in the way is left, and bind says so."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError:
            pass


def _why(cause: OSError) -> str:
    if cause.errno == errno.EADDRINUSE:
        return "the address is in use (is another gpunode running here?)"
    return cause.strerror or str(cause)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
