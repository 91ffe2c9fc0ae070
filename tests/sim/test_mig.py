"""MIG on the simulated driver, through pynvml: the cases that hardware has shown, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import pytest

from agent import errors

N: Any = pynvml

MAP_A = '[[gpu]]\nmodel = "{model}"\ngi-id-map = "A"\n'
MAP_B = '[[gpu]]\nmodel = "{model}"\ngi-id-map = "B"\n'
AMPERE = '[[gpu]]\nmodel = "a100.40gb"\nmode-change = "{change}"\ngi-id-map = "A"\n'
Open = Callable[..., Any]


def create(nvml: Any, gpu: Any, ids: Sequence[int]) -> list[int]:
    """Create without placement; return GPU-instance ids, and the code negated where it failed."""
    made = []
    for profile in ids:
        try:
            made.append(N.nvmlGpuInstanceGetInfo(N.nvmlDeviceCreateGpuInstance(gpu, profile)).id)
        except N.NVMLError as error:
            made.append(-error.value)
    return made


@pytest.mark.parametrize(
    ("profiles", "ids"),
    [
        ([19] * 7, [13, 11, 12, 7, 8, 9, 10]),
        ([19, 14, 5], [13, 5, 1]),
        ([9, 19, 14, 19], [2, 7, 4, 8]),
        ([19, 19, 14, 9], [13, 11, 3, -23]),
        ([9, 5], [2, 1]),
        ([5, 9], [1, 2]),
        ([9, 9], [2, 1]),
        ([20, 20], [13, -23]),
        ([0], [0]),
    ],
    ids=str,
)
def test_automatic_placement_and_ids_as_seen_on_seven_slice_parts(
    nvml: Open, profiles: list[int], ids: list[int]
) -> None:
    it = nvml(MAP_A.format(model="h100.80gb"))
    assert create(it, it.enable(), profiles) == ids


def test_the_other_id_map_counts_the_upper_half_first(nvml: Open) -> None:
    it = nvml(MAP_B.format(model="h100.80gb"))
    gpu = it.enable()
    made = [it.create_at(gpu, 19, start, 1) for start in range(7)]
    assert [N.nvmlGpuInstanceGetInfo(gi).id for gi in made] == [11, 12, 13, 14, 7, 8, 9]


def test_r450_places_the_first_3g_at_zero_so_that_3g_and_4g_depend_on_order(nvml: Open) -> None:
    it = nvml('driver-version = "450.80.02"\n' + AMPERE.format(change="immediate"))
    assert create(it, it.enable(), [9, 5]) == [1, -23]


def test_a30_and_rtx_pro_place_ascending(nvml: Open) -> None:
    it = nvml('[[gpu]]\nmodel = "a30.24gb"\nmode-change = "immediate"\n')
    assert create(it, it.enable(), [14, 14, 5]) == [3, 4, 2]
    it = nvml("rtxpro6000.96gb")
    assert create(it, it.enable(), [5, 14, 14]) == [1, 5, 6]


def test_media_engines_are_a_pool(nvml: Open) -> None:
    it = nvml("rtxpro6000.96gb")
    gpu = it.enable()
    ids = {name: info.id for name, info in it.profiles(gpu).items()}
    assert N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids["1g.24gb"]) == 4
    everything = it.create_at(gpu, ids["1g.24gb+me.all"], 0, 3)
    for name, left in (
        ("1g.24gb", 0),
        ("1g.24gb+gfx", 0),
        ("2g.48gb", 0),
        ("1g.24gb+me", 0),
        ("1g.24gb-me", 3),
        ("2g.48gb-me", 1),
    ):
        assert N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids[name]) == left, name
    assert it.code(it.create_at, gpu, ids["1g.24gb"], 3, 3) == 23
    it.create_at(gpu, ids["1g.24gb-me"], 3, 3)
    N.nvmlGpuInstanceDestroy(everything)
    assert N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids["1g.24gb"]) == 3


def test_an_unknown_engine_count_is_no_constraint(nvml: Open) -> None:
    it = nvml("b300.269gb")
    gpu = it.enable()
    assert create(it, gpu, [20, 20])[1] == -23  # still only one +me, by its own count
    assert N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 6


def test_figures_are_those_of_the_facts(nvml: Open) -> None:
    it = nvml(AMPERE.format(change="immediate"))
    profiles = it.profiles(it.enable())
    assert {name: (p.id, p.memorySizeMB, p.multiprocessorCount, p.instanceCount) for name, p in profiles.items()} == {
        "1g.5gb": (19, 4864, 14, 7),
        "1g.5gb+me": (20, 4864, 14, 1),
        "1g.10gb": (15, 9984, 14, 4),
        "2g.10gb": (14, 9984, 28, 3),
        "3g.20gb": (9, 20096, 42, 2),
        "4g.20gb": (5, 20096, 56, 1),
        "7g.40gb": (0, 40320, 98, 1),
    }
    assert it.placements(it.gpu(), 9) == [(0, 4), (4, 4)]
    assert it.placements(it.gpu(), 15) == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_double_memory_reaches_its_multiprocessors_through_compute_profile_seven_only(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    counts: dict[str, int] = {}
    for compute in (0, 7):
        instance = N.nvmlDeviceCreateGpuInstance(gpu, 15)
        N.nvmlGpuInstanceCreateComputeInstance(instance, compute)
        device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, len(counts))
        counts[N.nvmlDeviceGetName(device).split("MIG ")[1]] = N.nvmlDeviceGetAttributes(device).multiprocessorCount
        assert it.code(N.nvmlGpuInstanceCreateComputeInstance, instance, 7 - compute) == 23
    assert counts == {"1c.1g.20gb": 16, "1g.20gb": 26}


def test_splitting_a_3g_depends_on_order_unless_placed(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 9)
    assert it.compute_placements(instance, 1) == [(0, 2)]
    assert it.compute_placements(instance, 0) == [(0, 1), (1, 1), (2, 1)]
    first = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert it.code(N.nvmlGpuInstanceCreateComputeInstance, instance, 1) == 23
    assert N.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 1) == 0
    N.nvmlComputeInstanceDestroy(first)
    it.create_compute_at(instance, 0, 2, 1)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    devices = [N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i) for i in (0, 1)]
    assert [N.nvmlDeviceGetAttributes(d).multiprocessorCount for d in devices] == [16, 32]
    assert it.code(it.create_compute_at, instance, 1, 1, 2) == 2


def test_uuids_are_the_same_each_time_and_handles_follow_the_index(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instance = it.create_at(gpu, 19, 0, 1)
    compute = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    uuid = N.nvmlDeviceGetUUID(device)
    assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    old_form = f"MIG-{N.nvmlDeviceGetUUID(gpu)}/{N.nvmlGpuInstanceGetInfo(instance).id}/0"
    assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByUUID(old_form)) == uuid
    N.nvmlComputeInstanceDestroy(compute)
    assert it.code(N.nvmlDeviceGetUUID, device) == 2
    assert it.code(N.nvmlComputeInstanceGetInfo, compute) == 2
    N.nvmlGpuInstanceDestroy(instance)
    again = it.create_at(gpu, 19, 0, 1)
    N.nvmlGpuInstanceCreateComputeInstance(again, 0)
    assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)) == uuid
    assert N.nvmlDeviceGetUUID(device) == uuid  # a MIG handle is its index, whatever that has become
    assert it.code(N.nvmlGpuInstanceGetInfo, instance) == 2
    assert it.code(N.nvmlGpuInstanceDestroy, instance) == 2
    assert it.code(N.nvmlComputeInstanceDestroy, compute) == 2


def test_indexes_of_mig_devices_may_have_holes_and_are_taken_again(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instances = [it.create_at(gpu, 19, start, 1) for start in range(3)]
    computes = [N.nvmlGpuInstanceCreateComputeInstance(instance, 0) for instance in instances]
    N.nvmlComputeInstanceDestroy(computes[1])
    assert [it.code(N.nvmlDeviceGetMigDeviceHandleByIndex, gpu, i) for i in range(4)] == [0, 6, 0, 6]
    assert it.code(N.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 7) == 2
    N.nvmlGpuInstanceCreateComputeInstance(instances[1], 0)
    assert N.nvmlDeviceGetIndex(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)) == 1


def test_an_instance_without_compute_is_invisible_to_mig_handles(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    N.nvmlDeviceCreateGpuInstance(gpu, 19)
    assert it.code(N.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 0) == 6
    assert len(it.instances(gpu, 19)) == 1


def test_what_is_in_use_is_not_destroyed(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 9)
    number = N.nvmlGpuInstanceGetInfo(instance).id
    first = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    second = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert it.code(N.nvmlGpuInstanceDestroy, instance) == 19  # compute instances are left
    it.node.start_process(0, gpu_instance=number, compute_instance=0)
    assert it.code(N.nvmlComputeInstanceDestroy, first) == 19
    N.nvmlComputeInstanceDestroy(second)  # nobody is on this one
    it.node.stop_process()
    N.nvmlComputeInstanceDestroy(first)
    it.node.hold(0, gpu_instance=number, name="dcgm")
    assert it.code(N.nvmlGpuInstanceDestroy, instance) == 19  # an open file, and no process to be seen
    assert N.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    it.node.stop_process()
    N.nvmlGpuInstanceDestroy(instance)


def test_mode_change_pending_until_a_reset(nvml: Open) -> None:
    it = nvml(AMPERE.format(change="pending"))
    gpu = it.gpu()
    assert N.nvmlDeviceSetMigMode(gpu, 1) == 16
    assert N.nvmlDeviceGetMigMode(gpu) == [0, 1]
    assert N.nvmlDeviceSetMigMode(gpu, 1) == 16  # asked again: still waiting
    assert it.code(N.nvmlDeviceCreateGpuInstance, gpu, 19) == 3
    assert N.nvmlDeviceSetMigMode(gpu, 0) == 0  # taken back
    assert N.nvmlDeviceGetMigMode(gpu) == [0, 0]
    N.nvmlDeviceSetMigMode(gpu, 1)
    with pytest.raises(errors.ResetRefused):
        it.node.reset()  # our own session holds it
    N.nvmlShutdown()
    it.node.reset()
    N.nvmlInit()
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [1, 1]


def test_mode_change_in_use(nvml: Open) -> None:
    it = nvml(AMPERE.format(change="in-use"))
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 19
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [0, 1]


def test_mode_change_at_once_on_an_idle_ampere(nvml: Open) -> None:
    it = nvml(AMPERE.format(change="immediate"))
    pid = it.node.start_process(0)
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 19
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [0, 1]
    it.node.stop_process(pid)
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 0
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [1, 1]


def test_hopper_changes_at_once_and_not_at_all_while_busy(nvml: Open) -> None:
    it = nvml("h100.80gb")
    pid = it.node.start_process(0)
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 19
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [0, 0]
    it.node.stop_process(pid)
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 0
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [1, 1]
    assert N.nvmlDeviceSetMigMode(it.gpu(), 1) == 0


@pytest.mark.parametrize("text", ["h100.80gb", AMPERE.format(change="immediate")], ids=["hopper", "ampere"])
def test_mig_is_not_turned_off_over_instances(nvml: Open, text: str) -> None:
    it = nvml(text)
    gpu = it.enable()
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 19)
    assert N.nvmlDeviceSetMigMode(gpu, 0) == 19
    assert N.nvmlDeviceGetMigMode(gpu) == [1, 1]
    N.nvmlGpuInstanceDestroy(instance)
    assert N.nvmlDeviceSetMigMode(gpu, 0) == 0
    assert N.nvmlDeviceGetMigMode(gpu) == [0, 0]


def test_without_root_nothing_changes_and_little_is_told(nvml: Open) -> None:
    it = nvml('root = false\n[[gpu]]\nmodel = "h100.80gb"\n')
    gpu = it.gpu()
    assert it.code(N.nvmlDeviceSetMigMode, gpu, 1) == 4
    assert N.nvmlDeviceGetMigMode(gpu) == [0, 0]
    with it.node._store.change() as state:
        state.gpus[0].mig = state.gpus[0].pending = True
    for function in (
        N.nvmlDeviceCreateGpuInstance,
        N.nvmlDeviceGetGpuInstanceById,
        N.nvmlDeviceGetGpuInstanceRemainingCapacity,
    ):
        assert it.code(function, gpu, 19) == 4
    assert it.code(it.placements, gpu, 19) == 4
    assert it.code(it.instances, gpu, 19) == 4
    assert it.code(N.nvmlDeviceGetMemoryInfo, gpu) == 4
    assert it.code(N.nvmlDeviceGetComputeRunningProcesses, gpu) == 4
    assert it.profiles(gpu)  # what it offers is no secret
    assert it.node.mutations == 0


def test_with_mig_off(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.gpu()
    assert N.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert it.code(N.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 0) == 3
    assert it.code(N.nvmlDeviceCreateGpuInstance, gpu, 19) == 3
    assert it.code(N.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu, 19) == 3
    assert it.placements(gpu, 19)  # told whatever the mode
    assert it.profiles(gpu)


def test_profiles_that_need_mig(nvml: Open) -> None:
    it = nvml('profiles-need-mig = true\n[[gpu]]\nmodel = "h100.80gb"\n')
    assert it.profiles(it.gpu()) == {}
    assert N.nvmlDeviceGetFieldValues(it.gpu(), [199])[0].value.uiVal == 0
    assert it.profiles(it.enable())


@pytest.mark.parametrize("kind", ["g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g6e.xlarge", "g6f.2xlarge", "p3.2xlarge"])
def test_a_part_without_mig_says_not_supported(nvml: Open, kind: str) -> None:
    it = nvml(kind)
    gpu = it.gpu()
    assert it.code(N.nvmlDeviceGetMigMode, gpu) == 3
    assert it.code(N.nvmlDeviceSetMigMode, gpu, 1) == 3
    assert it.code(N.nvmlDeviceCreateGpuInstance, gpu, 19) == 3
    assert N.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert it.profiles(gpu) == {}


@pytest.mark.parametrize("kind", ["g7.2xlarge", "rtxpro5000.48gb"])
def test_a_part_whose_geometry_is_not_published_has_a_mode_and_no_profiles(nvml: Open, kind: str) -> None:
    it = nvml(kind)
    gpu = it.enable()
    assert it.profiles(gpu) == {}
    assert it.code(N.nvmlDeviceCreateGpuInstance, gpu, 14) == 3


def test_profile_selectors_end_with_invalid_argument(nvml: Open) -> None:
    it = nvml("a30.24gb")
    answers = [it.code(N.nvmlDeviceGetGpuInstanceProfileInfo, it.gpu(), selector) for selector in range(20)]
    assert answers == [0, 0, 3, 0, 3, 3, 3, 0, 0, *[3] * 9, 2, 2]


def test_an_occupied_place_is_insufficient_resources_and_a_wrong_one_invalid(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    it.create_at(gpu, 19, 1, 1)
    assert it.code(it.create_at, gpu, 19, 1, 1) == 23
    assert it.code(it.create_at, gpu, 9, 0, 4) == 23
    assert it.code(it.create_at, gpu, 9, 1, 4) == 2
    assert it.code(it.create_at, gpu, 9, 4, 3) == 2
    assert it.code(it.create_at, gpu, 99, 0, 1) == 2
    assert it.node.mutations == 2  # the mode and the one instance


def test_compute_profiles_of_another_instance_are_not_supported(nvml: Open) -> None:
    it = nvml("h100.80gb")
    instance = N.nvmlDeviceCreateGpuInstance(it.enable(), 14)
    assert it.code(N.nvmlGpuInstanceCreateComputeInstance, instance, 4) == 3
    assert it.code(N.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 4, 0) == 3
    assert it.code(N.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 9, 0) == 2
    assert it.code(N.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, 0, 1) == 2
    assert N.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 1, 0).name == "MIG 2g.20gb"
    assert N.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 1, 0, version=1).multiprocessorCount == 32
    assert it.code(N.nvmlGpuInstanceGetComputeInstanceById, instance, 3) == 6
    made = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    info = N.nvmlComputeInstanceGetInfo(N.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
    assert (info.id, info.profileId, info.placement.start, info.placement.size) == (0, 0, 0, 1)
    assert N.nvmlGpuInstanceGetInfo(info.gpuInstance).profileId == 14
    assert N.nvmlDeviceGetIndex(info.device) == 0
    array = (N.c_nvmlComputeInstance_t * 2)()
    count = ctypes.c_uint()
    N.nvmlGpuInstanceGetComputeInstances(instance, 0, array, ctypes.byref(count))
    assert count.value == 1
    N.nvmlComputeInstanceDestroy(made)


def test_capacity_counts_what_can_still_be_made(nvml: Open) -> None:
    it = nvml("a100.80gb")
    it.node.set_unit("nvidia-persistenced.service", active=False)
    gpu = it.enable()
    capacity = N.nvmlDeviceGetGpuInstanceRemainingCapacity
    assert [capacity(gpu, p) for p in (19, 20, 15, 14, 9, 5, 0)] == [7, 1, 4, 3, 2, 1, 1]
    it.create_at(gpu, 9, 4, 4)
    assert [capacity(gpu, p) for p in (19, 20, 15, 14, 9, 5, 0)] == [4, 1, 2, 2, 1, 1, 0]
    it.create_at(gpu, 20, 3, 1)
    assert [capacity(gpu, p) for p in (19, 20, 15, 14, 9, 5, 0)] == [3, 0, 1, 1, 0, 0, 0]


def test_a_mig_handle_is_one_and_tells_its_parts(nvml: Open) -> None:
    it = nvml("h100.80gb")
    gpu = it.enable()
    instance = it.create_at(gpu, 14, 2, 2)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert bool(N.nvmlDeviceIsMigDeviceHandle(device))
    assert not bool(N.nvmlDeviceIsMigDeviceHandle(gpu))
    assert N.nvmlDeviceGetGpuInstanceId(device) == N.nvmlGpuInstanceGetInfo(instance).id
    assert N.nvmlDeviceGetComputeInstanceId(device) == 0
    assert N.nvmlDeviceGetUUID(N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)) == N.nvmlDeviceGetUUID(gpu)
    found = N.nvmlDeviceGetAttributes(device)
    assert (found.multiprocessorCount, found.gpuInstanceSliceCount, found.computeInstanceSliceCount) == (32, 2, 2)
    assert (found.memorySizeMB, found.sharedCopyEngineCount, found.sharedDecoderCount) == (20096, 2, 2)
    for function in (N.nvmlDeviceGetGpuInstanceId, N.nvmlDeviceGetAttributes):
        assert it.code(function, gpu) == 3
    assert it.code(N.nvmlDeviceGetMigMode, device) == 2
    assert it.code(N.nvmlDeviceCreateGpuInstance, device, 19) == 2
    assert it.code(N.nvmlGpuInstanceGetInfo, ctypes.cast(gpu, N.c_nvmlGpuInstance_t)) == 2


def test_version_three_of_profile_info_and_by_id(nvml: Open) -> None:
    from agent.sim.calls import mig

    it = nvml("rtxpro6000.96gb")
    gpu = it.gpu()
    function = it.node.library.nvmlDeviceGetGpuInstanceProfileInfoV
    info = mig.GpuInstanceProfileInfoV3(version=0x03000098)
    assert function(gpu, 10, ctypes.byref(info)) == 0
    assert (info.name, info.capabilities & 2, info.id) == (b"MIG 1g.24gb+gfx", 2, 47)
    assert N.nvmlDeviceGetGpuInstanceProfileInfoById(gpu, 47).name == "MIG 1g.24gb+gfx"
    assert it.code(N.nvmlDeviceGetGpuInstanceProfileInfoById, gpu, 48) == 2
    info.version = 0x04000098
    assert function(gpu, 10, ctypes.byref(info)) == 25
    gi = N.nvmlDeviceCreateGpuInstance(it.enable(), 47)
    compute = mig.ComputeInstanceProfileInfoV3(version=0x0300008C)
    assert it.node.library.nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, ctypes.byref(compute)) == 0
    assert compute.name == b"MIG 1g.24gb+gfx"


def test_an_older_driver_lacks_newer_functions(nvml: Open) -> None:
    it = nvml('driver-version = "470.256.02"\n[[gpu]]\nmodel = "a100.40gb"\n')
    gpu = it.gpu()
    assert it.code(N.nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0) == 13
    assert N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=1).id == 19
    assert it.code(N.nvmlDeviceGetTemperatureV, gpu, 0) == 13
    assert N.nvmlDeviceGetTemperature(gpu, 0) > 0


def test_a_function_that_is_missing_on_request(nvml: Open) -> None:
    it = nvml('missing-functions = ["nvmlDeviceGetPowerUsage"]\n[[gpu]]\nmodel = "h100.80gb"\n')
    assert it.code(N.nvmlDeviceGetPowerUsage, it.gpu()) == 13
