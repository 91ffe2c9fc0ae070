# What gpunode uses of nvidia-ml-py. Functions take and give ctypes objects that pynvml itself does not
# type; which of them exist depends on the versions of pynvml and of the driver.
import ctypes
from collections.abc import Callable
from typing import Any

class NVMLError(Exception):
    value: int
    def __init__(self, value: int) -> None: ...

class NVMLError_InsufficientResources(NVMLError): ...
class NVMLError_InvalidArgument(NVMLError): ...
class NVMLError_NotSupported(NVMLError): ...

nvmlLib: object
_nvmlGetFunctionPointer_cache: dict[str, object]

class struct_c_nvmlDevice_t(ctypes.Structure): ...
class struct_c_nvmlGpuInstance_t(ctypes.Structure): ...
class struct_c_nvmlComputeInstance_t(ctypes.Structure): ...
class struct_c_nvmlEventSet_t(ctypes.Structure): ...
class struct_c_nvmlGpmSample_t(ctypes.Structure): ...

# Handles: pointers to structures that nobody looks into.
class c_nvmlDevice_t(ctypes._Pointer[struct_c_nvmlDevice_t]): ...
class c_nvmlGpuInstance_t(ctypes._Pointer[struct_c_nvmlGpuInstance_t]): ...
class c_nvmlComputeInstance_t(ctypes._Pointer[struct_c_nvmlComputeInstance_t]): ...
class c_nvmlEventSet_t(ctypes._Pointer[struct_c_nvmlEventSet_t]): ...
class c_nvmlGpmSample_t(ctypes._Pointer[struct_c_nvmlGpmSample_t]): ...

class c_nvmlGpuInstancePlacement_t(ctypes.Structure):
    start: int
    size: int

class c_nvmlComputeInstancePlacement_t(ctypes.Structure):
    start: int
    size: int

class c_nvmlGpmMetric_t(ctypes.Structure):
    metricId: int
    nvmlReturn: int
    value: float

class c_nvmlGpmMetricsGet_t(ctypes.Structure):
    version: int
    numMetrics: int
    sample1: object
    sample2: object
    metrics: ctypes.Array[c_nvmlGpmMetric_t]

class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
    version: int
    status: int
    cliqueId: int
    state: int
    healthMask: int

NVML_GPM_METRICS_GET_VERSION: int
nvmlMemory_v2: int
nvmlGpuFabricInfo_v2: int
NVML_COMPUTE_INSTANCE_PROFILE_COUNT: int

_Function = Callable[..., Any]

nvmlComputeInstanceDestroy: _Function
nvmlComputeInstanceGetInfo: _Function
nvmlComputeInstanceGetInfo_v2: _Function
nvmlDeviceCreateGpuInstance: _Function
nvmlDeviceCreateGpuInstanceWithPlacement: _Function
nvmlDeviceGetApplicationsClock: _Function
nvmlDeviceGetArchitecture: _Function
nvmlDeviceGetAttributes: _Function
nvmlDeviceGetBAR1MemoryInfo: _Function
nvmlDeviceGetBoardId: _Function
nvmlDeviceGetBrand: _Function
nvmlDeviceGetClockInfo: _Function
nvmlDeviceGetComputeInstanceId: _Function
nvmlDeviceGetComputeMode: _Function
nvmlDeviceGetComputeRunningProcesses: _Function
nvmlDeviceGetComputeRunningProcesses_v3: _Function
nvmlDeviceGetCount: _Function
nvmlDeviceGetCudaComputeCapability: _Function
nvmlDeviceGetCurrPcieLinkGeneration: _Function
nvmlDeviceGetCurrPcieLinkWidth: _Function
nvmlDeviceGetCurrentClocksEventReasons: _Function
nvmlDeviceGetCurrentClocksThrottleReasons: _Function
nvmlDeviceGetDecoderUtilization: _Function
nvmlDeviceGetDeviceHandleFromMigDeviceHandle: _Function
nvmlDeviceGetEccMode: _Function
nvmlDeviceGetEncoderUtilization: _Function
nvmlDeviceGetEnforcedPowerLimit: _Function
nvmlDeviceGetFanSpeed: _Function
nvmlDeviceGetFieldValues: _Function
nvmlDeviceGetGpuFabricInfoV: _Function
nvmlDeviceGetGpuInstanceById: _Function
nvmlDeviceGetGpuInstanceId: _Function
nvmlDeviceGetGpuInstancePossiblePlacements: _Function
nvmlDeviceGetGpuInstanceProfileInfo: _Function
nvmlDeviceGetGpuInstanceProfileInfoById: _Function
nvmlDeviceGetGpuInstanceProfileInfoV: _Function
nvmlDeviceGetGpuInstanceRemainingCapacity: _Function
nvmlDeviceGetGpuInstances: _Function
nvmlDeviceGetGraphicsRunningProcesses: _Function
nvmlDeviceGetGraphicsRunningProcesses_v3: _Function
nvmlDeviceGetHandleByIndex: _Function
nvmlDeviceGetHandleByPciBusId: _Function
nvmlDeviceGetHandleBySerial: _Function
nvmlDeviceGetHandleByUUID: _Function
nvmlDeviceGetIndex: _Function
nvmlDeviceGetJpgUtilization: _Function
nvmlDeviceGetMPSComputeRunningProcesses: _Function
nvmlDeviceGetMPSComputeRunningProcesses_v3: _Function
nvmlDeviceGetMarginTemperature: _Function
nvmlDeviceGetMaxClockInfo: _Function
nvmlDeviceGetMaxMigDeviceCount: _Function
nvmlDeviceGetMemoryErrorCounter: _Function
nvmlDeviceGetMemoryInfo: _Function
nvmlDeviceGetMigDeviceHandleByIndex: _Function
nvmlDeviceGetMigMode: _Function
nvmlDeviceGetMinorNumber: _Function
nvmlDeviceGetName: _Function
nvmlDeviceGetNumGpuCores: _Function
nvmlDeviceGetNvLinkErrorCounter: _Function
nvmlDeviceGetNvLinkState: _Function
nvmlDeviceGetNvLinkVersion: _Function
nvmlDeviceGetOfaUtilization: _Function
nvmlDeviceGetPciInfo: _Function
nvmlDeviceGetPciInfoExt: _Function
nvmlDeviceGetPciInfo_v3: _Function
nvmlDeviceGetPcieReplayCounter: _Function
nvmlDeviceGetPcieThroughput: _Function
nvmlDeviceGetPerformanceState: _Function
nvmlDeviceGetPersistenceMode: _Function
nvmlDeviceGetPowerManagementLimitConstraints: _Function
nvmlDeviceGetPowerUsage: _Function
nvmlDeviceGetRemappedRows: _Function
nvmlDeviceGetRetiredPages: _Function
nvmlDeviceGetRowRemapperHistogram: _Function
nvmlDeviceGetSerial: _Function
nvmlDeviceGetSupportedClocksEventReasons: _Function
nvmlDeviceGetSupportedEventTypes: _Function
nvmlDeviceGetTemperature: _Function
nvmlDeviceGetTemperatureThreshold: _Function
nvmlDeviceGetTemperatureV: _Function
nvmlDeviceGetTotalEccErrors: _Function
nvmlDeviceGetTotalEnergyConsumption: _Function
nvmlDeviceGetUUID: _Function
nvmlDeviceGetUtilizationRates: _Function
nvmlDeviceGetVbiosVersion: _Function
nvmlDeviceGetVirtualizationMode: _Function
nvmlDeviceIsMigDeviceHandle: _Function
nvmlDeviceRegisterEvents: _Function
nvmlDeviceSetComputeMode: _Function
nvmlDeviceSetMigMode: _Function
nvmlDeviceSetPersistenceMode: _Function
nvmlEventSetCreate: _Function
nvmlEventSetFree: _Function
nvmlEventSetWait_v2: _Function
nvmlGpmMetricsGet: _Function
nvmlGpmMigSampleGet: _Function
nvmlGpmQueryDeviceSupport: _Function
nvmlGpmSampleAlloc: _Function
nvmlGpmSampleFree: _Function
nvmlGpmSampleGet: _Function
nvmlGpuInstanceCreateComputeInstance: _Function
nvmlGpuInstanceCreateComputeInstanceWithPlacement: _Function
nvmlGpuInstanceDestroy: _Function
nvmlGpuInstanceGetComputeInstanceById: _Function
nvmlGpuInstanceGetComputeInstancePossiblePlacements: _Function
nvmlGpuInstanceGetComputeInstanceProfileInfo: _Function
nvmlGpuInstanceGetComputeInstanceProfileInfoV: _Function
nvmlGpuInstanceGetComputeInstanceRemainingCapacity: _Function
nvmlGpuInstanceGetComputeInstances: _Function
nvmlGpuInstanceGetInfo: _Function
nvmlInit: _Function
nvmlInitWithFlags: _Function
nvmlShutdown: _Function
nvmlSystemGetCudaDriverVersion: _Function
nvmlSystemGetCudaDriverVersion_v2: _Function
nvmlSystemGetDriverVersion: _Function
nvmlSystemGetNVMLVersion: _Function
nvmlSystemGetProcessName: _Function
