"""The image: built, run, and played through as a Bottlerocket bootstrap container."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host import nspawn

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
STORAGE = ("--storage-driver", "vfs")
MIXED = """
[[gpunode.layout]]
gpus = "all"
instances = { "1g.10gb" = 3, "3g.40gb" = 1 }
"""
ENTRY = "/usr/libexec/gpunode/container-entry"


def run(
    *argv: str | Path, seconds: float = 300, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
    )


def ok(*argv: str | Path) -> str:
    done = run(*argv)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image copies: gpunode and its libraries, laid out by the packages' own script."""
    target = tmp_path_factory.mktemp("tree") / "tree"
    ok(sys.executable, ROOT / "packaging/build.py", "tree", "--arch", os.uname().machine, "--out", target)
    return target


@pytest.fixture(scope="module")
def base_root() -> Path:
    why = nspawn.why_not()
    if why is not None:
        pytest.skip(f"SKIPPED: no base to build on: {why}")
    return nspawn.base()


def test_the_image_builds_and_does_the_main_job(
    tree: Path, base_root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for tool in ("podman", "buildah"):
        if shutil.which(tool) is None:
            pytest.skip(f"SKIPPED: {tool} is not installed")
    context = tmp_path / "context"
    arch = "arm64" if os.uname().machine == "aarch64" else "amd64"
    shutil.copytree(tree, context / "dist/tree" / arch)
    shutil.copytree(ROOT / "packaging/container", context / "packaging/container")
    archive = tmp_path / "base.tar"
    ok("tar", "-C", base_root, "-cf", archive, "--exclude=./dev/*", ".")
    short = tempfile.mkdtemp(prefix="gpn", dir="/var/tmp")  # podman takes no longer path
    request.addfinalizer(lambda: shutil.rmtree(short, ignore_errors=True))
    store = ("--root", f"{short}/store", "--runroot", f"{short}/run", *STORAGE)
    ok("podman", *store, "import", archive, "localhost/base")
    ok(
        *("podman", *store, "build", "--isolation", "chroot", "--build-arg", "BASE=localhost/base"),
        *("--build-arg", f"TARGETARCH={arch}", "--file", ROOT / "Containerfile", "--tag", "localhost/gpunode", context),
    )
    sizes = ok("podman", *store, "history", "--human", "--format", "{{.Size}}  {{.CreatedBy}}", "localhost/gpunode")
    print(*(f"figure: {line}" for line in sizes.splitlines()), sep="\n")
    name = ok("buildah", *store, "from", "localhost/gpunode").strip()

    def within(*words: str) -> str:
        return ok("buildah", *store, "run", "--isolation=chroot", name, "--", ENTRY, *words)

    node = ("--simulate", "p4d.24xlarge", "--sim-state", "/tmp/node")
    within("apply", "--yes", *node, "--settings", "/usr/share/doc/gpunode/examples/p4d-uniform.toml")
    found = json.loads(within("resources", *node, "--output", "json"))
    assert found["device_plugin"]["single"] == {"nvidia.com/gpu": 24}


class _Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class Bottlerocket:
    """A faked Bottlerocket host around an image's root."""

    def __init__(self, tree: Path, base_root: Path, place: Path) -> None:
        self.host = place / "host"
        for folder in ("run", "var", "dev", "etc", "proc"):
            (self.host / folder).mkdir(parents=True)
        release = "NAME=Bottlerocket\nID=bottlerocket\nVARIANT_ID=aws-k8s-1.34-nvidia\n"
        (self.host / "etc/os-release").write_text(release)
        for name in ("nvidia0", "nvidiactl"):
            (self.host / "dev" / name).touch()
        self.overlay = nspawn.Overlay([tree, base_root], place / "image")
        entry = self.overlay.root / ENTRY.lstrip("/")
        shutil.copy(ROOT / "packaging/container/entry.py", entry)
        self.settings: dict[str, object] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"kubelet-device-plugins": {"nvidia": outer.settings}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._api = _Unix(str(self.host / "run/api.sock"), Handler)
        threading.Thread(target=self._api.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def user_data(self, *words: str) -> None:
        """Give the host the settings, and the container the user data, that render.py makes."""
        layout = self.host.parent / "layout.toml"
        layout.write_text(MIXED)
        text = ok(sys.executable, ROOT / "bottlerocket/render.py", "--image", "x", *words, layout)
        settings = tomllib.loads(text)["settings"]
        self.settings = settings["kubelet-device-plugins"]["nvidia"]
        folder = self.overlay.root / ".bottlerocket/bootstrap-containers/current"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "user-data").write_bytes(base64.b64decode(settings["bootstrap-containers"]["gpunode"]["user-data"]))

    def run(self, *words: str, node: str) -> subprocess.CompletedProcess[str]:
        return run(
            "unshare",
            "--mount",
            "sh",
            ROOT / "tests/host/bootstrap.sh",
            self.overlay.root,
            self.host,
            ENTRY,
            *words,
            seconds=120,
            environ={
                "GPUNODE_SIMULATE": node,
                "GPUNODE_SIM_STATE": "/tmp/node",
                "GPUNODE_SIM_HOST": "real",
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            },
        )

    def close(self) -> None:
        self._api.shutdown()
        self._api.server_close()
        self.overlay.close()


@pytest.fixture
def bottlerocket(tree: Path, base_root: Path, tmp_path: Path) -> Iterator[Bottlerocket]:
    found = Bottlerocket(tree, base_root, tmp_path)
    yield found
    found.close()


def test_a_bootstrap_container_applies_at_every_boot(bottlerocket: Bottlerocket) -> None:
    bottlerocket.user_data("--gpu", "hopper")
    for boot in (1, 2):
        done = bottlerocket.run(node="p5.48xlarge")
        assert done.returncode == 0, f"boot {boot}: {done.stdout}{done.stderr}"
        assert "the node is as wanted" in done.stdout + done.stderr
        assert (bottlerocket.host / "run/gpunode/lock").exists(), "the lock is the host's"
        state = bottlerocket.run("status", "--output", "json", node="p5.48xlarge")
        gpus = json.loads(state.stdout)["gpus"]
        for gpu in gpus:
            assert sorted(gi["profile"] for gi in gpu["gpu_instances"]) == ["1g.10gb"] * 3 + ["3g.40gb"]
        again = bottlerocket.run("simulate", "reboot", node="p5.48xlarge")
        assert again.returncode == 0, again.stderr


def test_an_a100_whose_host_would_reboot_for_ever_is_refused_at_once(bottlerocket: Bottlerocket) -> None:
    bottlerocket.user_data("--gpu", "hopper")  # the wrong user data for these GPUs
    done = bottlerocket.run(node="p4de.24xlarge")
    assert done.returncode == 4
    assert "would never end" in done.stdout + done.stderr


def test_it_waits_for_the_hosts_own_manager(bottlerocket: Bottlerocket) -> None:
    bottlerocket.user_data("--gpu", "hopper")
    marker = bottlerocket.host / "run/nvidia-migmanager/reboot-required"
    marker.parent.mkdir()
    marker.touch()
    timer = threading.Timer(2.0, marker.unlink)
    timer.start()
    done = bottlerocket.run(node="p5.48xlarge")
    timer.join()
    assert done.returncode == 0, done.stdout + done.stderr
