"""`gpunode resources`: what the schedulers will see of this node as it is now, and what they really have."""

from __future__ import annotations

import argparse

from agent import app, errors, threads
from agent.cli import node as nodes
from agent.cli import out
from agent.host import facts as hosts
from agent.mig import advertise
from agent.serve import render


def main(found: argparse.Namespace) -> int:
    """Print what device plugin, DRA driver and ECS will find."""
    return nodes.work(found, _resources, say_simulated=False)


async def _resources(node: app.Node) -> int:
    options = node.options
    state = await app.observe(node)
    facts = await threads.run(lambda: hosts.gather(node.machine, state), name="facts")
    advertised = advertise.advertise(state)
    if options.output == "json":
        document = {"simulated": node.simulated, **render.resources_document(advertised, state, facts)}
        out.document(document, options.stdout)
    else:
        text = render.resources_table(advertised, simulated=node.simulated, node=state, facts=facts)
        out.table(text, options.stdout, options.environ)
    return errors.EXIT_OK
