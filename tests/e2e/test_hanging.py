"""The daemon while a driver call hangs: probes, the other GPUs, and a stop within three seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import app, daemon, errors
from agent.reconcile import cycle
from agent.sim import node as simulated
from tests.e2e import daemons

LAYOUT = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
FAST = "[gpunode]\nsample-interval = 1\n" + LAYOUT
REBOOT = '[gpunode]\nmode-change = ["reboot"]\n[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 2 }\n'
SPEC = "h100.80gb:4"


@contextlib.contextmanager
def node(where: Path, spec: str = SPEC) -> Iterator[tuple[Any, list[str | Path]]]:
    """A simulated node in a file, and the flags that open it in another process."""
    state = where / "state"
    sim = simulated.open_node(spec, state=state)
    settings = where / "gpunode.toml"
    settings.write_text(FAST)
    try:
        yield sim, ["--simulate", spec, "--sim-state", state, "--settings", settings]
    finally:
        sim.close()


def until(true: Callable[[], bool], gpunode: daemons.Running) -> None:
    end = time.monotonic() + daemons.PATIENCE
    while not true():
        assert time.monotonic() < end, gpunode.said()
        time.sleep(0.02)


def met(sim: Any, order: int) -> bool:
    return any(f.id == order and f.seen > f.skip for f in sim.faults.listed())


@pytest.mark.parametrize(
    ("call", "ready"),
    [("nvmlDeviceCreateGpuInstanceWithPlacement", False), ("nvmlDeviceGetTemperature*", True), ("nvmlInit*", False)],
    ids=["while enforcing", "while sampling", "while opening the driver"],
)
def test_a_stop_takes_less_than_three_seconds(tmp_path: Path, call: str, ready: bool) -> None:
    with node(tmp_path) as (sim, flags):
        order = sim.hang(call, gpu=None if call.startswith("nvmlInit") else 1, times=0)
        with daemons.run(tmp_path, *flags) as gpunode:
            until(lambda: met(sim, order), gpunode)
            gpunode.wait_serving()
            if ready:
                gpunode.wait_ready()
            asked = time.monotonic()
            code = gpunode.stop(signal.SIGTERM)
            assert time.monotonic() - asked < 3.0
            assert code == 0, gpunode.said()
            assert "Traceback" not in gpunode.said()


def test_probes_answer_and_the_others_are_measured_while_one_hangs(tmp_path: Path) -> None:
    with node(tmp_path) as (sim, flags), daemons.run(tmp_path, *flags) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_gpu_temperature_celsius{")
        order = sim.hang("nvmlDeviceGetTemperature*", gpu=2, times=0)
        until(lambda: met(sim, order), gpunode)
        slowest = 0.0
        for _ in range(40):
            for path in ("/livez", "/readyz", "/healthz"):
                began = time.monotonic()
                assert gpunode.get(path).status == 200
                slowest = max(slowest, time.monotonic() - began)
        assert slowest < 1.0
        before = _taken(gpunode)
        until(lambda: _taken(gpunode) > before, gpunode)  # sampling goes on
        assert gpunode.stop() == 0


def _taken(gpunode: daemons.Running) -> float:
    for line in gpunode.get("/metrics").body.decode().splitlines():
        if line.startswith("gpunode_sample_timestamp_seconds "):
            return float(line.split()[1])
    raise AssertionError("no sample time on the page")


def test_the_second_gpunode_observes_and_takes_over_when_the_first_has_ended(tmp_path: Path) -> None:
    with node(tmp_path, "h100.80gb:2") as (sim, flags):
        settings = Path(flags[-1])
        settings.write_text('[gpunode]\nenforcement = "continuous"\nperiod = 5\n' + LAYOUT)
        with daemons.run(tmp_path, *flags) as first:
            first.wait_ready()
            with daemons.run(tmp_path, *flags) as second:
                second.wait_ready()
                done = sim.mutations
                settings.write_text(
                    '[gpunode]\nenforcement = "continuous"\nperiod = 5\n'
                    '[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n'
                )
                for gpunode in (first, second):
                    gpunode.process.send_signal(signal.SIGHUP)
                for gpunode in (first, second):
                    until(lambda g=gpunode: _profiles(g) == [["7g.80gb"]] * 2, gpunode)  # type: ignore[misc]
                # Each instance was made once: by the one that has the lock.
                assert sim.mutations - done == 2 * (2 * 2 + 2)
                assert first.stop() == 0
                settings.write_text('[gpunode]\nenforcement = "continuous"\nperiod = 5\n' + LAYOUT)
                second.process.send_signal(signal.SIGHUP)
                until(lambda: _profiles(second) == [["3g.40gb"] * 2] * 2, second)
                assert second.stop() == 0


def _profiles(gpunode: daemons.Running) -> list[list[str]]:
    gpus = gpunode.get("/status").json()["gpus"]
    assert isinstance(gpus, list)
    return [[instance["profile"] for instance in gpu["gpu_instances"]] for gpu in gpus]


def test_ready_is_withheld_while_a_reboot_is_awaited_and_start_time_is_extended(tmp_path: Path) -> None:
    with node(tmp_path, "p4d.24xlarge") as (sim, flags):
        Path(flags[-1]).write_text(REBOOT)
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_serving()
            gpunode.wait_metric('gpunode_phase{phase="reboot-pending"} 1')
            assert sim.reboot_requested
            gpunode.messages.append(gpunode.notify.recv(65536).decode())
            until(lambda: _extended(gpunode), gpunode)
            assert not any("READY=1" in message for message in gpunode.messages)
            assert gpunode.stop() == 0


def _extended(gpunode: daemons.Running) -> bool:
    """Whether start time was extended after the cycle that asked for the reboot."""
    with contextlib.suppress(TimeoutError):
        gpunode.messages.append(gpunode.notify.recv(65536).decode())
    asked = [n for n, message in enumerate(gpunode.messages) if "reboot-pending" in message]
    later = gpunode.messages[asked[0] :] if asked else []
    return any("EXTEND_TIMEOUT_USEC" in message for message in later)


def test_a_driver_that_goes_away_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    with node(tmp_path, "h100.80gb:1") as (sim, flags), daemons.run(tmp_path, *flags) as gpunode:
        gpunode.wait_ready()
        sim.fail("nvmlInit*", 9, times=0)
        sim.reboot()  # every session dies under the process
        gpunode.process.send_signal(signal.SIGHUP)
        gpunode.wait_metric('gpunode_phase{phase="waiting-for-driver"} 1')
        assert gpunode.get("/livez").status == 200
        assert gpunode.get("/readyz").status == 503
        sim.release()
        gpunode.process.send_signal(signal.SIGHUP)
        gpunode.wait_metric('gpunode_phase{phase="converged"} 1')
        assert gpunode.stop() == 0


def test_a_daemon_that_started_itself_anew_only_observes(tmp_path: Path) -> None:
    options = app.Options(simulate="h100.80gb:1", environ={daemon.DRIVER_CHANGED: "1"})

    async def job() -> tuple[str, str] | None:
        async with app.open(options) as opened:
            return daemon.Daemon(opened)._hindrance()

    found = asyncio.run(job())
    assert found is not None
    assert found[0] == "driver-changed"


def test_starting_anew_hands_on_the_command_line_the_word_and_the_sockets(tmp_path: Path) -> None:
    became: list[tuple[str, list[str], dict[str, str]]] = []
    daemon.start_anew({"A": "b"}, (), become=lambda *words: became.append(words))
    ((program, argv, environ),) = became
    assert program == sys.executable
    assert argv[1:] == sys.orig_argv[1:]
    assert environ == {"A": "b", daemon.DRIVER_CHANGED: "1"}


STAND_IN = """
import os, sys, threading, time
from agent.nvml import gpus
from agent.__main__ import main
mark = sys.argv.pop(1)
gpus.NvmlGpus.driver_changed = lambda self: os.path.exists(mark) and not os.environ.get("GPUNODE_DRIVER_CHANGED")
sys.exit(main())
"""


def test_on_another_driver_the_daemon_becomes_one_that_observes(tmp_path: Path) -> None:
    with node(tmp_path, "h100.80gb:1") as (sim, flags):
        (tmp_path / "stand_in.py").write_text(STAND_IN)
        mark = tmp_path / "changed"
        os.environ["PYTHONPATH"] = str(tmp_path)
        try:
            with daemons.run(tmp_path, *flags, module=("stand_in", mark)) as gpunode:
                gpunode.wait_ready()
                mark.write_text("")
                until(lambda: "starting anew" in gpunode.said(), gpunode)
                before = sim.mutations
                Path(flags[-1]).write_text(LAYOUT.replace("3g.40gb", "2g.20gb"))
                pid = gpunode.process.pid
                until(lambda: _reasons(gpunode) >= {"driver-changed"}, gpunode)
                assert gpunode.process.pid == pid
                assert gpunode.process.poll() is None
                assert sim.mutations == before
                assert gpunode.stop() == 0
        finally:
            del os.environ["PYTHONPATH"]


def _reasons(gpunode: daemons.Running) -> set[str]:
    try:
        reasons = gpunode.get("/healthz").json()["reasons"]
    except OSError:
        return set()
    assert isinstance(reasons, list)
    return {reason["code"] for reason in reasons}


def test_state_that_cannot_be_written_reboots_nothing(tmp_path: Path) -> None:
    with node(tmp_path, "p4d.24xlarge") as (sim, flags):
        place = sim.machine.path(cycle.REBOOTS)
        place.mkdir(parents=True)
        Path(flags[-1]).write_text(REBOOT)
        done = daemons.command("apply", "--yes", "--output", "json", *flags, check=False)
        assert done.returncode == errors.EXIT_FAILED
        assert "no reboot is requested" in done.stderr
        assert json.loads(done.stdout)["status"]["phase"] == "failed"
        assert sim.reboot_requested is None


def test_two_targets_flapping_reboot_twice(tmp_path: Path) -> None:
    with node(tmp_path, "p4d.24xlarge") as (sim, flags):
        asked = []
        for turn in range(4):
            Path(flags[-1]).write_text(REBOOT if turn % 2 else REBOOT.replace('"3g.20gb" = 2', '"7g.40gb" = 1'))
            done = daemons.command("apply", "--yes", *flags, check=False)
            asked.append((done.returncode, sim.reboot_requested is not None))
            sim.reboot()
            with sim.driver.store.change() as state:
                for gpu in state.gpus:
                    gpu.mig = gpu.pending = False
        assert asked == [(4, True), (4, True), (1, False), (1, False)]
