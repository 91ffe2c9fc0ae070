from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from agent.host import listen


def test_a_real_child_takes_over_its_sockets() -> None:
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        ports = [listener.getsockname()[1] for listener in (first, second)]
        code = (
            "import os, socket\n"
            f"copies = [os.dup(n) for n in ({first.fileno()}, {second.fileno()})]\n"
            "copies = [os.dup(n) for n in copies]\n"
            "from agent.host import listen\n"
            "lowest = copies[0]\n"
            "environ = {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '2', 'LISTEN_FDNAMES': 'a:b'}\n"
            "found = listen.sockets(environ, pid=os.getpid(), first=lowest)\n"
            "print([s.getsockname()[1] for s in found], environ, [os.get_inheritable(s.fileno()) for s in found])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=(first.fileno(), second.fileno()),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.stdout == f"{ports} {{}} [False, False]\n", done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": "7"},
        {"LISTEN_PID": "7", "LISTEN_FDS": "many"},
        {"LISTEN_PID": "7", "LISTEN_FDS": "0"},
    ],
)
def test_sockets_for_somebody_else_are_left(environ: dict[str, str]) -> None:
    assert listen.sockets(environ, pid=7) == ()
    assert environ == {}


def test_a_promise_that_is_no_socket_is_an_error() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match=r"."):
            listen.sockets({"LISTEN_PID": "7", "LISTEN_FDS": "1"}, pid=7, first=read)
    finally:
        os.close(read)
        os.close(write)
