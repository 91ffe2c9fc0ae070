"""The main job from outside: start, layout in force, everything served, and an orderly end."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from agent.sim import calls as simulated_calls
from agent.sim import prototypes
from tests.e2e import daemons

SIMULATED = ("--simulate", "p4d.24xlarge", "--settings", daemons.EXAMPLE)
simulated_calls.load()  # the table is filled when the simulated library is made, which here happens in the child
MUTATING = {name for name, prototype in prototypes.PROTOTYPES.items() if prototype.mutates}


def test_layout_is_in_force_and_served(tmp_path: Path) -> None:
    with daemons.run(tmp_path, *SIMULATED) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_mig_memory_used_bytes{")
        status = gpunode.get("/status").json()
        assert status["phase"] == "converged"
        assert status["simulated"]
        gpus = status["gpus"]
        assert isinstance(gpus, list)
        profiles = [[instance["profile"] for instance in gpu["gpu_instances"]] for gpu in gpus]
        assert profiles == [["2g.10gb"] * 3] * 8
        for path in ("/livez", "/readyz", "/healthz"):
            assert gpunode.get(path).status == 200, path
        assert gpunode.get("/").headers["Content-Type"].startswith("text/html")
        metrics = gpunode.get("/metrics").body.decode()
        assert "gpunode_nvml_up 1" in metrics
        assert 'gpunode_phase{phase="converged"} 1' in metrics
        assert "gpunode_healthy 1" in metrics


@pytest.mark.full
def test_serves_within_two_seconds_and_stops_within_three(tmp_path: Path) -> None:
    with daemons.run(tmp_path, *SIMULATED) as gpunode:
        assert gpunode.wait_serving() < 2.0
        gpunode.wait_ready()
        asked = time.monotonic()
        assert gpunode.stop() == 0
        assert time.monotonic() - asked < 3.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "systemctl stop"])
def test_signal_ends_it_with_success_and_no_traceback(tmp_path: Path, number: signal.Signals) -> None:
    with daemons.run(tmp_path, *SIMULATED) as gpunode:
        gpunode.wait_ready()
        assert gpunode.stop(number) == 0
        assert "Traceback" not in gpunode.said()
        assert any("STOPPING=1" in message for message in _rest(gpunode))


def _rest(gpunode: daemons.Running) -> list[str]:
    """What else was sent to the notify socket until it ended."""
    gpunode.notify.setblocking(False)
    try:
        while True:
            gpunode.messages.append(gpunode.notify.recv(65536).decode())
    except BlockingIOError:
        return gpunode.messages


def test_signal_while_starting_ends_it_too(tmp_path: Path) -> None:
    with daemons.run(tmp_path, *SIMULATED) as gpunode:
        gpunode.wait_serving()
        assert gpunode.stop() == 0


def test_second_start_changes_nothing(tmp_path: Path) -> None:
    state, counts = tmp_path / "state", tmp_path / "counts"
    module = ("tests.bench.traced", counts)
    kept: list[list[str]] = []
    calls: list[dict[str, int]] = []
    for _ in range(2):
        with daemons.run(tmp_path, *SIMULATED, "--sim-state", state, module=module) as gpunode:
            gpunode.wait_ready()
            gpus = gpunode.get("/status").json()["gpus"]
            assert isinstance(gpus, list)
            kept.append([c["uuid"] for gpu in gpus for i in gpu["gpu_instances"] for c in i["compute_instances"]])
            assert gpunode.stop() == 0
        calls.append(json.loads(counts.read_text())["calls"])
    first, second = ({name: n for name, n in c.items() if name in MUTATING} for c in calls)
    assert first
    assert not second
    assert len(kept[0]) == 24
    assert kept[0] == kept[1]


def test_new_settings_are_applied_while_it_runs(tmp_path: Path) -> None:
    settings = tmp_path / "gpunode.toml"
    settings.write_text('[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.20gb" = 2 }\n')
    with daemons.run(tmp_path, "--simulate", "p4d.24xlarge", "--settings", settings) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_mig_gpu_instance_info{")
        settings.write_text('[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.20gb" = 1, "2g.10gb" = 1 }\n')
        gpunode.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + daemons.PATIENCE
        while 'profile="2g.10gb"' not in gpunode.get("/metrics").body.decode():
            assert time.monotonic() < until, gpunode.said()
            time.sleep(0.1)
        settings.write_text("[[gpunode.layout]]\ngpus = [0]\ninstancs = {}\n")
        until = time.monotonic() + daemons.PATIENCE
        while "instancs" not in gpunode.get("/healthz").body.decode():
            assert time.monotonic() < until, gpunode.said()
            time.sleep(0.1)
        assert gpunode.get("/readyz").status == 503
        assert gpunode.get("/livez").status == 200
        assert 'profile="2g.10gb"' in gpunode.get("/metrics").body.decode()
        assert gpunode.stop() == 0


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_it_stays_up_and_says_so(tmp_path: Path) -> None:
    with daemons.run(tmp_path, "--settings", daemons.EXAMPLE) as gpunode:
        gpunode.wait_serving()
        assert gpunode.wait_metric("gpunode_nvml_up ").endswith((" 0", " 0.0"))
        gpunode.wait_metric('gpunode_phase{phase="waiting-for-driver"} 1')
        assert gpunode.get("/livez").status == 200
        assert gpunode.get("/readyz").status == 503
        reasons = gpunode.get("/healthz").json()["reasons"]
        assert isinstance(reasons, list)
        assert "driver" in {reason["code"] for reason in reasons}
        assert gpunode.stop() == 0


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("verb", ["apply", "plan", "status", "profiles", "resources", "export"])
def test_without_a_driver_every_verb_says_so_in_one_line(verb: str) -> None:
    done = daemons.command(verb, "--settings", daemons.EXAMPLE, check=False)
    assert done.returncode == 5, done.stderr
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert "driver" in line
    assert "--simulate" in line


def test_applied_node_is_advertised_and_applying_again_does_nothing(tmp_path: Path) -> None:
    node = ("--simulate", "p4d.24xlarge", "--sim-state", tmp_path / "state", "--output", "json")
    first = json.loads(daemons.command("apply", "--yes", *node, "--settings", daemons.EXAMPLE).stdout)
    assert first["outcome"]["changed"]
    resources = json.loads(daemons.command("resources", *node).stdout)
    assert resources["device_plugin"]["single"] == {"nvidia.com/gpu": 24}
    second = json.loads(daemons.command("apply", "--yes", *node, "--settings", daemons.EXAMPLE).stdout)
    assert not second["outcome"]["changed"]
