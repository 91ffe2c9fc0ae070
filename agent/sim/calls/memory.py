"""Memory and processes: what belongs to a GPU instance, and what a whole GPU tells only root."""

from __future__ import annotations

from typing import Any

from agent.sim import codes, library, machine, state
from agent.sim import prototypes as p

On = p.On
Gi = state.GpuInstance
Ci = state.ComputeInstance
_KINDS = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}


def need_root_for_sum(lib: library.Library, gpu: machine.Gpu, gi: Gi | None) -> None:
    """Raise Refused for the sum over all instances of a GPU in MIG mode, which only root is told."""
    if gi is None and gpu.state.mig:
        lib.machine.need_root()


@p.call("nvmlDeviceGetMemoryInfo", On.EITHER, p.out(p.NVML.c_nvmlMemory_t))
def memory_info(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell memory; `used` includes what the driver has reserved."""
    total, reserved, used = _memory(lib, gpu, gi)
    into.total, into.used, into.free = total, used + reserved, total - used - reserved


@p.call("nvmlDeviceGetMemoryInfo_v2", On.EITHER, p.versioned((p.NVML.nvmlMemory_v2, p.NVML.c_nvmlMemory_v2_t)))
def memory_info_v2(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell memory, with what the driver has reserved apart."""
    total, reserved, used = _memory(lib, gpu, gi)
    into.total, into.reserved, into.used, into.free = total, reserved, used, total - used - reserved


def _memory(lib: library.Library, gpu: machine.Gpu, gi: Gi | None) -> tuple[int, int, int]:
    need_root_for_sum(lib, gpu, gi)
    if gi is None:
        if not gpu.model.memory_mib:
            raise codes.Refused(codes.NOT_SUPPORTED)
        return lib.figures.memory(gpu, lib.now())
    total, used = lib.figures.instance_memory(gpu, gi, lib.now())
    return total, 0, used


@p.call("nvmlDeviceGetBAR1MemoryInfo", On.EITHER, p.out(p.NVML.c_nvmlBAR1Memory_t))
def bar1(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell BAR1 memory."""
    need_root_for_sum(lib, gpu, gi)
    total, used = lib.figures.bar1(gpu, gi)
    into.bar1Total, into.bar1Used, into.bar1Free = total, used, total - used


def _processes(kind: str) -> Any:
    def body(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, count: Any, into: Any) -> None:
        need_root_for_sum(lib, gpu, gi)
        lib.machine.prune(gpu)
        found = [
            process
            for process in gpu.state.processes
            if process.kind == kind
            and (gi is None or process.gpu_instance == gi.id)
            and (ci is None or process.compute_instance in (ci.id, None))
        ]
        if found and (into is None or count.value < len(found)):
            count.value = len(found)
            raise codes.Refused(codes.INSUFFICIENT_SIZE)
        now = lib.now()

        def put(array: Any, n: int) -> None:
            process = found[n]
            array[n].pid = process.pid
            array[n].usedGpuMemory = lib.figures.process_memory(process, now)
            array[n].gpuInstanceId = codes.NO_ID if process.gpu_instance is None else process.gpu_instance
            array[n].computeInstanceId = codes.NO_ID if process.compute_instance is None else process.compute_instance

        p.fill(into, len(found), count, put)

    return body


for _name, _kind in _KINDS.items():
    p.call(f"nvmlDeviceGet{_name}RunningProcesses_v3", On.EITHER, p.UINT_OUT, p.array(p.NVML.c_nvmlProcessInfo_v3_t))(
        _processes(_kind)
    )
