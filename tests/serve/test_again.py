"""What a sample tells of instances that were made again, and of a GPU that stops answering."""

from __future__ import annotations

from agent import measures
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.serve import board as boards
from agent.serve import exposition
from tests.nvml import conftest as benches
from tests.serve import simulated

TWO = (("3g.40gb", 0), ("3g.40gb", 4))


async def remake(made: simulated.Sampled, start: int) -> None:
    """Remove the instance at a place, and make the same again: same id, same UUID, same place."""
    uuid, bench = made.bench.uuids[0], made.bench
    old = next(i for i in (await made.gpus.observe_gpu(uuid)).instances if i.placement.start == start)
    whole = profiles.parse("3g.40gb")
    await made.gpus.perform(uuid, plans.DestroyComputeInstance(old.id, 0, whole, old.placement))
    await made.gpus.perform(uuid, plans.DestroyGpuInstance(old.id, whole, old.placement))
    new = next(
        i for i in (await bench.split(0, ("3g.40gb", start))).instances if i.placement == nodes.Placement(start, 4)
    )
    assert (new.id, new.compute[0].uuid) == (old.id, old.compute[0].uuid)


def firsts(sample: measures.Sample) -> dict[int, float]:
    return {instance.start: instance.first_seen for instance in sample.gpus[0].instances}


async def test_an_instance_made_again_between_two_visits_is_new_by_its_event() -> None:
    async with simulated.sampled("h100.80gb:1", {0: TWO}) as made:
        before = firsts(await made.cycle())
        seen = made.sampler._first_seen._seen[made.bench.uuids[0]]
        assert len(seen) == 2
        await remake(made, 4)
        await benches.until(lambda: len(seen) == 1)
        after = firsts(await made.cycle())
        assert after[0] == before[0]
        assert after[4] == before[4] + simulated.INTERVAL
        assert firsts(await made.cycle()) == after


async def test_one_made_again_by_gpunode_while_it_does_not_listen_is_new_too() -> None:
    async with simulated.sampled("h100.80gb:1", {0: TWO}) as made:
        before = firsts(await made.cycle())
        await made.sampler.pause()
        made.clock.now += 1
        since = made.clock.now
        await remake(made, 4)
        await made.sampler.resume()
        made.sampler.remade(made.bench.uuids[0], 4, since)
        after = firsts(await made.cycle())
        assert after[0] == before[0]
        assert after[4] > since
        made.sampler.remade(made.bench.uuids[0], 4, since)
        assert firsts(await made.cycle()) == after, "seen since it was made, it stays what it is"


async def test_of_a_gpu_that_hangs_only_its_name_is_left_and_the_others_go_on() -> None:
    async with simulated.sampled("h100.80gb:2", {0: TWO, 1: TWO}, read_deadline=0.3, head_start=2.0) as made:
        await made.cycle()
        before = await made.cycle()
        hung, other = made.bench.uuids
        assert len(about(before, hung)) > 20
        made.node.hang("nvmlDeviceGetMemoryInfo*", gpu=0, times=0)
        sample = await made.cycle()
        assert about(sample, hung) == {"gpunode_gpu_info", "gpunode_gpu_up", "gpunode_xid_errors_total"}
        assert about(sample, other) == about(before, other)
        assert not sample.gpus[0].up
        assert "nvmlDeviceGetMemoryInfo" in (sample.gpus[0].problem or "")
        assert sample.gpus[1].taken == made.clock.now
        made.node.release()
        await benches.until(lambda: not made.gpus.any_hung)
        await made.cycle()
        assert about(await made.cycle(), hung) == about(before, hung), (
            "all of it is back, activity with the second visit"
        )


async def test_a_fabric_that_nobody_manages_keeps_whole_gpus_from_being_ready_until_it_is_complete() -> None:
    manager = "nvidia-fabricmanager.service"
    async with simulated.sampled("h100.80gb:3", {0: TWO}) as made:
        made.node.set_unit(manager, active=False)

        async def reasons() -> tuple[bool, list[tuple[str, str | None]]]:
            board = boards.Board(now=made.clock.now)
            sample = await made.cycle()
            board.publish_sample(sample)
            verdict = boards.verdict(await made.snapshot(wanted={0: TWO}), sample, now=made.clock.now)
            return verdict.ready, [(reason.code, reason.gpu) for reason in verdict.reasons]

        stuck = (False, [("fabric", uuid) for uuid in made.bench.uuids[1:]])
        assert await reasons() == stuck
        assert await reasons() == stuck, "the one with MIG on needs no fabric"
        made.node.set_unit(manager, active=True)
        assert await reasons() == (True, [])


def about(sample: measures.Sample, uuid: str) -> set[str]:
    """Return the families that have a series of a GPU."""
    board = boards.Board(now=sample.taken)
    board.publish_sample(sample)
    view = exposition.view_of(board, now=sample.taken, what=exposition.build())
    text = exposition.Renderer(process=False).render(view, exposition.TEXT).decode()
    return {line.partition("{")[0] for line in text.splitlines() if uuid in line}
