"""What is wanted is found by GPU."""

from __future__ import annotations

from agent.mig import layout
from tests.mig import parts


def test_a_layout_answers_for_the_gpus_that_somebody_declared() -> None:
    wanted = parts.wanted("2g.10gb@4", "3g.20gb/1c+2c")
    found = wanted.gpu(parts.UUID)
    assert found is wanted.gpus[0]
    assert [str(spec.profile) for spec in found.instances] == ["2g.10gb", "3g.20gb"]
    assert [spec.start for spec in found.instances] == [4, None]
    assert wanted.gpu("GPU-other") is None
    assert layout.Layout().gpus == ()
