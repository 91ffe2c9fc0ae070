from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host import notify

Socket = tuple[Path, Callable[[], list[bytes]]]


def test_every_word_reaches_the_socket(datagrams: Socket) -> None:
    path, received = datagrams
    told = notify.Notifier(str(path), monotonic=lambda: 12.5)
    told.status("waiting\nfor the driver")
    told.extend_timeout(1.5)
    told.ready("24 instances in force")
    told.watchdog()
    told.reloading()
    told.stopping()
    assert received() == [
        b"STATUS=waiting; for the driver",
        b"EXTEND_TIMEOUT_USEC=1500000",
        b"READY=1\nSTATUS=24 instances in force",
        b"WATCHDOG=1",
        b"RELOADING=1\nMONOTONIC_USEC=12500000",
        b"STOPPING=1",
    ]


def test_an_abstract_address_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel gives an abstract name
        name = "@" + receiver.getsockname()[1:].decode()
        notify.Notifier(name).ready()
        assert receiver.recv(100) == b"READY=1"


def test_without_systemd_nothing_happens() -> None:
    told = notify.from_environment({})
    told.ready("x")
    told.watchdog()
    assert not told.present
    assert told.watchdog_interval is None


def test_a_socket_that_is_gone_raises_nothing(tmp_path: Path) -> None:
    notify.Notifier(str(tmp_path / "gone")).ready()


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_or_not(environ: dict[str, str], interval: float | None) -> None:
    told = notify.from_environment({"NOTIFY_SOCKET": "/run/systemd/notify", **environ}, pid=77)
    assert told.present
    assert told.watchdog_interval == interval


def test_an_address_of_another_family_counts_as_absent() -> None:
    assert not notify.from_environment({"NOTIFY_SOCKET": "vsock:2:1"}).present
