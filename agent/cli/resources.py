"""`gpunode resources`: what the schedulers will see of this node as it is now."""

from __future__ import annotations

import argparse

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.mig import advertise
from agent.serve import render


def main(found: argparse.Namespace) -> int:
    """Print what device plugin, DRA driver and ECS will find."""
    return nodes.work(found, _resources, say_simulated=False)


async def _resources(node: app.Node) -> int:
    options = node.options
    state = await app.observe(node)
    advertised = advertise.advertise(state)
    if options.output == "json":
        out.document({"simulated": node.simulated, **render.resources_document(advertised)}, options.stdout)
    else:
        out.table(render.resources_table(advertised, simulated=node.simulated), options.stdout, options.environ)
    return errors.EXIT_OK
