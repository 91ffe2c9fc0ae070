"""The page, in a real browser on a running daemon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e import daemons

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser here (Debian: apt-get install chromium)"),
]
NODE = "p4d.24xlarge"


class Tab:
    """A tab of the browser, spoken to by its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.faults: list[str] = []
        """What the page's script threw, or its console called an error."""

    async def call(self, method: str, **words: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": words}))
        while True:
            said: dict[str, Any] = await self._socket.receive_json(timeout=daemons.PATIENCE)
            if said.get("method") == "Runtime.exceptionThrown":
                self.faults.append(
                    said["params"]["exceptionDetails"].get("text", "") + json.dumps(said["params"])[:500]
                )
            if said.get("id") == number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result

    async def value(self, expression: str) -> Any:
        """Return what a script's expression is worth."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def wait(self, expression: str) -> None:
        """Ask until an expression is true."""
        until = time.monotonic() + daemons.PATIENCE
        while not await self.value(expression):
            assert time.monotonic() < until, f"{expression}\n{await self.value('document.body.innerText')}"


@contextlib.asynccontextmanager
async def browsing(where: Path, url: str) -> AsyncIterator[Tab]:
    """Open a page in a browser with a profile of its own."""
    assert CHROMIUM is not None
    profile = where / "profile"
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    process = await asyncio.create_subprocess_exec(
        *argv, f"--user-data-dir={profile}", url, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        told = profile / "DevToolsActivePort"
        until = time.monotonic() + daemons.PATIENCE
        while not (told.exists() and told.read_text().count("\n")):  # a file tells it
            assert process.returncode is None
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        port = told.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.call("Runtime.enable")
                yield tab
    finally:
        process.terminate()
        await process.wait()


async def test_it_draws_the_node_follows_it_and_says_when_nobody_answers(tmp_path: Path) -> None:
    flags = ("--simulate", NODE, "--sim-state", tmp_path / "state")
    with daemons.run(tmp_path, *flags, "--settings", daemons.EXAMPLE) as running:
        running.wait_ready()
        running.wait_metric("gpunode_mig_memory_used_bytes")
        async with browsing(tmp_path, f"http://127.0.0.1:{running.port}/") as tab:
            await tab.wait("document.querySelectorAll('.card').length === 8")
            assert await tab.value("document.querySelectorAll('.slice.used').length") == 24
            assert await tab.value("document.querySelector('.slice.used').title") == ("2g.10gb at 0:2, memory 0 %")
            assert await tab.value("document.getElementById('verdict').textContent") == "healthy"
            assert await tab.value("document.getElementById('simulated').textContent") == f"simulated {NODE}"
            assert await tab.value("document.title") == "gpunode: healthy"

            for width in (360, 1400):
                await tab.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
                )
                assert await tab.value("document.documentElement.scrollWidth") <= width

            daemons.command("simulate", "fault", "lose", "3", *flags)
            await tab.wait("document.querySelectorAll('.card.bad').length === 1")
            assert "GPU 3" in await tab.value("document.querySelector('.card.bad').innerText")
            assert await tab.value("document.title") != "gpunode: healthy"

            running.stop()
            await tab.wait("document.title === 'gpunode: no answer'")
            assert tab.faults == []
