"""The wiring: after-change commands, locks and the documents' examples."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent import app, errors, threads
from agent.host import files, real
from agent.settings import source

ROOT = Path(__file__).resolve().parents[1]
SPEC = "h100.80gb:1"


@contextlib.asynccontextmanager
async def opened(where: Path, settings: str = "", **changes: Any) -> AsyncIterator[app.Node]:
    document = where / "gpunode.toml"
    document.write_text(settings)
    options = app.Options(simulate=SPEC, settings=(document,), environ={}, **changes)
    async with app.open(options) as node:
        yield node


def _hook(*words: str, timeout: float = 5.0) -> str:
    return f"[[gpunode.after-change]]\ncommand = {list(words)!r}\ntimeout-seconds = {timeout}\n"


async def test_after_a_change_on_a_real_host_the_commands_run_and_failures_are_told(tmp_path: Path) -> None:
    """A command that works, one that fails and one past its deadline: all run, two are told."""
    mark = tmp_path / "mark"
    words = _hook("touch", str(mark)) + _hook("false") + _hook("sleep", "20", timeout=0.2)
    async with opened(tmp_path, words) as node:
        machine = _Real(node.machine)
        told = await app._after_change(node.options, machine, node.require_settings())  # type: ignore[arg-type]
    assert mark.exists()
    assert [reason.code for reason in told] == ["after-change-failed"] * 2
    assert "false" in told[0].message
    assert "sleep" in told[1].message


async def test_whoever_takes_the_lock_starts_what_a_dead_run_left_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with opened(tmp_path) as node:
        machine = real.RealMachine(node.machine.root)
        left = machine.path(real.STOPPED_FILE)
        files.write_atomic(left, b"nvidia-persistenced.service\n")
        node.machine = machine
        await app.start_left_units(node)  # no systemd can be reached there, which is told and ends nothing
        assert left.exists()
    assert "nvidia-persistenced.service" in capfd.readouterr().err


class _Real:
    """The machine of a simulated node, said to be a real one."""

    simulated = None

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def path(self, absolute: str) -> Path:
        found = self._machine.path(absolute)
        assert isinstance(found, Path)
        return found


async def test_on_a_simulated_node_no_command_of_this_host_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    layout = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n'
    async with opened(tmp_path, _hook("touch", str(mark)) + layout) as node:
        after = await app.apply(node, stop=lambda: False, progress=lambda _: None)
    assert after.outcome is not None
    assert after.outcome.changed
    assert not after.reasons
    assert not mark.exists()


async def test_without_commands_nothing_is_asked_of_the_host(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        assert await app._after_change(node.options, node.machine, node.require_settings()) == ()


async def test_no_lock_no_write(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        with files.Lock.take(node.machine.path("/run/gpunode/lock")), pytest.raises(errors.BlockedError):
            await app.apply(node, stop=lambda: False, progress=lambda _: None)
        app.take_lock(node)
        app.take_lock(node)  # what is held is held


async def test_bad_settings_are_kept_and_raised_when_needed(tmp_path: Path) -> None:
    async with opened(tmp_path, "[gpunode]\nenforcment = 1\n") as node:
        with pytest.raises(errors.SettingsError):
            node.require_settings()
        assert (await app.look(node)).phase.value == "failed"


@pytest.mark.parametrize("page", ["docs/after-change.md", "docs/operations.md"])
def test_the_examples_of_after_change_are_settings(tmp_path: Path, page: str) -> None:
    examples = re.findall(r"^```(?:toml)?\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    found = [text for text in examples if "[[gpunode.after-change]]" in text]
    assert found
    for number, text in enumerate(found):
        place = tmp_path / f"{number}.toml"
        place.write_text(text)
        settings = source.load(source.Request(root=tmp_path, files=(place,), environ={}))
        assert settings.after_change
        assert not settings.problems


async def test_a_job_beside_the_loop_returns_and_raises() -> None:
    assert await threads.run(lambda: 3) == 3

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run(fail)


async def test_a_job_nobody_waits_for_any_more_ends_quietly() -> None:
    go = threading.Event()
    task = asyncio.create_task(threads.run(go.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    for thread in threading.enumerate():
        if thread.name == "gpunode-job":
            thread.join(5)
    await asyncio.sleep(0)


def test_a_job_that_outlives_its_loop_ends_quietly() -> None:
    go = threading.Event()

    async def begin() -> None:
        task = asyncio.create_task(threads.run(go.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(begin())
    go.set()
    for thread in threading.enumerate():
        if thread.name == "gpunode-job":
            thread.join(5)
