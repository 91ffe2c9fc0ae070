"""`gpunode apply`: one enforcement cycle. The plan is always shown before it runs.

Ctrl-C, SIGTERM and a terminal that closes end it between two steps, with exit 1 and a sentence about what was and was not
done. A second Ctrl-C does not wait for the step at hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys

from agent import app, daemon, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.cli import plan as plans
from agent.mig import plan as steps
from agent.reconcile import snapshot
from agent.serve import board as boards
from agent.serve import render

REBOOT_WAIT = 300.0
"""Seconds that a requested reboot has to end this process, before that is called a failure."""
TERM_WAIT = 2.5
"""Seconds that the step at hand has to end after SIGTERM; the promise is 3."""


def main(found: argparse.Namespace) -> int:
    """Show the plan, ask on a terminal unless `--yes`, do it, and tell what came of it."""
    return nodes.work(found, _apply)


async def _apply(node: app.Node) -> int:
    options = node.options
    planned = await app.plan(node)
    warnings = tuple(dict.fromkeys((*node.require_settings().problems, *planned.problems)))
    nodes.warn(warnings, options)
    plans.show(planned, options)
    in_sync = planned.plan.in_sync and not planned.plan.blocked
    if not in_sync and not planned.ownership.may_write:
        nodes.tell_owner(planned.ownership, options)
        return _end(planned, warnings, await app.look(node), options, errors.EXIT_BLOCKED)
    if planned.plan.steps and not options.yes and not _confirmed(planned.plan, options):
        print("gpunode: nothing was changed", file=options.stderr)
        return errors.EXIT_FAILED
    try:
        after, interrupted = await _work(node, planned)
    except errors.BlockedError as cause:
        if not in_sync:
            raise
        print(f"gpunode: nothing to do, and {cause}", file=options.stderr)
        after, interrupted = await app.look(node), False
    code = _code(after)
    for line in render.reason_lines(after.reasons, after.node):
        print(line, file=options.stderr)
    if interrupted and code != errors.EXIT_OK:
        code = errors.EXIT_FAILED
    if interrupted:
        print(f"gpunode: stopped; {_told(after)}", file=options.stderr)
    elif options.output != "json" and code == errors.EXIT_OK:
        print(_done(after), file=options.stdout)
    if after.phase is snapshot.Phase.REBOOT_PENDING:
        code = await _await_reboot(node)
    return _end(planned, warnings, after, options, code)


def _confirmed(plan: steps.Plan, options: app.Options) -> bool:
    """Ask on a terminal. Raises UsageError where there is nobody to ask."""
    if not (sys.stdin is not None and sys.stdin.isatty() and options.stderr.isatty()):
        raise errors.UsageError("there is no terminal to ask on; use --yes to apply this plan without being asked")
    print(f"apply these {plan.steps} steps? [y/N] ", end="", file=options.stderr, flush=True)
    # asyncio turns Ctrl-C into a cancellation that a blocking read would never notice.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=options.stderr)
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return answer.strip().lower() in ("y", "yes")


async def _work(node: app.Node, planned: app.Planned) -> tuple[snapshot.Snapshot, bool]:
    """Run the cycle; return what it left, and whether a signal ended it.

    What cannot be printed meanwhile (a terminal that closed, a full disk) ends no step half-way.
    """
    options = node.options
    shown = planned.plan

    def announce(next_: snapshot.Snapshot) -> None:
        # A second pass: the driver told its profiles only after MIG was on, or the node has changed.
        if next_.plan != shown and next_.node is not None:
            told = render.plan_table(next_.plan, next_.node)
            with contextlib.suppress(OSError):
                out.table(told, options.stderr if options.output == "json" else options.stdout, options.environ)

    node.around = dataclasses.replace(node.around, announce=announce)
    stop = asyncio.Event()
    again = asyncio.Event()
    terminated = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            again.set()
            return
        stop.set()
        with contextlib.suppress(OSError):
            print("gpunode: stopping after the step at hand (Ctrl-C again does not wait for it)", file=options.stderr)

    def terminate() -> None:
        stop.set()
        terminated.set()
        loop.call_later(TERM_WAIT, again.set)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    hangup = signal.getsignal(signal.SIGHUP)
    if hangup is not signal.SIG_IGN:  # nohup wants it ignored
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    last = ["nothing was begun"]

    def progress(what: str) -> None:
        last[0] = what
        with contextlib.suppress(OSError):
            print(what, file=options.stderr)

    try:
        cycle = asyncio.create_task(app.apply(node, stop=stop.is_set, progress=progress), name="apply")
        hurry = asyncio.create_task(again.wait(), name="hurry")
        await asyncio.wait([cycle, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not cycle.done():
            print(
                f"gpunode: ended without waiting for the step at hand ({last[0]}); what it left is not known, "
                "`gpunode status` shows it; nothing after it was begun",
                file=options.stderr,
            )
            daemon.end(errors.EXIT_FAILED)
        hurry.cancel()
        return cycle.result(), stop.is_set()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
        if hangup is not signal.SIG_IGN:
            loop.remove_signal_handler(signal.SIGHUP)


def _code(after: snapshot.Snapshot) -> int:
    codes = {reason.code for reason in after.reasons}
    match after.phase:
        case snapshot.Phase.CONVERGED:
            return errors.EXIT_OK
        case snapshot.Phase.WAITING:
            return errors.EXIT_NO_DRIVER
        case snapshot.Phase.FAILED:
            return errors.EXIT_USAGE if "settings-invalid" in codes else errors.EXIT_FAILED
        case _ if "not-root" in codes:
            return errors.EXIT_NO_DRIVER
        case _:
            return errors.EXIT_BLOCKED


def _done(after: snapshot.Snapshot) -> str:
    if after.outcome is None or not after.outcome.changed:
        return "nothing to do: the node is as wanted"
    return f"done: {_told(after)}; the node is as wanted"


def _told(after: snapshot.Snapshot) -> str:
    """Return what was and was not done, in words."""
    done = 0 if after.outcome is None else sum(len(taken) for _, taken in after.outcome.done)
    words = f"{done} step{'' if done == 1 else 's'} done"
    if after.plan.steps:
        left = [gpu.index for gpu in after.plan.gpus if gpu.steps]
        words += f", {after.plan.steps} not done (GPU {render.indexes(left)})"
    return words


async def _await_reboot(node: app.Node) -> int:
    """Wait to be ended by the reboot that was requested, up to its deadline."""
    options = node.options
    if node.simulated and options.sim_host != "real":
        print(
            "gpunode: a reboot was requested; `gpunode simulate reboot` does it on this simulated node",
            file=options.stderr,
        )
        return errors.EXIT_BLOCKED
    print(f"gpunode: a reboot was requested; waiting up to {REBOOT_WAIT:.0f} s for it", file=options.stderr)
    await asyncio.sleep(REBOOT_WAIT)
    print(f"gpunode: the reboot did not happen within {REBOOT_WAIT:.0f} s", file=options.stderr)
    return errors.EXIT_FAILED


def _end(
    planned: app.Planned,
    warnings: tuple[errors.Problem, ...],
    after: snapshot.Snapshot,
    options: app.Options,
    code: int,
) -> int:
    """Print the document of `--output json`: the plan, what came of it, and the node afterwards."""
    if options.output == "json":
        now = options.clock()
        told = plans.document(planned)
        told["outcome"] = render.outcome_document(after.outcome, after.node)
        told["warnings"] = [render.problem_document(problem) for problem in warnings]
        told["status"] = render.status_document(after, None, boards.verdict(after, now=now))
        out.document(told, options.stdout)
    return code
