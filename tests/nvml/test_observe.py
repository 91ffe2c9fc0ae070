from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.nvml import gpus as doors

OK, LOST, HUNG, ERROR = nodes.GpuState.OK, nodes.GpuState.LOST, nodes.GpuState.HUNG, nodes.GpuState.ERROR


async def test_a_node_with_everything_on_it(bench: Callable[..., Any]) -> None:
    made = await bench("p4d.24xlarge")
    await made.mig_on(0)
    await made.split(0, ("3g.20gb", 4), ("1g.5gb", 0), ("2g.10gb", 2))
    state = await made.gpus.observe()
    assert state.driver_version == "590.48.01"
    assert state.simulated == state.instance_type == "p4d.24xlarge"
    assert [gpu.index for gpu in state.gpus] == list(range(8))
    assert [gpu.pci_bus_id for gpu in state.gpus] == sorted(gpu.pci_bus_id for gpu in state.gpus)
    split, whole = state.gpus[0], state.gpus[1]
    assert (split.state, split.model, split.architecture, split.minor) == (OK, "a100.40gb", "Ampere", 0)
    assert split.mode == nodes.ModeState(True, True)
    assert whole.mode == nodes.ModeState(False, False)
    assert split.resetless is False
    assert split.memory_slices == 8
    assert [(str(i.profile), str(i.placement)) for i in split.instances] == [
        ("1g.5gb", "0:1"),
        ("2g.10gb", "2:2"),
        ("3g.20gb", "4:4"),
    ]
    for instance in split.instances:
        (compute,) = instance.compute
        assert compute.profile == instance.profile
        assert compute.uuid == made.node.driver.gpus[0].mig_uuid(instance.id, compute.id)
    assert whole.instances == ()
    assert whole.offers == tuple(o for o in whole.offers if o.compute is None or o.compute)


async def test_a_gpu_instance_without_compute_instance_is_seen(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    await made.mig_on()
    gpu = await made.gpus.observe_gpu(made.uuids[0])
    offer = gpu.offer(profiles.parse("3g.40gb"))
    await made.gpus.perform(gpu.uuid, plans.CreateGpuInstance(offer.profile, offer.id, nodes.Placement(4, 4)))
    (instance,) = (await made.gpus.observe_gpu(gpu.uuid)).instances
    assert instance.compute == ()


async def test_several_compute_instances_in_one_gpu_instance(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    await made.mig_on()
    uuid = made.uuids[0]
    offer = (await made.gpus.observe_gpu(uuid)).offer(profiles.parse("3g.40gb"))
    place = nodes.Placement(0, 4)
    await made.gpus.perform(uuid, plans.CreateGpuInstance(offer.profile, offer.id, place))
    await made.gpus.perform(uuid, plans.CreateComputeInstance(place, profiles.parse("1c.3g.40gb"), start=2))
    await made.gpus.perform(uuid, plans.CreateComputeInstance(place, profiles.parse("2c.3g.40gb"), start=0))
    (instance,) = (await made.gpus.observe_gpu(uuid)).instances
    seen = {(str(c.profile), c.placement, c.multiprocessors) for c in instance.compute}
    assert seen == {("1c.3g.40gb", nodes.Placement(2, 1), 16), ("2c.3g.40gb", nodes.Placement(0, 2), 32)}
    assert len({c.uuid for c in instance.compute} - {None}) == 2


async def test_processes_are_told_where_they_run(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    await made.mig_on(0)
    gpu = await made.split(0, ("1g.10gb", 0), ("2g.20gb", 2))
    small, large = gpu.instances
    first = made.node.start_process(0, gpu_instance=small.id, name="trainer")
    second = made.node.start_process(1, name="blender", kind="graphics")
    split, whole = (await made.gpus.observe()).gpus
    holder = nodes.Holder(kind="process", name="trainer", pid=first)
    assert split.instances[0].in_use == (holder,)
    assert split.instances[1].in_use == ()
    assert split.holders == ()
    assert whole.holders == (nodes.Holder(kind="process", name="blender", pid=second),)
    assert large.id == split.instances[1].id


async def test_a_gpu_without_mig(bench: Callable[..., Any]) -> None:
    made = await bench("g6.12xlarge")
    state = await made.gpus.observe()
    assert [(gpu.state, gpu.mode, gpu.offers, gpu.geometry_unknown) for gpu in state.gpus] == [(OK, None, (), None)] * 4


async def test_a_part_whose_geometry_nobody_has_published(bench: Callable[..., Any]) -> None:
    made = await bench("rtxpro4500.32gb:1")
    (gpu,) = (await made.gpus.observe()).gpus
    assert gpu.state is OK
    assert gpu.mode is not None
    assert gpu.offers == ()
    assert "not published" in gpu.geometry_unknown


@pytest.mark.parametrize(
    ("needs_mig", "driver", "knows_field", "unknown"),
    [
        pytest.param(True, "590.48.01", True, False, id="the driver says that it tells them with MIG on only"),
        pytest.param(False, "590.48.01", True, True, id="the driver says that it would tell them"),
        pytest.param(True, "535.161.07", False, False, id="a driver that does not say, of a branch that does not tell"),
        pytest.param(True, "590.48.01", False, True, id="a driver that does not say, of a branch that would tell"),
    ],
)
async def test_no_profiles_with_mig_off_mean_something_else_to_each_driver(
    bench: Callable[..., Any], tmp_path: Path, needs_mig: bool, driver: str, knows_field: bool, unknown: bool
) -> None:
    node = tmp_path / "node.toml"
    model = "h100.80gb" if needs_mig else "rtxpro4500.32gb"
    node.write_text(
        f'driver-version = "{driver}"\nprofiles-need-mig = {str(needs_mig).lower()}\n[[gpu]]\nmodel = "{model}"\n'
    )
    made = await bench(str(node), look=False)
    if not knows_field:
        made.node.fail("nvmlDeviceGetFieldValues", 3, times=0)
    (gpu,) = (await made.gpus.observe()).gpus
    assert gpu.offers == ()
    assert (gpu.geometry_unknown is not None) is unknown


async def test_a_no_op_apply_stays_within_its_calls(bench: Callable[..., Any]) -> None:
    for layout in (
        [("1g.10gb", n) for n in range(7)],
        [("3g.40gb", 4), ("2g.20gb", 2), ("1g.10gb", 0)],
        [("7g.80gb", 0)],
    ):
        made = await bench("p5.48xlarge")
        await made.mig_on()
        for index in range(8):
            await made.split(index, *layout)
        gpus = await made.again()
        before = made.counted()
        mutations = made.node.mutations
        await gpus.observe()
        spent = made.counted() - before
        assert sum(spent.values()) <= 8 * (30 + 6 * len(layout)), spent
        assert made.node.mutations == mutations
        await gpus.close()


async def test_without_root_what_is_possible_is_observed(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1", root=False)
    (gpu,) = (await made.gpus.observe()).gpus
    assert gpu.state is OK
    assert gpu.mode == nodes.ModeState(False, False)
    assert gpu.offers == ()
    assert "to root only" in gpu.geometry_unknown


async def test_without_root_mig_instances_cannot_be_read_and_that_is_said(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1", root=False, look=False)
    with made.node._store.change() as state:
        state.gpus[0].mig = state.gpus[0].pending = True
    with pytest.raises(errors.DriverError, match="needs root") as caught:
        await made.gpus.observe()
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)


async def test_a_lost_gpu_keeps_its_name_and_place(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge")
    made.node.lose(3)
    state = await made.gpus.observe()
    assert [gpu.state for gpu in state.gpus] == [OK] * 3 + [LOST] + [OK] * 4
    assert state.gpus[3].uuid == made.uuids[3]
    assert state.gpus[3].name == state.gpus[2].name
    assert "off the bus" in state.gpus[3].problem
    assert made.gpus.known() == made.uuids


async def test_a_gpu_lost_before_it_was_ever_seen_is_told_by_what_the_kernel_knows(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge", look=False)
    made.node.lose(3)
    state = await made.gpus.observe()
    lost = state.gpus[3]
    assert (lost.state, lost.index) == (LOST, 3)
    assert lost.uuid == made.node.driver.gpus[3].spec.uuid
    assert lost.model == "h100.80gb"
    assert [gpu.state for gpu in state.gpus].count(OK) == 7


async def test_a_gpu_that_nobody_can_name_is_still_counted(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge", look=False)
    made.node.lose(3)
    for path in made.node.machine.path("/proc/driver/nvidia/gpus").glob("*/information"):
        path.write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    lost = (await made.gpus.observe()).gpus[3]
    assert lost.uuid == f"unknown-{doors.address(made.node.driver.gpus[3].spec.pci_bus_id)}"


# --- hanging and failing


READS = (
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuInstances",
    "nvmlGpuInstanceGetInfo",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
)
SHARED = (
    "nvmlDeviceGetGpuInstanceProfileInfoV",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV",
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements",
)
NODE = ("nvmlInitWithFlags", "nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetCount_v2")  # fmt: skip
CODES = (*range(1, 31), 999)


async def _split_node(bench: Callable[..., Any], **options: Any) -> Any:
    made = await bench("h100.80gb:3", **options)
    await made.mig_on()
    for index in range(3):
        await made.split(index, ("1g.10gb", 0), ("3g.40gb", 4))
    return made


@pytest.mark.parametrize("call", READS)
async def test_a_hanging_read_isolates_its_gpu_and_the_rest_is_answered(
    bench: Callable[..., Any], call: str, until: Callable[..., Any]
) -> None:
    made = await _split_node(bench, read_deadline=0.15)
    gpus = await made.again()
    order = made.node.hang(call, gpu=1, times=0)
    returned: list[str] = []
    gpus.on_returned = returned.append
    state = await gpus.observe()
    assert [gpu.state for gpu in state.gpus] == [OK, HUNG, OK]
    assert [len(gpu.instances) for gpu in state.gpus] == [2, 0, 2]
    assert state.gpus[1].uuid == made.uuids[1]
    assert state.gpus[1].problem.startswith("cannot ")
    assert gpus.any_hung
    assert gpus.hung() == (made.uuids[1],)
    before = made.counted()
    again = await gpus.observe()
    assert [gpu.state for gpu in again.gpus] == [OK, HUNG, OK]
    assert (made.counted() - before)[call] <= 2 * before[call], "the hung GPU is told without a call"
    sample = await gpus.measure(made.uuids[1], slow=True)
    assert not sample.up
    assert (await gpus.measure(made.uuids[0], slow=True)).up
    with pytest.raises(errors.Hung):
        await gpus.perform(made.uuids[1], plans.SetMigMode(False))
    with pytest.raises(errors.BlockedError):
        await gpus.release()
    made.node.release(order)
    await until(lambda: returned == [made.uuids[1]])
    assert not gpus.any_hung
    after = await gpus.observe()
    assert [gpu.state for gpu in after.gpus] == [OK, OK, OK]
    assert [len(gpu.instances) for gpu in after.gpus] == [2, 2, 2]


@pytest.mark.parametrize("call", NODE)
async def test_a_hanging_driver_is_no_driver(bench: Callable[..., Any], call: str) -> None:
    made = await bench("h100.80gb:2", read_deadline=0.1, look=False)
    made.node.hang(call)
    with pytest.raises(errors.DriverError):
        await made.gpus.observe()
    with pytest.raises(errors.DriverError):
        await made.gpus.observe()
    assert made.gpus.hung() == ("node",)


@pytest.mark.parametrize("call", [*READS, *SHARED, *NODE])
async def test_no_return_code_at_any_call_ends_in_a_traceback(bench: Callable[..., Any], call: str) -> None:
    """Each code once and always: the GPU that meets it is told so, the others are as they are."""
    made = await _split_node(bench)
    on = None if call in NODE or call in SHARED else 1
    for code in CODES:
        if call.endswith("ProfileInfoV") and code in (3, 26):
            continue  # the right answer for a profile that the GPU does not have
        for times in (1, 0):
            gpus = await made.again()
            order = made.node.fail(call, code, gpu=on, times=times)
            try:
                state = await gpus.observe()
            except errors.DriverError as cause:
                assert str(cause)  # noqa: PT017
                assert "\n" not in str(cause)  # noqa: PT017
                assert call in NODE or (call in SHARED and code == 4), (call, code)
            else:
                for gpu in state.gpus:
                    assert gpu.state is OK or gpu.problem, (call, code)
                if on is not None:
                    assert [state.gpus[n].state for n in (0, 2)] == [OK, OK], (call, code)
                    assert [len(state.gpus[n].instances) for n in (0, 2)] == [2, 2], (call, code)
            made.node.release(order)
            clean = await gpus.observe()
            assert [gpu.state for gpu in clean.gpus] == [OK] * 3, (call, code, times)
            assert [len(gpu.instances) for gpu in clean.gpus] == [2, 2, 2], (call, code, times)


async def test_gpus_are_read_side_by_side(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge")
    for index in range(8):
        made.node.delay("nvmlDeviceGetMigMode", 0.3, gpu=index, times=1)
    async with asyncio.timeout(1.5):  # one after the other they would take 2.4 s
        await made.gpus.observe()
