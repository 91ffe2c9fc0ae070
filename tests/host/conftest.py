from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.host import hosts


@pytest.fixture
def host(tmp_path: Path) -> hosts.Host:
    return hosts.Host(tmp_path)


@pytest.fixture
def datagrams(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], list[bytes]]]]:
    """A datagram socket as systemd and the journal have, and a function that reads what came."""
    path = tmp_path / "socket"
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(path))
    receiver.setblocking(False)

    def received() -> list[bytes]:
        found = []
        while True:
            try:
                found.append(receiver.recv(65536))
            except BlockingIOError:
                return found

    yield path, received
    receiver.close()
