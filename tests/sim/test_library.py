"""The C face: opening and closing, handles, and the refusal of what would crash a real process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from agent.sim import prototypes

N: Any = pynvml
Open = Callable[..., Any]


def test_before_init_only_versions_work(nvml: Open) -> None:
    it = nvml(init=False)
    assert it.code(N.nvmlDeviceGetCount) == 1
    assert it.code(N.nvmlSystemGetDriverVersion) == 1
    assert N.nvmlSystemGetNVMLVersion() == "13.590.48.01"
    assert N.nvmlSystemGetCudaDriverVersion() == 13010
    assert str(N.NVMLError(23)) == "Insufficient Resources"
    assert it.code(N.nvmlShutdown) == 0
    N.nvmlInit()
    assert N.nvmlSystemGetDriverVersion() == "590.48.01"


def test_init_is_counted_and_handles_die_at_the_last_shutdown(nvml: Open) -> None:
    it = nvml()
    N.nvmlInit()
    gpu = it.gpu()
    N.nvmlShutdown()
    name = N.nvmlDeviceGetName(gpu)
    N.nvmlShutdown()
    assert it.code(N.nvmlDeviceGetName, gpu) == 1
    N.nvmlInit()
    assert it.code(N.nvmlDeviceGetName, gpu) == 2
    assert N.nvmlDeviceGetName(it.gpu()) == name


def test_a_handle_is_the_same_each_time(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    address = [ctypes.cast(it.gpu(i), ctypes.c_void_p).value for i in (0, 0, 1)]
    assert address[0] == address[1] != address[2]


def test_gpus_are_found_by_every_name(nvml: Open) -> None:
    it = nvml("p5.48xlarge")
    assert N.nvmlDeviceGetCount() == 8
    for index in range(8):
        gpu = it.gpu(index)
        pci = N.nvmlDeviceGetPciInfo(gpu)
        again = [
            N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID(gpu)),
            N.nvmlDeviceGetHandleBySerial(N.nvmlDeviceGetSerial(gpu)),
            N.nvmlDeviceGetHandleByPciBusId(pci.busId),
            N.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy.lower()),
            N.nvmlDeviceGetHandleByPciBusId(pci.busId.split(":", 1)[1]),
        ]
        assert [N.nvmlDeviceGetIndex(found) for found in again] == [index] * 5
    assert it.code(N.nvmlDeviceGetHandleByIndex, 8) == 2
    assert it.code(N.nvmlDeviceGetHandleByUUID, "GPU-no") == 6
    assert it.code(N.nvmlDeviceGetHandleByUUID, "MIG-no") == 6
    assert it.code(N.nvmlDeviceGetHandleBySerial, "1") == 6
    assert it.code(N.nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0") == 6
    assert it.code(N.nvmlDeviceGetHandleByPciBusId, "nonsense") == 2


def test_identity(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    gpu = it.gpu(3)
    assert N.nvmlDeviceGetName(gpu) == "NVIDIA A100-SXM4-40GB"
    assert N.nvmlDeviceGetMinorNumber(gpu) == 3
    assert N.nvmlDeviceGetArchitecture(gpu) == N.NVML_DEVICE_ARCH_AMPERE
    assert N.nvmlDeviceGetCudaComputeCapability(gpu) == (8, 0)
    assert N.nvmlDeviceGetPciInfo(gpu).pciDeviceId == 0x20B010DE
    assert N.nvmlDeviceGetVirtualizationMode(gpu) == N.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH
    assert N.nvmlDeviceGetBrand(gpu) == N.NVML_BRAND_NVIDIA
    assert N.nvmlDeviceGetNumGpuCores(gpu) == 6912
    assert N.nvmlDeviceGetBoardId(gpu) != N.nvmlDeviceGetBoardId(it.gpu(2))
    assert N.nvmlDeviceGetVbiosVersion(gpu).count(".") == 4
    extended = N.nvmlPciInfoExt_v1_t(version=N.nvmlPciInfoExt_v1)
    N.nvmlDeviceGetPciInfoExt(gpu, ctypes.byref(extended))
    assert (extended.baseClass, extended.pciDeviceId) == (3, 0x20B010DE)


def test_a_virtual_gpu_is_one(nvml: Open) -> None:
    it = nvml("g6f.2xlarge")
    gpu = it.gpu()
    assert N.nvmlDeviceGetName(gpu) == "NVIDIA L4-6Q"
    assert N.nvmlDeviceGetVirtualizationMode(gpu) == N.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    assert N.nvmlDeviceGetBrand(gpu) == 8
    for function in (N.nvmlDeviceGetSerial, N.nvmlDeviceGetPowerUsage, N.nvmlDeviceGetEccMode):
        assert it.code(function, gpu) == 3


def test_settings_of_a_gpu(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    N.nvmlDeviceSetComputeMode(gpu, 3)
    assert N.nvmlDeviceGetComputeMode(gpu) == 3
    assert it.code(N.nvmlDeviceSetComputeMode, gpu, 9) == 2
    N.nvmlDeviceSetPersistenceMode(gpu, 1)
    assert N.nvmlDeviceGetPersistenceMode(gpu) == 1
    assert it.code(N.nvmlDeviceSetPersistenceMode, gpu, 2) == 2
    it.enable()
    assert it.code(N.nvmlDeviceSetComputeMode, gpu, 0) == 3
    assert it.code(N.nvmlDeviceGetNumGpuCores, gpu) == 3
    assert it.node.mutations == 3
    assert it.node.mutating_calls() == {
        "nvmlDeviceSetComputeMode": 3,
        "nvmlDeviceSetPersistenceMode": 2,
        "nvmlDeviceSetMigMode": 1,
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda lib, gpu: lib.nvmlDeviceGetName(gpu, 12, 96),
        lambda lib, gpu: lib.nvmlDeviceGetName(0x7F, ctypes.create_string_buffer(96), 96),
        lambda lib, gpu: lib.nvmlDeviceGetName(gpu, ctypes.create_string_buffer(8), 96),
        lambda lib, gpu: lib.nvmlDeviceGetName(gpu, ctypes.create_string_buffer(96)),
        lambda lib, gpu: lib.nvmlDeviceGetMigMode(gpu, 0, 0),
        lambda lib, gpu: lib.nvmlDeviceGetMigMode(gpu, ctypes.byref(ctypes.c_ubyte()), ctypes.byref(ctypes.c_uint())),
        lambda lib, gpu: lib.nvmlDeviceGetHandleByUUID(12, ctypes.byref(N.c_nvmlDevice_t())),
        lambda lib, gpu: lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(N.c_nvmlMemory_t())),
        lambda lib, gpu: lib.nvmlDeviceGetHandleByIndex_v2("0", ctypes.byref(N.c_nvmlDevice_t())),
        lambda lib, gpu: lib.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(ctypes.c_ulonglong())),
        lambda lib, gpu: lib.nvmlDeviceGetMemoryInfo_v2(gpu, ctypes.byref(N.c_nvmlMemory_t())),
        lambda lib, gpu: lib.nvmlDeviceGetGpuInstances(
            gpu, 19, (N.c_nvmlGpuInstance_t * 3)(), ctypes.byref(ctypes.c_uint())
        ),
        lambda lib, gpu: lib.nvmlDeviceGetGpuInstances(gpu, 19, None, ctypes.byref(ctypes.c_uint())),
        lambda lib, gpu: lib.nvmlDeviceGetGpuInstances(gpu, 19, (ctypes.c_uint * 9)(), ctypes.byref(ctypes.c_uint())),
        lambda lib, gpu: lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            gpu, 19, (N.c_nvmlGpuInstancePlacement_t * 2)(), ctypes.byref(ctypes.c_uint(7))
        ),
        lambda lib, gpu: lib.nvmlDeviceGetFieldValues(gpu, ctypes.c_int32(3), (N.c_nvmlFieldValue_t * 1)()),
        lambda lib, gpu: lib.nvmlDeviceGetPciInfo_v3(gpu, ctypes.byref(ctypes.create_string_buffer(200))),
        lambda lib, gpu: lib.nvmlGpuInstanceDestroy(gpu),
        lambda lib, gpu: lib.nvmlEventSetFree(gpu),
    ],
)
def test_what_c_would_not_forgive_is_refused_loudly(nvml: Open, call: Callable[[Any, Any], int]) -> None:
    it = nvml()
    gpu = it.enable()
    with pytest.raises(prototypes.Misuse):
        call(it.node.library, gpu)


def test_misuse_is_no_driver_error(nvml: Open) -> None:
    assert not issubclass(prototypes.Misuse, N.NVMLError)


def test_what_c_answers_with_a_code_is_a_code(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    lib = it.node.library
    assert lib.nvmlDeviceGetName(gpu, ctypes.create_string_buffer(8), 8) == 7
    assert lib.nvmlDeviceGetName(None, ctypes.create_string_buffer(96), 96) == 2
    assert lib.nvmlDeviceGetName(ctypes.c_void_p(0xDEAD), ctypes.create_string_buffer(96), 96) == 2
    assert lib.nvmlDeviceGetMigMode(gpu, None, ctypes.byref(ctypes.c_uint())) == 2
    assert lib.nvmlDeviceGetHandleByUUID(None, ctypes.byref(N.c_nvmlDevice_t())) == 2
    memory = N.c_nvmlMemory_v2_t(version=0x03000028)
    assert lib.nvmlDeviceGetMemoryInfo_v2(gpu, ctypes.byref(memory)) == 25
    count = ctypes.c_uint(2)
    assert (
        lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            gpu, 19, (N.c_nvmlGpuInstancePlacement_t * 7)(), ctypes.byref(count)
        )
        == 7
    )
    assert count.value == 7


def test_pointers_come_in_every_way_ctypes_has(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    lib = it.node.library
    current, pending = ctypes.c_uint(), ctypes.c_int()
    assert lib.nvmlDeviceGetMigMode(gpu, ctypes.pointer(current), ctypes.byref(pending)) == 0
    assert (current.value, pending.value) == (1, 1)
    assert (
        lib.nvmlDeviceGetMigMode(ctypes.cast(gpu, ctypes.c_void_p), ctypes.byref(current), ctypes.byref(pending)) == 0
    )

    class Memory(ctypes.Structure):  # laid out as the real one, under another name
        _fields_ = (
            ("version", ctypes.c_uint),
            ("total", ctypes.c_ulonglong),
            ("reserved", ctypes.c_ulonglong),
            ("free", ctypes.c_ulonglong),
            ("used", ctypes.c_ulonglong),
        )

    memory = Memory(version=N.nvmlMemory_v2)
    assert lib.nvmlDeviceGetMemoryInfo_v2(gpu, ctypes.byref(memory)) == 0
    assert memory.total == 81559 * 2**20
    one = N.c_nvmlGpuInstancePlacement_t()
    count = ctypes.c_uint(1)
    assert lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, 0, ctypes.byref(one), ctypes.byref(count)) == 0
    assert one.size == 8


def test_an_unknown_symbol_is_an_attribute_error(nvml: Open) -> None:
    it = nvml()
    with pytest.raises(AttributeError, match="undefined symbol: nvmlNothing"):
        _ = it.node.library.nvmlNothing
    with pytest.raises(AttributeError):
        _ = it.node.library._private


def test_calls_are_counted_by_name(nvml: Open) -> None:
    it = nvml()
    for _ in range(5):
        N.nvmlDeviceGetName(it.gpu())
    assert it.node.library_calls()["nvmlDeviceGetName"] == 5
    assert it.node.mutating_calls() == {}
    assert it.node.mutations == 0


def test_calls_of_many_threads_do_not_disturb_each_other(nvml: Open) -> None:
    it = nvml("h100.80gb:4")
    for index in range(4):
        it.enable(index)
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            gpu = it.gpu(index)
            for _ in range(40):
                made = N.nvmlDeviceCreateGpuInstance(gpu, 14)
                compute = N.nvmlGpuInstanceCreateComputeInstance(made, 1)
                device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
                assert N.nvmlDeviceGetAttributes(device).multiprocessorCount == 32
                N.nvmlComputeInstanceDestroy(compute)
                N.nvmlGpuInstanceDestroy(made)
        except BaseException as error:  # noqa: BLE001  # told by the test's own thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert it.node.mutations == 4 + 4 * 40 * 4


def test_after_the_node_is_closed_there_is_no_driver(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    it.node.close()
    assert it.code(N.nvmlDeviceGetName, gpu) == 1
    assert it.code(N.nvmlInit) == 9
