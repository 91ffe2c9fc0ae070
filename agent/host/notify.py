"""Tell systemd where we stand: sd_notify's datagrams in plain Python, and nothing without systemd."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping


class Notifier:
    """Sends state to the socket that systemd gave us.

    Without an address (not under systemd) every method does nothing. A lost message never raises:
    a daemon must not end because its supervisor is busy.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        watchdog_interval: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._monotonic = monotonic
        self.watchdog_interval = watchdog_interval
        """Seconds within which `watchdog()` must come again, None where nobody watches."""

    @property
    def present(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def ready(self, status: str | None = None) -> None:
        """Start-up (or a reload) is done: units ordered after us may start."""
        self._send(("READY=1",), status)

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send((), text)

    def watchdog(self) -> None:
        """We are alive."""
        self._send(("WATCHDOG=1",))

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping takes up to `seconds` more from now."""
        self._send((f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}",))

    def reloading(self) -> None:
        """Settings are being read again; `ready()` ends it."""
        self._send(("RELOADING=1", f"MONOTONIC_USEC={round(self._monotonic() * 1e6)}"))

    def stopping(self, status: str | None = None) -> None:
        """We are on our way out."""
        self._send(("STOPPING=1",), status)

    def _send(self, lines: tuple[str, ...], status: str | None = None) -> None:
        if self._address is None:
            return
        if status is not None:
            lines = (*lines, "STATUS=" + status.replace("\n", "; "))
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass


def from_environment(environ: Mapping[str, str], *, pid: int | None = None) -> Notifier:
    """Return a notifier as NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID say.

    A watchdog meant for another process is not ours. Addresses other than a path or an abstract
    socket (`@…`) are not understood and count as absent.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")) or len(address) < 2:
        return Notifier()
    interval = None
    try:
        meant_for = int(environ.get("WATCHDOG_PID", "") or (pid or os.getpid()))
        if meant_for == (pid or os.getpid()):
            interval = int(environ["WATCHDOG_USEC"]) / 1e6
    except (KeyError, ValueError):
        pass
    return Notifier(address, watchdog_interval=interval or None)
