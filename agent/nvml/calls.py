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
_counting = threading.Lock()
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


class Abandoned(BaseException):
    """The lane of this thread was given up while a call was out: its job must not go on.

    No Exception on purpose: nothing that handles driver errors on the way may swallow it, or a job
    would go on changing a GPU long after everybody was told that it hangs. `done` tells that the call
    did come back and had succeeded: what it opened is open.
    """

    def __init__(self, *, done: bool = False) -> None:
        super().__init__()
        self.done = done


class Record:
    """What a lane's thread is doing: `call` is (function name, start on the monotonic clock) or None.

    `abandoned` is set by whoever gives the lane up; `changed` says that the job at hand has made a
    call that changes the GPU.
    """

    __slots__ = ("abandoned", "call", "changed", "gpu")

    def __init__(self, gpu: str | None) -> None:
        self.gpu = gpu
        self.call: tuple[str, float] | None = None
        self.abandoned = False
        self.changed = False


def attend(record: Record | None) -> None:
    """Make `record` the one that calls of this thread are noted in."""
    _local.record = record


def attended() -> Record | None:
    """Return the record of this thread, None outside a lane."""
    record: Record | None = getattr(_local, "record", None)
    return record


def call(name: str, *args: Any) -> Any:
    """Call pynvml's function `name`. Raises `agent.errors.CallError` kinds."""
    record: Record | None = getattr(_local, "record", None)
    gpu = None
    if record is not None:
        if record.abandoned:
            raise Abandoned
        gpu = record.gpu
        record.changed = record.changed or name in MUTATING
        record.call = (name, time.monotonic())
    with _counting:
        counts[name] += 1
    done = False
    try:
        answer = getattr(pynvml, name)(*args)
        done = True
        return answer
    except pynvml.NVMLError as cause:
        raise codes.translate(int(cause.value), name, gpu) from None
    except AttributeError:
        # This pynvml is older than the function.
        if hasattr(pynvml, name):
            raise
        raise codes.translate(13, name, gpu) from None
    except UnicodeDecodeError:
        raise codes.translate(999, name, gpu) from None
    finally:
        if record is not None:
            record.call = None
            if record.abandoned:
                raise Abandoned(done=done)
