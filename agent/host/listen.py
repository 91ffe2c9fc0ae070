"""Sockets that systemd opened for us (socket activation), by sd_listen_fds's rules in plain Python."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

FIRST = 3
"""The first descriptor that systemd passes."""
_NAMES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def sockets(environ: MutableMapping[str, str], *, pid: int, first: int = FIRST) -> tuple[socket.socket, ...]:
    """Return the listening stream sockets passed to this process, () when there are none.

    The variables are taken out of `environ`, so that no child believes they are for it. Variables
    meant for another process (`LISTEN_PID`) are passed over. `first` is the first descriptor (3).
    Raises OSError when a promised descriptor is not a socket.
    """
    values = {name: environ.pop(name, None) for name in _NAMES}
    try:
        meant_for, count = int(values["LISTEN_PID"] or ""), int(values["LISTEN_FDS"] or "")
    except ValueError:
        return ()
    if meant_for != pid:
        return ()
    found = []
    for descriptor in range(first, first + count):
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        found.append(listener)
    return tuple(found)
