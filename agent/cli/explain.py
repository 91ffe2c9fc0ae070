"""`gpunode explain`: does this Pod, ResourceClaim or ECS task definition fit this node, and if not, why.

Several workloads are packed one after another, so the first that does not fit is the one in the way.
"""

from __future__ import annotations

import argparse
import sys

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.host import facts
from agent.mig import advertise
from agent.mig import node as states
from agent.serve import render
from agent.settings import model
from agent.workload import dra, fit, read


def main(found: argparse.Namespace) -> int:
    """Print a verdict a workload; 0 when all fit, 1 when one does not, 2 when one cannot be read."""
    workloads = _read(found.files)
    return nodes.work(found, lambda node: _explain(node, workloads, found.strategy), say_simulated=False)


def _read(files: list[str]) -> tuple[read.Workload, ...]:
    """Read all files, `-` being stdin. Raises SettingsError with everything wrong in all of them."""
    workloads: list[read.Workload] = []
    problems: list[errors.Problem] = []
    for name in files:
        try:
            workloads += read.read(_text(name), file="standard input" if name == "-" else name)
        except errors.SettingsError as cause:
            problems += cause.problems
    if problems:
        raise errors.SettingsError(tuple(problems))
    return tuple(workloads)


def _text(name: str) -> str:
    shown = "standard input" if name == "-" else name
    try:
        if name == "-":
            data = sys.stdin.buffer.read(read.LIMIT + 1)
        else:
            with open(name, "rb") as file:  # noqa: PTH123  # a name from the command line, read bounded
                data = file.read(read.LIMIT + 1)
    except OSError as cause:
        raise _one(shown, f"cannot be read: {cause.strerror or cause}") from cause
    if len(data) > read.LIMIT:
        raise _one(shown, f"is larger than {read.LIMIT} bytes, more than any manifest")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise _one(shown, f"is not UTF-8 (byte {cause.start})", data[: cause.start].count(b"\n") + 1) from cause


def _one(file: str, message: str, line: int | None = None) -> errors.SettingsError:
    return errors.SettingsError((errors.Problem("error", "workload-file", message, file=file, line=line),))


def offer(node: states.NodeState) -> fit.Offer:
    """Return what schedulers see of `node` in the form the workloads are held against."""
    seen = advertise.advertise(node)
    plugin = seen.device_plugin
    fraction = next((float(value) for value in seen.ecs.values if "." in value), None)
    return fit.Offer(
        plugin={"none": plugin.none, "single": plugin.single, "mixed": plugin.mixed},
        refused=plugin.refused,
        devices=tuple(dra.Device(d.name, d.attributes, d.capacity) for d in seen.dra),
        gpus=seen.ecs.gpus,
        mig_on=any(gpu.mode is not None and gpu.mode.current for gpu in node.gpus),
        fraction=fraction,
        gpu_memory_mib=min((gpu.memory_bytes >> 20 for gpu in node.gpus if gpu.memory_bytes), default=None),
    )


def known_strategy(node: app.Node) -> tuple[str | None, str | None]:
    """Return the MIG strategy of this node's device plugin and what tells it, (None, None) where nothing
    does: Bottlerocket's settings (its plugin knows single alone), else the plugin's own file or the labels
    of GPU feature discovery."""
    settings = node.settings
    if settings is not None:
        if isinstance(settings.declaration, model.BottlerocketDeclaration):
            return "single", f"Bottlerocket's settings in {settings.declaration.origin.file or 'the layout declared'}"
        view = settings.bottlerocket
        if view is not None and view.problem is None and view.enabled:
            return ("single" if view.partitions else "none"), f"Bottlerocket's settings ({view.source})"
    strategy, source, _ = facts.plugin_settings(node.machine)
    return strategy, source


async def _explain(node: app.Node, workloads: tuple[read.Workload, ...], strategy: str | None) -> int:
    options = node.options
    state = await app.observe(node)
    plugin, source = (None, None) if strategy is not None else known_strategy(node)
    if plugin is not None:
        print(f"gpunode: the device plugin's strategy is {plugin}, by {source}", file=options.stderr)
    verdicts = fit.judge(workloads, offer(state), strategy=strategy, plugin=plugin)
    unreadable = [v for v in verdicts if v.unreadable]
    fits: dict[tuple[str, str, str], bool] = {}
    for verdict in verdicts:
        key = (verdict.file, verdict.kind, verdict.name)
        fits[key] = fits.get(key, False) or verdict.fits
    if options.output == "json":
        out.document([_document(verdict) for verdict in verdicts], options.stdout)
    else:
        out.table(_table(verdicts, node.simulated), options.stdout, options.environ)
    for verdict in unreadable:
        where = f"{verdict.file}, line {verdict.line}" if verdict.line else verdict.file
        print(f"error: {where}: {verdict.reasons[0]}", file=options.stderr)
    if unreadable:
        return errors.EXIT_USAGE
    return errors.EXIT_OK if all(fits.values()) else errors.EXIT_FAILED


def _document(verdict: fit.Verdict) -> render.Document:
    return {
        "file": verdict.file,
        "line": verdict.line,
        "kind": verdict.kind,
        "name": verdict.name,
        "fits": verdict.fits,
        "strategy": verdict.strategy,
        "reasons": list(verdict.reasons),
        "change": verdict.change or None,
        "warnings": list(verdict.warnings),
    }


def _table(verdicts: tuple[fit.Verdict, ...], simulated: str | None) -> str:
    lines = [f"SIMULATED NODE {simulated}: these GPUs are not there"] if simulated else []
    for verdict in verdicts:
        answer = "fits" if verdict.fits else "DOES NOT FIT"
        lines.append(f"{verdict.kind} {verdict.name} ({verdict.file}), {verdict.strategy}: {answer}")
        where = f"line {verdict.line}: " if verdict.line and not verdict.fits else ""
        lines += [f"  {where}{reason}" for reason in verdict.reasons]
        if verdict.change:
            lines.append(f"  to change: {verdict.change}")
        lines += [f"  warning: {warning}" for warning in verdict.warnings]
    return "\n".join(lines)
