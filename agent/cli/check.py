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
from agent.settings import model, shown


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
    problems = (*problems, *_web_problems(settings))
    if any(problem.is_error for problem in problems) and code == errors.EXIT_OK:
        code = errors.EXIT_USAGE
    return _tell(node, problems, settings, code)


def _web_problems(settings: model.Settings) -> tuple[errors.Problem, ...]:
    """Return what is wrong with the web configuration file, for which `run` would not start."""
    if settings.web_config_file is None:
        return ()
    from agent.serve import webconfig  # TLS costs at every start and is seldom asked for

    try:
        webconfig.load(settings.web_config_file)
    except errors.SettingsError as cause:
        return cause.problems
    return ()


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
        told = shown.values(settings)
        rows += [(key, shown.words(said["value"]), str(said["from"])) for key, said in told.items()]
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
        told["values"] = shown.values(settings, secret=secret)
    return told
