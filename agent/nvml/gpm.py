"""Activity of a GPU and of its GPU instances, from two GPM samples: Hopper and later.

A sample is taken in each visit and kept for the next, so a figure is the mean since the last visit.
The driver gives a GPU instance made again its old id, so whoever owns these windows drops them on
any change of the instances. Samples must be freed before the library is shut down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

import pynvml

from agent import errors, measures
from agent.nvml import calls

SHORTEST = 0.1
"""Seconds between two samples below which the driver has no figures."""
LONGEST = 600.0
"""Seconds after which a kept sample is too old to say anything about now."""

# NVML's metric ids; all of these are percent.
_METRICS = {
    1: "graphics",
    2: "sm",
    3: "sm_occupancy",
    4: "integer",
    5: "tensor",
    10: "dram",
    11: "fp64",
    12: "fp32",
    13: "fp16",
}


class _Window:
    """Two samples of one thing; `taken` is when the older one was, None before the first."""

    __slots__ = ("last", "newer", "older", "taken")

    def __init__(self) -> None:
        self.older: Any = calls.call("nvmlGpmSampleAlloc")
        try:
            self.newer: Any = calls.call("nvmlGpmSampleAlloc")
        except errors.CallError:
            _free(self.older)
            raise
        self.taken: float | None = None
        self.last: measures.Activity | None = None

    def free(self) -> None:
        _free(self.older)
        _free(self.newer)


class Windows:
    """The windows of one GPU. For that GPU's lane only."""

    def __init__(self, handle: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._handle = handle
        self._clock = clock
        self._windows: dict[int | None, _Window] = {}
        self._question: Any = None

    def activity(self, instance: int | None) -> measures.Activity | None:
        """Return the activity of a GPU instance (None: of the GPU) since the last visit.

        None in the first visit; a visit too soon after the last one gets that one's figures again.
        Raises CallError where the driver refuses a sample.
        """
        window = self._windows.get(instance)
        if window is None:
            window = self._windows[instance] = _Window()
        now = self._clock()
        if window.taken is not None and now - window.taken < SHORTEST:
            return window.last
        try:
            if instance is None:
                calls.call("nvmlGpmSampleGet", self._handle, window.newer)
            else:
                calls.call("nvmlGpmMigSampleGet", self._handle, instance, window.newer)
            fresh = window.taken is not None and now - window.taken <= LONGEST
            window.last = self._between(window) if fresh else None
        except errors.CallError:
            self._drop(instance)
            raise
        window.older, window.newer = window.newer, window.older
        window.taken = now
        return window.last

    def keep(self, instances: Collection[int]) -> None:
        """Drop the windows of GPU instances that are gone."""
        for instance in [i for i in self._windows if i is not None and i not in instances]:
            self._drop(instance)

    def free(self) -> None:
        """Free everything."""
        for instance in list(self._windows):
            self._drop(instance)

    def _drop(self, instance: int | None) -> None:
        window = self._windows.pop(instance, None)
        if window is not None:
            window.free()

    def _between(self, window: _Window) -> measures.Activity:
        # The structure has 19 kB and is the same for all questions.
        question = self._question
        if question is None:
            question = self._question = pynvml.c_nvmlGpmMetricsGet_t()
            question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            question.numMetrics = len(_METRICS)
            for number, metric in enumerate(_METRICS):
                question.metrics[number].metricId = metric
        question.sample1, question.sample2 = window.older, window.newer
        calls.call("nvmlGpmMetricsGet", question)
        found: dict[str, float] = {}
        for number, name in enumerate(_METRICS.values()):
            answer = question.metrics[number]
            value = float(answer.value)
            if int(answer.nvmlReturn) == 0 and not math.isnan(value):
                found[name] = min(1.0, max(0.0, value / 100))
        return measures.Activity(**found)


def supported(handle: Any) -> bool:
    """Whether this GPU has GPM. Raises CallError for what is no answer (lost, unknown)."""
    try:
        return bool(calls.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice)
    except (errors.NotSupported, errors.NoPermission, errors.InvalidArgument):
        return False


def _free(sample: Any) -> None:
    try:
        calls.call("nvmlGpmSampleFree", sample)
    except errors.CallError:
        pass  # it died with the session
