"""`gpunode check`: everything wrong with the settings at once, and where each value comes from.

Where there are GPUs (simulated ones too) it is also checked whether the layout fits them, empty.
Without a driver that part is left out, and stderr says so.
"""

from __future__ import annotations

import argparse

from agent import app, errors
from agent.cli import node as nodes
from agent.cli import out
from agent.serve import render
from agent.settings import model


def main(found: argparse.Namespace) -> int:
    """Print the problems; 0 when there is no error, 2 when there is, 4 when a GPU cannot do what is asked."""
    return nodes.work(found, _check, say_simulated=False)


async def _check(node: app.Node) -> int:
    options = node.options
    settings = node.settings
    if settings is None:
        assert node.settings_error is not None
        return _tell(node, node.settings_error.problems, None, errors.EXIT_USAGE)
    problems = settings.problems
    code = errors.EXIT_OK
    try:
        planned = await app.plan(node)
    except errors.SettingsError as cause:
        problems = (*problems, *cause.problems)
        code = errors.EXIT_USAGE
    except errors.DriverError as cause:
        if node.simulated:
            raise
        print(f"gpunode: the settings were read, not held against GPUs: {cause}", file=options.stderr)
    else:
        problems = (*problems, *planned.problems)
        for gpu in planned.plan.blocked:
            assert gpu.blocked is not None
            if gpu.blocked.kind.value in ("not-capable", "unknown-geometry", "unplaceable"):
                problems = (*problems, errors.Problem("error", gpu.blocked.kind.value, gpu.blocked.message))
                code = errors.EXIT_BLOCKED
    return _tell(node, problems, settings, code)


def _tell(node: app.Node, found: tuple[errors.Problem, ...], settings: model.Settings | None, code: int) -> int:
    options = node.options
    problems = tuple(dict.fromkeys(found))
    if options.output == "json":
        out.document(document(node, problems, settings), options.stdout)
        return code
    lines = [f"SIMULATED NODE {node.simulated}: these GPUs are not there"] if node.simulated else []
    if settings is not None:
        lines.append("sources, lowest first: " + (", ".join(settings.sources) or "none, so these are the defaults"))
        rows = [("KEY", "VALUE", "FROM")]
        rows += [(key, _words(_value(settings, key)), str(origin)) for key, origin in settings.provenance.items()]
        lines += render.columns(rows)
    lines += [f"{problem.severity}: {problem}" for problem in problems]
    errors_found = sum(problem.is_error for problem in problems)
    warnings = len(problems) - errors_found
    verdict = "ok" if code == errors.EXIT_OK else "not ok"
    lines.append(
        f"{verdict}: {errors_found} error{'' if errors_found == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
    )
    out.table("\n".join(lines), options.stdout, options.environ)
    return code


def document(
    node: app.Node, problems: tuple[errors.Problem, ...], settings: model.Settings | None, *, secret: bool = False
) -> render.Document:
    """Return what was read and what is wrong with it. `secret` leaves out what may be nobody else's
    business: arguments of commands."""
    told: render.Document = {
        "ok": settings is not None and not any(problem.is_error for problem in problems),
        "problems": [render.problem_document(problem) for problem in problems],
        "simulated": node.simulated,
    }
    if settings is not None:
        told["sources"] = list(settings.sources)
        told["digest"] = settings.digest
        told["values"] = {
            key: {
                "value": _value(settings, key, secret=secret),
                "source": origin.source,
                "file": origin.file,
                "line": origin.line,
            }
            for key, origin in settings.provenance.items()
        }
    return told


def _value(settings: model.Settings, key: str, *, secret: bool = False) -> object:
    """Return the value of a key as JSON can hold it; the layout is told by its kind."""
    if key == "layout":
        declared = settings.declaration
        match declared:
            case None:
                return None
            case model.BottlerocketDeclaration():
                return "bottlerocket"
            case model.LayoutDeclaration():
                return "gpunode"
            case model.MigPartedDeclaration():
                return f"mig-parted:{declared.label}"
    value = getattr(settings, key.removeprefix("gpunode.").replace("-", "_"), None)
    if isinstance(value, tuple):
        shown = slice(1) if secret else slice(None)
        return [list(v.command[shown]) if isinstance(v, model.AfterChange) else v for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _words(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case list():
            return "[" + ", ".join(_words(v) for v in value) + "]"
        case _:
            return str(value)
