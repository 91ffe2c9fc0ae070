"""Names of profiles: what is one, how it prints, and the figure in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mig import profile
from tests.mig import parts


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1g.5gb", profile.Profile(1, 5)),
        ("1c.3g.20gb", profile.Profile(3, 20, 1)),
        ("7c.7g.40gb", profile.Profile(7, 40, 7)),
        ("1g.5gb+me", profile.Profile(1, 5, None, ("me",))),
        ("1g.24gb+me.all", profile.Profile(1, 24, None, ("me.all",))),
        ("2g.48gb+gfx", profile.Profile(2, 48, None, ("gfx",))),
        ("1g.24gb-me", profile.Profile(1, 24, None, (), ("me",))),
        ("1g.24gb+gfx,me", profile.Profile(1, 24, None, ("gfx", "me"))),
        ("1c.2g.12gb+me", profile.Profile(2, 12, 1, ("me",))),
        ("1g.0gb", profile.Profile(1, 0)),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_name_is_read_and_printed_as_it_was(text: str, meant: profile.Profile) -> None:
    assert profile.parse(text) == meant
    assert str(meant) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a MIG profile name"),
        ("1g.5", "like 1g.10gb"),
        ("1G.5gb", "not a MIG profile name"),
        ("1g.5gb ", "not a MIG profile name"),
        ("1g.5gb+", "not a MIG profile name"),
        ("1g.5gb+me-me", '"me-me" is no attribute'),
        ("1g.5gb+.me", '".me" is no attribute'),
        ("1g.5gb+me.", '"me." is no attribute'),
        ("1g.5gb+me,", '"" is no attribute'),
        ("1g.5gb+me,me", "given twice"),
        ("0g.5gb", "count from 1"),
        ("0c.1g.5gb", "count from 1"),
        ("4c.3g.20gb", "4 compute slices do not fit in 3"),
        ("١g.5gb", "not a MIG profile name"),
        ("1g.12345gb", "not a MIG profile name"),
    ],
)
def test_what_is_no_name_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(profile.ProfileSyntaxError, match="not a MIG profile name") as caught:
        profile.parse(text)
    assert says in str(caught.value)


words = st.from_regex(r"[a-z][a-z0-9]{0,3}(\.[a-z0-9]{1,3})?", fullmatch=True)


@given(st.text(alphabet="0123456789cgb.+-,mexfal", max_size=20))
def test_whatever_is_accepted_prints_as_an_equal_profile(text: str) -> None:
    try:
        read = profile.parse(text)
    except profile.ProfileSyntaxError:
        return
    assert profile.parse(str(read)) == read


@given(st.integers(1, 8), st.integers(0, 9999), st.lists(words, unique=True, max_size=3), st.booleans())
def test_every_profile_survives_its_name(slices: int, gb: int, attributes: list[str], plus: bool) -> None:
    found = tuple(attributes)
    one = profile.Profile(slices, gb, None, found if plus else (), () if plus else found)
    assert profile.parse(str(one)) == one
    assert one.is_gpu_instance
    part = one.part(1)
    assert not part.is_gpu_instance
    assert part.gpu_instance == one
    assert one.gpu_instance is one


def test_the_figure_in_the_name_follows_the_rule_for_every_known_profile() -> None:
    counted = 0
    for model in parts.models().values():
        total = model["memory_total_mib"]["nvml"]
        for entry in model["gi_profiles"]:
            if total and entry["memory_mib"] and model["id"] != "thor-igpu":
                named = profile.parse(entry["name"]).memory_gb
                assert profile.name_gb(entry["memory_mib"], total * 2**20) == named, (model["id"], entry["name"])
                counted += 1
    assert counted > 100


def test_half_a_gigabyte_rounds_up_where_python_would_go_to_even() -> None:
    assert profile.name_gb(70 * 1024, 141 * 2**30) == 71
