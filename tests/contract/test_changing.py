"""What a device does when it is changed. Only simulated ones are, so this says what they stand for."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import Any

import pynvml
import pytest

N: Any = pynvml


def profiles(gpu: Any) -> list[Any]:
    found = []
    for selector in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with contextlib.suppress(N.NVMLError_NotSupported):
            found.append(N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, selector))
    return found


def placements(gpu: Any, profile: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint(64)
    array = (N.c_nvmlGpuInstancePlacement_t * 64)()
    N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, array, ctypes.byref(count))
    return [(place.start, place.size) for place in array[: count.value]]


def create(gpu: Any, profile: int, place: tuple[int, int]) -> Any:
    return N.nvmlDeviceCreateGpuInstanceWithPlacement(
        gpu, profile, ctypes.byref(N.c_nvmlGpuInstancePlacement_t(*place))
    )


def refused(function: Any, *arguments: Any) -> int:
    with pytest.raises(N.NVMLError) as caught:
        function(*arguments)
    return int(caught.value.value)


def test_what_is_made_is_where_it_was_asked_for_and_as_the_profile_said(changeable: Any) -> None:
    for info in profiles(changeable):
        for place in placements(changeable, info.id):
            made = create(changeable, info.id, place)
            told = N.nvmlGpuInstanceGetInfo(made)
            assert (told.profileId, told.placement.start, told.placement.size) == (info.id, *place)
            again = N.nvmlDeviceGetGpuInstanceById(changeable, told.id)
            assert N.nvmlGpuInstanceGetInfo(again).placement.start == place[0]
            N.nvmlGpuInstanceDestroy(made)
            assert refused(N.nvmlDeviceGetGpuInstanceById, changeable, told.id) == 6


def test_an_occupied_place_is_refused_whatever_is_asked_for(changeable: Any) -> None:
    for first, second in itertools.product(profiles(changeable), repeat=2):
        start, size = placements(changeable, first.id)[0]
        made = create(changeable, first.id, (start, size))
        for other in placements(changeable, second.id):
            if other[0] < start + size and start < sum(other):
                assert refused(create, changeable, second.id, other) == 23
        N.nvmlGpuInstanceDestroy(made)


def test_capacity_is_how_many_can_really_be_made(changeable: Any) -> None:
    for info in profiles(changeable):
        for step in range(info.instanceCount, -1, -1):
            assert N.nvmlDeviceGetGpuInstanceRemainingCapacity(changeable, info.id) == step
            if step:
                N.nvmlDeviceCreateGpuInstance(changeable, info.id)
        assert refused(N.nvmlDeviceCreateGpuInstance, changeable, info.id) == 23
        array = (N.c_nvmlGpuInstance_t * info.instanceCount)()
        count = ctypes.c_uint()
        N.nvmlDeviceGetGpuInstances(changeable, info.id, array, ctypes.byref(count))
        assert count.value == info.instanceCount
        for made in array:
            N.nvmlGpuInstanceDestroy(made)


def test_a_compute_instance_is_a_mig_device_with_the_profile_s_figures(changeable: Any) -> None:
    for info in profiles(changeable):
        made = N.nvmlDeviceCreateGpuInstance(changeable, info.id)
        spans = []
        for selector in range(N.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            with contextlib.suppress(N.NVMLError_NotSupported):
                compute = N.nvmlGpuInstanceGetComputeInstanceProfileInfo(made, selector, 0)
                instance = N.nvmlGpuInstanceCreateComputeInstance(made, compute.id)
                device = N.nvmlDeviceGetMigDeviceHandleByIndex(changeable, 0)
                told = N.nvmlDeviceGetAttributes(device)
                assert told.multiprocessorCount == compute.multiprocessorCount
                assert told.computeInstanceSliceCount == compute.sliceCount
                assert (told.gpuInstanceSliceCount, told.memorySizeMB) == (info.sliceCount, info.memorySizeMB)
                assert N.nvmlDeviceGetMemoryInfo(device).total == info.memorySizeMB * 2**20
                assert N.nvmlDeviceGetName(device).endswith(compute.name)
                assert refused(N.nvmlGpuInstanceDestroy, made) == 19
                N.nvmlComputeInstanceDestroy(instance)
                spans.append(compute.multiprocessorCount == info.multiprocessorCount)
        assert any(spans)  # one of them is the whole instance
        N.nvmlGpuInstanceDestroy(made)


def test_mig_cannot_be_turned_off_over_an_instance(changeable: Any) -> None:
    made = N.nvmlDeviceCreateGpuInstance(changeable, profiles(changeable)[0].id)
    assert N.nvmlDeviceSetMigMode(changeable, 0) == 19
    assert N.nvmlDeviceGetMigMode(changeable)[0] == 1
    N.nvmlGpuInstanceDestroy(made)
    assert N.nvmlDeviceSetMigMode(changeable, 0) == 0
    assert N.nvmlDeviceGetMigMode(changeable) == [0, 0]


def test_utilisation_is_not_told_in_mig_mode(changeable: Any) -> None:
    assert refused(N.nvmlDeviceGetUtilizationRates, changeable) == 3


def test_a_stale_handle_is_an_invalid_argument(changeable: Any) -> None:
    profile = profiles(changeable)[0].id
    made = N.nvmlDeviceCreateGpuInstance(changeable, profile)
    N.nvmlGpuInstanceDestroy(made)
    assert refused(N.nvmlGpuInstanceGetInfo, made) == 2
    again = N.nvmlDeviceCreateGpuInstance(changeable, profile)  # the same place and id, another instance
    assert refused(N.nvmlGpuInstanceDestroy, made) == 2
    N.nvmlGpuInstanceDestroy(again)
