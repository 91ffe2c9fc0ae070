"""What the contract is held against: simulated nodes always, a real GPU with `--nvml-real`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from agent.sim import node as nodes
from agent.sim import spec

N: Any = pynvml

SIMULATED = (
    "a100.40gb:2",
    "h100.80gb:2",
    "a30.24gb",
    "rtxpro6000.96gb",
    "b300.269gb",
    "g7.2xlarge",
    "g4dn.xlarge",
    "g6f.2xlarge",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nvml-real", action="store_true", help="hold the contract against the GPUs of this machine, read-only"
    )


@dataclasses.dataclass(slots=True)
class Device:
    """What the contract is held against. `simulated` is None for real GPUs, which are only read."""

    simulated: nodes.SimulatedNode | None

    def gpus(self) -> list[Any]:
        return [N.nvmlDeviceGetHandleByIndex(index) for index in range(N.nvmlDeviceGetCount())]

    def code(self, function: Callable[..., object], *arguments: Any) -> int:
        """Return the code that a call fails with, 0 when it succeeds."""
        try:
            function(*arguments)
        except N.NVMLError as error:
            return int(error.value)
        return 0


def put_below(library: object) -> None:
    N.nvmlLib = library
    N._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture(params=[*SIMULATED, pytest.param("real", marks=pytest.mark.real_gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Every kind of device in turn, NVML not yet initialised."""
    before = N.nvmlLib
    if request.param == "real":
        if not request.config.getoption("--nvml-real", default=False):
            pytest.skip("needs a real NVIDIA GPU: run with --nvml-real on one")
        put_below(None)
        yield Device(None)
    else:
        node = nodes.open_node(request.param)
        put_below(node.library)
        yield Device(node)
        node.close()
    put_below(before)


@pytest.fixture
def opened(device: Device) -> Iterator[Device]:
    """The same, initialised."""
    N.nvmlInit()
    yield device
    N.nvmlShutdown()


@pytest.fixture(params=["a100.40gb", "h100.80gb", "a30.24gb", "rtxpro6000.96gb", "b300.269gb"])
def changeable(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A simulated GPU with MIG on: the only kind of device that the contract changes."""
    before = N.nvmlLib
    about = spec.read(request.param)
    at_once = dataclasses.replace(
        about, gpus=tuple(dataclasses.replace(gpu, mode_change="immediate") for gpu in about.gpus)
    )
    node = nodes.open_spec(at_once)
    put_below(node.library)
    N.nvmlInit()
    gpu = N.nvmlDeviceGetHandleByIndex(0)
    assert N.nvmlDeviceSetMigMode(gpu, 1) == 0
    yield gpu
    node.close()
    put_below(before)
