"""The claims that the bench times are decided right."""

from __future__ import annotations

from pathlib import Path

from tests.bench import claims


def test_eight_gpus_with_different_layouts_in_both_directions(tmp_path: Path) -> None:
    assert len({tuple(layout) for layout in claims.LAYOUTS}) == 8
    told = list(claims.rows(tmp_path))
    assert [row.unit for row in told] == ["ms", "ms"]
    assert all(row.reached for row in told)
