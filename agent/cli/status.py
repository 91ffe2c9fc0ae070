"""`gpunode status`: the node now. `--check` answers by exit code, `--watch` draws it again and again."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time

from agent import app, errors, measures
from agent.cli import node as nodes
from agent.cli import out
from agent.reconcile import snapshot
from agent.serve import board as boards
from agent.serve import health, render

POLL = 0.5
"""Seconds between two looks of `--check --wait`."""
INTERVAL = 2.0
"""Seconds between two drawings of `--watch`, unless told."""


def main(found: argparse.Namespace) -> int:
    """Print the node, or with `--check` say by exit code whether it is as wanted."""
    if found.check and found.watch:
        raise errors.UsageError("--check answers once and --watch never ends: use one of them")
    if found.wait is not None and not found.check:
        raise errors.UsageError("--wait belongs to --check")
    if found.interval is not None and not found.watch:
        raise errors.UsageError("--interval belongs to --watch")

    async def job(node: app.Node) -> int:
        if found.check:
            return await _check(node, found.wait or 0.0)
        if found.watch:
            return await _watch(node, INTERVAL if found.interval is None else found.interval)
        return await _once(node)

    return nodes.work(found, job, say_simulated=found.output == "nvidia-smi")


def code(seen: snapshot.Snapshot) -> int:
    """Return what `--check` ends with: 2 settings, 5 no driver, 4 blocked, 3 drift, 0 as wanted."""
    if not seen.settings.valid:
        return errors.EXIT_USAGE
    if seen.node is None:
        return errors.EXIT_NO_DRIVER if seen.driver_problem is not None else errors.EXIT_FAILED
    if seen.plan.blocked:
        return errors.EXIT_BLOCKED
    return errors.EXIT_OK if seen.plan.in_sync else errors.EXIT_DRIFT


async def _look(node: app.Node) -> tuple[snapshot.Snapshot, measures.Sample | None, health.Health]:
    seen = await app.look(node)
    sample = None if seen.node is None else await app.sample(node)
    now = node.options.clock()
    return seen, sample, boards.verdict(seen, sample, now=now)


def _complain(seen: snapshot.Snapshot, options: app.Options) -> int:
    """Say on stderr what keeps the status from being shown or trusted; return the exit code."""
    nodes.warn(seen.settings.problems, options)
    if seen.driver_problem is not None:
        hint = "" if seen.simulated else f"; {app.NO_DRIVER_HINT}"
        print(f"gpunode: {seen.driver_problem}{hint}", file=options.stderr)
        return errors.EXIT_NO_DRIVER
    return errors.EXIT_OK if seen.settings.valid else errors.EXIT_USAGE


async def _once(node: app.Node) -> int:
    options = node.options
    seen, sample, judged = await _look(node)
    if options.output == "json":
        out.document(render.status_document(seen, sample, judged), options.stdout)
    elif seen.node is not None and options.output == "nvidia-smi":
        print(render.nvidia_smi(seen.node), file=options.stdout)
    elif seen.node is not None:
        out.table(render.status_table(seen, sample, judged), options.stdout, options.environ)
    return _complain(seen, options)


async def _pause(node: app.Node, seconds: float) -> None:
    """Wait with the driver let go of: an open session of ours would make a reset by `apply` or the
    daemon fail, which is just what is being waited for or watched."""
    try:
        await node.gpus.release()
    except errors.BlockedError:  # a call hangs; then nobody can reset that GPU anyway
        await asyncio.sleep(seconds)
        return
    await asyncio.sleep(seconds)
    try:
        await node.gpus.retake()
    except errors.DriverError:
        pass  # the next look says so


async def _check(node: app.Node, wait: float) -> int:
    options = node.options
    until = time.monotonic() + wait
    while True:
        seen = await app.look(node)
        answer = code(seen)
        if answer == errors.EXIT_OK or time.monotonic() >= until:
            break
        await _pause(node, min(POLL, max(0.0, until - time.monotonic())))
    if options.output == "json":
        now = options.clock()
        out.document(render.status_document(seen, None, boards.verdict(seen, now=now)), options.stdout)
    elif answer == errors.EXIT_OK:
        simulated = f" (simulated {seen.simulated})" if seen.simulated else ""
        print(f"{seen.phase.value}{simulated}: as wanted", file=options.stdout)
    if answer != errors.EXIT_OK and _complain(seen, options) == errors.EXIT_OK:
        for line in render.reason_lines(seen.reasons, seen.node):
            print(line, file=options.stderr)
    return answer


async def _watch(node: app.Node, interval: float) -> int:
    """Draw until Ctrl-C, which is how it is meant to end: 0 then."""
    try:
        while True:
            await _draw(node)
            await _pause(node, max(interval, 0.1))
    except asyncio.CancelledError:  # what asyncio.run makes of Ctrl-C
        return errors.EXIT_OK


async def _draw(node: app.Node) -> None:
    """Draw the node once: on a terminal in place, else behind what was drawn before."""
    options = node.options
    seen, sample, judged = await _look(node)
    if options.output == "json":
        out.document(render.status_document(seen, sample, judged), options.stdout)
    elif options.output == "nvidia-smi" and seen.node is not None:
        print(render.nvidia_smi(seen.node), file=options.stdout, flush=True)
    else:
        text = render.status_table(seen, sample, judged)
        if options.stdout.isatty() and options.environ.get("TERM") != "dumb":
            width, height = shutil.get_terminal_size()
            lines = [line[:width] for line in text.splitlines()[: height - 1]]
            text = "\x1b[H\x1b[2J" + "\n".join(lines)
        out.table(text, options.stdout, options.environ)
