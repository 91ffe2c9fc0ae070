"""When READY is said, and what the daemon takes up of its settings; the rest is shown with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent import app, daemon, errors
from agent.host import files
from agent.reconcile import snapshot
from agent.settings import model

LAYOUT = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n'
Received = Callable[[], list[str]]


@contextlib.asynccontextmanager
async def built(where: Path, settings: str = LAYOUT) -> AsyncIterator[tuple[daemon.Daemon, app.Node, Received]]:
    """A daemon that does not run, and what systemd heard of it."""
    document = where / "gpunode.toml"
    document.write_text(settings)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        address = where / "notify"
        systemd.bind(str(address))
        systemd.setblocking(False)
        options = app.Options(
            simulate="h100.80gb:1",
            settings=(document,),
            environ={"NOTIFY_SOCKET": str(address)},
            listen=(f"unix:{where / 'http'}",),
        )

        def received() -> list[str]:
            found: list[str] = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    found += systemd.recv(65536).decode().split("\n")
            return found

        async with app.open(options) as node:
            yield daemon.Daemon(node), node, received


def _snapshot(phase: snapshot.Phase) -> snapshot.Snapshot:
    return snapshot.Snapshot(phase=phase, simulated="x", reasons=(snapshot.Reason("code", "why"),))


@pytest.mark.parametrize(
    "phase", [snapshot.Phase.CONVERGED, snapshot.Phase.BLOCKED, snapshot.Phase.FAILED, snapshot.Phase.DRIFTED]
)
async def test_ready_is_said_once_whatever_came_of_the_first_cycle(tmp_path: Path, phase: snapshot.Phase) -> None:
    async with built(tmp_path) as (made, _, received):
        await made._on_cycle(_snapshot(phase))
        await made._on_cycle(_snapshot(phase))
        assert received().count("READY=1") == 1


@pytest.mark.parametrize(
    ("phase", "deadline"), [(snapshot.Phase.WAITING, "_ready_by"), (snapshot.Phase.REBOOT_PENDING, "_reboot_by")]
)
async def test_ready_waits_for_driver_and_reboot_up_to_their_deadline(
    tmp_path: Path, phase: snapshot.Phase, deadline: str
) -> None:
    async with built(tmp_path) as (made, _, received):
        made._ready_by = float("inf")
        await made._on_cycle(_snapshot(phase))
        assert "READY=1" not in received()
        setattr(made, deadline, 0.0)
        made._settle_ready()
        assert "READY=1" in received()


async def test_before_the_first_cycle_nothing_is_ready(tmp_path: Path) -> None:
    async with built(tmp_path) as (made, _, received):
        made._settle_ready()
        assert "READY=1" not in received()
        made._give_up = 0.0  # a first cycle that never ends holds nobody back for ever
        made._settle_ready()
        assert "READY=1" in received()


async def test_settings_of_the_sockets_wait_for_a_start_and_are_said_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with built(tmp_path) as (made, node, _):
        made._take_up()  # nothing was loaded by a cycle yet
        settings = node.require_settings()
        assert isinstance(settings, model.Settings)
        made._around.memory.settings = settings
        made._take_up()
        made._around.memory.settings = dataclasses.replace(settings, dcgm_metrics=True, sample_interval=9.0)
        made._take_up()
    assert "dcgm-metrics" in capfd.readouterr().err


async def test_without_the_lock_nothing_is_written_until_it_is_free(tmp_path: Path) -> None:
    async with built(tmp_path) as (made, node, _):
        place = node.machine.path("/run/gpunode/lock")
        with files.Lock.take(place):
            found = made._hindrance()
            assert found is not None
            assert found[0] == "lock"
        assert made._hindrance() is None


@pytest.mark.parametrize("locked", [False, True], ids=["free", "locked by another"])
async def test_a_whole_life(tmp_path: Path, locked: bool) -> None:
    async with built(tmp_path) as (made, node, received):
        with contextlib.ExitStack() as stack:
            if locked:
                stack.enter_context(files.Lock.take(node.machine.path("/run/gpunode/lock")))
            life = asyncio.create_task(made.run())
            async with asyncio.timeout(30):
                await made._first.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await life == errors.EXIT_OK
        heard = received()
        assert "READY=1" in heard
        assert "STOPPING=1" in heard
        shown = made._board.snapshot
        assert shown is not None
        assert shown.phase is (snapshot.Phase.BLOCKED if locked else snapshot.Phase.CONVERGED)


async def test_a_part_that_fails_ends_the_daemon_with_a_failure(tmp_path: Path) -> None:
    async with built(tmp_path) as (made, _, _received):

        async def broken() -> None:
            raise RuntimeError("no")

        made._sample = broken  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            assert await made.run() == errors.EXIT_FAILED


async def test_on_another_driver_it_ends_to_be_started_anew(tmp_path: Path) -> None:
    async with built(tmp_path) as (made, node, _):
        node.gpus.driver_changed = lambda: True  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            assert await made.run() == errors.EXIT_OK
        assert made.again


def test_the_sockets_of_systemd_are_put_where_the_next_one_looks() -> None:
    """In a child: descriptors 3 and up are this process's own business."""
    script = (
        "import os, socket; from agent import daemon; s = socket.socket(); copy = os.dup(s.fileno());"
        "same = lambda: os.fstat(3).st_ino == os.fstat(copy).st_ino;"
        "daemon.start_anew({}, (copy,), become=lambda *_: print(os.get_inheritable(3), same()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True"]
