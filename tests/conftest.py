"""What every test begins with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from agent import log


@pytest.fixture(scope="session", autouse=True)
def _nothing_steers_from_outside() -> None:
    """Forget the variables that whoever runs the tests may have set for gpunode."""
    for name in [name for name in os.environ if name.startswith("GPUNODE_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> Iterator[None]:
    """Undo what a test set about logging: the setting is the process's, and a worker runs many tests."""
    yield
    log.setup()
    log.set_sink(None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests printed as a figure: how much was judged, which a bare "passed" does not say."""
    for report in terminalreporter.getreports("passed"):
        for figure in re.findall(r"^figure: (.*)$", report.capstdout, re.MULTILINE):
            terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {figure}")
