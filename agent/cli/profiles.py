"""`gpunode profiles`: what each GPU can be split into, and what still fits beside what is there."""

from __future__ import annotations

import argparse

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.serve import render


def main(found: argparse.Namespace) -> int:
    """Print the profiles of every GPU."""
    # The document is a list, which has no place to say that the node is simulated.
    return nodes.work(found, _profiles, say_simulated=found.output == "json")


async def _profiles(node: app.Node) -> int:
    options = node.options
    state = await app.observe(node)
    if options.output == "json":
        out.document(render.profiles_document(state), options.stdout)
    else:
        out.table(render.profiles_table(state), options.stdout, options.environ)
    return errors.EXIT_OK
