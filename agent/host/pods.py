"""Which pod was given which GPU device: the kubelet's PodResources API, version 1, over its socket.

The eight messages of it that matter are read here by hand: they are nothing but strings in numbered
fields, and generated code would bring protobuf into the daemon. grpclib (extra `kubernetes`) speaks
HTTP/2; it is imported on the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import errors, records

if TYPE_CHECKING:
    import grpclib.client

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
_SERVICE = "/v1.PodResourcesLister"
_LONGEST_ADDRESS = 100


@records.dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one resource: `resource` as pods ask for it, `ids` as the plugin names them."""

    resource: str
    ids: tuple[str, ...]


@records.dataclass(frozen=True, slots=True)
class Claimed:
    """A device that a resource claim (DRA) brought: `driver`, `pool`, `device` of its ResourceSlice."""

    driver: str
    pool: str
    device: str
    claim: str = ""


@records.dataclass(frozen=True, slots=True)
class Container:
    """A container and what it was given."""

    name: str
    devices: tuple[Devices, ...] = ()
    claimed: tuple[Claimed, ...] = ()


@records.dataclass(frozen=True, slots=True)
class Pod:
    """A pod on this node."""

    name: str
    namespace: str
    containers: tuple[Container, ...]


class Unreadable(errors.GpunodeError):
    """The kubelet did not tell: no socket, no answer in time, or no grpclib to ask with."""


async def list_pods(socket: Path, *, deadline: float = 5.0) -> tuple[Pod, ...]:
    """Return every pod with what its containers hold (`List`). Raises `Unreadable`."""
    answer = await _call(socket, "List", deadline)
    return tuple(_pod(value) for value in _messages(answer, 1))


async def allocatable(socket: Path, *, deadline: float = 5.0) -> tuple[Devices, ...]:
    """Return what the node has to give, taken or not (`GetAllocatableResources`). Raises `Unreadable`."""
    answer = await _call(socket, "GetAllocatableResources", deadline)
    return tuple(_devices(value) for value in _messages(answer, 1))


def read(socket: Path, *, deadline: float = 5.0) -> tuple[Pod, ...]:
    """Do `list_pods` from a thread that has no event loop."""
    return asyncio.run(list_pods(socket, deadline=deadline))


def read_allocatable(socket: Path, *, deadline: float = 5.0) -> tuple[Devices, ...]:
    """Do `allocatable` from a thread that has no event loop."""
    return asyncio.run(allocatable(socket, deadline=deadline))


# --- the call ----------------------------------------------------------------------------------


async def _call(socket: Path, method: str, deadline: float) -> bytes:
    try:
        import grpclib.client
        import grpclib.exceptions
        from grpclib.encoding import base
    except ImportError as error:
        raise Unreadable(
            'cannot ask the kubelet for its pods: grpclib is not installed (pip install "gpunode[kubernetes]")'
        ) from error

    class Bytes(base.CodecBase):
        """Messages stay bytes: they are read by `_fields`."""

        __content_subtype__ = "proto"

        def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002  # as grpclib calls it
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002  # as grpclib calls it
            return data

    with _short_address(socket) as address:
        channel = grpclib.client.Channel(path=address, codec=Bytes())
        try:
            ask: grpclib.client.UnaryUnaryMethod[bytes, bytes] = grpclib.client.UnaryUnaryMethod(
                channel, f"{_SERVICE}/{method}", bytes, bytes
            )
            async with asyncio.timeout(deadline):
                return await ask(b"", timeout=deadline)
        except TimeoutError as error:
            raise Unreadable(f"cannot ask the kubelet for its pods: no answer on {socket} in {deadline:g} s") from error
        except grpclib.exceptions.GRPCError as error:
            why = f"{error.status.name}: {error.message}" if error.message else error.status.name
            raise Unreadable(f"cannot ask the kubelet for its pods: {method} answers {why}") from error
        except (OSError, grpclib.exceptions.ProtocolError, grpclib.exceptions.StreamTerminatedError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise Unreadable(f"cannot ask the kubelet for its pods on {socket}: {why}") from error
        finally:
            channel.close()


@contextlib.contextmanager
def _short_address(socket: Path) -> Iterator[str]:
    """Give a path that fits into a socket address (108 bytes), by way of its directory when needed."""
    if len(os.fsencode(socket)) <= _LONGEST_ADDRESS:
        yield str(socket)
        return
    try:
        directory = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(f"cannot ask the kubelet for its pods on {socket}: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{directory}/{socket.name}"
    finally:
        os.close(directory)


# --- the messages (numbers of kubelet's pkg/apis/podresources/v1/api.proto) ----------------------


def _pod(data: bytes) -> Pod:
    return Pod(
        name=_text(data, 1),
        namespace=_text(data, 2),
        containers=tuple(_container(value) for value in _messages(data, 3)),
    )


def _container(data: bytes) -> Container:
    return Container(
        name=_text(data, 1),
        devices=tuple(_devices(value) for value in _messages(data, 2)),
        claimed=tuple(claimed for value in _messages(data, 5) for claimed in _claims(value)),
    )


def _devices(data: bytes) -> Devices:
    return Devices(resource=_text(data, 1), ids=tuple(_decode(value) for value in _messages(data, 2)))


def _claims(data: bytes) -> Iterator[Claimed]:
    claim = f"{_text(data, 3)}/{_text(data, 2)}"
    for value in _messages(data, 4):
        yield Claimed(driver=_text(value, 2), pool=_text(value, 3), device=_text(value, 4), claim=claim)


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    for field, value in _fields(data):
        if field == number and isinstance(value, bytes):
            yield value


def _text(data: bytes, number: int) -> str:
    text = ""
    for value in _messages(data, number):
        text = _decode(value)  # the last one counts, as protobuf has it
    return text


def _decode(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Walk a protobuf message: (field number, value). Unknown fields come too; that is how new kubelets
    stay readable. Raises `Unreadable` for what is no such message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, number = tag & 7, tag >> 3
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Unreadable(f"cannot read the kubelet's answer: wire type {kind}")
        if at + size > len(data):
            raise Unreadable("cannot read the kubelet's answer: it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Unreadable("cannot read the kubelet's answer: it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
