"""`gpunode plan`: what `apply` would do, and why. It never touches a GPU."""

from __future__ import annotations

import argparse

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.serve import render


def main(found: argparse.Namespace) -> int:
    """Print the plan; 0 when in sync, 3 when something would be done, 4 when something is in the way."""
    return nodes.work(found, _plan)


async def _plan(node: app.Node) -> int:
    options = node.options
    planned = await app.plan(node)
    nodes.warn((*node.require_settings().problems, *planned.problems), options)
    show(planned, options, json_to=options.stdout)
    if planned.plan.in_sync and not planned.plan.blocked:
        return errors.EXIT_OK
    if not planned.ownership.may_write:
        nodes.tell_owner(planned.ownership, options)
        return errors.EXIT_BLOCKED
    hindrance = node.around.hindrance()
    if hindrance is None and node.require_settings().enforcement == "observe":
        hindrance = ("observe", "enforcement is set to observe")
    if hindrance is not None:
        print(f"gpunode: apply would not do it: {hindrance[1]}", file=options.stderr)
    return errors.EXIT_BLOCKED if planned.plan.blocked else errors.EXIT_DRIFT


def show(planned: app.Planned, options: app.Options, *, json_to: object = None) -> None:
    """Print a plan as a table, or with `--output json` as a document to stdout (`json_to` given) or
    else as a table to stderr, so that it is seen before it runs."""
    if options.output != "json":
        out.table(render.plan_table(planned.plan, planned.state), options.stdout, options.environ)
        if not planned.layout.gpus:
            print("no layout is declared for any GPU of this node", file=options.stderr)
    elif json_to is not None:
        out.document(document(planned), options.stdout)
    else:
        out.table(render.plan_table(planned.plan, planned.state), options.stderr, options.environ)


def document(planned: app.Planned) -> render.Document:
    """Return the plan with whose layout it is and what is doubtful about the settings."""
    told = render.plan_document(planned.plan, planned.state)
    told["owner"] = {
        "owner": planned.ownership.owner,
        "may_write": planned.ownership.may_write,
        "why": planned.ownership.why,
        "takeover": planned.ownership.takeover,
    }
    told["warnings"] = [render.problem_document(problem) for problem in dict.fromkeys(planned.problems)]
    return told
