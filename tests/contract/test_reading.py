"""What any device answers when it is only asked. Nothing here changes a GPU, so it may be a real one."""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import pynvml
import pytest

N: Any = pynvml
ABSENT = {3, 13, 26}
"""Three ways of not having something: not supported, no such function, deprecated."""


def mig_state(gpu: Any) -> list[int] | None:
    with contextlib.suppress(N.NVMLError_NotSupported):
        found: list[int] = N.nvmlDeviceGetMigMode(gpu)
        return found
    return None


def profiles(gpu: Any) -> list[Any]:
    found = []
    for selector in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with contextlib.suppress(N.NVMLError_NotSupported):
            found.append(N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, selector))
    return found


def test_nothing_but_versions_works_before_init(device: Any) -> None:
    if device.simulated is None:
        N._LoadNvmlLibrary()
    assert device.code(N.nvmlDeviceGetCount) == 1
    assert device.code(N.nvmlSystemGetDriverVersion) == 1
    assert N.nvmlSystemGetNVMLVersion()


def test_one_shutdown_too_many_is_no_failure(device: Any) -> None:
    N.nvmlInit()
    N.nvmlShutdown()
    assert device.code(N.nvmlShutdown) in (0, 1)


def test_handles_die_with_the_session(device: Any) -> None:
    N.nvmlInit()
    gpu = N.nvmlDeviceGetHandleByIndex(0)
    N.nvmlShutdown()
    assert device.code(N.nvmlDeviceGetName, gpu) == 1


def test_versions_look_like_versions(opened: Any) -> None:
    assert N.nvmlSystemGetDriverVersion().split(".")[0].isdigit()
    assert N.nvmlSystemGetNVMLVersion().endswith(N.nvmlSystemGetDriverVersion())
    assert N.nvmlSystemGetCudaDriverVersion() >= 11000


def test_gpus_are_numbered_by_pci_address_and_found_by_every_name(opened: Any) -> None:
    gpus = opened.gpus()
    addresses = [N.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus]
    assert addresses == sorted(addresses)
    for index, gpu in enumerate(gpus):
        assert N.nvmlDeviceGetIndex(gpu) == index
        uuid = N.nvmlDeviceGetUUID(gpu)
        assert uuid.startswith("GPU-")
        assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByUUID(uuid)) == uuid
        assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByPciBusId(addresses[index])) == uuid
    assert opened.code(N.nvmlDeviceGetHandleByIndex, len(gpus)) == 2
    assert opened.code(N.nvmlDeviceGetHandleByUUID, "GPU-00000000-0000-0000-0000-000000000000") == 6


def test_a_gpu_is_no_mig_device(opened: Any) -> None:
    gpu = opened.gpus()[0]
    assert not bool(N.nvmlDeviceIsMigDeviceHandle(gpu))
    assert opened.code(N.nvmlDeviceGetGpuInstanceId, gpu) in (2, 3)
    assert opened.code(N.nvmlDeviceGetAttributes, gpu) in (2, 3)


def test_mig_mode_is_two_bits_or_not_supported(opened: Any) -> None:
    for gpu in opened.gpus():
        mode = mig_state(gpu)
        assert mode is None or all(bit in (0, 1) for bit in mode)
        if mode is None or not mode[0]:
            assert N.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
            assert opened.code(N.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 0) == 3


def test_profile_selectors_have_holes_and_end_with_invalid_argument(opened: Any) -> None:
    gpu = opened.gpus()[0]
    answers = [opened.code(N.nvmlDeviceGetGpuInstanceProfileInfo, gpu, selector) for selector in range(64)]
    end = answers.index(2)
    assert end >= N.NVML_GPU_INSTANCE_PROFILE_COUNT - 3  # an older driver knows fewer
    assert set(answers[:end]) <= {0, 3}


def test_profiles_agree_with_their_first_version_and_their_placements(opened: Any) -> None:
    for gpu in opened.gpus():
        found = profiles(gpu)
        assert len({info.id for info in found}) == len(found)
        for selector in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
            with contextlib.suppress(N.NVMLError_NotSupported, N.NVMLError_InvalidArgument):
                new = N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, selector)
                old = N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, selector, version=1)
                for field in (
                    "id",
                    "sliceCount",
                    "instanceCount",
                    "multiprocessorCount",
                    "memorySizeMB",
                    "decoderCount",
                ):
                    assert getattr(new, field) == getattr(old, field)
        for info in found:
            count = ctypes.c_uint()
            N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, info.id, None, ctypes.byref(count))
            assert count.value >= info.instanceCount or "+me" in info.name or count.value > 0
            array = (N.c_nvmlGpuInstancePlacement_t * count.value)()
            N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, info.id, array, ctypes.byref(count))
            assert len({place.start for place in array}) == count.value
            assert len({place.size for place in array}) == 1
            assert info.name.removeprefix("MIG ").startswith(f"{info.sliceCount}g.")


def test_a_structure_of_another_version_is_refused(opened: Any) -> None:
    gpu = opened.gpus()[0]
    if not profiles(gpu):
        return
    info = N.c_nvmlGpuInstanceProfileInfo_v2_t()
    info.version = 0x09000098
    assert N._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")(gpu, 0, ctypes.byref(info)) == 25


def test_capacity_is_not_told_with_mig_off(opened: Any) -> None:
    for gpu in opened.gpus():
        found = profiles(gpu)
        if found and mig_state(gpu) == [0, 0]:
            assert opened.code(N.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu, found[0].id) == 3


def test_both_versions_of_memory_agree(opened: Any) -> None:
    gpu = opened.gpus()[0]
    v1 = N.nvmlDeviceGetMemoryInfo(gpu)
    v2 = N.nvmlDeviceGetMemoryInfo(gpu, version=N.nvmlMemory_v2)
    assert v1.total == v2.total
    assert abs(v1.used - v2.used - v2.reserved) < 64 * 2**20  # somebody may be at work between the two
    assert v2.used + v2.free + v2.reserved == v2.total


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetPerformanceState",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRowRemapperHistogram",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetVirtualizationMode",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetVbiosVersion",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetBAR1MemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    ],
)
def test_a_figure_is_there_or_absent_and_nothing_else(opened: Any, name: str) -> None:
    for gpu in opened.gpus():
        assert opened.code(getattr(N, name), gpu) in {0, *ABSENT}


def test_temperature_old_and_new_agree_where_both_are(opened: Any) -> None:
    gpu = opened.gpus()[0]
    old, new = (opened.code(function, gpu, 0) for function in (N.nvmlDeviceGetTemperature, N.nvmlDeviceGetTemperatureV))
    assert {old, new} <= {0, *ABSENT}
    if old == new == 0:
        assert abs(N.nvmlDeviceGetTemperature(gpu, 0) - N.nvmlDeviceGetTemperatureV(gpu, 0)) <= 2


def test_energy_does_not_run_backwards(opened: Any) -> None:
    gpu = opened.gpus()[0]
    with contextlib.suppress(N.NVMLError_NotSupported):
        first = N.nvmlDeviceGetTotalEnergyConsumption(gpu)
        time.sleep(0.02)
        assert N.nvmlDeviceGetTotalEnergyConsumption(gpu) >= first


def test_fields_answer_one_by_one(opened: Any) -> None:
    values = N.nvmlDeviceGetFieldValues(opened.gpus()[0], [83, 184, 186, 60_000])
    assert [value.fieldId for value in values] == [83, 184, 186, 60_000]
    assert values[3].nvmlReturn != 0
    assert values[1].nvmlReturn in {0, *ABSENT}


def test_an_event_set_waits_and_gives_up(opened: Any) -> None:
    gpu = opened.gpus()[0]
    types = N.nvmlDeviceGetSupportedEventTypes(gpu)
    events = N.nvmlEventSetCreate()
    assert opened.code(N.nvmlDeviceRegisterEvents, gpu, 1 << 40, events) in (2, 3)
    N.nvmlDeviceRegisterEvents(gpu, types & (N.nvmlEventTypeXidCriticalError | 0x100), events)
    assert opened.code(N.nvmlEventSetWait_v2, events, 10) == 10
    N.nvmlEventSetFree(events)


def test_gpm_measures_where_it_is_supported(opened: Any) -> None:
    gpu = opened.gpus()[0]
    if not N.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
        sample = N.nvmlGpmSampleAlloc()
        assert opened.code(N.nvmlGpmSampleGet, gpu, sample) == 3
        N.nvmlGpmSampleFree(sample)
        return
    first, second = N.nvmlGpmSampleAlloc(), N.nvmlGpmSampleAlloc()
    N.nvmlGpmSampleGet(gpu, first)
    time.sleep(0.15)
    N.nvmlGpmSampleGet(gpu, second)
    wanted = N.c_nvmlGpmMetricsGet_t(
        version=N.NVML_GPM_METRICS_GET_VERSION, numMetrics=1, sample1=first, sample2=second
    )
    wanted.metrics[0].metricId = N.NVML_GPM_METRIC_SM_UTIL
    N.nvmlGpmMetricsGet(wanted)
    assert wanted.metrics[0].nvmlReturn == 0
    assert 0 <= wanted.metrics[0].value <= 100
    for sample in (first, second):
        N.nvmlGpmSampleFree(sample)
