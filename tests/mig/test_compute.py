"""Compute instances: which kind a name means, where they go, which stay."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mig import compute, node, profile
from tests.mig import parts


def offer(model: str, name: str, *, told: bool = True) -> node.ProfileOffer:
    found = parts.gpu(model, told=told).offer(profile.parse(name))
    assert found is not None
    return found


@pytest.mark.parametrize("told", [True, False], ids=["told by the driver", "by rule"])
@pytest.mark.parametrize(
    ("model", "gi", "name", "kind"),
    [
        ("a100-40gb", "3g.20gb", "3g.20gb", compute.WHOLE),
        ("a100-40gb", "3g.20gb", "1c.3g.20gb", 1),
        ("a100-40gb", "7g.40gb", "7c.7g.40gb", compute.WHOLE),
        ("a100-40gb", "1g.10gb", "1c.1g.10gb", compute.WHOLE),
        ("h100-sxm-80gb", "1g.10gb", "1c.1g.10gb", compute.WHOLE),
        ("h100-sxm-80gb", "1g.20gb", "1c.1g.20gb", 1),
        ("h100-sxm-80gb", "1g.20gb", "1g.20gb", compute.WHOLE),
    ],
)
def test_a_name_means_the_whole_instance_or_a_part_of_its_sms(
    model: str, gi: str, name: str, kind: int, told: bool
) -> None:
    one = offer(model, gi, told=told)
    base = 16 if model.startswith("h100") else 14
    assert compute.kind_of(one, profile.parse(name), base_multiprocessors=base) == kind


def test_both_names_told_are_two_kinds_even_where_sms_are_not_known() -> None:
    one = offer("a100-96gb", "1g.24gb")
    assert {c.multiprocessors for c in one.compute or ()} == {0}
    assert compute.kind_of(one, profile.parse("1c.1g.24gb")) == 1
    assert compute.kind_of(one, profile.parse("1g.24gb")) == compute.WHOLE


def present(name: str, sms: int) -> node.ComputeInstance:
    return node.ComputeInstance(
        id=0, profile=profile.parse(name), profile_id=node.ProfileId(0), uuid=None, multiprocessors=sms, slices=1
    )


def test_the_small_compute_instance_of_a_double_memory_slice_is_not_the_default() -> None:
    for told in (True, False):
        one = offer("h100-sxm-80gb", "1g.20gb", told=told)
        assert compute.kind_present(one, present("1c.1g.20gb", 16)) == 1
        assert compute.kind_present(one, present("1g.20gb", 26)) == compute.WHOLE


def test_a_full_part_with_all_sms_is_the_whole_one_whatever_it_is_called() -> None:
    one = offer("a100-40gb", "1g.10gb", told=False)
    assert compute.kind_present(one, present("1c.1g.10gb", 14)) == compute.WHOLE
    assert compute.kind_present(one, present("1c.1g.10gb", 7)) == 1
    assert compute.kind_present(offer("a100-40gb", "3g.20gb", told=False), present("1c.3g.20gb", 42)) == 1


@pytest.mark.parametrize("model", sorted(parts.models()))
def test_the_rule_for_starts_is_what_drivers_print(model: str) -> None:
    for told, by_rule in zip(parts.offers(model), parts.offers(model, told=False), strict=True):
        assert told.compute is not None
        kinds = {c.profile.compute_slices or 0 for c in told.compute} - {0}
        for kind in range(1, told.slices):
            assert compute.starts_of(by_rule, kind) == compute.starts_of(told, kind)
            assert bool(compute.starts_of(by_rule, kind)) == (kind in kinds), (told.profile, kind)


def test_starts_are_cut_to_the_count_where_an_old_driver_tells_no_places() -> None:
    one = offer("a100-40gb", "3g.20gb")
    assert one.compute is not None
    old = dataclasses.replace(one, compute=tuple(dataclasses.replace(c, placements=None) for c in one.compute))
    assert compute.starts_of(old, 2) == (0,)
    assert compute.starts_of(old, 1) == (0, 1, 2)
    assert compute.starts_of(old, 3) == ()


def settled(gi: str, wanted: str, *there: compute.Present) -> compute.Settled | None:
    kinds = [0 if word == "whole" else int(word) for word in wanted.split()]
    return compute.settle(offer("a100-40gb", gi), kinds, there)


def test_the_largest_goes_first_because_a_2c_of_a_3g_fits_only_at_0() -> None:
    found = settled("3g.20gb", "1 2")
    assert found == compute.Settled((), (compute.New(2, 0), compute.New(1, 2)))


def test_the_whole_one_has_one_place_which_the_driver_knows() -> None:
    assert settled("3g.20gb", "whole") == compute.Settled((), (compute.New(0, None),))


def test_what_is_there_as_wanted_stays() -> None:
    there = compute.Present(2, 0), compute.Present(1, 2)
    assert settled("3g.20gb", "1 2", *there) == compute.Settled((0, 1), ())


def test_a_small_one_in_the_way_of_a_large_one_goes_if_nobody_uses_it() -> None:
    assert settled("3g.20gb", "1 2", compute.Present(1, 0)) == compute.Settled(
        (), (compute.New(2, 0), compute.New(1, 2))
    )
    assert settled("3g.20gb", "1 2", compute.Present(1, 0, busy=True)) is None
    assert settled("3g.20gb", "1 2", compute.Present(1, 2, busy=True)) == compute.Settled((0,), (compute.New(2, 0),))


def test_strange_ones_go_and_busy_strange_ones_forbid_it() -> None:
    assert settled("3g.20gb", "whole", compute.Present(1, 1)) == compute.Settled((), (compute.New(0, None),))
    assert settled("3g.20gb", "whole", compute.Present(1, 1, busy=True)) is None


def test_duplicates_are_removed_down_to_what_is_wanted() -> None:
    there = [compute.Present(1, start) for start in range(3)]
    assert settled("3g.20gb", "1", *there) == compute.Settled((0,), ())
    there[2] = compute.Present(1, 2, busy=True)
    assert settled("3g.20gb", "1", *there) == compute.Settled((2,), ())


def test_beside_one_of_unknown_place_only_single_slices_are_made() -> None:
    unknown = compute.Present(1, None)
    assert settled("3g.20gb", "1 1", unknown) == compute.Settled((0,), (compute.New(1, None),))
    assert settled("3g.20gb", "1 2", unknown) == compute.Settled((), (compute.New(2, 0), compute.New(1, 2)))


def test_beside_a_busy_one_of_unknown_place_the_driver_has_the_last_word() -> None:
    busy = compute.Present(1, None, busy=True)
    assert settled("3g.20gb", "1 2", busy) == compute.Settled((0,), (compute.New(2, None),))


def test_a_split_that_fits_has_no_problem() -> None:
    assert compute.problem(offer("a100-40gb", "7g.40gb"), (1, 2, 4)) is None
    assert compute.problem(offer("a100-40gb", "3g.20gb"), (compute.WHOLE,)) is None


def test_a_split_that_is_too_much_says_what_runs_out_and_what_is_nearest() -> None:
    text = compute.problem(offer("a100-40gb", "3g.20gb"), (1, 1, 2))
    assert text == (
        "cannot split 3g.20gb into 1c.3g.20gb, 1c.3g.20gb, 2c.3g.20gb: compute slices ran out (4 wanted, 3 there); "
        "the nearest split that fits is 2c.3g.20gb, 1c.3g.20gb"
    )


def test_slices_that_do_not_line_up_are_told_apart_from_too_many() -> None:
    one = offer("a100-40gb", "3g.20gb")
    assert one.compute is not None
    odd = dataclasses.replace(one.compute[0], placements=(node.Placement(0, 1), node.Placement(1, 1)))
    text = compute.problem(dataclasses.replace(one, compute=(odd, *one.compute[1:])), (1, 2))
    assert text is not None
    assert "3 wanted, 3 there" in text
    assert "do not line up" in text


def test_a_part_that_is_not_offered_is_refused_with_what_is() -> None:
    for told in (True, False):
        text = compute.problem(offer("a100-40gb", "4g.20gb", told=told), (3, 1))
        assert text is not None
        assert "no 3c.4g.20gb" in text
        assert "4g.20gb, 1c.4g.20gb, 2c.4g.20gb" in text


@st.composite
def situations(draw: st.DrawFn) -> tuple[node.ProfileOffer, tuple[int, ...], tuple[compute.Present, ...]]:
    one = offer("a100-40gb", draw(st.sampled_from(["2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"])))
    kinds = [k for k in range(one.slices + 1) if compute.starts_of(one, k)]

    def fill(options: list[int]) -> list[tuple[int, int]]:
        used: set[int] = set()
        found = []
        for kind in options:
            width = one.slices if kind == 0 else kind
            for start in compute.starts_of(one, kind):
                span = set(range(start, start + width))
                if not span & used and draw(st.booleans()):
                    used |= span
                    found.append((kind, start))
                    break
        return found

    wanted = tuple(kind for kind, _ in fill(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))))
    there = fill(draw(st.lists(st.sampled_from(kinds), max_size=7)))
    return one, wanted or (0,), tuple(compute.Present(k, s, draw(st.booleans())) for k, s in there)


@given(situations())
def test_settling_keeps_as_many_as_any_way_does(
    situation: tuple[node.ProfileOffer, tuple[int, ...], tuple[compute.Present, ...]],
) -> None:
    one, wanted, there = situation
    found = compute.settle(one, wanted, there)
    spans = {
        k: [set(range(s, s + (k or one.slices))) for s in compute.starts_of(one, k)] for k in range(one.slices + 1)
    }
    best = -1
    busy = {i for i, p in enumerate(there) if p.busy}
    places = [[(k, frozenset(span)) for span in spans[k]] for k in wanted]
    existing = [(p.kind, frozenset(range(p.start or 0, (p.start or 0) + (p.kind or one.slices)))) for p in there]
    for chosen in itertools.product(*places):
        if sum(len(span) for _, span in chosen) == len(set().union(*(span for _, span in chosen))):
            kept = {i for i, place in enumerate(existing) if place in chosen}
            if busy <= kept:
                best = max(best, len(kept))
    if found is None:
        assert best == -1
        return
    assert len(found.kept) == best
    result = [existing[i] for i in found.kept]
    result += [(n.kind, frozenset(range(n.start or 0, (n.start or 0) + (n.kind or one.slices)))) for n in found.new]
    assert sorted(k for k, _ in result) == sorted(wanted)
    assert sum(len(span) for _, span in result) == len(set().union(*(span for _, span in result)))
    widths = [n.kind or one.slices for n in found.new]
    assert widths == sorted(widths, reverse=True)
