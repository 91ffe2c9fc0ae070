"""How a verb gets its node: opened, told to be simulated if it is, and closed even when a call hangs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from agent import app, daemon, errors, log
from agent.cli import options as flags
from agent.cli import parser
from agent.reconcile import cycle


def work(found: argparse.Namespace, job: Callable[[app.Node], Awaitable[int]], *, say_simulated: bool = True) -> int:
    """Open the node that the flags name, do `job` on it and return its exit code.

    Says on stderr that the node is simulated. Ends the process at once, after the error has been
    told, when a driver call hangs: its thread would keep the process.
    """
    options = flags.build(found)
    log.setup(verbose=options.verbose, quiet=not options.verbose)

    async def main() -> int:
        hung: tuple[str, ...] = ()
        try:
            async with app.open(options) as node:
                if node.simulated and say_simulated:
                    print(f"simulated node {node.simulated}: no real GPU is read or changed", file=options.stderr)
                try:
                    code = await job(node)
                finally:
                    hung = node.gpus.hung()
        except errors.GpunodeError as error:
            if not hung:
                raise
            print(parser.tell(error), file=options.stderr)
            code = error.exit_code
        if hung:
            print(f"gpunode: ending although a driver call on {', '.join(hung)} has not come back", file=options.stderr)
            daemon.end(code)
        return code

    return asyncio.run(main())


def warn(problems: tuple[errors.Problem, ...], options: app.Options) -> None:
    """Print problems of the settings to stderr, a line each, every one once."""
    for problem in dict.fromkeys(problems):
        print(f"{problem.severity}: {problem}", file=options.stderr)


def tell_owner(ownership: cycle.Ownership, options: app.Options) -> None:
    """Say on stderr who owns the layout, why, and how to take over where one may."""
    print(f"{ownership.code}: {ownership.why or f'the layout belongs to {ownership.owner}'}", file=options.stderr)
    if ownership.takeover:
        print(f"gpunode: {ownership.takeover}", file=options.stderr)
