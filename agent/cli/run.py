"""`gpunode run`: the daemon."""

from __future__ import annotations

import argparse

from agent import memory


def main(found: argparse.Namespace) -> int:
    """Run the daemon until a signal."""
    memory.hold()  # before the imports, which are most of a start
    from agent import daemon
    from agent.cli import options

    return daemon.run(options.build(found))
