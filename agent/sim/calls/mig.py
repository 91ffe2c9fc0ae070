"""MIG: the mode, profiles, placements, GPU and compute instances, and MIG devices."""

from __future__ import annotations

import ctypes
from typing import Any

from agent.sim import codes, library, machine, state, tables
from agent.sim import prototypes as p

On = p.On
Gi = state.GpuInstance
Ci = state.ComputeInstance
_GI_SELECTORS = 18
_CI_SELECTORS = 9
_CAPABILITY_P2P, _CAPABILITY_GRAPHICS = 1, 2
_NAME = 96


class GpuInstanceProfileInfoV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, for which pynvml has no class."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("sliceCount", ctypes.c_uint),
        ("instanceCount", ctypes.c_uint),
        ("multiprocessorCount", ctypes.c_uint),
        ("copyEngineCount", ctypes.c_uint),
        ("decoderCount", ctypes.c_uint),
        ("encoderCount", ctypes.c_uint),
        ("jpegCount", ctypes.c_uint),
        ("ofaCount", ctypes.c_uint),
        ("memorySizeMB", ctypes.c_ulonglong),
        ("name", ctypes.c_char * _NAME),
        ("capabilities", ctypes.c_uint),
    )


class ComputeInstanceProfileInfoV3(ctypes.Structure):
    """nvmlComputeInstanceProfileInfo_v3_t, for which pynvml has no class."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("sliceCount", ctypes.c_uint),
        ("instanceCount", ctypes.c_uint),
        ("multiprocessorCount", ctypes.c_uint),
        ("sharedCopyEngineCount", ctypes.c_uint),
        ("sharedDecoderCount", ctypes.c_uint),
        ("sharedEncoderCount", ctypes.c_uint),
        ("sharedJpegCount", ctypes.c_uint),
        ("sharedOfaCount", ctypes.c_uint),
        ("name", ctypes.c_char * _NAME),
        ("capabilities", ctypes.c_uint),
    )


_GI_INFO = p.versioned((0x02000098, p.NVML.c_nvmlGpuInstanceProfileInfo_v2_t), (0x03000098, GpuInstanceProfileInfoV3))
_CI_INFO = p.versioned(
    (0x02000088, p.NVML.c_nvmlComputeInstanceProfileInfo_v2_t), (0x0300008C, ComputeInstanceProfileInfoV3)
)


# --- mode


@p.call("nvmlDeviceGetMigMode", On.GPU, p.UINT_OUT, p.UINT_OUT)
def get_mode(lib: library.Library, gpu: machine.Gpu, current: Any, pending: Any) -> None:  # noqa: ARG001
    """Tell the mode in effect and the one that the next reset brings."""
    if not gpu.model.mig_capable:
        raise codes.Refused(codes.NOT_SUPPORTED)
    now = gpu.state
    current.value, pending.value = int(now.mig), int(now.pending)


@p.call("nvmlDeviceSetMigMode", On.GPU, p.uint, p.UINT_OUT, latency="set-mode", mutates=True)
def set_mode(lib: library.Library, gpu: machine.Gpu, mode: int, status: Any) -> None:
    """Ask for a mode. The call succeeds; whether the mode has taken effect is the activation status."""
    status.value = lib.machine.set_mig_mode(gpu, mode)


@p.call("nvmlDeviceGetMaxMigDeviceCount", On.GPU, p.UINT_OUT)
def max_mig_devices(lib: library.Library, gpu: machine.Gpu, into: Any) -> None:  # noqa: ARG001
    """Tell how many MIG devices there can be; 0 with MIG off."""
    into.value = gpu.model.max_mig_devices if gpu.state.mig else 0


# --- GPU-instance profiles


def _selected(lib: library.Library, gpu: machine.Gpu, selector: int) -> tables.Profile:
    if not 0 <= selector < _GI_SELECTORS:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    lib.machine.need_profiles(gpu)
    profile = gpu.model.profile_by_index(selector)
    if profile is None:
        raise codes.Refused(codes.NOT_SUPPORTED)
    return profile


def _fill_info(profile: tables.Profile, into: Any) -> None:
    copy, decoder, encoder, jpeg, ofa = (count or 0 for count in profile.engines)
    into.id = profile.id
    into.sliceCount = profile.slices
    into.instanceCount = profile.max_instances
    into.multiprocessorCount = profile.multiprocessors
    into.copyEngineCount = copy
    into.decoderCount, into.encoderCount, into.jpegCount, into.ofaCount = decoder, encoder, jpeg, ofa
    into.memorySizeMB = profile.memory_mib
    if isinstance(into, GpuInstanceProfileInfoV3):
        into.capabilities = (_CAPABILITY_P2P if profile.p2p else 0) | (_CAPABILITY_GRAPHICS if profile.graphics else 0)
    else:
        into.isP2pSupported = int(bool(profile.p2p))


def _fill_named_info(profile: tables.Profile, into: Any) -> None:
    _fill_info(profile, into)
    into.name = library.char_array(f"MIG {profile.name}", _NAME)


@p.call("nvmlDeviceGetGpuInstanceProfileInfo", On.GPU, p.uint, p.out(p.NVML.c_nvmlGpuInstanceProfileInfo_t))
def profile_info(lib: library.Library, gpu: machine.Gpu, selector: int, into: Any) -> None:
    """Describe the profile behind a selector, without its name."""
    _fill_info(_selected(lib, gpu, selector), into)


@p.call("nvmlDeviceGetGpuInstanceProfileInfoV", On.GPU, p.uint, _GI_INFO, since=535)
def profile_info_versioned(lib: library.Library, gpu: machine.Gpu, selector: int, into: Any) -> None:
    """Describe the profile behind a selector, with the driver's name for it."""
    _fill_named_info(_selected(lib, gpu, selector), into)


@p.call("nvmlDeviceGetGpuInstanceProfileInfoByIdV", On.GPU, p.uint, _GI_INFO, since=590)
def profile_info_by_id(lib: library.Library, gpu: machine.Gpu, number: int, into: Any) -> None:
    """Describe the profile with this id."""
    lib.machine.need_profiles(gpu)
    _fill_named_info(gpu.profile(number), into)


_GI_PLACEMENTS = p.array(p.NVML.c_nvmlGpuInstancePlacement_t)


@p.call("nvmlDeviceGetGpuInstancePossiblePlacements_v2", On.GPU, p.uint, _GI_PLACEMENTS, p.UINT_OUT)
def possible_placements(lib: library.Library, gpu: machine.Gpu, number: int, into: Any, count: Any) -> None:
    """List every legal placement of a profile, whatever is occupied."""
    lib.machine.need_root()
    lib.machine.need_profiles(gpu)
    profile = gpu.profile(number)

    def put(array: Any, n: int) -> None:
        array[n].start, array[n].size = profile.starts[n], profile.size

    p.fill(into, len(profile.starts), count, put)


@p.call("nvmlDeviceGetGpuInstanceRemainingCapacity", On.GPU, p.uint, p.UINT_OUT)
def remaining_capacity(lib: library.Library, gpu: machine.Gpu, number: int, into: Any) -> None:
    """Count how many more instances of a profile would fit now."""
    lib.machine.need_root()
    lib.machine.need_mig(gpu)
    into.value = lib.machine.capacity(gpu, gpu.profile(number))


# --- GPU instances

_GI_OUT = p.out(p.NVML.c_nvmlGpuInstance_t)
_GI_PLACEMENT = p.out(p.NVML.c_nvmlGpuInstancePlacement_t)


@p.call("nvmlDeviceCreateGpuInstance", On.GPU, p.uint, _GI_OUT, latency="create-gi", mutates=True)
def create_gpu_instance(lib: library.Library, gpu: machine.Gpu, number: int, into: Any) -> None:
    """Make a GPU instance where the driver likes."""
    p.put_handle(into, lib.instance_address(gpu, lib.machine.create_gpu_instance(gpu, number)))


@p.call(
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    On.GPU,
    p.uint,
    _GI_PLACEMENT,
    _GI_OUT,
    latency="create-gi",
    mutates=True,
)
def create_gpu_instance_at(lib: library.Library, gpu: machine.Gpu, number: int, where: Any, into: Any) -> None:
    """Make a GPU instance at a place."""
    made = lib.machine.create_gpu_instance(gpu, number, placement=(where.start, where.size))
    p.put_handle(into, lib.instance_address(gpu, made))


@p.call("nvmlGpuInstanceDestroy", On.GPU_INSTANCE, latency="destroy-gi", mutates=True)
def destroy_gpu_instance(lib: library.Library, gpu: machine.Gpu, gi: Gi) -> None:
    """Remove a GPU instance."""
    lib.machine.destroy_gpu_instance(gpu, gi)


def _list(into: Any, room: int, count: Any, addresses: list[int]) -> None:
    # The count is OUT only: C writes as many handles as there are, up to the profile's instanceCount.
    if into is None:
        raise p.Misuse("an array of handles belongs here, not a null pointer: the process would have crashed")
    if len(into) < room:
        raise p.Misuse(f"the array has {len(into)} elements and instanceCount is {room}: memory may be overwritten")
    count.value = len(addresses)
    for number, address in enumerate(addresses):
        ctypes.c_void_p.from_buffer(into, number * ctypes.sizeof(ctypes.c_void_p)).value = address


@p.call("nvmlDeviceGetGpuInstances", On.GPU, p.uint, p.array(p.NVML.c_nvmlGpuInstance_t), p.UINT_OUT)
def gpu_instances(lib: library.Library, gpu: machine.Gpu, number: int, into: Any, count: Any) -> None:
    """List the GPU instances of one profile."""
    lib.machine.need_root()
    now = lib.machine.need_mig(gpu)
    profile = gpu.profile(number)
    found = [gi for _, gi in sorted(now.instances.items()) if gi.profile == number]
    _list(into, profile.max_instances, count, [lib.instance_address(gpu, gi) for gi in found])


@p.call("nvmlDeviceGetGpuInstanceById", On.GPU, p.uint, _GI_OUT)
def gpu_instance_by_id(lib: library.Library, gpu: machine.Gpu, number: int, into: Any) -> None:
    """Give the handle of the GPU instance with this id."""
    lib.machine.need_root()
    gi = lib.machine.need_mig(gpu).instances.get(number)
    if gi is None:
        raise codes.Refused(codes.NOT_FOUND)
    p.put_handle(into, lib.instance_address(gpu, gi))


@p.call("nvmlGpuInstanceGetInfo", On.GPU_INSTANCE, p.out(p.NVML.c_nvmlGpuInstanceInfo_t))
def gpu_instance_info(lib: library.Library, gpu: machine.Gpu, gi: Gi, into: Any) -> None:
    """Describe a GPU instance."""
    p.put_handle_field(into, "device", lib.gpu_address(gpu))
    into.id, into.profileId = gi.id, gi.profile
    into.placement.start, into.placement.size = gi.start, gi.size


# --- compute-instance profiles


def _selected_compute(gpu: machine.Gpu, gi: Gi, selector: int, engine: int) -> tables.ComputeProfile:
    if not 0 <= selector < _CI_SELECTORS or engine != 0:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    for profile in gpu.profile(gi.profile).compute:
        if profile.index == selector:
            return profile
    raise codes.Refused(codes.NOT_SUPPORTED)


def _fill_compute_info(gpu: machine.Gpu, gi: Gi, profile: tables.ComputeProfile, into: Any) -> None:
    copy, decoder, encoder, jpeg, ofa = (count or 0 for count in gpu.profile(gi.profile).engines)
    into.id = profile.id
    into.sliceCount = profile.slices
    into.instanceCount = profile.max_instances
    into.multiprocessorCount = profile.multiprocessors
    into.sharedCopyEngineCount = copy
    into.sharedDecoderCount, into.sharedEncoderCount = decoder, encoder
    into.sharedJpegCount, into.sharedOfaCount = jpeg, ofa


@p.call(
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    On.GPU_INSTANCE,
    p.uint,
    p.uint,
    p.out(p.NVML.c_nvmlComputeInstanceProfileInfo_t),
)
def compute_profile_info(lib: library.Library, gpu: machine.Gpu, gi: Gi, selector: int, engine: int, into: Any) -> None:  # noqa: ARG001
    """Describe a compute profile of a GPU instance, without its name."""
    _fill_compute_info(gpu, gi, _selected_compute(gpu, gi, selector, engine), into)


@p.call("nvmlGpuInstanceGetComputeInstanceProfileInfoV", On.GPU_INSTANCE, p.uint, p.uint, _CI_INFO, since=535)
def compute_profile_info_versioned(
    lib: library.Library,  # noqa: ARG001
    gpu: machine.Gpu,
    gi: Gi,
    selector: int,
    engine: int,
    into: Any,
) -> None:
    """Describe a compute profile of a GPU instance, with the driver's name for it."""
    profile = _selected_compute(gpu, gi, selector, engine)
    _fill_compute_info(gpu, gi, profile, into)
    into.name = library.char_array(f"MIG {profile.name}", _NAME)


_CI_PLACEMENTS = p.array(p.NVML.c_nvmlComputeInstancePlacement_t)


@p.call(
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements",
    On.GPU_INSTANCE,
    p.uint,
    _CI_PLACEMENTS,
    p.UINT_OUT,
    since=535,
)
def possible_compute_placements(
    lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, into: Any, count: Any
) -> None:
    """List every legal placement of a compute profile, in compute slices."""
    lib.machine.need_root()
    profile = lib.machine.compute_profile(gpu, gi, number)

    def put(array: Any, n: int) -> None:
        array[n].start, array[n].size = profile.starts[n], profile.slices

    p.fill(into, len(profile.starts), count, put)


@p.call("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", On.GPU_INSTANCE, p.uint, p.UINT_OUT)
def remaining_compute_capacity(lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, into: Any) -> None:
    """Count how many more compute instances of a profile would fit now."""
    lib.machine.need_root()
    into.value = lib.machine.compute_capacity(gi, lib.machine.compute_profile(gpu, gi, number))


# --- compute instances

_CI_OUT = p.out(p.NVML.c_nvmlComputeInstance_t)
_CI_PLACEMENT = p.out(p.NVML.c_nvmlComputeInstancePlacement_t)


@p.call("nvmlGpuInstanceCreateComputeInstance", On.GPU_INSTANCE, p.uint, _CI_OUT, latency="create-ci", mutates=True)
def create_compute_instance(lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, into: Any) -> None:
    """Make a compute instance at the first place free."""
    made = lib.machine.create_compute_instance(gpu, gi, number)
    p.put_handle(into, lib.compute_address(gpu, gi, made))


@p.call(
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    On.GPU_INSTANCE,
    p.uint,
    _CI_PLACEMENT,
    _CI_OUT,
    since=535,
    latency="create-ci",
    mutates=True,
)
def create_compute_instance_at(
    lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, where: Any, into: Any
) -> None:
    """Make a compute instance at a place."""
    made = lib.machine.create_compute_instance(gpu, gi, number, placement=(where.start, where.size))
    p.put_handle(into, lib.compute_address(gpu, gi, made))


@p.call("nvmlComputeInstanceDestroy", On.COMPUTE_INSTANCE, latency="destroy-ci", mutates=True)
def destroy_compute_instance(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci) -> None:
    """Remove a compute instance."""
    lib.machine.destroy_compute_instance(gpu, gi, ci)


@p.call(
    "nvmlGpuInstanceGetComputeInstances", On.GPU_INSTANCE, p.uint, p.array(p.NVML.c_nvmlComputeInstance_t), p.UINT_OUT
)
def compute_instances(lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, into: Any, count: Any) -> None:
    """List the compute instances of one profile."""
    lib.machine.need_root()
    profile = lib.machine.compute_profile(gpu, gi, number)
    found = [ci for _, ci in sorted(gi.compute.items()) if ci.profile == number]
    _list(into, profile.max_instances, count, [lib.compute_address(gpu, gi, ci) for ci in found])


@p.call("nvmlGpuInstanceGetComputeInstanceById", On.GPU_INSTANCE, p.uint, _CI_OUT)
def compute_instance_by_id(lib: library.Library, gpu: machine.Gpu, gi: Gi, number: int, into: Any) -> None:
    """Give the handle of the compute instance with this id."""
    lib.machine.need_root()
    ci = gi.compute.get(number)
    if ci is None:
        raise codes.Refused(codes.NOT_FOUND)
    p.put_handle(into, lib.compute_address(gpu, gi, ci))


@p.call("nvmlComputeInstanceGetInfo_v2", On.COMPUTE_INSTANCE, p.out(p.NVML.c_nvmlComputeInstanceInfo_t))
def compute_instance_info(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci, into: Any) -> None:
    """Describe a compute instance."""
    p.put_handle_field(into, "device", lib.gpu_address(gpu))
    p.put_handle_field(into, "gpuInstance", lib.instance_address(gpu, gi))
    into.id, into.profileId = ci.id, ci.profile
    into.placement.start, into.placement.size = ci.start, ci.size


# --- MIG devices


@p.call("nvmlDeviceGetMigDeviceHandleByIndex", On.GPU, p.uint, p.DEVICE_OUT)
def mig_device(lib: library.Library, gpu: machine.Gpu, index: int, into: Any) -> None:
    """Give the handle of a MIG device: a compute instance. Indexes may have holes."""
    if not gpu.model.mig_capable or not gpu.state.mig:
        raise codes.Refused(codes.NOT_SUPPORTED)
    if not 0 <= index < max(gpu.model.max_mig_devices, 1):
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if lib.machine.mig_device(gpu, index) is None:
        raise codes.Refused(codes.NOT_FOUND)
    p.put_handle(into, lib.mig_address(gpu, index))


@p.call("nvmlDeviceIsMigDeviceHandle", On.EITHER, p.UINT_OUT)
def is_mig_device(lib: library.Library, gpu: machine.Gpu, gi: Gi | None, ci: Ci | None, into: Any) -> None:  # noqa: ARG001
    """Tell a MIG device's handle from a GPU's."""
    into.value = int(ci is not None)


@p.call("nvmlDeviceGetGpuInstanceId", On.MIG, p.UINT_OUT)
def gpu_instance_id(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci, into: Any) -> None:  # noqa: ARG001
    """Tell the id of a MIG device's GPU instance."""
    into.value = gi.id


@p.call("nvmlDeviceGetComputeInstanceId", On.MIG, p.UINT_OUT)
def compute_instance_id(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci, into: Any) -> None:  # noqa: ARG001
    """Tell the id of a MIG device's compute instance."""
    into.value = ci.id


@p.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", On.MIG, p.DEVICE_OUT)
def parent(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci, into: Any) -> None:  # noqa: ARG001
    """Give the handle of a MIG device's GPU."""
    p.put_handle(into, lib.gpu_address(gpu))


@p.call("nvmlDeviceGetAttributes_v2", On.MIG, p.out(p.NVML.c_nvmlDeviceAttributes))
def attributes(lib: library.Library, gpu: machine.Gpu, gi: Gi, ci: Ci, into: Any) -> None:
    """Tell multiprocessors, shared engines, slices and memory of a MIG device."""
    profile = gpu.profile(gi.profile)
    part = lib.machine.compute_profile(gpu, gi, ci.profile)
    copy, decoder, encoder, jpeg, ofa = (count or 0 for count in profile.engines)
    into.multiprocessorCount = part.multiprocessors
    into.sharedCopyEngineCount = copy
    into.sharedDecoderCount, into.sharedEncoderCount = decoder, encoder
    into.sharedJpegCount, into.sharedOfaCount = jpeg, ofa
    into.gpuInstanceSliceCount = profile.slices
    into.computeInstanceSliceCount = part.slices
    into.memorySizeMB = profile.memory_mib
