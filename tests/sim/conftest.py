"""Simulated nodes put below pynvml, and taken away again."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent.sim import node as nodes

N: Any = pynvml


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Nvml:
    """A simulated node with pynvml on top, and the few calls that pynvml leaves to its caller."""

    def __init__(self, node: nodes.SimulatedNode, clock: Clock) -> None:
        self.node = node
        self.clock = clock

    def gpu(self, index: int = 0) -> Any:
        return N.nvmlDeviceGetHandleByIndex(index)

    def code(self, function: Callable[..., object], *arguments: Any) -> int:
        """Return the code that a call fails with, 0 when it succeeds."""
        try:
            function(*arguments)
        except N.NVMLError as error:
            return int(error.value)
        return 0

    def profiles(self, gpu: Any) -> dict[str, Any]:
        found = {}
        for selector in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
            with contextlib.suppress(N.NVMLError_NotSupported):
                info = N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, selector)
                found[info.name.removeprefix("MIG ")] = info
        return found

    def placements(self, gpu: Any, profile: int) -> list[tuple[int, int]]:
        count = ctypes.c_uint()
        N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, None, ctypes.byref(count))
        array = (N.c_nvmlGpuInstancePlacement_t * count.value)()
        N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, array, ctypes.byref(count))
        return [(place.start, place.size) for place in array]

    def compute_placements(self, instance: Any, profile: int) -> list[tuple[int, int]]:
        count = ctypes.c_uint()
        N.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, profile, None, ctypes.byref(count))
        array = (N.c_nvmlComputeInstancePlacement_t * count.value)()
        N.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, profile, array, ctypes.byref(count))
        return [(place.start, place.size) for place in array]

    def instances(self, gpu: Any, profile: int, room: int = 8) -> list[Any]:
        array = (N.c_nvmlGpuInstance_t * room)()
        count = ctypes.c_uint()
        N.nvmlDeviceGetGpuInstances(gpu, profile, array, ctypes.byref(count))
        return [array[number] for number in range(count.value)]

    def create_at(self, gpu: Any, profile: int, start: int, size: int) -> Any:
        place = N.c_nvmlGpuInstancePlacement_t(start, size)
        return N.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, ctypes.byref(place))

    def create_compute_at(self, instance: Any, profile: int, start: int, size: int) -> Any:
        place = N.c_nvmlComputeInstancePlacement_t(start, size)
        return N.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, profile, ctypes.byref(place))

    def enable(self, index: int = 0) -> Any:
        """Bring MIG on, by reset where the part needs one; return a fresh handle."""
        if N.nvmlDeviceSetMigMode(self.gpu(index), 1) != 0:
            N.nvmlShutdown()
            self.node.set_unit("nvidia-persistenced.service", active=False)
            self.node.reset()
            N.nvmlInit()
        assert N.nvmlDeviceGetMigMode(self.gpu(index)) == [1, 1]
        return self.gpu(index)


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[Callable[..., Nvml]]:
    """Open a node (a name, or the text of a node file) below pynvml, initialised."""
    opened: list[nodes.SimulatedNode] = []
    before = N.nvmlLib

    def open_it(text: str = "h100.80gb", *, state: Path | None = None, init: bool = True) -> Nvml:
        if "\n" in text:
            path = tmp_path / "node.toml"
            path.write_text(text)
            text = str(path)
        clock = Clock()
        node = nodes.open_node(text, state=state, clock=clock)
        opened.append(node)
        N.nvmlLib = node.library
        N._nvmlGetFunctionPointer_cache.clear()
        if init:
            N.nvmlInit()
        return Nvml(node, clock)

    yield open_it
    for node in opened:
        node.close()
    N.nvmlLib = before
    N._nvmlGetFunctionPointer_cache.clear()
