"""`gpunode export`: the layout that is there, as a document that asks for just that."""

from __future__ import annotations

import argparse

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.settings import write


def main(found: argparse.Namespace) -> int:
    """Print the document; 1 with the reason when the format cannot say what is there."""
    if found.exact and found.format != "gpunode":
        raise errors.UsageError(f"--exact belongs to --format gpunode: a {found.format} document cannot say where")
    if found.label is not None and found.format != "mig-parted":
        raise errors.UsageError("--label belongs to --format mig-parted")

    async def export(node: app.Node) -> int:
        options = node.options
        state = await app.observe(node)
        if found.format == "bottlerocket":
            text = write.to_bottlerocket(state)
        elif found.format == "mig-parted":
            text = write.to_mig_parted(state, label=found.label or "current")
        else:
            text = write.to_gpunode(state, exact=found.exact)
        if options.output == "json":
            out.document({"simulated": node.simulated, "format": found.format, "document": text}, options.stdout)
        else:
            print(text, end="", file=options.stdout)
        return errors.EXIT_OK

    return nodes.work(found, export, say_simulated=False)
