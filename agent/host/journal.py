"""Log lines as journal entries with fields, when our stderr is the journal.

`journalctl GPU_UUID=GPU-…` then finds every line about a GPU. systemd-python sends them where it is
installed; where it is not (python3.11 on Amazon Linux 2023 has no such package), the journal's
datagram protocol is spoken here, which is twenty lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from agent import log

SOCKET = Path("/run/systemd/journal/socket")
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
_NAMES = {"gpu": "GPU_UUID", "message": "DETAIL", "priority": "FIELD_PRIORITY"}

Send = Callable[[Mapping[str, str]], None]


def install(environ: Mapping[str, str], *, stderr: int = 2, address: Path = SOCKET) -> bool:
    """Send log lines to the journal when descriptor `stderr` leads there; say whether it was done.

    JOURNAL_STREAM tells device and inode of the stream that systemd connected; a stderr that was
    redirected since is no longer it, and then lines stay key=value on stderr.
    """
    if not _is_journal(environ.get("JOURNAL_STREAM", ""), stderr):
        return False
    log.set_sink(sink(_sender(address)))
    return True


def _is_journal(stream: str, descriptor: int) -> bool:
    try:
        known = os.fstat(descriptor)
    except OSError:
        return False
    return stream == f"{known.st_dev}:{known.st_ino}"


def sink(send: Send) -> Callable[[str, str, dict[str, object]], None]:
    """Return a sink for `agent.log` that turns a line into journal fields and hands them to `send`.

    `gpu=` becomes GPU_UUID, other keys their upper-case form (`phase=` PHASE, `code=` CODE). MESSAGE
    repeats the fields, so that a plain `journalctl` shows them.
    """

    def write(level: str, event: str, fields: dict[str, object]) -> None:
        known = {key: str(value) for key, value in fields.items() if value is not None}
        words = " ".join([event, *(f"{key}={value}" for key, value in known.items())])
        entry = {"MESSAGE": words, "PRIORITY": str(_PRIORITIES[level]), "SYSLOG_IDENTIFIER": "gpunode"}
        for key, value in known.items():
            entry[_field(key)] = value
        with contextlib.suppress(OSError):  # a full or restarting journal must not end the daemon
            send(entry)

    return write


def _field(key: str) -> str:
    name = _NAMES.get(key) or re.sub(r"[^A-Z0-9]", "_", key.upper()).lstrip("_0123456789")
    return name[:64] or "FIELD"


def _sender(address: Path) -> Send:
    try:
        from systemd import journal
    except ImportError:
        return lambda entry: _send_native(entry, address)

    def send(entry: Mapping[str, str]) -> None:
        journal.sendv(*(f"{key}={value}" for key, value in entry.items()))

    return send


def _send_native(entry: Mapping[str, str], address: Path) -> None:
    """Send one entry as systemd's "Native Journal Protocol" says: a value with line breaks goes
    behind its length."""
    data = bytearray()
    for key, value in entry.items():
        raw = value.encode("utf-8", "replace")
        if b"\n" in raw:
            data += key.encode() + b"\n" + len(raw).to_bytes(8, "little") + raw + b"\n"
        else:
            data += key.encode() + b"=" + raw + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)
        channel.sendto(bytes(data), str(address))
