"""Every layout of every kind of GPU, against a brute force that knows only the simulated driver.

The numbers of placed layouts and multisets are those of the design notes: 2,319 and 128 on seven
slices, 717 and 115 on an RTX PRO 6000, 76 and 20 on an A30.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.mig import layout, node, placement, plan, profile
from tests.mig import driver, oracle, parts

MEMBERS = 8
KNOWN = {
    "a30-24gb": (76, 20),
    "a100-40gb": (2319, 128),
    "h100-sxm-80gb": (2319, 128),
    "rtxpro6000-server-96gb": (717, 115),
}


def signatures() -> dict[object, str]:
    """Return one model for every geometry there is: equal places, slices, counts, attributes and engines."""
    found: dict[object, str] = {}
    for model in parts.models():
        shape = tuple(
            (
                o.profile.gpu_slices,
                o.profile.attributes,
                o.profile.without,
                o.slices,
                o.max_instances,
                o.placements,
                o.engines,
            )
            for o in parts.offers(model)
        )
        found.setdefault(shape, model)
    return found


MODELS = sorted(set(signatures().values()) | set(KNOWN))


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A simulated GPU, the core's view of it, and all that it can hold."""

    simulated: Any
    gpu: driver.Driver
    layouts: oracle.Layouts
    profiles: dict[int, profile.Profile]

    def wanted(self, multiset: oracle.Multiset) -> layout.Layout:
        instances = tuple(layout.InstanceSpec(self.profiles[number]) for number in multiset)
        return layout.Layout((layout.GpuLayout(self.gpu.uuid, mig=True, instances=instances),))

    def plan(self, one: node.Gpu, multiset: oracle.Multiset) -> plan.GpuPlan:
        return plan.compute(self.wanted(multiset), node.NodeState(gpus=(one,)), plan.Policy()).gpus[0]


@pytest.fixture(params=MODELS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    model: str = request.param
    with oracle.mig_gpu(model, tmp_path) as (simulated, handle):
        found = oracle.layouts(handle)
        gpu = driver.Driver(handle, parts.models()[model]["architecture"])
        gpu.learn_compute()
        yield Bench(simulated, gpu, found, {int(offer.id): offer.profile for offer in gpu.offers()})


some = pytest.mark.parametrize("bench", ["a30-24gb"], indirect=True)
known = pytest.mark.parametrize("bench", sorted(KNOWN), indirect=True)


@known
def test_the_driver_holds_as_many_layouts_as_the_design_counts(bench: Bench, request: pytest.FixtureRequest) -> None:
    counts = (len(bench.layouts.all), len(bench.layouts.by_multiset))
    assert counts == KNOWN[request.node.callspec.params["bench"]]


def judge_every_multiset(bench: Bench) -> tuple[int, int]:
    """Plan every multiset from an empty GPU: what the driver can hold is applied and read back, everything else is
    refused without a call that changes anything. Returns how many of each."""
    empty = bench.gpu.observe()
    accepted = refused = 0
    ids = [offer.id for offer in empty.offers]
    for multiset in oracle.multisets([int(number) for number in ids], MEMBERS):
        before = bench.simulated.mutations
        found = bench.plan(empty, multiset)
        if multiset not in bench.layouts.by_multiset:
            assert found.blocked is not None, multiset
            assert found.blocked.kind is plan.BlockedKind.UNPLACEABLE
            assert not found.steps
            assert bench.simulated.mutations == before
            refused += 1
            continue
        assert found.blocked is None, found.blocked
        for step in found.steps:
            bench.gpu.perform(step)
        after = bench.gpu.observe()
        assert tuple(sorted(instance.profile_id for instance in after.instances)) == multiset
        for instance in after.instances:
            offer = after.offer(instance.profile)
            assert offer is not None
            assert [compute.multiprocessors for compute in instance.compute] == [offer.multiprocessors]
        assert bench.plan(after, multiset).in_sync
        bench.gpu.clear()
        accepted += 1
    return accepted, refused


@some
def test_what_the_driver_holds_is_planned_and_the_rest_refused(bench: Bench) -> None:
    accepted, refused = judge_every_multiset(bench)
    assert accepted == len(bench.layouts.by_multiset)
    assert accepted + refused == 1287


@pytest.mark.full
def test_what_any_driver_holds_is_planned_and_the_rest_refused(bench: Bench) -> None:
    accepted, refused = judge_every_multiset(bench)
    print(f"figure: {accepted} multisets planned, applied and verified, {refused} refused")
    assert accepted == sum(len(multiset) <= MEMBERS for multiset in bench.layouts.by_multiset)


def compare(bench: Bench, stride: int) -> int:
    """Plan from every placed layout to every multiset (every `stride`-th pair) and compare what is destroyed and
    created with the minimum over all layouts. Returns how many pairs."""
    number_of = {(s.profile_id, s.start): number for number, s in enumerate(bench.layouts.spots)}
    empty = bench.gpu.observe()
    wanted = {multiset: bench.wanted(multiset) for multiset in bench.layouts.by_multiset}
    held = {offer.profile: offer.id for offer in empty.offers}
    compared = 0
    for count, (mask, multiset) in enumerate(itertools.product(bench.layouts.all, wanted)):
        if count % stride:
            continue
        one = dataclasses.replace(empty, instances=bench.gpu.hold(bench.layouts.of(mask)))
        found = plan.compute(wanted[multiset], node.NodeState(gpus=(one,)), plan.Policy()).gpus[0]
        assert found.blocked is None
        gone = sum(isinstance(step, plan.DestroyGpuInstance) for step in found.steps)
        came = [step for step in found.steps if isinstance(step, plan.CreateGpuInstance)]
        kept = bench.layouts.most_kept(mask, multiset)
        assert (gone, len(came)) == (mask.bit_count() - kept, len(multiset) - kept), (bench.layouts.of(mask), multiset)
        after = 0
        for stays in found.kept:
            after |= 1 << number_of[held[stays.profile], stays.placement.start]
        for step in came:
            after |= 1 << number_of[step.profile_id, step.placement.start]
        assert after in bench.layouts.by_multiset[multiset]
        compared += 1
    return compared


@some
def test_from_every_layout_to_every_multiset_of_a_small_gpu_the_least_is_changed(bench: Bench) -> None:
    assert compare(bench, 1) == 76 * 20


@known
def test_from_some_layouts_to_some_multisets_the_least_is_changed(bench: Bench) -> None:
    assert compare(bench, 701) > 0


@pytest.mark.full
@known
def test_from_every_layout_to_every_multiset_the_least_is_changed(bench: Bench) -> None:
    compared = compare(bench, 1)
    print(f"figure: {compared} pairs compared with the brute force")
    assert compared == len(bench.layouts.all) * len(bench.layouts.by_multiset)


def count_what_still_fits(bench: Bench, stride: int) -> int:
    """Fill the GPU with every `stride`-th placed layout and compare how many more of each profile fit with what the
    driver says. Returns how many figures."""
    compared = 0
    for mask in bench.layouts.all[::stride]:
        bench.gpu.clear()
        for spot in bench.layouts.of(mask):
            assert oracle.create(bench.gpu.handle, spot) is not None
        one = bench.gpu.observe()
        for offer in one.offers:
            told = oracle.remaining(bench.gpu.handle, int(offer.id))
            assert placement.remaining(one, offer.profile) == told, (offer.profile, bench.layouts.of(mask))
            compared += 1
    bench.gpu.clear()
    return compared


@known
def test_what_still_fits_beside_some_layouts_is_what_the_driver_says(bench: Bench) -> None:
    assert count_what_still_fits(bench, 17) > 0


@pytest.mark.full
def test_what_still_fits_beside_every_layout_is_what_the_driver_says(bench: Bench) -> None:
    compared = count_what_still_fits(bench, 1)
    print(f"figure: {compared} remaining capacities compared")
    assert compared == len(bench.layouts.all) * len(bench.profiles)


def interrupt(bench: Bench, stride: int) -> int:
    """Do every prefix of a plan on the driver, then plan and go on from there: the same end, by the steps that were
    left. Returns how many prefixes."""
    tried = 0
    masks = bench.layouts.all
    pairs = itertools.islice(itertools.product(masks, bench.layouts.by_multiset), 0, None, stride)
    for mask, multiset in pairs:

        def start(mask: int = mask) -> node.Gpu:
            bench.gpu.clear()
            for spot in bench.layouts.of(mask):
                made = oracle.create(bench.gpu.handle, spot)
                assert made is not None
            for instance in bench.gpu.observe().instances:
                bench.gpu.perform(plan.CreateComputeInstance(instance.placement, instance.profile))
            return bench.gpu.observe()

        whole = bench.plan(start(), multiset)
        for length in range(len(whole.steps) + 1):
            start()
            for step in whole.steps[:length]:
                bench.gpu.perform(step)
            rest = bench.plan(bench.gpu.observe(), multiset)
            assert rest.blocked is None
            assert len(rest.steps) == len(whole.steps) - length
            for step in rest.steps:
                bench.gpu.perform(step)
            after = bench.gpu.observe()
            assert tuple(sorted(i.profile_id for i in after.instances)) == multiset
            assert bench.plan(after, multiset).in_sync
            tried += 1
    bench.gpu.clear()
    return tried


@known
def test_an_interrupted_plan_is_finished_by_the_steps_that_were_left(bench: Bench) -> None:
    stride = max(1, len(bench.layouts.all) * len(bench.layouts.by_multiset) // 7)
    assert interrupt(bench, stride) > 7


@pytest.mark.full
@known
def test_many_interrupted_plans_are_finished_by_the_steps_that_were_left(bench: Bench) -> None:
    tried = interrupt(bench, max(1, len(bench.layouts.all) * len(bench.layouts.by_multiset) // 200))
    print(f"figure: {tried} prefixes")
    assert tried > 200
