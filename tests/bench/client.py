"""An HTTP client that costs as little as Python allows, so that the server's time is what shows.

Blocking sockets for one client, a selector for many; answers are told apart by Content-Length.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n"
"""What a scraper sends, without its names for itself."""


class Refused(OSError):
    """The server answered, and not with what was asked for."""


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._missing = -1
        self._head = b""
        self.body_bytes = 0

    def ask(self) -> None:
        """Send one request."""
        self._missing, self._head = -1, b""
        self.socket.sendall(REQUEST)

    def take(self) -> bool:
        """Receive what is there; True once the answer is whole. Raises Refused for any but a 200."""
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        if self._missing < 0:
            self._head += chunk
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = self._head[:end]
            if not head.startswith(b"HTTP/1.1 200"):
                raise Refused(f"the server answered {head[:60]!r}")
            at = head.lower().index(b"content-length:") + 15
            self.body_bytes = int(head[at:].split(b"\r", 1)[0])
            self._missing = self.body_bytes - (len(self._head) - end - 4)
        else:
            self._missing -= len(chunk)
        return self._missing == 0

    def close(self) -> None:
        """Close it."""
        self.socket.close()


def one(connection: Connection, count: int) -> list[float]:
    """Return the seconds that each of `count` requests took, one after another."""
    took = []
    for _ in range(count):
        started = time.perf_counter()
        connection.ask()
        while not connection.take():
            pass
        took.append(time.perf_counter() - started)
    return took


def many(connections: Sequence[Connection], seconds: float) -> tuple[float, list[float]]:
    """Keep a request open on every connection for `seconds`; return answers a second and each one's seconds."""
    took: list[float] = []
    started: dict[Connection, float] = {}
    with selectors.DefaultSelector() as selector:
        begin = time.perf_counter()
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            started[connection] = time.perf_counter()
            connection.ask()
        until = begin + seconds
        open_ = len(connections)
        while open_:
            for key, _ in selector.select(30):
                connection = key.data
                if not connection.take():
                    continue
                now = time.perf_counter()
                took.append(now - started[connection])
                if now < until:
                    started[connection] = time.perf_counter()
                    connection.ask()
                else:
                    open_ -= 1
        end = time.perf_counter()
    return len(took) / (end - begin), took
