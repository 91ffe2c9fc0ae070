"""PCIe, NVLink and the fabric of NVSwitch machines."""

from __future__ import annotations

from typing import Any

from agent.sim import codes, library, machine, workload
from agent.sim import prototypes as p

On = p.On
_MAX_LINKS = 18
_FABRIC_IN_PROGRESS, _FABRIC_COMPLETED = 2, 3
FABRIC_MANAGER = "nvidia-fabricmanager.service"
"""Runs unless somebody stopped it; without it no GPU gets done with its registration."""


@p.call(
    "nvmlDeviceGetPcieThroughput", On.GPU, p.uint, p.UINT_OUT, latency="pcie-throughput", on_mig=codes.NOT_SUPPORTED
)
def pcie_throughput(lib: library.Library, gpu: machine.Gpu, counter: int, into: Any) -> None:
    """Tell KB/s sent (0) or received (1) over the last 20 ms, which is how long it takes."""
    if gpu.model.virtual:
        raise codes.Refused(codes.NOT_SUPPORTED)
    if counter not in (0, 1):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.value = lib.figures.pcie_kib(gpu, counter, lib.now())


@p.call("nvmlDeviceGetPcieReplayCounter", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def pcie_replays(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Count PCIe replays."""
    into.value = gpu.state.replays


def _generation(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    into.value = workload.board(gpu).pcie_generation


def _width(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    into.value = 16


for _which in ("Curr", "Max"):
    p.call(f"nvmlDeviceGet{_which}PcieLinkGeneration", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)(_generation)
    p.call(f"nvmlDeviceGet{_which}PcieLinkWidth", On.GPU, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)(_width)


def _need_link(gpu: machine.Gpu, link: int) -> None:
    if not 0 <= link < _MAX_LINKS:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if link >= workload.board(gpu).nvlinks:
        raise codes.Refused(codes.NOT_SUPPORTED)


@p.call("nvmlDeviceGetNvLinkState", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def nvlink_state(lib: library.Library, gpu: machine.Gpu, link: int, into: Any) -> None:  # noqa: ARG001
    """Tell whether a link is up."""
    _need_link(gpu, link)
    into.value = 1


@p.call("nvmlDeviceGetNvLinkVersion", On.GPU, p.uint, p.UINT_OUT, on_mig=codes.NOT_SUPPORTED)
def nvlink_version(lib: library.Library, gpu: machine.Gpu, link: int, into: Any) -> None:  # noqa: ARG001
    """Tell the version of a link."""
    _need_link(gpu, link)
    into.value = workload.board(gpu).nvlink_version


@p.call("nvmlDeviceGetNvLinkErrorCounter", On.GPU, p.uint, p.uint, p.ULONGLONG_OUT, on_mig=codes.NOT_SUPPORTED)
def nvlink_errors(lib: library.Library, gpu: machine.Gpu, link: int, counter: int, into: Any) -> None:  # noqa: ARG001
    """Count the errors of a link."""
    _need_link(gpu, link)
    if not 0 <= counter <= 4:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    into.value = 0


def has_fabric(lib: library.Library, gpu: machine.Gpu) -> bool:
    """Return whether the GPU registers with a fabric manager: Hopper and later behind NVSwitch."""
    return gpu.model.resetless and workload.board(gpu).nvlinks > 0 and len(lib.machine.gpus) > 1


def _fabric(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    if not has_fabric(lib, gpu):
        raise codes.Refused(codes.NOT_SUPPORTED)
    managed = lib.machine.store.node.units.get(FABRIC_MANAGER, True)
    into.state = _FABRIC_COMPLETED if managed else _FABRIC_IN_PROGRESS
    into.status, into.cliqueId = codes.SUCCESS, 0


p.call("nvmlDeviceGetGpuFabricInfo", On.GPU, p.out(p.NVML.c_nvmlGpuFabricInfo_t), on_mig=codes.NOT_SUPPORTED)(_fabric)


@p.call(
    "nvmlDeviceGetGpuFabricInfoV",
    On.GPU,
    p.versioned(
        (p.NVML.nvmlGpuFabricInfo_v2, p.NVML.c_nvmlGpuFabricInfo_v2_t),
        (p.NVML.nvmlGpuFabricInfo_v3, p.NVML.c_nvmlGpuFabricInfo_v3_t),
    ),
    since=535,
    on_mig=codes.NOT_SUPPORTED,
)
def fabric_versioned(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:
    """Tell how far the GPU's registration with the fabric is, and its health."""
    _fabric(lib, gpu, into)
    into.healthMask = 0b101010  # degraded bandwidth, route recovery, route unhealthy: each "no"
    if isinstance(into, p.NVML.c_nvmlGpuFabricInfo_v3_t):
        into.healthSummary = 1
