"""Settings that came with the machine: a Bottlerocket container's user data, and EC2's.

The container's file is ours alone. EC2 user data is everybody's and may hold secrets: it is opened
only when the operator has enabled that, only parts of our own type are looked at, and nothing of
the rest is ever repeated in a message.

nodeadm ignores parts of types it does not know, and Karpenter puts its own part behind those of the
operator, so an own part survives both. The whole and each part may be base64 or gzip or both.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from agent import errors
from agent.settings import document

CONTAINER_FILES = (
    ".bottlerocket/bootstrap-containers/current/user-data",
    ".bottlerocket/host-containers/current/user-data",
)
EC2_FILE = "var/lib/cloud/instance/user-data.txt"
"""Where cloud-init keeps what IMDS gave it."""
CONTENT_TYPE = "application/gpunode+toml"

_GZIP = b"\x1f\x8b"
_BASE64 = re.compile(rb"[A-Za-z0-9+/\s]+={0,2}\s*")
_MIME = re.compile(rb"(?im)\A(?:[!-9;-~]+:.*\r?\n(?:[ \t].*\r?\n)*)*content-type:\s*multipart/")
_OURS = re.compile(rb"(?i)application/gpunode\+toml")


def container_files(root: Path) -> tuple[Path, ...]:
    """Return the files that may hold this container's user data."""
    return tuple(root / name for name in CONTAINER_FILES)


def own_parts(data: bytes, *, name: str) -> tuple[bytes, ...]:
    """Return the contents of our parts in EC2 user data, in order; () when there are none.

    Raises document.Unreadable when there is one that cannot be taken out.
    """

    def fail(message: str) -> document.Unreadable:
        return document.Unreadable(errors.Problem("error", "user-data", message, file=name))

    try:
        plain = _unpack(data)
    except ValueError as cause:
        raise fail(f"cannot unpack the user data: {cause}") from cause
    if _OURS.search(plain) is None:
        return ()
    if _MIME.search(plain) is None:
        raise fail(f"names {CONTENT_TYPE}, but is no MIME multipart document")
    try:
        found = tuple(_parts(plain))
    except (ValueError, RecursionError) as cause:
        raise fail(f"cannot take the {CONTENT_TYPE} part out: {cause}") from cause
    if not found:
        raise fail(f"names {CONTENT_TYPE}, but has no such part: its MIME boundaries are broken")
    return found


def _parts(plain: bytes) -> Iterator[bytes]:
    """Yield the unpacked contents of our parts. Raises ValueError."""
    import email  # only here: few machines have such a part, and the package is a large one
    import email.errors
    import email.policy

    message = email.message_from_bytes(plain, policy=email.policy.compat32)
    for part in message.walk():
        if part.get_content_type() != CONTENT_TYPE or part.is_multipart():
            continue
        raw = part.get_payload(decode=False)
        assert isinstance(raw, str)  # what is not multipart is text, bytes beyond ASCII escaped
        content = raw.encode("ascii", "surrogateescape")
        encoding = str(part.get("Content-Transfer-Encoding", "")).strip().lower()
        if encoding == "base64":
            content = _base64(content)
        elif encoding == "quoted-printable":
            content = binascii.a2b_qp(content)
        yield _unpack(content)


def _unpack(data: bytes) -> bytes:
    """Return data without its gzip and base64 layers, three at most. Raises ValueError."""
    for _ in range(3):
        if data.startswith(_GZIP):
            data = _gunzip(data)
        elif len(data) > 16 and _BASE64.fullmatch(data):
            # Any short word would pass for base64; what comes out must be something we expect.
            try:
                decoded = _base64(data)
            except ValueError:
                return data
            if not (decoded.startswith(_GZIP) or _MIME.search(decoded) or b"\n" in decoded):
                return data
            data = decoded
        else:
            return data
    return data


def _base64(data: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error as cause:
        raise ValueError("its base64 is broken") from cause


def _gunzip(data: bytes) -> bytes:
    """Unpack gzip, never to more than a settings file may have."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(data, document.LIMIT + 1)
    except zlib.error as cause:
        raise ValueError("its gzip is broken") from cause
    if len(plain) > document.LIMIT:
        raise ValueError("it unpacks to more than 1 MiB")
    if not unpacker.eof:
        raise ValueError("its gzip is cut off")
    return plain
