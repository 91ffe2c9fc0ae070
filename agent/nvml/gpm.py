"""Activity by GPM (Hopper and later): two samples of a GPU or GPU instance, and what lies between.

A sample is kept from one visit to the next, so a window is as long as the sampler's interval. A GPU
instance that was remade keeps its id, so whoever knows of a change calls `drop`.
"""

from __future__ import annotations

import time
from typing import Any

import pynvml

from agent import errors, measures
from agent.nvml import calls

SHORTEST = 0.1
"""Seconds two samples must lie apart."""
LONGEST = 600.0
"""Seconds after which a kept sample is too old to say anything about now."""

_IDS = {
    "graphics": 1,
    "sm": 2,
    "sm_occupancy": 3,
    "integer": 4,
    "tensor": 5,
    "dram": 10,
    "fp64": 11,
    "fp32": 12,
    "fp16": 13,
}


class Windows:
    """Kept samples by (GPU, GPU instance or None). One GPU's are touched by its lane alone."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int | None], tuple[Any, float]] = {}
        self._spare: dict[tuple[str, int | None], Any] = {}
        self._unsupported: set[str] = set()

    def supported(self, uuid: str, handle: Any) -> bool:
        """Whether the GPU has GPM; asked once."""
        if uuid in self._unsupported:
            return False
        if any(key[0] == uuid for key in self._kept):
            return True
        try:
            if bool(calls.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice):
                return True
        except errors.NotSupported:
            pass
        self._unsupported.add(uuid)
        return False

    def activity(self, uuid: str, handle: Any, instance: int | None) -> measures.Activity | None:
        """Take a sample and return what happened since the last one; None on the first visit."""
        key = (uuid, instance)
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and now - kept[1] < SHORTEST:
            return None
        # Two buffers a key take turns: allocating for each visit would be two calls more.
        sample = self._spare.pop(key, None)
        if sample is None:
            sample = calls.call("nvmlGpmSampleAlloc")
        try:
            if instance is None:
                calls.call("nvmlGpmSampleGet", handle, sample)
            else:
                calls.call("nvmlGpmMigSampleGet", handle, instance, sample)
        except errors.CallError:
            _free(sample)
            raise
        self._kept[key] = (sample, now)
        if kept is None:
            return None
        self._spare[key] = kept[0]
        return self._between(kept[0], sample) if now - kept[1] <= LONGEST else None

    def _between(self, older: Any, newer: Any) -> measures.Activity:
        # 19 kB: made for each question, as lanes run side by side.
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_IDS)
        request.sample1, request.sample2 = older, newer
        for position, number in enumerate(_IDS.values()):
            request.metrics[position].metricId = number
        calls.call("nvmlGpmMetricsGet", request)
        found: dict[str, float] = {}
        for position, name in enumerate(_IDS):
            metric = request.metrics[position]
            if int(metric.nvmlReturn) == 0 and metric.value == metric.value:  # not NaN
                found[name] = float(metric.value) / 100.0
        return measures.Activity(**found)

    def drop(self, uuid: str) -> None:
        """Forget the samples of a GPU, as its instances changed."""
        for key in [key for key in self._kept if key[0] == uuid]:
            _free(self._kept.pop(key)[0])
        for key in [key for key in self._spare if key[0] == uuid]:
            _free(self._spare.pop(key))

    def release(self) -> None:
        """Free all samples, before the library is shut down."""
        for sample in [*(kept for kept, _ in self._kept.values()), *self._spare.values()]:
            _free(sample)
        self._kept.clear()
        self._spare.clear()
        self._unsupported.clear()


def _free(sample: Any) -> None:
    try:
        calls.call("nvmlGpmSampleFree", sample)
    except errors.CallError:
        pass  # the library is gone, and the sample with it
