"""`gpunode run`: the daemon."""

from __future__ import annotations

import argparse

from agent import daemon
from agent.cli import options


def main(found: argparse.Namespace) -> int:
    """Run the daemon until a signal."""
    return daemon.run(options.build(found))
