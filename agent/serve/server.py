"""HTTP: metrics, probes, status and the page, from what hangs on the board.

No request ever reaches the driver, so answers take milliseconds whatever it does. Nothing that
changes the node is reachable here. What a listener beyond loopback may tell without TLS and
authentication is metrics and probes; status and page name pods and processes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web, web_runner

from agent import log, threads
from agent.reconcile import snapshot as snapshots
from agent.serve import address, health
from agent.serve import board as boards

if TYPE_CHECKING:  # loaded when somebody asks: nothing of it is needed to say that the node is ready
    from agent.serve import exposition, webconfig

OPEN_PATHS = ("/metrics", "/metrics/dcgm", "/livez", "/readyz")
"""What is served to anybody who reaches a listener."""
MAX_REQUESTS = 40
"""Large answers under way at a time; further requests are turned away with 503."""
MAX_WHOLE = 5 << 20
"""Bytes that answers under way may keep while each is handed over in one piece; beyond that, in pieces as clients take them."""
SEND_WITHIN = 10.0
"""Seconds in which a client must have taken a large answer (the usual scrape timeout)."""
KEEP_ALIVE = 90.0
"""Seconds an idle connection is kept: longer than the usual scrape interval."""
_CHUNK = 1 << 16
_BUFFER = 1 << 15
_REFRESH = 5.0
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_PAGE = Path(__file__).with_name("page") / "index.html"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server:
    """A running server; `addresses` are the addresses it listens on, in words. Made by `start`."""

    def __init__(
        self,
        board: boards.Board,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        guard: webconfig.Web | None,
        dcgm: bool,
    ) -> None:
        self._board = board
        self._clock = clock
        self._monotonic = monotonic
        self._guard = guard
        self._exposition: exposition.Exposition | None = None
        self._chosen: dict[str, exposition.Format] = {}
        self._under_way = 0
        self._listeners: list[address.Listener] = []
        self._runners: list[web_runner.ServerRunner] = []
        self._refresher: asyncio.Task[None] | None = None
        self._page: tuple[bytes, str] | None = None
        self._handlers: dict[str, Handler] = {
            "/": self._root,
            "/metrics": self._metrics,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/healthz": self._healthz,
            "/status": self._status_document,
        }
        self._dcgm: exposition.Exposition | None = None
        if dcgm:
            self._handlers["/metrics/dcgm"] = self._dcgm_metrics

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses listened on, ports as bound."""
        return tuple(listener.name for listener in self._listeners)

    async def open(self, listeners: Sequence[address.Listener]) -> None:
        """Answer on these sockets."""
        self._listeners = list(listeners)
        for listener in listeners:
            guard = None if listener.unix else self._guard
            guarded = guard is not None and guard.guarded
            everything = listener.local or guarded
            # A browser on this machine may be led here by a page elsewhere whose name turns into 127.0.0.1.
            own_names = listener.local and not listener.unix and not guarded
            server = web.Server(
                functools.partial(self._answer, everything=everything, own_names=own_names, guard=guard),
                access_log=None,
                logger=_logger(),
                keepalive_timeout=KEEP_ALIVE,
                read_bufsize=1 << 14,
                lingering_time=1.0,
            )
            runner = web_runner.ServerRunner(server, handle_signals=False, shutdown_timeout=0.3)
            await runner.setup()
            self._runners.append(runner)
            context = None if guard is None else guard.context
            await web.SockSite(runner, listener.socket, ssl_context=context).start()
            if not everything:
                log.debug("only metrics and probes are served here", address=listener.name)
        if self._guard is not None:
            self._refresher = asyncio.get_running_loop().create_task(self._refresh(self._guard), name="web-config")

    async def prepare(self) -> exposition.Exposition:
        """Load what renders metrics, in a thread, unless that is done: it takes tens of milliseconds."""
        if self._exposition is None:
            await threads.run(lambda: importlib.import_module("agent.serve.exposition"), name="exposition")
        if self._exposition is None:  # nobody else waited for it meanwhile
            from agent.serve import exposition

            self._exposition = exposition.Exposition(self._board, clock=self._clock, monotonic=self._monotonic)
        return self._exposition

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._refresher is not None:
            self._refresher.cancel()
        if self._exposition is not None:
            await self._exposition.close()
        if self._dcgm is not None:
            await self._dcgm.close()
        for runner in self._runners:
            await runner.cleanup()
        for listener in self._listeners:
            listener.close()

    async def _refresh(self, guard: webconfig.Web) -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            await threads.run(guard.refresh, name="web-config")

    async def _answer(
        self, request: web.BaseRequest, *, everything: bool, own_names: bool, guard: webconfig.Web | None
    ) -> web.StreamResponse:
        """Find who answers a request, and let nothing but an answer out."""
        try:
            if guard is not None:
                refusal = await self._check(request, guard)
                if refusal is not None:
                    return refusal
            handler = self._handlers.get(request.path)
            if handler is None:
                known = " ".join(path for path in self._handlers if everything or path in OPEN_PATHS)
                response: web.StreamResponse = _say(
                    404, f"there is nothing at {_printable(request.path)}; there is: {known}\n"
                )
            elif request.method not in ("GET", "HEAD"):
                text = f"{_printable(request.method)} is not answered here, only GET and HEAD\n"
                response = _say(405, text, {"Allow": "GET, HEAD"})
            elif not everything and request.path not in OPEN_PATHS:
                whose = "by listeners on loopback and Unix sockets, by others only with TLS and authentication"
                response = _say(403, f"{request.path} is served {whose}\n")
            elif own_names and request.path not in OPEN_PATHS and not address.names_this_machine(request.host):
                text = f"{_printable(request.host)} is no name of this machine; ask for localhost or an address\n"
                response = _say(403, text)
            else:
                response = await handler(request)
            if guard is not None and not response.prepared:
                response.headers.update(guard.headers)
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as cause:  # noqa: BLE001  # a fault in one answer is logged in words, the server goes on
            log.error("cannot answer a request", path=_printable(request.path), cause=repr(cause))
            return _say(500, "gpunode failed to answer; its log says why\n")

    async def _check(self, request: web.BaseRequest, guard: webconfig.Web) -> web.Response | None:
        """Return why a request is turned away, None when it may pass."""
        if not guard.admits(self._monotonic()):
            return _say(429, "too many requests\n")
        if request.transport is not None and not guard.allows_certificate(request.transport.get_extra_info("peercert")):
            return _say(403, "the client certificate is not among the names allowed\n")
        if not guard.asks_password:
            return None
        known = await guard.knows(request.headers.get("Authorization"))
        if known is None:
            return _say(429, "too many password checks at once\n")
        if not known:
            return _say(
                401, "user and password are needed\n", {"WWW-Authenticate": 'Basic realm="gpunode", charset="UTF-8"'}
            )
        return None

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        kept = self._exposition or await self.prepare()
        accept = request.headers.get("Accept", "")
        form = self._chosen.get(accept)
        if form is None:
            from agent.serve import exposition

            form = exposition.choose(accept)
            if len(self._chosen) < 64:
                self._chosen[accept] = form
        return await self._ready_bytes(request, kept, form)

    async def _dcgm_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        await self.prepare()
        from agent.serve import exposition

        if self._dcgm is None:
            from agent.serve.families import dcgm

            self._dcgm = exposition.Exposition(
                self._board,
                clock=self._clock,
                monotonic=self._monotonic,
                renderer=exposition.Renderer(dcgm.FAMILIES, process=False),
                formats=(exposition.TEXT,),
            )
        return await self._ready_bytes(request, self._dcgm, exposition.TEXT)

    async def _ready_bytes(
        self, request: web.BaseRequest, kept: exposition.Exposition, form: exposition.Format
    ) -> web.StreamResponse:
        page = kept.ready(form)
        if page is None:
            page = await kept.page(form)
        headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding", "Cache-Control": "no-store"}
        body = page.plain
        if _takes_gzip(request.headers.get("Accept-Encoding", "")):
            headers["Content-Encoding"] = "gzip"
            body = page.gzipped
        return await self._send(request, body, headers)

    async def _send(self, request: web.BaseRequest, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Send a large answer in pieces as the client takes them, to a bounded number of clients at a time."""
        if self._under_way >= MAX_REQUESTS:
            return _say(503, f"{MAX_REQUESTS} answers are under way already\n", {"Retry-After": "5"})
        headers["Server"] = "gpunode"
        if len(body) <= _CHUNK or request.method == "HEAD":
            return web.Response(body=body, headers=headers)
        transport = request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=_BUFFER)
        self._under_way += 1
        # Who keeps up gets it in one piece: five writes cost half as much again as the answer itself.
        whole = self._under_way * len(body) <= MAX_WHOLE
        response = web.Response(body=body, headers=headers) if whole else web.StreamResponse(headers=headers)
        deadline = asyncio.get_running_loop().call_later(SEND_WITHIN, _cut, transport)
        try:
            if not whole:
                response.content_length = len(body)
            await response.prepare(request)
            if not whole:
                view = memoryview(body)
                for start in range(0, len(body), _CHUNK):
                    await response.write(view[start : start + _CHUNK])
            await response.write_eof()
        except ConnectionError:
            pass  # the client has gone or was cut off; the response is not finished, and aiohttp ends the connection
        finally:
            deadline.cancel()
            self._under_way -= 1
        return response

    def _judge(self) -> health.Health:
        board = self._board
        return health.judge(
            board.snapshot,
            board.sample,
            now=self._clock(),
            loop_turned=board.loop_turned,
            noticed=board.findings,
        )

    async def _livez(self, _: web.BaseRequest) -> web.StreamResponse:
        live = self._judge().live
        return _say(200 if live else 503, "live\n" if live else "not live: loop-stuck\n")

    async def _readyz(self, _: web.BaseRequest) -> web.StreamResponse:
        verdict = self._judge()
        codes = f": {', '.join(verdict.codes)}" if verdict.codes else ""
        if not verdict.ready:
            return _say(503, f"not ready{codes}\n")
        return _say(200, f"ready, degraded{codes}\n" if verdict.degraded else "ready\n")

    async def _healthz(self, _: web.BaseRequest) -> web.StreamResponse:
        verdict, snapshot = self._judge(), self._board.snapshot
        document = {
            "live": verdict.live,
            "ready": verdict.ready,
            "degraded": verdict.degraded,
            "healthy": verdict.healthy,
            "phase": "starting" if snapshot is None else snapshot.phase.value,
            "simulated": None if snapshot is None else snapshot.simulated,
            "reasons": [
                {"code": reason.code, "message": reason.message, "gpu": reason.gpu} for reason in verdict.reasons
            ],
        }
        return _json(document, status=200 if verdict.ready else 503)

    async def _status_document(self, _: web.BaseRequest) -> web.StreamResponse:
        from agent.serve import render

        board = self._board
        snapshot = board.snapshot or snapshots.Snapshot(phase=snapshots.Phase.STARTING)
        document = render.status_document(snapshot, board.sample, self._judge())
        return _json(document)

    async def _root(self, _: web.BaseRequest) -> web.StreamResponse:
        if self._page is None:
            text = _PAGE.read_text(encoding="utf-8")
            self._page = (text.encode(), _policy(text))
        body, policy = self._page
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Server": "gpunode",
        }
        return web.Response(body=body, headers=headers)


def _policy(html: str) -> str:
    """Return a policy that lets exactly the page's own scripts and styles run, and nothing from elsewhere."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found
        )

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _cut(transport: asyncio.Transport | None) -> None:
    """End a connection at once; what the client did not take is kept nowhere, in the kernel neither."""
    if transport is None:
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Quiet(logging.Handler):
    """Takes what aiohttp has to say about broken clients: a line for who looks for a fault, no traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("http", what=record.getMessage())


def _logger() -> logging.Logger:
    quiet = logging.getLogger("gpunode.http")
    quiet.handlers[:] = [_Quiet()]
    quiet.propagate = False
    return quiet


def _takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in accepted.split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() in ("gzip", "*"):
            return re.fullmatch(r"\s*q=0(\.0*)?\s*", weight) is None
    return False


def _printable(text: str) -> str:
    """Return something a client sent so that it can be said back: short, and no control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:80])


def _say(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    base = {
        "Content-Type": _TEXT,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Server": "gpunode",
    }
    return web.Response(status=status, body=text.encode(), headers={**base, **(headers or {})})


def _json(document: object, *, status: int = 200) -> web.Response:
    body = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    headers = {
        "Content-Type": _JSON,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Server": "gpunode",
    }
    return web.Response(status=status, body=body, headers=headers)


async def start(
    board: boards.Board,
    *,
    listen: Sequence[str] = (),
    sockets: Sequence[socket.socket] = (),
    web_config: Path | None = None,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    dcgm: bool = False,
) -> Server:
    """Serve `board` on the addresses `listen`, or on `sockets` where some were handed in instead.

    `clock` gives Unix seconds. Raises UsageError for an address that cannot be read, ListenError
    for one that cannot be listened on, SettingsError for a bad web configuration file.
    """
    guard = None
    if web_config is not None:
        from agent.serve import webconfig

        guard = webconfig.load(web_config)
    listeners = [address.adopt(handed) for handed in sockets] or address.open_all(tuple(listen))
    server = Server(board, clock=clock, monotonic=monotonic, guard=guard, dcgm=dcgm)
    try:
        await server.open(listeners)
    except BaseException:
        with contextlib.suppress(Exception):
            await server.close()
        raise
    return server
