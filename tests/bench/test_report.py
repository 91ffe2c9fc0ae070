"""Figures are only worth what the arithmetic on them is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.bench import report


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 100.0])
def test_exponent_is_found_beside_a_fixed_cost(power: float, fixed: float) -> None:
    points = [(float(n), fixed + 3.0 * n**power) for n in (1, 2, 4, 8, 16, 72)]
    assert report.exponent(points) == pytest.approx(power, abs=0.02)


def test_what_hardly_changes_has_no_exponent() -> None:
    assert report.exponent([(1, 59.4), (2, 59.3), (4, 59.9), (7, 60.4)]) == 0
    assert report.exponent([(1, 10.0), (2, 11.0), (4, 13.0), (7, 16.0)]) == pytest.approx(1, abs=0.02)


def test_a_figure_is_worse_only_beyond_its_slack() -> None:
    row = report.Row("memory", 50.0, "MiB", slack=1.1, noise=1.0)
    assert not report.worse([dataclasses.replace(row, value=56.0)], {"memory": 50.0})
    assert report.worse([dataclasses.replace(row, value=56.1)], {"memory": 50.0})
    rate = report.Row("rate", 1.0, "x", least=True, slack=1.25)
    assert not report.worse([dataclasses.replace(rate, value=0.8)], {"rate": 1.0})
    assert report.worse([dataclasses.replace(rate, value=0.79)], {"rate": 1.0})


def test_seconds_are_told_and_not_compared() -> None:
    assert not report.worse([report.Row("start", 9.0, "s")], {"start": 1.0})


def test_baseline_reads_what_was_written(tmp_path: Path) -> None:
    rows = [report.Row("a", 1.5, "x", reach=1.3), report.Row("b", 3, "calls", reach=0)]
    report.write(tmp_path / "out.json", rows)
    assert report.read_baseline(tmp_path / "out.json") == {"a": 1.5, "b": 3}
    assert report.read_baseline(tmp_path / "none.json") == {}
    assert [row.reached for row in rows] == [False, False]
    text = report.table(rows, {"a": 1.4})
    assert "MISSED" in text
    assert "1.4" in text
