from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.mig import profile as profiles
from agent.nvml import catalog
from agent.sim import tables


async def test_offers_are_what_the_table_of_the_model_says(bench: Callable[..., Any]) -> None:
    for key in ("a100.40gb", "a30.24gb", "h100.80gb", "h200.141gb", "b200.180gb", "rtxpro6000.96gb"):
        made = await bench(f"{key}:1")
        gpu = await made.gpus.observe_gpu(made.uuids[0])
        model = tables.model(made.node.driver.gpus[0].spec.model)
        told = {str(o.profile): (o.id, o.index, o.slices, o.multiprocessors, o.max_instances) for o in gpu.offers}
        assert told == {p.name: (p.id, p.index, p.slices, p.multiprocessors, p.max_instances) for p in model.profiles}
        for profile in model.profiles:
            offer = gpu.offer(profiles.parse(profile.name))
            assert offer is not None
            assert {p.start for p in offer.placements} == set(profile.starts)
            assert offer.size == profile.size
            assert offer.memory_bytes == profile.memory_mib * 2**20
        await made.gpus.close()


@pytest.mark.parametrize(
    "key", ["a100.40gb", "a100.80gb", "a30.24gb", "h100.80gb", "h200.141gb", "b200.180gb", "rtxpro6000.96gb"]
)
async def test_a_driver_without_names_gets_them_by_the_rule(bench: Callable[..., Any], key: str) -> None:
    named = (await (await bench(f"{key}:1")).gpus.observe()).gpus[0]
    old = ("nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlGpuInstanceGetComputeInstanceProfileInfoV")
    unnamed = (await (await bench(f"{key}:1", missing_functions=old)).gpus.observe()).gpus[0]
    assert [str(o.profile) for o in unnamed.offers] == [str(o.profile) for o in named.offers]


async def test_compute_profiles_are_learnt_from_a_living_instance_and_kept(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    await made.mig_on()
    gpu = await made.split(0, ("1g.20gb", 0), ("3g.40gb", 4))
    offer = gpu.offer(profiles.parse("1g.20gb"))
    assert offer.compute is not None
    assert {str(c.profile): c.multiprocessors for c in offer.compute} == {"1c.1g.20gb": 16, "1g.20gb": 26}
    assert gpu.offer(profiles.parse("2g.20gb")).compute is None
    other = await made.gpus.observe_gpu(made.uuids[1])
    assert other.offer(profiles.parse("3g.40gb")).compute == gpu.offer(profiles.parse("3g.40gb")).compute
    await made.gpus.perform(made.uuids[0], _destroy(gpu, "1g.20gb", compute=True))
    await made.gpus.perform(made.uuids[0], _destroy(gpu, "1g.20gb", compute=False))
    assert (await made.gpus.observe_gpu(made.uuids[0])).offer(profiles.parse("1g.20gb")).compute is not None


def _destroy(gpu: nodes.Gpu, name: str, *, compute: bool) -> Any:
    from agent.mig import plan as plans

    one = next(i for i in gpu.instances if str(i.profile) == name)
    if compute:
        return plans.DestroyComputeInstance(one.id, one.compute[0].id, one.compute[0].profile, one.placement)
    return plans.DestroyGpuInstance(one.id, one.profile, one.placement)


async def test_names_without_a_driver_that_tells_placements_of_compute(bench: Callable[..., Any]) -> None:
    made = await bench("a100.80gb:1", missing_functions=("nvmlGpuInstanceGetComputeInstancePossiblePlacements",))
    await made.mig_on()
    gpu = await made.split(0, ("3g.40gb", 0))
    offer = gpu.offer(profiles.parse("3g.40gb"))
    assert [c.placements for c in offer.compute] == [None] * len(offer.compute)
    assert offer.aliases == (profiles.parse("3g.39gb"),)


async def test_identical_gpus_ask_once_even_side_by_side(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge", latency=(("read", 0.002), ("pcie-throughput", 0.02)))
    assert made.counted()["nvmlDeviceGetGpuInstanceProfileInfoV"] == 31
    assert made.counted()["nvmlDeviceGetGpuInstancePossiblePlacements_v2"] == 7


async def test_a_driver_that_tells_profiles_only_with_mig_on(bench: Callable[..., Any]) -> None:
    made = await bench("a100.40gb:2", profiles_need_mig=True, driver_version="535.161.07")
    state = await made.gpus.observe()
    assert [gpu.offers for gpu in state.gpus] == [(), ()]
    assert [gpu.geometry_unknown for gpu in state.gpus] == [None, None]
    await made.mig_on(0)
    on, off = (await made.gpus.observe()).gpus
    assert len(on.offers) == 7
    assert off.offers == on.offers, "a GPU of the same kind with MIG on has told them"


def test_waiting_for_another_lane_has_an_end() -> None:
    book = catalog.Catalog(patience=0.05)
    inside, go = threading.Event(), threading.Event()
    answers: list[object] = []

    def hang() -> tuple[int, ...]:
        inside.set()
        go.wait(30)
        return (1,)

    known: dict[str, tuple[int, ...]] = {}
    stuck = threading.Thread(target=lambda: answers.append(book._once(known, "kind", hang)), daemon=True)
    stuck.start()
    assert inside.wait(5)
    began = time.monotonic()
    assert book._once(known, "kind", lambda: (2,)) == (2,)
    assert time.monotonic() - began < 5
    go.set()
    stuck.join(5)
    assert answers == [(2,)], "what was told first stays"


def test_a_question_that_failed_is_asked_again() -> None:
    book = catalog.Catalog()
    known: dict[str, tuple[int, ...]] = {}

    def fail() -> tuple[int, ...]:
        raise errors.Lost("lost", call="x", code=15)

    with pytest.raises(errors.Lost):
        book._once(known, "kind", fail)
    assert book._once(known, "kind", lambda: (1,)) == (1,)


def _selectors(*answers: object) -> tuple[list[int], Callable[[int], str]]:
    """Give a function that answers selectors, and what it was asked."""
    left = list(answers)
    asked: list[int] = []

    def ask(index: int) -> str:
        asked.append(index)
        answer = left.pop(0) if left else errors.InvalidArgument("end", call="x", code=2)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    return asked, ask


INVALID = errors.InvalidArgument("invalid", call="x", code=2)
UNSUPPORTED = errors.NotSupported("unsupported", call="x", code=3)


def test_the_end_of_a_table_is_believed_when_told_twice() -> None:
    asked, ask = _selectors("a", UNSUPPORTED, UNSUPPORTED, "b")
    assert list(catalog._each(ask)) == [(0, "a"), (2, "b")]
    assert asked == [0, 1, 1, 2, 3, 3]


def test_a_profile_that_cannot_be_there_is_believed_missing_at_once() -> None:
    asked, ask = _selectors("a", UNSUPPORTED, "b")
    assert list(catalog._each(ask, expected=lambda index: index != 1)) == [(0, "a"), (2, "b")]
    assert asked == [0, 1, 2, 3, 3]


def test_a_selector_unsupported_once_leaves_no_hole() -> None:
    _, ask = _selectors("a", UNSUPPORTED, "b", "c")
    assert list(catalog._each(ask)) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_selector_refused_once_does_not_cut_the_table_short() -> None:
    _, ask = _selectors("a", INVALID, "b", "c")
    assert list(catalog._each(ask)) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_dead_handle_is_not_taken_for_an_empty_table() -> None:
    _, ask = _selectors()
    with pytest.raises(errors.InvalidArgument):
        list(catalog._each(ask))
