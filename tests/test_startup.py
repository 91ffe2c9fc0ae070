"""`version` and `--help` answer at once: what they import is counted, as seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent import __version__

HEAVY = {
    *("agent.app", "agent.daemon", "agent.nvml", "agent.serve", "agent.settings", "agent.sim"),
    *("aiohttp", "prometheus_client", "pydantic", "pynvml", "rich", "ruamel", "tomli"),
    *(
        "asyncio",
        "dataclasses",
        "importlib.metadata",
        "pathlib",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "tomllib",
        "typing",
    ),
}
ROOM = 12
"""Modules beyond those of argparse and our own that a start may need."""

_SAY_MODULES = """
import sys
from agent.cli import parser
try:
    code = parser.run(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def modules(code: str, *argv: str) -> tuple[set[str], str]:
    """Run `code` in a Python without site packages' start-up files; return what it imported and printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split()), done.stdout


@pytest.mark.parametrize("argv", [("version",), ("--help",), ("run", "--help")])
def test_start_imports_nothing_heavy(argv: tuple[str, ...]) -> None:
    loaded, printed = modules(_SAY_MODULES, *argv)
    bare, _ = modules("import sys, argparse, json; print(*sorted(sys.modules), file=sys.stderr)")
    assert printed
    assert not (loaded - bare) & HEAVY
    others = {name for name in loaded - bare if not name.startswith("agent")}
    assert len(others) <= ROOM, sorted(others)


def test_version_is_the_package_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", "version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert __version__ in done.stdout
