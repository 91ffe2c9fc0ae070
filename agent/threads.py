"""Run a blocking job beside the event loop without ever holding the process at its end.

A daemon thread a job: executors and `asyncio.to_thread` keep the process alive until the job
returns, and a job here (a child process, a hung driver) may not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run(job: Callable[[], T], *, name: str = "job") -> T:
    """Run `job` in a daemon thread of its own and return (or raise) what it does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = job()
        except BaseException as caught:  # noqa: BLE001  # handed to whoever awaits
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop has ended meanwhile; nobody waits any more

    threading.Thread(target=work, name=f"gpunode-{name}", daemon=True).start()
    return await future
