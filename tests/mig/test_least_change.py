"""Use, splits and interruption drawn at random: the least is changed, nothing in use goes, and any prefix converges.

The minimum is found by `tests.mig.oracle`, which knows only the simulated driver; every plan drawn is also
carried out on that driver.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.mig import layout, node, plan, profile
from tests.mig import driver, oracle, parts

PYTHON = node.Holder("process", "python", pid=4711)


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A simulated GPU, the core's view of it, and all that it and its instances can hold."""

    simulated: Any
    gpu: driver.Driver
    layouts: oracle.Layouts
    splits: dict[int, oracle.Splits]
    profiles: dict[int, profile.Profile]


MODELS = ["a100-40gb", "h100-sxm-80gb", "a30-24gb", "rtxpro6000-server-96gb"]


@pytest.fixture(params=MODELS, scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model: str = request.param
    with oracle.mig_gpu(model, tmp_path_factory.mktemp("node")) as (simulated, handle):
        gpu = driver.Driver(handle, parts.models()[model]["architecture"])
        gpu.learn_compute()
        profiles = {int(offer.id): offer.profile for offer in gpu.offers()}
        yield Bench(simulated, gpu, oracle.layouts(handle), oracle.splits(handle), profiles)


def draw_held(bench: Bench, data: st.DataObject) -> tuple[oracle.Held, ...]:
    """Draw a layout with anything in its instances, and who uses what."""
    mask = data.draw(st.sampled_from(bench.layouts.all), "from")
    held = []
    for spot in bench.layouts.of(mask):
        splits = bench.splits[spot.profile_id]
        compute = frozenset({(splits.default, 0)})
        if data.draw(st.booleans()):
            split = data.draw(st.sampled_from(sorted(splits.placed)), "split there")
            compute = data.draw(st.sampled_from(splits.placed[split]))
        busy = frozenset(one for one in sorted(compute) if data.draw(st.integers(0, 4)) == 0)
        held.append(oracle.Held(spot, compute, busy, in_use=data.draw(st.integers(0, 9)) == 0))
    return tuple(held)


def draw_wishes(bench: Bench, data: st.DataObject, held: tuple[oracle.Held, ...]) -> tuple[oracle.Wish, ...]:
    """Draw a target: any layout, or one that keeps what is in use, so that not all are blocked."""
    busy = {one.spot for one in held if one.untouchable}
    choices = [m for m in bench.layouts.all if busy <= set(bench.layouts.of(m))]
    mask = data.draw(st.sampled_from(choices if data.draw(st.integers(0, 3)) else bench.layouts.all), "to")
    there = {one.spot: one for one in held}
    wishes = []
    for spot in bench.layouts.of(mask):
        splits = bench.splits[spot.profile_id]
        split: oracle.Split = (splits.default,)
        if spot in there and there[spot].compute and data.draw(st.booleans()):
            split = tuple(sorted(number for number, _ in there[spot].compute))
        elif data.draw(st.integers(0, 2)) == 0:
            split = data.draw(st.sampled_from(sorted(set(splits.placed) - {()})), "split wanted")
        start = spot.start if data.draw(st.integers(0, 4)) == 0 else -1
        wishes.append(oracle.Wish(spot.profile_id, split, start))
    return tuple(data.draw(st.permutations(wishes)))


def put(bench: Bench, held: tuple[oracle.Held, ...]) -> None:
    """Make the GPU hold exactly this."""
    bench.gpu.clear()
    for one in held:
        made = oracle.create(bench.gpu.handle, one.spot)
        assert made is not None
        for number, start in sorted(one.compute):
            size = bench.splits[one.spot.profile_id].slices[number]
            assert oracle.create_compute(made, number, start, size) is not None


def see(bench: Bench, held: tuple[oracle.Held, ...]) -> node.NodeState:
    """Read the GPU, with holders on what is in use."""
    used = {(one.spot.profile_id, one.spot.start): one for one in held}

    def instance(one: node.GpuInstance) -> node.GpuInstance:
        what = used.get((one.profile_id, one.placement.start))
        if what is None:
            return one
        compute = tuple(
            dataclasses.replace(c, holders=(PYTHON,))
            if c.placement is not None and (c.profile_id, c.placement.start) in what.busy
            else c
            for c in one.compute
        )
        return dataclasses.replace(one, compute=compute, holders=(PYTHON,) if what.in_use else ())

    one = bench.gpu.observe()
    return node.NodeState(gpus=(dataclasses.replace(one, instances=tuple(instance(i) for i in one.instances)),))


def as_layout(bench: Bench, wishes: tuple[oracle.Wish, ...]) -> layout.Layout:
    specs = []
    for wish in wishes:
        splits = bench.splits[wish.profile_id]
        compute = tuple(profile.parse(splits.names[number]) for number in wish.split)
        specs.append(
            layout.InstanceSpec(
                bench.profiles[wish.profile_id],
                () if wish.split == (splits.default,) else compute,
                None if wish.start < 0 else wish.start,
            )
        )
    return layout.Layout((layout.GpuLayout(bench.gpu.uuid, mig=True, instances=tuple(specs)),))


def content(state: node.NodeState) -> collections.Counter[tuple[int, oracle.Split]]:
    """Return what a GPU holds: profile ids with what is in them."""
    return collections.Counter(
        (int(i.profile_id), tuple(sorted(int(c.profile_id) for c in i.compute))) for i in state.gpus[0].instances
    )


def touched(found: plan.GpuPlan, state: node.NodeState) -> list[node.Holder]:
    """Return the holders of everything that the plan destroys."""
    holders: list[node.Holder] = []
    by_id = {instance.id: instance for instance in state.gpus[0].instances}
    for step in found.steps:
        match step:
            case plan.DestroyGpuInstance():
                holders += by_id[step.id].in_use
            case plan.DestroyComputeInstance():
                instance = by_id[step.gpu_instance_id]
                holders += instance.holders
                holders += [h for c in instance.compute if c.id == step.id for h in c.holders]
            case _:
                pass
    return holders


def judge(bench: Bench, data: st.DataObject) -> None:
    held = draw_held(bench, data)
    wishes = draw_wishes(bench, data, held)
    put(bench, held)
    state = see(bench, held)
    wanted = as_layout(bench, wishes)
    found = plan.compute(wanted, state, plan.Policy()).gpus[0]
    best = oracle.least_change(bench.layouts, bench.splits, held, wishes)
    if best is None:
        assert found.blocked is not None
        assert found.blocked.kind in (plan.BlockedKind.IN_USE, plan.BlockedKind.UNPLACEABLE)
        assert found.blocked.holders == (PYTHON,) * len(found.blocked.holders) != ()
        assert not found.steps
        assert found.drift
        return
    assert found.blocked is None, found.blocked
    kept, compute = best
    count = collections.Counter(type(step) for step in found.steps)
    assert len(found.kept) == kept
    assert count[plan.DestroyGpuInstance] == len(held) - kept
    assert count[plan.CreateGpuInstance] == len(wishes) - kept
    assert count[plan.DestroyComputeInstance] == sum(len(one.compute) for one in held) - compute
    assert count[plan.CreateComputeInstance] == sum(len(wish.split) for wish in wishes) - compute
    assert touched(found, state) == []
    assert bool(found.drift) == bool(found.steps)
    done = data.draw(st.integers(0, len(found.steps)), "steps done")
    for step in found.steps[:done]:
        bench.gpu.perform(step)
    half = see(bench, held)
    rest = plan.compute(wanted, half, plan.Policy()).gpus[0]
    assert rest.blocked is None
    assert len(rest.steps) == len(found.steps) - done
    assert touched(rest, half) == []
    for step in rest.steps:
        bench.gpu.perform(step)
    after = see(bench, held)
    assert content(after) == collections.Counter((wish.profile_id, wish.split) for wish in wishes)
    starts = {(int(i.profile_id), i.placement.start) for i in after.gpus[0].instances}
    assert all((wish.profile_id, wish.start) in starts for wish in wishes if wish.start >= 0)
    again = plan.compute(wanted, after, plan.Policy()).gpus[0]
    assert again.in_sync
    assert not again.steps


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
long = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(data=st.data())
def test_use_and_splits_cost_no_more_than_they_must(bench: Bench, data: st.DataObject) -> None:
    judge(bench, data)


@pytest.mark.full
@long
@given(data=st.data())
def test_use_and_splits_cost_no_more_than_they_must_at_length(bench: Bench, data: st.DataObject) -> None:
    judge(bench, data)
