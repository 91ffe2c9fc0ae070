"""What simulated GPUs measure: figures that belong together, move with the clock, and are absent where hardware has none."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

N: Any = pynvml
MIB = 2**20
Open = Callable[..., Any]


def fields(gpu: Any, *wanted: Any) -> dict[int, Any]:
    return {value.fieldId: value for value in N.nvmlDeviceGetFieldValues(gpu, list(wanted))}


def test_an_idle_gpu(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    v1 = N.nvmlDeviceGetMemoryInfo(gpu)
    v2 = N.nvmlDeviceGetMemoryInfo(gpu, version=N.nvmlMemory_v2)
    assert v1.total == v2.total == 81559 * MIB
    assert v1.used == v2.used + v2.reserved
    assert v2.total == v2.used + v2.free + v2.reserved
    assert N.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    assert N.nvmlDeviceGetUtilizationRates(gpu).gpu == 0
    assert N.nvmlDeviceGetCurrentClocksEventReasons(gpu) == 1
    assert N.nvmlDeviceGetPowerUsage(gpu) < 80_000


def test_load_moves_everything_together(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    idle = (N.nvmlDeviceGetPowerUsage(gpu), N.nvmlDeviceGetTemperature(gpu, 0))
    pid = it.node.start_process(0, memory_mib=4096, activity=0.8, name="train")
    process = N.nvmlDeviceGetComputeRunningProcesses(gpu)[0]
    assert process.pid == pid
    assert 0.9 * 4096 * MIB < process.usedGpuMemory <= 4096 * MIB
    assert process.gpuInstanceId == 0xFFFFFFFF
    assert N.nvmlSystemGetProcessName(pid) == "train"
    assert N.nvmlDeviceGetMemoryInfo(gpu, version=N.nvmlMemory_v2).used == process.usedGpuMemory
    assert N.nvmlDeviceGetPowerUsage(gpu) > idle[0]
    assert N.nvmlDeviceGetTemperature(gpu, 0) > idle[1]
    assert N.nvmlDeviceGetClockInfo(gpu, 1) == N.nvmlDeviceGetMaxClockInfo(gpu, 1)
    seen = set()
    for _ in range(30):
        it.clock.now += 3
        seen.add(N.nvmlDeviceGetUtilizationRates(gpu).gpu)
    assert len(seen) > 5
    assert all(0.8 * 80 <= percent <= 1.2 * 80 for percent in seen)


def test_the_same_moment_gives_the_same_figures(nvml: Open) -> None:
    it = nvml()
    it.node.start_process(0)
    gpu = it.gpu()
    first = (
        N.nvmlDeviceGetPowerUsage(gpu),
        N.nvmlDeviceGetMemoryInfo(gpu).used,
        N.nvmlDeviceGetTotalEnergyConsumption(gpu),
    )
    assert first == (
        N.nvmlDeviceGetPowerUsage(gpu),
        N.nvmlDeviceGetMemoryInfo(gpu).used,
        N.nvmlDeviceGetTotalEnergyConsumption(gpu),
    )


def test_counters_only_grow_also_when_the_process_ends(nvml: Open) -> None:
    it = nvml("p5.48xlarge")
    gpu = it.gpu()
    watched = [83, 74, 197, 198, (138, 0)]
    last = [0] * len(watched)
    it.node.start_process(0)
    for step in range(20):
        it.clock.now += 5
        if step == 10:
            it.node.stop_process()
        now = [value.value.ullVal for value in N.nvmlDeviceGetFieldValues(gpu, watched)]
        assert all(new >= old for new, old in zip(now, last, strict=True)), (step, now, last)
        last = now
    assert all(last)
    assert N.nvmlDeviceGetTotalEnergyConsumption(gpu) == last[0]


def test_memory_and_activity_belong_to_the_gpu_instance(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instance = it.create_at(gpu, 9, 0, 4)
    number = N.nvmlGpuInstanceGetInfo(instance).id
    for _ in range(2):
        N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    other = it.create_at(gpu, 14, 4, 2)
    N.nvmlGpuInstanceCreateComputeInstance(other, 1)
    devices = [N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index) for index in range(3)]
    idle = [N.nvmlDeviceGetMemoryInfo(device).used // MIB for device in devices]
    assert idle == [26, 26, 17]
    pid = it.node.start_process(0, gpu_instance=number, compute_instance=1, memory_mib=2048)
    used = [N.nvmlDeviceGetMemoryInfo(device).used for device in devices]
    assert used[0] == used[1] > idle[0] * MIB
    assert used[2] == idle[2] * MIB
    assert N.nvmlDeviceGetMemoryInfo(gpu, version=N.nvmlMemory_v2).used == used[0] + used[2]
    assert [len(N.nvmlDeviceGetComputeRunningProcesses(device)) for device in devices] == [0, 1, 0]
    entry = N.nvmlDeviceGetComputeRunningProcesses(gpu)[0]
    assert (entry.pid, entry.gpuInstanceId, entry.computeInstanceId) == (pid, number, 1)
    whole = N.nvmlDeviceGetBAR1MemoryInfo(gpu)
    part = N.nvmlDeviceGetBAR1MemoryInfo(devices[0])
    assert 0 < part.bar1Total < whole.bar1Total
    assert part.bar1Used > N.nvmlDeviceGetBAR1MemoryInfo(devices[2]).bar1Used


def test_kinds_of_processes_are_listed_apart(nvml: Open) -> None:
    it = nvml()
    for kind in ("compute", "graphics", "mps"):
        it.node.start_process(0, kind=kind, memory_mib=10)
    gpu = it.gpu()
    for function in (
        N.nvmlDeviceGetComputeRunningProcesses,
        N.nvmlDeviceGetGraphicsRunningProcesses,
        N.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        assert len(function(gpu)) == 1


def test_in_mig_mode_utilisation_and_rows_are_absent_and_the_histogram_is_not(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 19)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    for function in (
        N.nvmlDeviceGetUtilizationRates,
        N.nvmlDeviceGetEncoderUtilization,
        N.nvmlDeviceGetDecoderUtilization,
        N.nvmlDeviceGetJpgUtilization,
        N.nvmlDeviceGetOfaUtilization,
        N.nvmlDeviceGetRemappedRows,
        N.nvmlDeviceGetFanSpeed,
    ):
        assert it.code(function, gpu) == 3
        assert it.code(function, device) == 3
    assert N.nvmlDeviceGetRowRemapperHistogram(gpu).max == 2560
    assert fields(gpu, 142)[142].nvmlReturn == 0
    for function in (
        N.nvmlDeviceGetPowerUsage,
        N.nvmlDeviceGetPciInfo,
        N.nvmlDeviceGetEccMode,
        N.nvmlDeviceGetRowRemapperHistogram,
    ):
        assert it.code(function, device) == 3
    assert N.nvmlDeviceGetTotalEccErrors(device, 1, 0) == 0
    assert it.code(N.nvmlDeviceGetTotalEccErrors, device, 0, 0) == 3
    assert it.code(N.nvmlDeviceGetMemoryErrorCounter, device, 1, 0, 2) == 3
    assert N.nvmlDeviceGetMemoryErrorCounter(device, 1, 0, 7) == 0


def test_ecc_and_rows(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    it.node.damage(
        0, ecc={"corrected/dram": 3, "uncorrected/sram": 1}, remapped_uncorrectable=2, remap_pending=True, replays=4
    )
    assert N.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 3
    assert N.nvmlDeviceGetMemoryErrorCounter(gpu, 1, 1, 7) == 1
    assert it.code(N.nvmlDeviceGetMemoryErrorCounter, gpu, 1, 1, 0) == 3
    assert it.code(N.nvmlDeviceGetTotalEccErrors, gpu, 2, 0) == 2
    assert N.nvmlDeviceGetRemappedRows(gpu) == (0, 2, 1, 0)
    found = N.nvmlDeviceGetRowRemapperHistogram(gpu)
    assert (found.max, found.high) == (2558, 2)
    assert N.nvmlDeviceGetPcieReplayCounter(gpu) == 4
    values = fields(gpu, 3, 6, 94, 143, 144, 145, 230)
    assert {key: value.value.uiVal for key, value in values.items()} == {
        3: 3,
        6: 1,
        94: 4,
        143: 2,
        144: 1,
        145: 0,
        230: 1,
    }
    it.node.damage(0, remap_failed=True)
    assert N.nvmlDeviceGetRowRemapperHistogram(gpu).none == 1
    assert it.code(N.nvmlDeviceGetRetiredPages, gpu, 0) == 3


def test_parts_from_before_row_remapping_retire_pages(nvml: Open) -> None:
    it = nvml("g4dn.xlarge")
    gpu = it.gpu()
    assert list(N.nvmlDeviceGetRetiredPages(gpu, 0)) == []
    assert it.code(N.nvmlDeviceGetRemappedRows, gpu) == 3
    assert fields(gpu, 31)[31].nvmlReturn == 0


def test_field_values_answer_each_by_itself(nvml: Open) -> None:
    it = nvml("p5.48xlarge")
    gpu = it.gpu()
    values = fields(gpu, 82, 184, 185, 186, 190, 193, 199, 777, 91)
    assert values[777].nvmlReturn == 3
    assert values[184].value.uiVal == 1
    assert values[193].value.siVal < 0
    assert values[91].value.uiVal == 18
    assert values[186].value.uiVal == N.nvmlDeviceGetPowerUsage(gpu)
    assert fields(gpu, (138, 99))[138].nvmlReturn == 2
    assert fields(gpu, (186, 7))[186].nvmlReturn == 3
    per_link = fields(gpu, (138, 0))[138].value.ullVal
    assert fields(gpu, (138, 0xFFFFFFFF))[138].value.ullVal == 18 * per_link
    a30 = nvml("a30.24gb")
    assert fields(a30.gpu(), 184)[184].value.uiVal == 0
    assert fields(a30.gpu(), 193)[193].nvmlReturn == 3


def test_limits_thresholds_and_clocks(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    gpu = it.gpu()
    assert N.nvmlDeviceGetEnforcedPowerLimit(gpu) == 400_000
    assert N.nvmlDeviceGetPowerManagementLimitConstraints(gpu) == [200_000, 400_000]
    assert N.nvmlDeviceGetTemperatureThreshold(gpu, 0) > N.nvmlDeviceGetTemperatureThreshold(gpu, 1)
    assert it.code(N.nvmlDeviceGetTemperatureThreshold, gpu, 5) == 3
    assert it.code(N.nvmlDeviceGetTemperatureThreshold, gpu, 50) == 2
    assert it.code(N.nvmlDeviceGetTemperature, gpu, 1) == 2
    assert N.nvmlDeviceGetTemperatureV(gpu, 0) == N.nvmlDeviceGetTemperature(gpu, 0)
    assert N.nvmlDeviceGetMarginTemperature(gpu) > 0
    assert it.code(N.nvmlDeviceGetClockInfo, gpu, 4) == 2
    assert it.code(N.nvmlDeviceGetMaxClockInfo, gpu, 4) == 2
    assert N.nvmlDeviceGetMaxClockInfo(gpu, 2) == N.nvmlDeviceGetClockInfo(gpu, 2)
    assert N.nvmlDeviceGetPerformanceState(gpu) == 0
    assert N.nvmlDeviceGetSupportedClocksEventReasons(gpu) & 4
    assert it.code(N.nvmlDeviceGetApplicationsClock, gpu, 0) == 26  # a third way of being absent


def test_links_and_fabric(nvml: Open) -> None:
    it = nvml("p5.48xlarge")
    gpu = it.gpu()
    assert [N.nvmlDeviceGetNvLinkState(gpu, link) for link in range(18)] == [1] * 18
    assert it.code(N.nvmlDeviceGetNvLinkState, gpu, 18) == 2
    assert N.nvmlDeviceGetNvLinkVersion(gpu, 0) == 4
    assert N.nvmlDeviceGetNvLinkErrorCounter(gpu, 0, 0) == 0
    assert it.code(N.nvmlDeviceGetNvLinkErrorCounter, gpu, 0, 9) == 2
    fabric = N.c_nvmlGpuFabricInfoV_t()
    N.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(fabric))
    assert (fabric.state, fabric.status) == (3, 0)
    for active, state in ((False, 2), (True, 3)):
        it.node.set_unit("nvidia-fabricmanager.service", active=active)
        N.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(fabric))
        assert fabric.state == state
    assert N.nvmlDeviceGetCurrPcieLinkGeneration(gpu) == 5
    assert N.nvmlDeviceGetCurrPcieLinkWidth(gpu) == 16
    single = nvml("g6e.xlarge")
    assert single.code(N.nvmlDeviceGetNvLinkState, single.gpu(), 0) == 3
    assert single.code(N.nvmlDeviceGetGpuFabricInfoV, single.gpu(), ctypes.byref(fabric)) == 3
    assert N.nvmlDeviceGetPcieThroughput(single.gpu(), 0) > 0
    assert single.code(N.nvmlDeviceGetPcieThroughput, single.gpu(), 2) == 2


def gpm(it: Any, take: Callable[[Any], None], metric: int) -> Any:
    first, second = N.nvmlGpmSampleAlloc(), N.nvmlGpmSampleAlloc()
    take(first)
    it.clock.now += 0.5
    take(second)
    wanted = N.c_nvmlGpmMetricsGet_t(
        version=N.NVML_GPM_METRICS_GET_VERSION, numMetrics=1, sample1=first, sample2=second
    )
    wanted.metrics[0].metricId = metric
    N.nvmlGpmMetricsGet(wanted)
    N.nvmlGpmSampleFree(first)
    N.nvmlGpmSampleFree(second)
    return wanted.metrics[0]


def test_gpm_tells_each_gpu_instance_apart(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    assert N.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice
    numbers = []
    for start in (0, 2):
        instance = it.create_at(gpu, 14, start, 2)
        N.nvmlGpuInstanceCreateComputeInstance(instance, 1)
        numbers.append(N.nvmlGpuInstanceGetInfo(instance).id)
    it.node.start_process(0, gpu_instance=numbers[0], activity=0.5)
    busy, idle = (gpm(it, functools.partial(N.nvmlGpmMigSampleGet, gpu, n), 1).value for n in numbers)
    assert 40 <= busy <= 60
    assert idle == 0
    whole = gpm(it, lambda s: N.nvmlGpmSampleGet(gpu, s), 1).value
    assert 0 < whole < busy
    device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert 40 <= gpm(it, lambda s: N.nvmlGpmSampleGet(device, s), 1).value <= 60
    assert gpm(it, lambda s: N.nvmlGpmMigSampleGet(gpu, numbers[0], s), 20).nvmlReturn == 3  # PCIe is the GPU's
    assert gpm(it, lambda s: N.nvmlGpmSampleGet(gpu, s), 20).value > 0
    assert gpm(it, lambda s: N.nvmlGpmSampleGet(gpu, s), 400).nvmlReturn == 3
    assert it.code(N.nvmlGpmMigSampleGet, gpu, 99, N.nvmlGpmSampleAlloc()) == 2


def test_gpm_refuses_samples_that_do_not_belong_together(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    first, second = N.nvmlGpmSampleAlloc(), N.nvmlGpmSampleAlloc()
    wanted = N.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=first, sample2=second)
    assert it.code(N.nvmlGpmMetricsGet, wanted) == 2  # never taken
    N.nvmlGpmSampleGet(it.gpu(0), first)
    N.nvmlGpmSampleGet(it.gpu(1), second)
    assert it.code(N.nvmlGpmMetricsGet, wanted) == 2  # of two GPUs
    N.nvmlGpmSampleGet(it.gpu(0), second)
    N.nvmlGpmMetricsGet(wanted)
    assert wanted.metrics[0].nvmlReturn == 21  # no time between them
    wanted.version = 9
    assert it.code(N.nvmlGpmMetricsGet, wanted) == 25
    N.nvmlGpmSampleFree(first)
    assert it.code(N.nvmlGpmSampleFree, first) == 2
    wanted.version = 1
    assert it.code(N.nvmlGpmMetricsGet, wanted) == 2  # freed


def test_ampere_has_no_gpm(nvml: Open) -> None:
    it = nvml("a100.40gb")
    assert not N.nvmlGpmQueryDeviceSupport(it.gpu()).isSupportedDevice
    assert it.code(N.nvmlGpmSampleGet, it.gpu(), N.nvmlGpmSampleAlloc()) == 3


def test_events_reach_a_set_that_was_registered_before(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    it.node.xid(0, 31)  # too early to be seen
    events = N.nvmlEventSetCreate()
    for index in range(2):
        N.nvmlDeviceRegisterEvents(it.gpu(index), 8 | 0x100, events)
    assert it.code(N.nvmlEventSetWait_v2, events, 0) == 10
    threading.Timer(0.05, lambda: it.node.xid(1, 43, gpu_instance=2, compute_instance=0)).start()
    event = N.nvmlEventSetWait_v2(events, 5000)
    assert (event.eventType, event.eventData, event.gpuInstanceId, event.computeInstanceId) == (8, 43, 2, 0)
    assert N.nvmlDeviceGetIndex(event.device) == 1
    N.nvmlDeviceSetMigMode(it.gpu(0), 1)
    event = N.nvmlEventSetWait_v2(events, 5000)
    assert (event.eventType, N.nvmlDeviceGetIndex(event.device)) == (0x100, 0)
    N.nvmlEventSetFree(events)
    assert it.code(N.nvmlEventSetWait_v2, events, 0) == 2
    assert it.code(N.nvmlEventSetFree, events) == 2


def test_a_set_gets_only_what_it_asked_for(nvml: Open) -> None:
    it = nvml()
    events = N.nvmlEventSetCreate()
    N.nvmlDeviceRegisterEvents(it.gpu(), 0x100, events)
    it.node.xid(0, 43)
    assert it.code(N.nvmlEventSetWait_v2, events, 0) == 10
    assert it.code(N.nvmlDeviceRegisterEvents, it.gpu(), 0x8000, events) == 3
    t4 = nvml("g4dn.xlarge")
    assert not N.nvmlDeviceGetSupportedEventTypes(t4.gpu()) & 0x100


def test_a_waiting_thread_comes_back_at_shutdown(nvml: Open) -> None:
    it = nvml()
    events = N.nvmlEventSetCreate()
    N.nvmlDeviceRegisterEvents(it.gpu(), 8, events)
    threading.Timer(0.05, N.nvmlShutdown).start()
    assert it.code(N.nvmlEventSetWait_v2, events, 20_000) == 1


def test_unprivileged_readers_learn_of_the_whole_gpu_only(nvml: Open) -> None:
    it = nvml('root = false\n[[gpu]]\nmodel = "h100.80gb"\n')
    events = N.nvmlEventSetCreate()
    N.nvmlDeviceRegisterEvents(it.gpu(), 8, events)
    it.node.xid(0, 43, gpu_instance=2)
    assert N.nvmlEventSetWait_v2(events, 1000).gpuInstanceId == 0xFFFFFFFF


def test_a_busy_node_has_load_where_there_is_somebody_to_bear_it(nvml: Open) -> None:
    it = nvml('load = "busy"\n[[gpu]]\nmodel = "h100.80gb"\n[[gpu]]\nmodel = "t4.16gb"\n')
    assert [len(N.nvmlDeviceGetComputeRunningProcesses(it.gpu(i))) for i in range(2)] == [1, 1]
    it.node.stop_process(gpu=0)
    gpu = it.enable(0)
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 19)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert len(N.nvmlDeviceGetComputeRunningProcesses(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))) == 1


@pytest.mark.parametrize("key", ["t4.16gb", "l40s.48gb", "a30.24gb", "b300.269gb", "rtxpro6000.96gb", "h20.96gb"])
def test_every_kind_of_board_has_figures(nvml: Open, key: str) -> None:
    it = nvml(key)
    it.node.start_process(0, activity=1.0)
    gpu = it.gpu()
    assert 0 < N.nvmlDeviceGetPowerUsage(gpu) <= N.nvmlDeviceGetEnforcedPowerLimit(gpu)
    assert 30 <= N.nvmlDeviceGetTemperature(gpu, 0) < N.nvmlDeviceGetTemperatureThreshold(gpu, 1)
