"""A real HTTP server on a Unix socket that plays Bottlerocket's API, well or badly."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

REAL = {
    "device-id-strategy": "index",
    "device-list-strategy": "cdi-cri",
    "device-partitioning-strategy": "none",
    "device-sharing-strategy": "none",
    "enabled": True,
    "pass-device-specs": True,
}
"""What the API answers on a node where nobody set anything."""


def table(**changes: object) -> dict[str, object]:
    """An answer without a wrapper, as `/settings?prefix=` gives it."""
    settings = {**REAL, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return {"kubelet-device-plugins": {"nvidia": settings}}


MIG = table(device_partitioning_strategy="mig", mig={"profile": {"a100.40gb": "2g.10gb"}})


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    allow_reuse_address = True


class Api:
    """The server's side. `body` and `status` are what it answers next; `mode` how: "http" (a length),
    "close" (no length, the end of the connection ends it), "hang" (nothing), "drip" (byte by byte),
    "raw" (`body` as it is), "keep" (a length, and the connection stays open)."""

    def __init__(self) -> None:
        self.body = b"{}"
        self.status = 200
        self.mode = "http"
        self.asked: list[str] = []
        self.ended = threading.Event()

    def answer(self, value: object, status: int = 200) -> None:
        self.body = json.dumps(value).encode()
        self.status = status


@contextlib.contextmanager
def serving(path: Path) -> Iterator[Api]:
    """Serve at `path` until the end of the block."""
    api = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            api.asked.append(self.path)
            match api.mode:
                case "hang":
                    api.ended.wait(10)
                    return
                case "raw":
                    self.wfile.write(api.body)
                case "drip":
                    for _ in range(1000):
                        self.wfile.write(b"H")
                        self.wfile.flush()
                        if api.ended.wait(0.02):
                            break
                case _:
                    self.send_response(api.status)
                    if api.mode != "close":
                        self.send_header("Content-Length", str(len(api.body)))
                    self.end_headers()
                    self.wfile.write(api.body)
            if api.mode == "keep":
                self.wfile.flush()
                api.ended.wait(10)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                super().handle()

    path.parent.mkdir(parents=True, exist_ok=True)
    with _Server(str(path), Handler) as server:
        worker = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        worker.start()
        try:
            yield api
        finally:
            api.ended.set()
            server.shutdown()
            worker.join()
    path.unlink(missing_ok=True)
