"""What is answered where, to whom, and how it fares with clients that take their time."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from agent import errors
from agent.reconcile import snapshot as snapshots
from agent.serve import address, exposition, server
from agent.serve import board as boards
from tests.serve import built, openssl

PATHS = ("/", "/metrics", "/livez", "/readyz", "/healthz", "/status")
PASSWORD = "correct horse"
HASH = "$2y$04$x2fSrjEgMDUYdnBmAMRIBe4QWhmnfEICbByoeZJGznLqXlfSOA0Em"
Start = Callable[..., Awaitable[server.Server]]


@pytest.fixture
def board() -> boards.Board:
    board = boards.Board(now=built.NOW)
    board.publish_snapshot(built.snapshot())
    board.publish_sample(built.sample())
    return board


@pytest.fixture
async def start(board: boards.Board) -> AsyncIterator[Start]:
    """Start servers with clocks that stand; they end with the test."""
    running = []

    async def begin(*listen: str, **more: object) -> server.Server:
        found = await server.start(board, listen=listen or ("127.0.0.1:0",), clock=lambda: built.NOW, **more)  # type: ignore[arg-type]
        running.append(found)
        return found

    yield begin
    for one in running:
        await one.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode()


async def get(
    client: aiohttp.ClientSession, base: str, path: str = "/metrics", *, method: str = "GET", **headers: str
) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.request(method, f"http://{base}{path}", headers=named) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.read())


async def test_every_path_on_loopback(start: Start, client: aiohttp.ClientSession) -> None:
    base = (await start()).addresses[0]
    for path in PATHS:
        assert (await get(client, base, path)).status == 200, path
        head = await get(client, base, path, method="HEAD")
        assert (head.status, head.body) == (200, b""), path


async def test_metrics_are_negotiated_and_zipped(start: Start, client: aiohttp.ClientSession) -> None:
    base = (await start()).addresses[0]
    text = await get(client, base, Accept="*/*", Accept_Encoding="identity")
    assert text.headers["Content-Type"] == exposition.TEXT.content_type
    assert "Content-Encoding" not in text.headers
    assert text.body.startswith(b"# HELP gpunode_build_info ")
    zipped = await get(client, base, Accept_Encoding="gzip, deflate")
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert zipped.headers["Vary"] == "Accept, Accept-Encoding"
    assert gzip.decompress(zipped.body) == text.body
    refused = await get(client, base, Accept_Encoding="gzip;q=0, deflate")
    assert "Content-Encoding" not in refused.headers
    other = await get(client, base, Accept="application/openmetrics-text;version=1.0.0", Accept_Encoding="identity")
    assert other.headers["Content-Type"] == exposition.OPENMETRICS.content_type
    assert other.body.endswith(b"# EOF\n")


async def test_a_new_sample_is_served_next(board: boards.Board, start: Start, client: aiohttp.ClientSession) -> None:
    running = await start()
    base = running.addresses[0]
    assert "gpunode_gpu_power_watts" in (await get(client, base, Accept_Encoding="identity")).text
    board.publish_sample(built.sample(nvml_up=False, gpus=()))
    worker = (await running.prepare())._worker
    assert worker is not None
    await worker
    after = (await get(client, base, Accept_Encoding="identity")).text
    assert "gpunode_nvml_up 0.0" in after
    assert "gpunode_gpu_power_watts" not in after


async def test_what_is_not_there_and_what_is_not_done(start: Start, client: aiohttp.ClientSession) -> None:
    base = (await start()).addresses[0]
    missing = await get(client, base, "/metric")
    assert (missing.status, missing.text) == (
        404,
        "there is nothing at /metric; there is: / /metrics /livez /readyz /healthz /status\n",
    )
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        refused = await get(client, base, "/status", method=method)
        assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


async def test_probes_follow_the_board(board: boards.Board, start: Start, client: aiohttp.ClientSession) -> None:
    base = (await start()).addresses[0]

    async def probes() -> list[tuple[int, str]]:
        return [(a.status, a.text) for a in [await get(client, base, "/livez"), await get(client, base, "/readyz")]]

    assert await probes() == [(200, "live\n"), (200, "ready\n")]
    board.publish_snapshot(built.snapshot(gpus_expected=8))
    assert await probes() == [(200, "live\n"), (200, "ready, degraded: gpu-missing\n")]
    board.publish_snapshot(built.snapshot(plan=built.plan_of(built.drifted(0))))
    assert await probes() == [(200, "live\n"), (503, "not ready: drift\n")]
    board.turned(built.NOW - 11)
    assert await probes() == [(503, "not live: loop-stuck\n"), (503, "not ready: loop-stuck, drift\n")]


async def test_healthz_is_the_verdict_with_its_reasons(
    board: boards.Board, start: Start, client: aiohttp.ClientSession
) -> None:
    base = (await start()).addresses[0]
    good = await get(client, base, "/healthz")
    assert json.loads(good.body) == {
        "live": True,
        "ready": True,
        "degraded": False,
        "healthy": True,
        "phase": "converged",
        "simulated": None,
        "reasons": [],
    }
    board.publish_snapshot(built.snapshot(plan=built.plan_of(built.drifted(0)), phase=snapshots.Phase.DRIFTED))
    bad = await get(client, base, "/healthz")
    assert bad.status == 503
    assert json.loads(bad.body)["reasons"] == [
        {"code": "drift", "message": "GPU 0: 1g.10gb at 0:1 is missing", "gpu": built.uuid(0)}
    ]


async def test_status_is_the_document_that_the_command_prints(start: Start, client: aiohttp.ClientSession) -> None:
    base = (await start()).addresses[0]
    document = json.loads((await get(client, base, "/status")).body)
    assert document["phase"] == "converged"
    assert [gpu["gpu_instances"][0]["profile"] for gpu in document["gpus"]] == ["1g.10gb", "1g.10gb"]
    assert document["gpus"][0]["gpu_instances"][0]["memory"]["used_bytes"] > 0


async def test_before_anything_was_published(client: aiohttp.ClientSession) -> None:
    running = await server.start(boards.Board(now=built.NOW), listen=("127.0.0.1:0",), clock=lambda: built.NOW)
    try:
        base = running.addresses[0]
        answers = {path: (await get(client, base, path)).status for path in PATHS}
        assert answers == {"/": 200, "/metrics": 200, "/livez": 200, "/readyz": 503, "/healthz": 503, "/status": 200}
    finally:
        await running.close()


async def test_the_page_runs_its_own_script_and_loads_nothing_from_elsewhere(
    start: Start, client: aiohttp.ClientSession
) -> None:
    page = await get(client, (await start()).addresses[0], "/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text
    for handler in (" onclick=", " onload=", " style=", "src=", "@import", "innerHTML"):
        assert handler not in page.text, f"{handler} would be stopped by the policy or lets markup in"


async def test_beyond_loopback_only_metrics_and_probes(start: Start, client: aiohttp.ClientSession) -> None:
    running = await start("0.0.0.0:0", "127.0.0.1:0")
    everywhere, loopback = running.addresses
    port = everywhere.rpartition(":")[2]
    answers = {path: await get(client, f"127.0.0.1:{port}", path) for path in PATHS}
    assert {path: answer.status for path, answer in answers.items()} == {
        "/": 403,
        "/metrics": 200,
        "/livez": 200,
        "/readyz": 200,
        "/healthz": 403,
        "/status": 403,
    }
    assert "only with TLS and authentication" in answers["/status"].text
    missing = await get(client, f"127.0.0.1:{port}", "/nothing")
    assert missing.text == "there is nothing at /nothing; there is: /metrics /livez /readyz\n"
    assert (await get(client, loopback, "/status")).status == 200


async def test_probes_beyond_loopback_tell_codes_and_no_names(
    board: boards.Board, start: Start, client: aiohttp.ClientSession
) -> None:
    reason = snapshots.Reason("in-use", "held by train (pid 77) in pod ml/secret", built.uuid(0))
    board.publish_snapshot(built.snapshot(reasons=(reason,)))
    port = (await start("0.0.0.0:0")).addresses[0].rpartition(":")[2]
    assert (await get(client, f"127.0.0.1:{port}", "/readyz")).text == "ready, degraded: in-use\n"


async def test_a_unix_socket_serves_everything_and_is_removed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    running = await start(f"unix:{path}")
    assert running.addresses == (f"unix:{path}",)
    assert path.stat().st_mode & 0o777 == 0o660
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
        assert (await get(client, "localhost", "/status")).status == 200
    await running.close()
    assert not path.exists()


async def test_sockets_handed_in_are_used_instead_of_addresses(start: Start, client: aiohttp.ClientSession) -> None:
    handed = socket.create_server(("127.0.0.1", 0))
    handed.setblocking(False)
    port = handed.getsockname()[1]
    running = await start("127.0.0.1:1", sockets=(handed,))
    assert running.addresses == (f"127.0.0.1:{port}",)
    assert (await get(client, running.addresses[0], "/status")).status == 200


async def test_a_port_in_use_is_one_sentence_that_names_it(start: Start) -> None:
    taken = (await start()).addresses[0]
    with pytest.raises(address.ListenError) as caught:
        await start("127.0.0.1:0", taken)
    assert str(caught.value) == f"cannot listen on {taken}: the address is in use (is another gpunode running here?)"
    assert caught.value.exit_code == errors.EXIT_FAILED


async def test_more_large_answers_than_are_allowed_are_turned_away(
    board: boards.Board, start: Start, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_REQUESTS", 0)
    board.publish_sample(built.sample(*(built.gpu_sample(i, instances=7) for i in range(8))))
    base = (await start()).addresses[0]
    busy = await get(client, base, Accept_Encoding="identity")
    assert (busy.status, busy.headers["Retry-After"]) == (503, "5")
    assert (await get(client, base, "/livez")).status == 200


@pytest.mark.parametrize("whole", [0, 4 << 20], ids=["sent in pieces", "handed over in one piece"])
async def test_a_client_that_does_not_read_is_dropped_and_others_are_served(
    board: boards.Board, start: Start, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(server, "SEND_WITHIN", 0.05)
    monkeypatch.setattr(server, "MAX_WHOLE", whole)
    board.publish_sample(built.sample(*(built.gpu_sample(i, instances=7) for i in range(8))))
    running = await start()
    host, _, port = running.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 400)  # more than any socket buffer takes
        async with asyncio.timeout(20):
            assert (await get(client, running.addresses[0], "/livez")).status == 200
            while slow.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == ESTABLISHED:  # noqa: ASYNC110  # the kernel has no event
                await asyncio.sleep(0.01)
            while running._under_way:  # noqa: ASYNC110  # the kernel knows of the end before our own side does
                await asyncio.sleep(0.01)


async def test_a_fault_in_an_answer_is_500_without_a_traceback(
    start: Start, client: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> dict[str, object]:
        raise KeyError("secret")

    monkeypatch.setattr("agent.serve.render.status_document", broken)
    answer = await get(client, (await start()).addresses[0], "/status")
    assert (answer.status, answer.text) == (500, "gpunode failed to answer; its log says why\n")
    log = capsys.readouterr().err
    assert "cannot answer a request" in log
    assert "Traceback" not in log


async def test_nonsense_on_the_wire_is_400(start: Start) -> None:
    host, _, port = (await start()).addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.0 400")
    writer.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with server.pem, server.key and a client's pair, each signed by itself."""
    where = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "stranger"):
        names = ("-addext", f"subjectAltName=DNS:{name}.test,IP:127.0.0.1")
        openssl.make(where / f"{name}.key", where / f"{name}.pem", name, *names)
    return where


def web_config(where: Path, text: str) -> Path:
    path = where / "web.yml"
    path.write_text(text)
    return path


TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
ESTABLISHED = b"\1"
"""The kernel's word for a TCP connection that stands."""
USERS = f"basic_auth_users:\n  ana: {HASH}\n"


async def secure(
    port: str, path: str, *, trust: Path, user: tuple[str, str] | None = None, pair: tuple[Path, Path] | None = None
) -> Answer:
    context = ssl.create_default_context(cafile=str(trust))
    context.check_hostname = False
    if pair is not None:
        context.load_cert_chain(*pair)
    headers = {}
    if user is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(":".join(user).encode()).decode()
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.get(f"https://127.0.0.1:{port}{path}", headers=headers) as answer,
    ):
        return Answer(answer.status, dict(answer.headers), await answer.read())


async def test_with_tls_and_passwords_everything_is_served_beyond_loopback(start: Start, certificates: Path) -> None:
    config = web_config(certificates, TLS + USERS + "http_server_config:\n  headers:\n    X-Frame-Options: deny\n")
    port = (await start("0.0.0.0:0", web_config=config)).addresses[0].rpartition(":")[2]
    trust = certificates / "server.pem"
    for path in PATHS:
        nobody = await secure(port, path, trust=trust)
        assert (nobody.status, nobody.headers["WWW-Authenticate"]) == (401, 'Basic realm="gpunode", charset="UTF-8"')
        for wrong in (("ana", "wrong"), ("eve", PASSWORD), ("", "")):
            assert (await secure(port, path, trust=trust, user=wrong)).status == 401, wrong
        known = await secure(port, path, trust=trust, user=("ana", PASSWORD))
        assert known.status == 200, path
        assert known.headers["X-Frame-Options"] == "deny"


async def test_tls_without_authentication_opens_nothing_more(start: Start, certificates: Path) -> None:
    port = (await start("0.0.0.0:0", web_config=web_config(certificates, TLS))).addresses[0].rpartition(":")[2]
    trust = certificates / "server.pem"
    assert (await secure(port, "/metrics", trust=trust)).status == 200
    assert (await secure(port, "/status", trust=trust)).status == 403


async def test_passwords_without_tls_open_nothing_more(
    start: Start, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    port = (await start("0.0.0.0:0", web_config=web_config(tmp_path, USERS))).addresses[0].rpartition(":")[2]
    right = "Basic " + base64.b64encode(f"ana:{PASSWORD}".encode()).decode()
    assert (await get(client, f"127.0.0.1:{port}", "/metrics", Authorization=right)).status == 200
    assert (await get(client, f"127.0.0.1:{port}", "/status", Authorization=right)).status == 403


async def test_client_certificates_are_authentication_too(start: Start, certificates: Path) -> None:
    text = (
        TLS
        + "  client_ca_file: client.pem\n  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [client.test]\n"
    )
    port = (await start("0.0.0.0:0", web_config=web_config(certificates, text))).addresses[0].rpartition(":")[2]
    trust = certificates / "server.pem"
    pair = (certificates / "client.pem", certificates / "client.key")
    assert (await secure(port, "/status", trust=trust, pair=pair)).status == 200
    stranger = (certificates / "stranger.pem", certificates / "stranger.key")
    with pytest.raises(aiohttp.ClientError):
        await secure(port, "/status", trust=trust, pair=stranger)
    with pytest.raises(aiohttp.ClientError):
        await secure(port, "/status", trust=trust)


async def test_a_unix_socket_asks_no_password(start: Start, tmp_path: Path) -> None:
    await start(f"unix:{tmp_path}/s", web_config=web_config(tmp_path, USERS))
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{tmp_path}/s")) as client:
        assert (await get(client, "localhost", "/status")).status == 200


async def test_a_bad_web_configuration_stops_the_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="unknown key"):
        await start(web_config=web_config(tmp_path, "basic_auth_user:\n  ana: x\n"))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("127.0.0.1:19400", ("127.0.0.1", 19400)),
        ("[::1]:19400", ("::1", 19400)),
        (":9400", ("", 9400)),
        ("localhost:0", ("localhost", 0)),
        ("unix:/run/gpunode/http.sock", Path("/run/gpunode/http.sock")),
    ],
)
def test_addresses(text: str, read: object) -> None:
    assert address.split(text) == read


@pytest.mark.parametrize(
    "text", ["", "19400", "host", "1.2.3.4:", "1.2.3.4:70000", "::1:19400", "unix:relative", "[::1]", "http://x:1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(errors.UsageError, match=f'cannot listen on "{urllib.parse.unquote(text)}"'.replace("[", r"\[")):
        address.split(text)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST.:19400", 200),
        ("gpu.localhost:8080", 200),
        ("127.0.0.1:19400", 200),
        ("[::1]:19400", 200),
        (socket.gethostname(), 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:19400", 403),
        ("[::1", 403),
    ],
)
async def test_a_name_from_elsewhere_that_leads_here_opens_no_page(
    start: Start, client: aiohttp.ClientSession, host: str, status: int
) -> None:
    base = (await start()).addresses[0]
    answer = await get(client, base, "/status", Host=host)
    assert answer.status == status
    assert status == 200 or "is no name of this machine" in answer.text
    assert (await get(client, base, "/livez", Host=host)).status == 200


async def test_ipv6_loopback_is_loopback(start: Start, client: aiohttp.ClientSession) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        running = await start("[::1]:0")
    except address.ListenError:
        pytest.skip("no IPv6 loopback here")
    assert (await get(client, running.addresses[0], "/status")).status == 200


def test_a_stale_unix_socket_is_replaced_and_anything_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    (listener,) = address.open_all((f"unix:{path}",))
    with pytest.raises(address.ListenError, match="in use"):
        address.open_all((f"unix:{path}",))
    listener.close()
    path.write_text("somebody's file")
    with pytest.raises(address.ListenError, match="something else than a socket is there"):
        address.open_all((f"unix:{path}",))
    assert path.read_text() == "somebody's file"
