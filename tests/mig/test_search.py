"""The search finds the best places, and a bound never costs it one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mig import profile, search
from tests.mig import parts


def geometry(model: str = "a100-40gb") -> search.Geometry:
    return search.Geometry(parts.offers(model))


def number(of: search.Geometry, name: str) -> int:
    found = of.number(profile.parse(name))
    assert found is not None
    return found


def counts(of: search.Geometry, **wanted: int) -> dict[int, int]:
    return {number(of, name.replace("_", ".").replace("PLUS", "+")): count for name, count in wanted.items()}


@pytest.mark.parametrize(
    ("model", "pools"),
    [
        ("a100-40gb", {"decoder": 5, "encoder": 0, "jpeg": 1, "ofa": 1}),
        ("h100-sxm-80gb", {"decoder": 7, "encoder": 0, "jpeg": 7, "ofa": 1}),
        ("rtxpro6000-server-96gb", {"decoder": 4, "encoder": 4, "jpeg": 4, "ofa": 1}),
        ("a100-96gb", {}),
    ],
)
def test_a_pool_of_media_engines_is_what_a_full_gpu_has_and_unknown_is_no_pool(
    model: str, pools: dict[str, int]
) -> None:
    assert geometry(model).pools == pools


@pytest.mark.parametrize(
    ("model", "wanted", "resource"),
    [
        ("a100-40gb", {"3g_20gb": 2, "1g_5gb": 1}, "memory slices"),
        ("a100-40gb", {"1g_5gb": 8}, "compute slices"),
        ("a100-40gb", {"1g_5gbPLUSme": 2}, "media engines"),
        ("a100-96gb", {"1g_12gbPLUSme": 2}, "max instances"),
        ("a100-40gb", {"3g_20gb": 2}, None),
        ("a100-40gb", {"1g_5gb": 0}, None),
    ],
)
def test_the_resource_that_runs_out_is_named(model: str, wanted: dict[str, int], resource: str | None) -> None:
    one = geometry(model)
    shortage = one.shortage(counts(one, **wanted))
    assert (None if shortage is None else shortage.resource) == resource


def test_a_profile_that_is_not_offered_has_no_number() -> None:
    assert geometry().number(profile.parse("1g.10gb+me")) is None


def test_the_largest_free_block_is_what_an_instance_can_still_take() -> None:
    one = geometry()
    # A 1g at 6, as the driver places it, leaves a 4g; at 0 it leaves a longer run, but only a 3g.
    assert one.room(1 << 6) > one.room(1)
    assert one.room(0)[:2] == (8, 7)
    assert one.room(0b11111111) == (0, 0, 0, 0)
    # The last slice of a seven-slice part serves no 1g: free, but no block.
    assert one.room(0b01111111) == (0, 0, 1, 0)


def test_a_gpu_that_offers_nothing_has_no_slices() -> None:
    empty = search.Geometry(())
    assert (empty.slots, empty.compute_slices, empty.base_multiprocessors) == (0, 0, 0)
    assert search.arrange(empty, [], {}) == search.Arrangement((), 0)


def options(of: search.Geometry, name: str, present: dict[int, int] | None = None) -> tuple[search.Option, ...]:
    return tuple(
        search.Option(start, mask, *((present[start], 1) if present and start in present else ()))
        for start, mask in of.places[number(of, name)]
    )


def test_more_instances_than_places_cannot_be() -> None:
    one = geometry()
    assert search.arrange(one, [search.Group(3, options(one, "3g.20gb"))], {}) is None


def test_a_busy_instance_that_no_group_takes_forbids_the_strict_answer_only() -> None:
    one = geometry()
    group = search.Group(1, options(one, "1g.5gb"))
    busy = {0: 0b1111}
    assert search.arrange(one, [group], busy) is None
    assert search.arrange(one, [], busy) is None
    assert search.arrange(one, [group], busy, strict=False) is not None


def test_equal_places_go_to_the_lowest_starts() -> None:
    one = geometry("a30-24gb")
    found = search.arrange(one, [search.Group(1, options(one, "4g.24gb"))], {})
    assert found is not None
    assert found.used == 0b1111
    half = search.arrange(one, [search.Group(1, options(one, "2g.12gb"))], {})
    assert half is not None
    assert [o.start for o in half.places[0]] == [0]


small = st.lists(
    st.tuples(st.sampled_from(["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb"]), st.integers(1, 3)),
    min_size=1,
    max_size=4,
    unique_by=lambda pair: pair[0],
)


@given(small, st.dictionaries(st.integers(0, 6), st.booleans(), max_size=5), st.booleans())
def test_nothing_beats_what_the_search_finds(
    wanted: list[tuple[str, int]], there: dict[int, bool], strict: bool
) -> None:
    """Against all choices of places, tried one by one."""
    one = geometry()
    present = {start: at for at, start in enumerate(sorted(there))}
    busy = {present[start]: 1 << start for start, held in there.items() if held}
    groups = [search.Group(count, options(one, name, present if name == "1g.5gb" else None)) for name, count in wanted]
    found = search.arrange(one, groups, busy, strict=strict)
    best: tuple[object, ...] | None = None
    for choice in itertools.product(*(itertools.combinations(group.options, group.count) for group in groups)):
        flat = [option for group in choice for option in group]
        used = 0
        for option in flat:
            if option.mask & used:
                break
            used |= option.mask
        else:
            saved = sum(option.present in busy for option in flat)
            if strict and saved < len(busy):
                continue
            kept = sum(option.present >= 0 for option in flat)
            full = (saved, kept, sum(option.kept for option in flat), one.room(used))
            if best is None or full > best:
                best = full
    if found is None:
        assert best is None
        return
    flat = [option for group in found.places for option in group]
    assert [len(group) for group in found.places] == [group.count for group in groups]
    assert (
        sum(option.present in busy for option in flat),
        sum(option.present >= 0 for option in flat),
        sum(option.kept for option in flat),
        one.room(found.used),
    ) == best
