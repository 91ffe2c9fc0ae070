"""Whether a layout fits, and what is said when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from agent.mig import node, placement, profile
from tests.mig import parts


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("a100-40gb", ["2g.10gb"] * 3),
        ("a100-40gb", ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"]),
        ("a100-40gb", ["1g.5gb"] * 7),
        ("a100-40gb", ["4g.20gb", "2g.10gb", "1g.10gb"]),
        ("a100-40gb", ["1g.5gb"] * 6 + ["1g.10gb"]),
        ("a100-40gb", ["1g.5gb"] * 6 + ["1g.5gb+me"]),
        ("a30-24gb", ["2g.12gb+me", "1g.6gb", "1g.6gb"]),
        ("rtxpro6000-server-96gb", ["1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"]),
        ("h100-sxm-80gb", ["3g.40gb@4/1c+2c", "2g.20gb@0", "1g.10gb+me@2"]),
        ("b300-269gb", ["7g.269gb"]),
        ("a100-40gb", []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
@pytest.mark.parametrize("told", [True, False], ids=["compute told", "compute unknown"])
def test_what_a_gpu_can_hold_fits(model: str, wanted: list[str], told: bool) -> None:
    assert placement.fits_empty(parts.gpu(model, told=told), parts.specs(*wanted)) is None


@pytest.mark.parametrize(
    ("model", "wanted", "says"),
    [
        (
            "a100-40gb",
            ["3g.20gb", "3g.20gb", "1g.5gb"],
            (
                "cannot place 2 x 3g.20gb and 1g.5gb on GPU 0 (a100.40gb): memory slices ran out (9 wanted, 8 there); "
                "slices 0-7 |3g.20gb|3g.20gb| leaves no room for 1g.5gb; the nearest layout that fits is 2 x 3g.20gb"
            ),
        ),
        ("a100-40gb", ["1g.5gb"] * 8, "compute slices ran out (8 wanted, 7 there)"),
        ("a100-40gb", ["1g.5gb"] * 8, "the nearest layout that fits is 7 x 1g.5gb"),
        ("a100-40gb", ["1g.5gb+me"] * 2, "media engines ran out (2 OFA wanted, 1 there)"),
        ("a100-40gb", ["1g.5gb+me"] * 2, "the nearest layout that fits is 1g.5gb and 1g.5gb+me"),
        ("a100-96gb", ["1g.12gb+me"] * 2, "max instances ran out (2 1g.12gb+me wanted, at most 1)"),
        ("a100-40gb", ["4g.20gb"] * 2, "the nearest layout that fits is 4g.20gb and 3g.20gb"),
        ("a100-40gb", ["2g.10gb"] * 4, "the nearest layout that fits is 3 x 2g.10gb and 1g.10gb"),
        ("a100-40gb", ["1g.5gb"] * 60, "leaves no room for 53 x 1g.5gb"),
        ("a100-40gb", ["2g.20gb"], "it offers 1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"),
        ("a100-40gb", ["3g.20gb@0", "2g.10gb@2"], "memory slices ran out (no places that do not overlap)"),
        ("a100-40gb", ["3g.20gb@0", "2g.10gb@2"], "the nearest layout that fits is 2g.10gb at 0, 3g.20gb at 4"),
        ("a100-40gb", ["3g.20gb@0", "7g.40gb@0"], "the nearest layout that fits is 4g.20gb and 3g.20gb"),
        ("a100-40gb", ["3g.20gb@2"], "no place of it starts at memory slice 2 (they start at 0, 4)"),
        ("a100-40gb", ["3g.20gb/2c+2c"], "cannot split 3g.20gb into 2c.3g.20gb, 2c.3g.20gb"),
        (
            "rtxpro6000-server-96gb",
            ["1g.24gb+me.all", "1g.24gb"],
            "media engines ran out (5 JPEG engines wanted, 4 there)",
        ),
        ("rtxpro6000-server-96gb", ["1g.24gb+me.all", "1g.24gb"], "slices 0-11 |1g.24gb"),
    ],
)
def test_what_does_not_fit_is_refused_with_reason_map_and_neighbour(model: str, wanted: list[str], says: str) -> None:
    text = placement.fits_empty(parts.gpu(model), parts.specs(*wanted))
    assert text is not None
    assert says in text


def test_a_part_of_another_profile_is_no_split() -> None:
    one = parts.gpu()
    strange = dataclasses.replace(parts.spec("3g.20gb"), compute=(profile.parse("1c.2g.10gb"),))
    text = placement.fits_empty(one, (strange,))
    assert text is not None
    assert "1c.2g.10gb is a part of 2g.10gb, not of it" in text


def test_a_gpu_whose_driver_tells_no_places_or_profiles_holds_nothing() -> None:
    one = parts.gpu(model_id := "a100-40gb")
    blind = dataclasses.replace(
        one, offers=tuple(dataclasses.replace(o, placements=()) for o in parts.offers(model_id))
    )
    text = placement.fits_empty(blind, parts.specs("3g.20gb"))
    assert text is not None
    assert "tells no place" in text
    text = placement.fits_empty(dataclasses.replace(one, offers=(), model=""), parts.specs("3g.20gb"))
    assert text == "cannot place 3g.20gb on GPU 0: it offers no profile"


def test_what_not_even_one_instance_of_fits_has_no_neighbour() -> None:
    """A GPU with one profile of which none may be made: the driver's own figures can be that odd."""
    one = parts.gpu()
    barren = dataclasses.replace(
        one, offers=(dataclasses.replace(one.offers[0], max_instances=0, engines=node.Engines()),)
    )
    text = placement.fits_empty(barren, parts.specs("1g.5gb"))
    assert text is not None
    assert "max instances ran out" in text
    assert "nearest" not in text
    assert "leaves" not in text


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ([], {"1g.5gb": 7, "1g.5gb+me": 1, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1}),
        (["3g.20gb@4"], {"1g.5gb": 4, "1g.5gb+me": 1, "1g.10gb": 2, "2g.10gb": 2, "3g.20gb": 1, "4g.20gb": 1}),
        (["3g.20gb@0"], {"1g.5gb": 3, "1g.5gb+me": 1, "1g.10gb": 2, "2g.10gb": 1, "3g.20gb": 1}),
        (["1g.5gb+me@2"], {"1g.5gb": 6, "1g.10gb": 3, "2g.10gb": 2, "3g.20gb": 1}),
        (["7g.40gb@0"], {}),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_what_still_fits_beside_what_is_there(held: list[str], left: dict[str, int]) -> None:
    one = parts.gpu("a100-40gb", *held)
    found = {str(o.profile): n for o in one.offers if (n := placement.remaining(one, o.profile))}
    assert found == left


def test_compute_slices_limit_what_still_fits() -> None:
    one = parts.gpu("a100-40gb", "4g.20gb@0", "2g.10gb@4")
    assert placement.remaining(one, profile.parse("1g.5gb")) == 1
    assert placement.remaining(one, profile.parse("1g.10gb")) == 1
    two = parts.gpu("a100-40gb", *(f"1g.5gb@{start}" for start in range(6)), "1g.10gb@6")
    assert [placement.remaining(two, o.profile) for o in two.offers] == [0] * 7


def test_an_unknown_profile_fits_never_and_takes_its_place() -> None:
    one = parts.gpu("a100-40gb", "3g.20gb@4")
    assert placement.remaining(one, profile.parse("9g.99gb")) == 0
    odd = dataclasses.replace(one.instances[0], profile=profile.parse("9g.99gb"))
    assert placement.remaining(dataclasses.replace(one, instances=(odd,)), profile.parse("3g.20gb")) == 1


def test_the_map_is_drawn_to_scale() -> None:
    seven = placement.geometry_of(parts.offers("a100-40gb"))
    drawn = placement.slice_map(seven, [("3g.20gb", 4, 4), ("1g.5gb+me", 0, 1)])
    assert drawn == "slices 0-7 |1g.5gb+me|free                         |3g.20gb                                |"
    cells = drawn.removeprefix("slices 0-7 |").removesuffix("|").split("|")
    assert [(len(cell) + 1) / 10 for cell in cells] == [1, 3, 4]
    twelve = placement.geometry_of(parts.offers("rtxpro6000-server-96gb"))
    assert placement.slice_map(twelve, [("2g.48gb", 6, 6)]) == "slices 0-11 |free   |2g.48gb|"
    assert placement.slice_map(seven, []) == "slices 0-7 |free           |"
