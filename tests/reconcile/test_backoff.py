"""Delays double, are bounded, and jitter keeps them apart."""

from __future__ import annotations

import pytest

from agent.reconcile import backoff


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [(0, 5.0), (1, 5.0), (2, 10.0), (3, 20.0), (7, 300.0), (10_000, 300.0)],
)
def test_the_middle_of_the_jitter_is_the_delay(attempt: int, seconds: float) -> None:
    assert backoff.delay(attempt, 0.5) == seconds


def test_jitter_spreads_a_quarter_to_both_sides() -> None:
    assert backoff.delay(1, 0.0) == 3.75
    assert backoff.delay(1, 1.0) == 6.25
