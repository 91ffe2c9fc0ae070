from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from agent import measures
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.nvml import gpm

SEVEN = tuple(("1g.10gb", start) for start in range(7))
MIXED = (("3g.40gb", 4), ("2g.20gb", 2), ("1g.10gb", 0))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two visits be as close as the test makes them: the simulated driver does not mind."""
    monkeypatch.setattr(gpm, "SHORTEST", 0.0)


async def visit(made: Any, index: int = 0, *, slow: bool = False) -> measures.GpuSample:
    sample: measures.GpuSample = await made.gpus.measure(made.uuids[index], slow=slow)
    assert sample.up, sample.problem
    return sample


async def split(bench: Callable[..., Any], name: str, *layout: tuple[str, int], **options: Any) -> Any:
    made = await bench(name, **options)
    await made.mig_on()
    await made.split(0, *layout)
    return made


async def test_a_whole_gpu(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    first = made.node.start_process(0, memory_mib=2048, activity=0.5)
    made.node.start_process(0, memory_mib=1024, kind="mps")
    made.node.damage(
        0, ecc={"uncorrected/sram": 3, "corrected/dram": 2}, remapped_correctable=1, remap_pending=True, replays=7
    )
    await visit(made, slow=True)
    sample = await visit(made, slow=True)
    assert first
    assert sample.uuid == made.uuids[0]
    assert (sample.index, sample.minor, sample.architecture) == (0, 0, "hopper")
    assert sample.memory is not None
    assert sample.memory.total == 81559 * 2**20
    assert sample.memory.used + sample.memory.free + (sample.memory.reserved or 0) == sample.memory.total
    assert sample.memory.used >= 2500 * 2**20
    assert set(sample.utilization) == {"gpu", "memory", "encoder", "decoder"}
    assert 0 < sample.utilization["gpu"] <= 1
    assert sample.activity is not None
    assert 0 < (sample.activity.sm or 0) <= 1
    assert set(sample.temperatures) == {"core", "memory"}
    assert set(sample.clocks) == set(sample.clocks_max) == {"graphics", "sm", "memory", "video"}
    assert all(0 < sample.clocks[domain] <= sample.clocks_max[domain] for domain in sample.clocks)
    assert 0 < (sample.power_watts or 0) < (sample.power_limit_watts or 0)
    assert sample.ecc["uncorrected", "sram", "volatile"] == 3
    assert sample.ecc["corrected", "dram", "aggregate"] == 2
    assert len(sample.ecc) == 8
    assert sample.remapped_rows == {"correctable": 1, "uncorrectable": 0}
    assert (sample.remap_pending, sample.remap_failed) == (True, False)
    assert sample.remap_banks["max"] == 2559
    assert sample.pcie_replays == 7
    assert sample.recovery_action == "gpu-reset"
    assert sample.fabric_state == "completed"
    assert sample.nvlinks_active == 18
    assert (sample.mig_enabled, sample.mig_pending) == (False, False)
    assert sample.processes == 1, "an MPS client is no compute process of its own"
    assert sample.instances == ()
    assert sample.creatable == {}


async def test_instances_have_what_is_theirs_and_no_more(bench: Callable[..., Any]) -> None:
    made = await split(bench, "h100.80gb:1", *MIXED)
    ids = {str(i.profile): i.id for i in (await made.gpus.observe_gpu(made.uuids[0])).instances}
    made.node.start_process(0, gpu_instance=ids["3g.40gb"], memory_mib=4096, activity=0.9)
    await visit(made)
    sample = await visit(made, slow=True)
    by_name = {i.profile: i for i in sample.instances}
    assert set(by_name) == {"1g.10gb", "2g.20gb", "3g.40gb"}
    busy, idle = by_name["3g.40gb"], by_name["2g.20gb"]
    assert (busy.id, busy.start, busy.size, busy.memory_slices) == (ids["3g.40gb"], 4, 4, 4)
    assert busy.memory is not None
    assert busy.memory.total == 40448 * 2**20
    assert busy.memory.used >= 3500 * 2**20
    assert idle.memory is not None
    assert idle.memory.used < 100 * 2**20
    assert busy.activity is not None
    assert (busy.activity.sm or 0) > 0
    assert idle.activity is not None
    assert idle.activity.sm == 0
    assert [(c.profile, c.multiprocessors, c.slices, c.processes) for c in busy.compute] == [("3g.40gb", 60, 3, 1)]
    assert [c.processes for c in idle.compute] == [0]
    assert busy.compute[0].uuid == made.node.driver.gpus[0].mig_uuid(busy.id, 0)
    assert busy.ecc_sram_uncorrected == 0
    assert busy.engines["copy"] >= 1
    assert busy.bar1_total is not None
    assert sample.utilization == {}
    assert sample.remapped_rows == {}
    assert sample.remap_banks
    assert sample.mig_instances_max == 7
    assert sample.creatable["1g.10gb"] == 1
    assert sample.creatable["7g.80gb"] == 0


async def test_several_compute_instances_share_the_memory_of_one_gpu_instance(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    await made.mig_on()
    uuid, place = made.uuids[0], nodes.Placement(0, 4)
    offer = (await made.gpus.observe_gpu(uuid)).offer(profiles.parse("3g.40gb"))
    await made.gpus.perform(uuid, plans.CreateGpuInstance(offer.profile, offer.id, place))
    empty = await visit(made)
    assert empty.instances[0].memory is None, "without a compute instance nobody tells its memory"
    for name in ("2c.3g.40gb", "1c.3g.40gb"):  # the two-slice one fits at the start only
        await made.gpus.perform(uuid, plans.CreateComputeInstance(place, profiles.parse(name)))
    before = made.counted()
    (instance,) = (await visit(made)).instances
    assert len(instance.compute) == 2
    assert instance.memory is not None
    await visit(made)
    assert (made.counted() - before)["nvmlDeviceGetMemoryInfo_v2"] == 2 * 2, (
        "the GPU's and the GPU instance's, each once a visit"
    )


async def test_an_ampere_gpu_has_no_activity_and_that_is_absent(bench: Callable[..., Any]) -> None:
    made = await split(bench, "a100.40gb:1", ("3g.20gb", 0))
    await visit(made)
    sample = await visit(made)
    assert sample.activity is None
    assert sample.instances[0].activity is None
    assert made.counted()["nvmlGpmSampleAlloc"] == 0


async def test_a_virtual_gpu_has_only_what_it_tells(bench: Callable[..., Any]) -> None:
    made = await bench("g6f.large")
    sample = await visit(made, slow=True)
    assert sample.memory is not None
    assert sample.power_watts is sample.energy_joules is sample.power_limit_watts is None
    assert sample.temperatures == {}
    assert sample.ecc == {}
    assert sample.mig_enabled is None


async def test_what_is_unsupported_is_asked_once_a_generation(bench: Callable[..., Any]) -> None:
    made = await bench("g6f.large")
    await visit(made, slow=True)
    before = made.counted()
    await visit(made, slow=True)
    asked = made.counted() - before
    for call in (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetMemoryErrorCounter",
        "nvmlDeviceGetNvLinkState",
    ):
        assert before[call] >= 1
        assert asked[call] == 0, call


async def test_older_drivers_are_asked_the_older_way(bench: Callable[..., Any]) -> None:
    old = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetFieldValues",
    )
    made = await bench("h100.80gb:1", missing_functions=old)
    sample = await visit(made, slow=True)
    assert sample.memory is not None
    assert sample.memory.reserved is None
    assert "core" in sample.temperatures
    assert sample.clock_events["gpu_idle"]
    assert sample.power_watts is not None
    assert sample.energy_joules is not None
    assert sample.pcie_replays == 0


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("p5.48xlarge", SEVEN, id="eight H100 of seven"),
        pytest.param("p5.48xlarge", MIXED, id="eight H100 mixed"),
        pytest.param("p5.48xlarge", (), id="eight H100 whole"),
        pytest.param("p4d.24xlarge", tuple(("1g.5gb", n) for n in range(7)), id="eight A100 of seven"),
    ],
)
async def test_calls_a_cycle_over_a_minute(
    bench: Callable[..., Any], name: str, layout: tuple[tuple[str, int], ...]
) -> None:
    """Twelve cycles of five seconds, one of them with the slow groups."""
    made = await bench(name)
    if layout:
        await made.mig_on()
        for index in range(8):
            await made.split(index, *layout)
    for index in range(8):
        await visit(made, index, slow=True)
    before = made.counted()
    for cycle in range(12):
        for index in range(8):
            await visit(made, index, slow=cycle == index)
    spent = made.counted() - before
    mean = sum(spent.values()) / 12 / 8
    assert mean <= 20 + (5 + 2) * len(layout), (mean, spent)
    # Calls that go to instances; three of their kinds are made once for the GPU itself, too.
    instances = {"nvmlDeviceGetMemoryInfo_v2": 1, "nvmlDeviceGetBAR1MemoryInfo": 1, "nvmlGpmMetricsGet": 1,
                 "nvmlDeviceGetGpuInstanceById": 0, "nvmlGpmMigSampleGet": 0, "nvmlGpuInstanceGetInfo": 0,
                 "nvmlGpuInstanceGetComputeInstances": 0, "nvmlComputeInstanceGetInfo_v2": 0}  # fmt: skip
    of_gpu = sum(n / 96 if c not in instances else min(instances[c], n / 96) for c, n in spent.items())
    assert of_gpu <= 20, (of_gpu, spent)
    if layout:
        assert (mean - of_gpu) / len(layout) <= 5, (mean, of_gpu, spent)
    assert spent["nvmlDeviceGetPcieThroughput"] == 0
    assert spent["nvmlDeviceGetUUID"] == 0
    assert not made.node.mutating_calls().keys() & spent.keys()


async def test_after_a_repartition_the_next_sample_shows_what_is_there(bench: Callable[..., Any]) -> None:
    made = await split(bench, "h100.80gb:1", ("3g.40gb", 0), ("1g.10gb", 4))
    uuid = made.uuids[0]
    assert [i.profile for i in (await visit(made)).instances] == ["3g.40gb", "1g.10gb"]
    large = (await made.gpus.observe_gpu(uuid)).instances[0]
    await made.gpus.perform(uuid, plans.DestroyComputeInstance(large.id, 0, large.compute[0].profile, large.placement))
    await made.gpus.perform(uuid, plans.DestroyGpuInstance(large.id, large.profile, large.placement))
    assert [i.profile for i in (await visit(made)).instances] == ["1g.10gb"]
    await made.split(0, ("2g.20gb", 0))
    assert [i.profile for i in (await visit(made)).instances] == ["2g.20gb", "1g.10gb"]


@pytest.mark.parametrize("name", ["h100.80gb:1", "a100.80gb:1"])
async def test_an_instance_that_another_process_destroys_vanishes_with_the_next_sample(
    bench: Callable[..., Any], name: str
) -> None:
    from agent.nvml import gpus as doors
    from agent.nvml import session as sessions

    made = await split(bench, name, ("3g.40gb", 0), ("1g.10gb", 4))
    assert len((await visit(made)).instances) == 2
    other = doors.NvmlGpus(sessions.Session(made.node.library, root=made.node.machine.root), machine=made.node.machine)
    large = (await other.observe_gpu(made.uuids[0])).instances[0]
    await other.perform(
        made.uuids[0], plans.DestroyComputeInstance(large.id, 0, large.compute[0].profile, large.placement)
    )
    await other.perform(made.uuids[0], plans.DestroyGpuInstance(large.id, large.profile, large.placement))
    assert [i.profile for i in (await visit(made)).instances] == ["1g.10gb"]
    await other.close()


async def test_a_remade_instance_gets_no_figures_of_the_old_one(bench: Callable[..., Any]) -> None:
    made = await split(bench, "h100.80gb:1", ("3g.40gb", 0))
    uuid = made.uuids[0]
    made.node.start_process(0, gpu_instance=(await visit(made)).instances[0].id, activity=0.9)
    await visit(made)
    old = (await visit(made)).instances[0]
    assert old.activity is not None
    assert (old.activity.sm or 0) > 0
    made.node.stop_process()
    place = nodes.Placement(old.start, old.size)
    whole = profiles.parse(old.profile)
    await made.gpus.perform(uuid, plans.DestroyComputeInstance(old.id, 0, whole, place))
    await made.gpus.perform(uuid, plans.DestroyGpuInstance(old.id, whole, place))
    (again,) = (await made.split(0, ("3g.40gb", 0))).instances
    assert again.id == old.id
    assert (await visit(made)).instances[0].activity is None, "the first visit of a new instance has no window yet"
    fresh = (await visit(made)).instances[0].activity
    assert fresh is not None
    assert fresh.sm == 0


async def test_fabric_on_its_way_is_asked_each_visit(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    real = made.node.library.nvmlDeviceGetGpuFabricInfoV
    state, status = 2, 0

    def fabric(device: Any, into: Any) -> int:
        code = int(real(device, into))
        into._obj.state, into._obj.status = state, status
        return code

    made.node.library.__dict__["nvmlDeviceGetGpuFabricInfoV"] = fabric
    assert (await visit(made, slow=True)).fabric_state == "in-progress"
    state, status = 3, 999
    assert (await visit(made)).fabric_state == "failed"
    status = 0
    assert (await visit(made)).fabric_state == "completed"


async def test_a_lost_gpu_is_down_with_its_name(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    await visit(made)
    made.node.lose(0)
    sample = await made.gpus.measure(made.uuids[0], slow=True)
    assert not sample.up
    assert (sample.index, sample.name) == (0, "NVIDIA H100 80GB HBM3")
    assert "off the bus" in (sample.problem or "")
    assert sample.memory is None
    await visit(made, 1)


async def test_a_hung_gpu_is_down_and_the_others_are_fresh(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2", read_deadline=0.15)
    made.node.hang("nvmlDeviceGetBAR1MemoryInfo", gpu=0)
    sample = await made.gpus.measure(made.uuids[0], slow=True)
    assert not sample.up
    assert "BAR1" in (sample.problem or "")
    assert not (await made.gpus.measure(made.uuids[0], slow=True)).up
    await visit(made, 1, slow=True)


async def test_a_slow_gpu_holds_up_none_but_itself(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    made.node.delay("nvmlDeviceGetMigMode", 1.0, gpu=0)
    slow = asyncio.create_task(made.gpus.measure(made.uuids[0], slow=False))
    async with asyncio.timeout(0.8):
        await visit(made, 1)
    assert (await slow).up


def calls_of_a_visit() -> tuple[str, ...]:
    return (
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetBAR1MemoryInfo",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetPerformanceState",
        "nvmlDeviceGetMemoryErrorCounter",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceGetInfo",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetGpuInstanceRemainingCapacity",
        "nvmlGpmQueryDeviceSupport",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleGet",
        "nvmlGpmMigSampleGet",
        "nvmlGpmMetricsGet",
        "nvmlGpmSampleFree",
    )


@pytest.mark.parametrize("call", calls_of_a_visit())
async def test_every_code_at_every_call_of_a_visit_leaves_the_rest_standing(
    bench: Callable[..., Any], call: str
) -> None:
    made = await split(bench, "h100.80gb:2", ("3g.40gb", 0), ("1g.10gb", 4))
    clean = _comparable(await visit(made, slow=True))
    for code in (*range(1, 31), 999):
        made.gpus._meter.forget(made.uuids[0])
        order = made.node.fail(call, code, times=0)
        sample = await made.gpus.measure(made.uuids[0], slow=True)
        assert sample.up or sample.problem, (call, code)
        made.node.release(order)
        made.gpus._meter.forget(made.uuids[0])
        assert _comparable(await visit(made, slow=True)) == clean, (call, code)
    if call != "nvmlGpmSampleFree":  # what the driver does not free stays
        assert len(made.node.library.samples) <= 2 * 3, "no sample is left behind"


def _comparable(sample: measures.GpuSample) -> object:
    """What a sample has, whatever the figures: which keys, which instances."""
    plain = dataclasses.asdict(sample)
    for name in ("taken", "power_watts", "energy_joules", "pcie_transmit_bytes", "pcie_receive_bytes", "activity"):
        plain.pop(name)
    return {
        name: sorted(map(str, value))
        if isinstance(value, dict)
        else len(value)
        if name == "instances"
        else value is None
        for name, value in plain.items()
    }
