"""The one way from here into pynvml: noted before, counted, and its errors translated.

Each lane's thread has a `Record`; the timer of the lanes judges deadlines by what is noted in it.
A call made outside a lane (opening the library, tests) is simply not watched.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

import pynvml

from agent.nvml import errors as codes

_local = threading.local()
counts: collections.Counter[str] = collections.Counter()
"""Calls per function since the process began; figures for the bench and for tests."""

MUTATING = frozenset({
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstance",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlComputeInstanceDestroy",
})  # fmt: skip


class Record:
    """What a lane's thread is doing: `call` is (function name, start on the monotonic clock) or None."""

    __slots__ = ("call", "gpu")

    def __init__(self, gpu: str | None) -> None:
        self.gpu = gpu
        self.call: tuple[str, float] | None = None


def attend(record: Record | None) -> None:
    """Make `record` the one that calls of this thread are noted in."""
    _local.record = record


def call(name: str, *args: Any) -> Any:
    """Call pynvml's function `name`. Raises `agent.errors.CallError` kinds."""
    record: Record | None = getattr(_local, "record", None)
    counts[name] += 1
    if record is not None:
        record.call = (name, time.monotonic())
    try:
        return getattr(pynvml, name)(*args)
    except pynvml.NVMLError as cause:
        gpu = record.gpu if record is not None else None
        raise codes.translate(int(cause.value), name, gpu) from None
    except AttributeError:
        # This pynvml is older than the function.
        raise codes.translate(13, name, record.gpu if record is not None else None) from None
    except UnicodeDecodeError:
        raise codes.translate(999, name, record.gpu if record is not None else None) from None
    finally:
        if record is not None:
            record.call = None
