"""Settings changed under a running daemon: in force within 3 s, however they are changed, and nobody who
scrapes notices. A broken document in between changes nothing, and says where it is broken."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import daemons
from tests.settings import api as apis

WITHIN = 3.0
"""Seconds from the change of a document to the layout being in force, as promised."""
NODE = "a100.40gb:2"


def layout(profile: str, count: int) -> str:
    return f'[gpunode]\nperiod = 3600\n[[gpunode.layout]]\ngpus = "all"\ninstances = {{ "{profile}" = {count} }}\n'


class Scraper:
    """A client that scrapes each 50 ms on one connection, and keeps what went wrong."""

    def __init__(self, port: int) -> None:
        self.count = 0
        self.lost: list[str] = []
        self._port = port
        self._ended = threading.Event()
        self._worker = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        while not self._ended.wait(0.05):
            try:
                connection.request("GET", "/metrics")
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200 or b"gpunode_settings_valid" not in body:
                    self.lost.append(f"{answer.status} {body[:80]!r}")
            except (OSError, http.client.HTTPException) as cause:
                self.lost.append(repr(cause))
                connection.close()
            self.count += 1
        connection.close()

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Scrape during the block and a little longer."""
        self._worker.start()
        try:
            yield
            until = self.count + 10
            while self.count < until and not self.lost:
                self._ended.wait(0.05)
        finally:
            self._ended.set()
            self._worker.join()
        assert self.lost == []


def instances(gpunode: daemons.Running) -> list[str]:
    status = gpunode.get("/status").json()
    gpus = status["gpus"]
    assert isinstance(gpus, list)
    return sorted(i["profile"] for gpu in gpus for i in gpu["gpu_instances"])


def wait(gpunode: daemons.Running, wanted: Callable[[], bool], since: float) -> None:
    """Wait until something holds, which must be within the promise."""
    while not wanted():
        assert time.monotonic() - since < WITHIN, gpunode.said()
        time.sleep(0.02)


def complaint(gpunode: daemons.Running) -> str:
    """What health says of the settings."""
    reasons = gpunode.get("/healthz").json()["reasons"]
    assert isinstance(reasons, list)
    return " ".join(r["message"] for r in reasons if r["code"] == "settings-invalid")


def renamed(path: Path, text: str) -> None:
    """Change a file as editors do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def rewritten(path: Path, text: str) -> None:
    path.write_text(text)


class ConfigMap:
    """A directory as Kubernetes mounts it: names link through `..data`, which is turned as a whole."""

    def __init__(self, place: Path, name: str) -> None:
        self._place = place
        self._name = name
        self._turn = 0
        place.mkdir(parents=True, exist_ok=True)

    def set(self, text: str) -> None:
        self._turn += 1
        fresh = self._place / f"..{self._turn}"
        fresh.mkdir()
        (fresh / self._name).write_text(text)
        link = self._place / "..data_tmp"
        link.symlink_to(fresh.name)
        link.replace(self._place / "..data")
        visible = self._place / self._name
        if not visible.is_symlink():
            visible.symlink_to(Path("..data") / self._name)
        for old in self._place.glob("..[0-9]*"):
            if old != fresh:
                (old / self._name).unlink()
                old.rmdir()


WAYS = ["a file in place", "a file renamed over", "a ConfigMap turned", "a drop-in added", "the API's answer", "SIGHUP"]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_in_force_within_three_seconds_and_no_scrape_is_lost(tmp_path: Path, way: str) -> None:
    root = tmp_path / "state.root"
    config = root / "etc/gpunode/config.toml"
    config.parent.mkdir(parents=True)
    flags: list[str | Path] = ["--simulate", NODE, "--sim-state", tmp_path / "state"]
    with contextlib.ExitStack() as stack:
        first, second = layout("3g.20gb", 2), layout("2g.10gb", 3)
        match way:
            case "a ConfigMap turned":
                mount = ConfigMap(root / "etc/gpunode/config.d", "50-layout.toml")
                mount.set(first)
                change = lambda: mount.set(second)  # noqa: E731
            case "the API's answer":
                api = stack.enter_context(apis.serving(root / "run/api.sock"))
                mig = {"device_partitioning_strategy": "mig"}
                api.answer(apis.table(**mig, mig={"profile": {"a100.40gb": "3g.20gb"}}))
                change = lambda: api.answer(apis.table(**mig, mig={"profile": {"a100.40gb": "2g.10gb"}}))  # noqa: E731
            case "a drop-in added":
                config.write_text("[gpunode]\nperiod = 3600\n[[gpunode.layout]]\ngpus = [0]\nmig = false\n")
                change = lambda: renamed(  # noqa: E731
                    root / "etc/gpunode/config.d/10.toml",
                    layout("3g.20gb", 2).replace('"all"', "[1]").split("\n", 2)[2],
                )
                (root / "etc/gpunode/config.d").mkdir()
            case "a file in place":
                config.write_text(first)
                change = lambda: rewritten(config, second)  # noqa: E731
            case _:
                config.write_text(first)
                change = lambda: renamed(config, second)  # noqa: E731
        wanted = ["3g.20gb"] * 2 if way == "a drop-in added" else ["2g.10gb"] * 6
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            assert instances(gpunode) == ([] if way == "a drop-in added" else ["3g.20gb"] * 4)
            with Scraper(gpunode.port).going():
                since = time.monotonic()
                change()
                if way == "SIGHUP":
                    gpunode.process.send_signal(signal.SIGHUP)
                wait(gpunode, lambda: instances(gpunode) == wanted, since)
                wait(gpunode, lambda: gpunode.get("/readyz").status == 200, since)
            assert gpunode.process.poll() is None, "it is the same process"
            assert gpunode.stop() == 0


def test_a_broken_document_in_between_changes_nothing_and_says_where(tmp_path: Path) -> None:
    config = tmp_path / "state.root/etc/gpunode/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(layout("3g.20gb", 2))
    with daemons.run(tmp_path, "--simulate", NODE, "--sim-state", tmp_path / "state") as gpunode:
        gpunode.wait_ready()
        with Scraper(gpunode.port).going():
            for broken, key, line in (
                (layout("3g.20gb", 2).replace("instances", "instancs"), "instancs", 5),
                (layout("3g.20gb", 2).replace("3600", "'soon'"), "period", 2),
                (layout("3g.20gb", 7), "layout[0]", 3),
                (layout("3g.20gb", 2) + "mig = 1\n", "mig", 6),
            ):
                since = time.monotonic()
                renamed(config, broken)
                wait(gpunode, lambda: f"line {line}, key" in complaint(gpunode), since)  # noqa: B023  # used at once
                assert gpunode.get("/readyz").status == 503
                assert "gpunode_settings_valid 0" in gpunode.get("/metrics").body.decode()
                for word in (str(config), f"line {line}", key):
                    assert word in complaint(gpunode)
                    logged = [row for row in gpunode.said().splitlines() if "last good ones stay in force" in row]
                    assert word in logged[-1]
                assert gpunode.get("/livez").status == 200
                assert instances(gpunode) == ["3g.20gb"] * 4
                values = gpunode.get("/status").json()["settings"]
                assert isinstance(values, dict)
                assert values["valid"] is False
                assert values["values"]["period"]["value"] == 3600.0, "what was good is in force"
            since = time.monotonic()
            renamed(config, layout("2g.10gb", 3))
            wait(gpunode, lambda: instances(gpunode) == ["2g.10gb"] * 6, since)
            wait(gpunode, lambda: gpunode.get("/readyz").status == 200, since)
            assert "gpunode_settings_valid 1" in gpunode.get("/metrics").body.decode()
        assert gpunode.stop() == 0


def test_how_often_it_measures_changes_at_once_and_what_waits_for_a_start_is_said(tmp_path: Path) -> None:
    config = tmp_path / "state.root/etc/gpunode/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[gpunode]\nsample-interval = 3600\n")
    with daemons.run(tmp_path, "--simulate", NODE, "--sim-state", tmp_path / "state") as gpunode:
        gpunode.wait_ready()

        def taken() -> str:
            return gpunode.wait_metric("gpunode_sample_timestamp_seconds")

        before = taken()
        since = time.monotonic()
        renamed(config, "[gpunode]\nsample-interval = 0.2\ndcgm-metrics = true\n")
        wait(gpunode, lambda: taken() != before, since)
        before = taken()
        wait(gpunode, lambda: taken() != before, time.monotonic())
        assert "take effect at the next start" in gpunode.said()
        assert gpunode.stop() == 0


METADATA = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_PUT(self):
        self.answer(b"token")
    def do_GET(self):
        self.answer(json.dumps({"instanceType": "p4d.24xlarge", "instanceId": "i-0123456789abcdef0"}).encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("answers", [True, False], ids=["that answers", "that hangs"])
def test_the_metadata_service_is_asked_beside_everything_else(tmp_path: Path, answers: bool) -> None:
    """On a real host whose files do not tell the type: the daemon serves at once, whatever the service does."""
    root = tmp_path / "host"
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("5d0c5a4e-0000-4000-8000-000000000001\n")
    with contextlib.ExitStack() as stack:
        if answers:
            service = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", METADATA], stdout=subprocess.PIPE, text=True)
            )
            stack.callback(service.kill)
            assert service.stdout is not None
            port = int(service.stdout.readline())
        else:
            deaf = stack.enter_context(socket.socket())
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            port = deaf.getsockname()[1]
        more = {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}",
            "GPUNODE_HOST_ROOT": str(root),
            "http_proxy": "http://127.0.0.1:9",  # nobody there: were it used, nothing would be learned
        }
        with daemons.run(tmp_path, more=more) as gpunode:
            gpunode.wait_serving()
            if answers:
                gpunode.wait_metric("gpunode_gpus_expected 8")
                assert "p4d.24xlarge" in (root / "run/gpunode/identity.json").read_text()
            assert gpunode.get("/livez").status == 200
            assert gpunode.stop() == 0
