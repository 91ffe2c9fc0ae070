"""What every test begins with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent import log


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> Iterator[None]:
    """Undo what a test set about logging: the setting is the process's, and a worker runs many tests."""
    yield
    log.setup()
    log.set_sink(None)
