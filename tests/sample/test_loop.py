"""The sampler: in turn, never held up by one GPU, quiet while paused, and never the one that fails."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from agent import errors, measures
from agent.sample import loop
from tests.sample import fakes


class Bench:
    """A sampler on a fake source with clocks that stand, and what it published."""

    def __init__(self, count: int = 2, *, interval: float = 0.02) -> None:
        self.source = fakes.FakeSource(count)
        self.clock = fakes.Clock()
        self.monotonic = fakes.Clock(50.0)
        self.published: list[measures.Sample] = []
        self.news = asyncio.Event()
        self.sampler = loop.Sampler(
            self.source,
            clock=self.clock,
            monotonic=self.monotonic,
            interval=interval,
            publish=self.publish,
            initializations=lambda: 3,
            head_start=0.005,
        )

    def publish(self, sample: measures.Sample) -> None:
        self.published.append(sample)
        self.news.set()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.monotonic.now += seconds

    async def next(self) -> measures.Sample:
        self.news.clear()
        async with asyncio.timeout(5):
            await self.news.wait()
        return self.published[-1]

    def tell(self, event: measures.Event) -> None:
        for deliver in tuple(self.source.watchers):
            deliver(event)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for uuid in tuple(bench.source._held):
        bench.source.let_go(uuid)


async def test_a_cycle_visits_every_gpu_in_turn_and_publishes_what_they_said(bench: Bench) -> None:
    sample = await bench.sampler.cycle()
    assert bench.published == [sample]
    assert [gpu.uuid for gpu in sample.gpus] == ["GPU-0", "GPU-1"]
    assert bench.source.most_at_once == 1
    assert (sample.taken, sample.nvml_up, sample.nvml_initializations) == (1000.0, True, 3)
    assert (sample.driver_version, sample.nvml_version, sample.cuda_version) == ("550.90.07", "12.550.90.07", "12.4")
    assert sample.event_watch_up is True
    assert sample.collectors["gpu"].success
    assert sample.collectors["gpu"].last_success == 1000.0
    assert sample.xid_errors["GPU-1", "", "", 79] == 0


async def test_without_a_driver_it_says_so_and_comes_back_when_there_is_one(bench: Bench) -> None:
    driver, bench.source.driver = bench.source.driver, None
    sample = await bench.sampler.cycle()
    assert (sample.nvml_up, sample.gpus, sample.event_watch_up, sample.driver_version) == (False, (), None, None)
    assert bench.source.visits == []
    bench.source.driver = driver
    sample = await bench.sampler.cycle()
    assert (sample.nvml_up, len(sample.gpus), sample.event_watch_up) == (True, 2, True)


async def test_a_driver_that_goes_takes_the_gpus_with_it(bench: Bench) -> None:
    await bench.sampler.cycle()
    bench.source.driver = None
    sample = await bench.sampler.cycle()
    assert sample.gpus == ()
    assert bench.source.watchers == []


async def test_a_gpu_that_takes_long_does_not_hold_up_the_others(bench: Bench) -> None:
    bench.source.hold("GPU-0")
    first = await bench.sampler.cycle()
    assert [gpu.uuid for gpu in first.gpus] == ["GPU-1"]
    bench.source.gpus["GPU-1"] = fakes.gpu(1, power_watts=300.0)
    second = await bench.sampler.cycle()
    assert [gpu.power_watts for gpu in second.gpus] == [300.0]
    assert [uuid for uuid, _ in bench.source.visits].count("GPU-0") == 1, "a GPU that is still out is not visited again"


async def test_a_slow_gpu_keeps_its_last_figures_until_the_next_ones_come(bench: Bench) -> None:
    bench.source.gpus["GPU-0"] = fakes.gpu(0, power_watts=100.0)
    await bench.sampler.cycle()
    bench.source.hold("GPU-0")
    sample = await bench.sampler.cycle()
    assert sample.gpus[0].power_watts == 100.0
    bench.source.gpus["GPU-0"] = fakes.gpu(0, power_watts=200.0)
    bench.source.let_go("GPU-0")
    sample = await bench.sampler.cycle()
    assert sample.gpus[0].power_watts == 200.0


async def test_a_visit_that_does_not_end_makes_its_gpu_silent_and_its_figures_vanish(bench: Bench) -> None:
    bench.source.gpus["GPU-0"] = fakes.gpu(0, power_watts=100.0, instances=(fakes.instance(1),), architecture="hopper")
    await bench.sampler.cycle()
    bench.source.hold("GPU-0")
    await bench.sampler.cycle()
    bench.pass_time(loop.PATIENCE + 1)
    sample = await bench.sampler.cycle()
    silent, other = sample.gpus
    assert (silent.up, silent.power_watts, silent.instances) == (False, None, ())
    assert (silent.name, silent.pci_bus_id, silent.architecture) == ("H100", "0000:00:00.0", "hopper")
    assert silent.problem == "its visit has not ended after 61 s"
    assert other.up
    assert not sample.collectors["gpu"].success
    assert sample.collectors["gpu"].last_success == 1000.0


async def test_a_gpu_that_the_lanes_call_hung_is_passed_on_and_the_collector_fails(bench: Bench) -> None:
    bench.source.gpus["GPU-1"] = fakes.gpu(1, up=False, problem="hung")
    sample = await bench.sampler.cycle()
    assert [gpu.up for gpu in sample.gpus] == [True, False]
    assert not sample.collectors["gpu"].success


@pytest.mark.parametrize(
    "cause", [errors.DriverError("cannot measure: gone"), ValueError("a surprise")], ids=["ours", "not ours"]
)
async def test_a_source_that_raises_for_one_gpu_does_not_end_the_measuring(bench: Bench, cause: Exception) -> None:
    bench.source.errors["GPU-0"] = cause
    sample = await bench.sampler.cycle()
    silent, other = sample.gpus
    assert (silent.up, other.up) == (False, True)
    assert silent.problem is not None
    assert str(cause) in silent.problem
    assert silent.index == 0
    del bench.source.errors["GPU-0"]
    assert (await bench.sampler.cycle()).gpus[0].up


async def test_the_first_visit_is_slow_and_then_one_gpu_after_another_within_the_minute() -> None:
    bench = Bench(count=4)
    slow: list[list[str]] = []
    for _ in range(25):
        bench.source.visits.clear()
        await bench.sampler.cycle()
        slow.append([uuid for uuid, asked in bench.source.visits if asked])
        bench.pass_time(5.0)
    assert slow[0] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert {second * 5: names for second, names in enumerate(slow) if names and second} == {
        15: ["GPU-0"],
        30: ["GPU-1"],
        45: ["GPU-2"],
        60: ["GPU-3"],
        75: ["GPU-0"],
        90: ["GPU-1"],
        105: ["GPU-2"],
        120: ["GPU-3"],
    }


async def test_a_slow_visit_that_failed_is_made_again_at_once(bench: Bench) -> None:
    bench.source.gpus["GPU-0"] = fakes.gpu(0, up=False)
    await bench.sampler.cycle()
    bench.source.visits.clear()
    await bench.sampler.cycle()
    assert bench.source.visits == [("GPU-0", True), ("GPU-1", False)]


async def test_a_new_topology_is_measured_at_once_and_wholly() -> None:
    bench = Bench(interval=3600)
    task = asyncio.create_task(bench.sampler.run())
    await bench.next()
    bench.source.visits.clear()
    bench.sampler.topology_changed(7)
    assert (await bench.next()).generation == 7
    assert ("GPU-0", True) in bench.source.visits
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.source.watchers == []


async def test_a_pause_waits_for_the_visit_under_way_and_then_nothing_is_touched(bench: Bench) -> None:
    bench.source.hold("GPU-0")
    cycle = asyncio.create_task(bench.sampler.cycle())
    await bench.source.begun.wait()
    pausing = asyncio.create_task(bench.sampler.pause())
    await cycle
    assert not pausing.done()
    assert bench.source.watchers == [], "events are not watched through a reset"
    bench.source.let_go("GPU-0")
    await pausing
    assert bench.source.under_way == 0
    visits = list(bench.source.visits)
    task = asyncio.create_task(bench.sampler.run())
    bench.sampler.topology_changed(9)
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.source.visits == visits
    await bench.sampler.resume()
    sample = await bench.next()
    assert sample.generation == 9
    assert bench.source.watchers != []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_pause_does_not_wait_for_ever_for_a_visit_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAUSE_LIMIT", 0.01)
    bench.source.hold("GPU-0")
    await bench.sampler.cycle()
    async with asyncio.timeout(5):
        await bench.sampler.pause()
    assert bench.source.under_way == 1


async def test_pauses_add_up(bench: Bench) -> None:
    await bench.sampler.pause()
    await bench.sampler.pause()
    await bench.sampler.resume()
    task = asyncio.create_task(bench.sampler.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.published == []
    await bench.sampler.resume()
    await bench.next()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_xids_are_counted_with_their_instance_and_outlive_samples(bench: Bench) -> None:
    await bench.sampler.cycle()
    bench.tell(measures.Event("xid", "GPU-1", gpu_instance_id=3, compute_instance_id=0, xid=94))
    bench.tell(measures.Event("xid", "GPU-1", xid=79))
    await asyncio.sleep(0)
    for _ in range(2):
        sample = await bench.sampler.cycle()
        assert sample.xid_errors["GPU-1", "3", "0", 94] == 1
        assert sample.xid_errors["GPU-1", "", "", 79] == 1
        assert sample.xid_errors["GPU-0", "", "", 79] == 0
        assert sample.xid_last == {("GPU-1", "3", "0", 94): 1000.0, ("GPU-1", "", "", 79): 1000.0}


async def test_a_change_of_instances_that_is_heard_of_is_measured_at_once() -> None:
    bench = Bench(interval=3600)
    task = asyncio.create_task(bench.sampler.run())
    await bench.next()
    bench.tell(measures.Event("mig-config-change", "GPU-0"))
    await bench.next()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_changes_of_gpunode_s_own_are_measured_when_they_are_done_and_no_visit_delays_a_step() -> None:
    bench = Bench(interval=3600)
    task = asyncio.create_task(bench.sampler.run())
    await bench.next()
    bench.source.visits.clear()
    bench.sampler.changing()
    for _ in range(3):
        bench.tell(measures.Event("mig-config-change", "GPU-0", gpu_instance_id=1))
        for _ in range(20):
            await asyncio.sleep(0)
    assert bench.source.visits == []
    bench.sampler.topology_changed(0)  # rolled back: the same generation, and yet not the same instances
    await bench.next()
    bench.tell(measures.Event("mig-config-change", "GPU-0"))
    await bench.next()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_instance_keeps_the_time_it_was_first_seen_until_it_is_made_again(bench: Bench) -> None:
    def first_seen(sample: measures.Sample) -> dict[int, float]:
        return {one.id: one.first_seen for one in sample.gpus[0].instances}

    bench.source.gpus["GPU-0"] = fakes.gpu(0, instances=(fakes.instance(1), fakes.instance(2)))
    assert first_seen(await bench.sampler.cycle()) == {1: 1000.0, 2: 1000.0}
    bench.pass_time(5)
    bench.source.gpus["GPU-0"] = fakes.gpu(0, instances=(fakes.instance(1), fakes.instance(3)))
    assert first_seen(await bench.sampler.cycle()) == {1: 1000.0, 3: 1005.0}
    bench.pass_time(5)
    bench.tell(measures.Event("mig-config-change", "GPU-0", gpu_instance_id=1))
    await asyncio.sleep(0)
    assert first_seen(await bench.sampler.cycle()) == {1: 1010.0, 3: 1005.0}


async def test_xids_of_an_instance_go_with_it_and_not_to_the_next_of_its_id(bench: Bench) -> None:
    def counted(sample: measures.Sample) -> dict[str, int]:
        return {gi: count for (_, gi, _, code), count in sample.xid_errors.items() if code == 94 and gi}

    compute = (measures.ComputeSample(id=0, uuid="MIG-1", profile="1g.10gb", multiprocessors=16, slices=1),)
    bench.source.gpus["GPU-0"] = fakes.gpu(0, instances=tuple(fakes.instance(n, compute=compute) for n in (1, 2, 3)))
    assert counted(await bench.sampler.cycle()) == {"1": 0, "2": 0, "3": 0}
    for number in (1, 2, 3, 9):
        bench.tell(measures.Event("xid", "GPU-0", gpu_instance_id=number, compute_instance_id=0, xid=94))
    await asyncio.sleep(0)
    assert counted(await bench.sampler.cycle()) == {"1": 1, "2": 1, "3": 1, "9": 1}
    whole = bench.source.gpus["GPU-0"]
    bench.source.gpus["GPU-0"] = fakes.gpu(0, up=False)
    assert counted(await bench.sampler.cycle()) == {"1": 1, "2": 1, "3": 1, "9": 1}, (
        "it did not answer: nothing has gone"
    )
    bench.source.gpus["GPU-0"] = dataclasses.replace(whole, instances=whole.instances[:2])
    bench.tell(measures.Event("mig-config-change", "GPU-0", gpu_instance_id=1))
    await asyncio.sleep(0)
    bench.pass_time(5)
    sample = await bench.sampler.cycle()
    assert counted(sample) == {"1": 0, "2": 1, "9": 1}
    assert {key[1] for key in sample.xid_last} == {"2", "9"}
    assert [one.first_seen for one in sample.gpus[0].instances] == [1005.0, 1000.0]


async def test_events_that_cannot_be_watched_are_told_and_tried_again(bench: Bench) -> None:
    bench.source.watch_error = errors.DriverError("cannot watch events: no permission")
    assert (await bench.sampler.cycle()).event_watch_up is False
    bench.source.watch_error = None
    assert (await bench.sampler.cycle()).event_watch_up is True


async def test_a_gpu_that_is_known_no_more_is_gone_from_the_sample(bench: Bench) -> None:
    await bench.sampler.cycle()
    del bench.source.gpus["GPU-0"]
    sample = await bench.sampler.cycle()
    assert [gpu.uuid for gpu in sample.gpus] == ["GPU-1"]


async def test_other_collectors_are_shown_beside_its_own(bench: Bench) -> None:
    pods = measures.Collector(False, 0.5, None)
    bench.sampler.record("pods", pods)
    sample = await bench.sampler.cycle()
    assert sample.collectors["pods"] is pods
    assert set(sample.collectors) == {"gpu", "gpu-slow", "pods"}
