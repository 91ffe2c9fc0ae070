"""The command line: which verbs there are, what they take, and how every one of them ends.

This file is read at each start, so it imports nothing heavy: a verb's own file is imported when it
is chosen, and only the chosen verb's arguments are built. Here ends every error: a sentence on
stderr and an exit code, never a traceback (unless `-v` asks for it).
"""

import argparse
import errno
import os
import sys

from agent import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn  # typing costs more than all of argparse

PROGRAM = "gpunode"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)

VERBS = {
    "run": ("enforce the layout, then watch, sample and serve until stopped", "gpunode run --simulate p4d.24xlarge"),
    "apply": ("bring the node to its layout once, then exit", "gpunode apply --yes --settings layout.toml"),
    "plan": (
        "show what apply would do, and why; touches nothing",
        "gpunode plan --mig-config config.yaml:half-balanced",
    ),
    "status": ("show the node now: GPUs, instances, who uses them, drift", "gpunode status --check --wait 60"),
    "check": (
        "read the settings and tell every mistake with file, line and key",
        "gpunode check --settings layout.toml",
    ),
    "profiles": (
        "list what each GPU can be split into, and what still fits",
        "gpunode profiles --simulate p5.48xlarge",
    ),
    "resources": ("tell what schedulers will see: device plugin, DRA, ECS", "gpunode resources --output json"),
    "explain": (
        "tell whether a Pod, claim or ECS task definition fits this node, and if not, why",
        "gpunode explain pod.yaml --strategy mixed",
    ),
    "export": ("write the present layout down as a settings document", "gpunode export --format gpunode > layout.toml"),
    "simulate": (
        "list and describe nodes that are not there, and act on one",
        "gpunode simulate describe p4d.24xlarge",
    ),
    "support": ("gather what a bug report needs into one file", "gpunode support --to bundle.tar.gz"),
    "version": ("print the version; -v adds those of libraries and driver", "gpunode version -v"),
}
"""Verb: what it does, and an example."""

OUTPUTS = {"status": ("table", "json", "nvidia-smi")}

# Flags every verb takes: name, variable of the environment, placeholder, help. The variables of the
# first two are read by agent.settings, which says of each value where it came from.
_COMMON = (
    (
        "--settings",
        "GPUNODE_SETTINGS",
        "FILE",
        "read this document instead of the host's files and API (repeatable; in the variable, with colons between)",
    ),
    ("--mig-config", "GPUNODE_MIG_CONFIG", "FILE[:LABEL]", "take the layout from a mig-parted document"),
    (
        "--simulate",
        "GPUNODE_SIMULATE",
        "NODE",
        "work on a node that is not there: p4d.24xlarge, h100.80gb:2, or a node file",
    ),
    ("--sim-state", "GPUNODE_SIM_STATE", "FILE", "keep the simulated node in this file, shared by processes"),
    (
        "--sim-host",
        "GPUNODE_SIM_HOST",
        "private|real",
        "the machine around simulated GPUs: a private one (default), or this host with its units and reboot",
    ),
    ("--output", "GPUNODE_OUTPUT", "FORMAT", "table (default) or json"),
)
_TAKES_VALUE = frozenset(name for name, _, _, _ in _COMMON)

_DESCRIPTION = """\
gpunode keeps the NVIDIA GPUs of this node split the way its settings say, and
tells what every instance does."""

_FOOTER = """\
Every verb takes these flags (environment variables in brackets); `gpunode VERB --help` says more:
"""

_EXIT_CODES = """\
Exit codes: 0 as wanted or done; 1 failed; 2 usage or settings; 3 drift;
4 blocked (in use, not owner, reset or reboot needed); 5 no driver or no access.
Results go to stdout, everything else to stderr."""


class _Parser(argparse.ArgumentParser):
    """Argparse, whose complaints end as our own errors do."""

    def error(self, message: str) -> "NoReturn":
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        if unknown != message.split()[0] and unknown.startswith("--"):
            import difflib

            for near in difflib.get_close_matches(unknown, self._option_string_actions, n=1):
                message += f"; did you mean {near}?"
        raise errors.UsageError(f"{message} (see `{self.prog} --help`)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Argparse's own, told its width: it would import shutil (3 ms) to find that out at each start."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_width())


def _width() -> int:
    told = os.environ.get("COLUMNS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    try:
        return min(os.get_terminal_size(sys.stdout.fileno()).columns - 2, 118)
    except (OSError, ValueError):
        return 78


def overview() -> str:
    """Return what `gpunode --help` prints."""
    lines = [_DESCRIPTION, "", "usage: gpunode VERB [flags]", ""]
    for verb, (what, example) in VERBS.items():
        lines += [f"  {verb:<10} {what}", f"             $ {example}"]
    lines += ["", _FOOTER.rstrip()]
    for name, variable, value, what in _COMMON:
        lines += [f"  {name + ' ' + value:<26} [{variable}]", f"      {what}"]
    lines += ["  -v, --verbose              [GPUNODE_VERBOSE]", "      say more; a traceback when gpunode itself fails"]
    lines += ["", _EXIT_CODES]
    return "\n".join(lines)


def _environment(name: str, environ: "dict[str, str]") -> str | None:
    return environ.get(name) or None


def _truth(name: str, environ: "dict[str, str]") -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise errors.UsageError(f"{name}={environ[name]} says neither yes nor no (use 1 or 0)")


def build(verb: str, environ: "dict[str, str]") -> argparse.ArgumentParser:
    """Return the parser of one verb; flags that are not given come from `environ`."""
    what, example = VERBS[verb]
    parser = _Parser(
        prog=f"{PROGRAM} {verb}",
        description=what[0].upper() + what[1:] + ".",
        epilog=f"example:\n  $ {example}\n\n{_EXIT_CODES}",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    common = parser.add_argument_group("flags of every verb")
    outputs = OUTPUTS.get(verb, ("table", "json"))
    for name, variable, value, text in _COMMON:
        told = f"{text} [{variable}]"
        default = _environment(variable, environ)
        if name == "--settings":
            common.add_argument(name, action="append", metavar=value, help=told)
        elif name == "--mig-config":
            common.add_argument(name, metavar=value, help=told)
        elif name == "--output":
            if default is not None and default not in OUTPUTS["status"]:
                raise errors.UsageError(f"{variable}={default} is no output (use {', '.join(OUTPUTS['status'])})")
            # A value of the environment that another verb understands must not stop this one.
            default = default if default in outputs else None
            told = f"{', '.join(outputs)} (the first is the default) [{variable}]"
            common.add_argument(name, choices=outputs, default=default or "table", metavar=value, help=told)
        elif name == "--sim-host":
            if default not in (None, "private", "real"):
                raise errors.UsageError(f"{variable}={default} is neither private nor real")
            common.add_argument(
                name, choices=("private", "real"), default=default or "private", metavar=value, help=told
            )
        else:
            common.add_argument(name, default=default, metavar=value, help=told)
    common.add_argument("-v", "--verbose", action="store_true", help="say more [GPUNODE_VERBOSE]")
    _ARGUMENTS.get(verb, lambda _: None)(parser)
    return parser


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="serve here: HOST:PORT or unix:PATH (repeatable; 127.0.0.1:19400 unless settings say otherwise) [GPUNODE_LISTEN]",
    )


def _apply_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask; needed where there is no terminal [GPUNODE_YES]"
    )
    _force(parser)


def _force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="also change what is allocated to a pod or task but has no process; nothing is ever killed",
    )


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="print nothing but what is off, and answer by exit code")
    parser.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="with --check: wait so long for the node to be as wanted"
    )
    parser.add_argument("--watch", action="store_true", help="draw the status again and again, until Ctrl-C")
    parser.add_argument(
        "--interval",
        type=_seconds,
        metavar="SECONDS",
        help="with --watch: how often (2 seconds unless given)",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a manifest or task definition, YAML or JSON; - reads standard input"
    )
    parser.add_argument(
        "--strategy",
        choices=("none", "single", "mixed", "dra", "ecs"),
        help="judge by what this consumer sees: the device plugin under none, single or mixed, the DRA driver, or ECS "
        "(every one that can apply, unless given)",
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("gpunode", "bottlerocket", "mig-parted"),
        default="gpunode",
        help="which document to write: gpunode TOML (default), Bottlerocket settings, or mig-parted YAML",
    )
    parser.add_argument("--exact", action="store_true", help="with gpunode: also write where each instance lies")
    parser.add_argument("--label", help="with mig-parted: the name of the configuration (current)")


_SIMULATE = """\
actions:
  list [PART]               all nodes, or those with PART in their name (the default)
  describe NODE             what is known of a node, and what is not
  node-file NODE            write a node file to edit, to stdout
with --simulate NODE --sim-state FILE, on the node kept in that file:
  reboot                    Ampere keeps its MIG mode, instances go; Hopper loses both
  reset [GPU...]            all GPUs unless given
  unit NAME start|stop      kubelet.service, ecs.service, nvidia-persistenced.service,
                            nvidia-fabricmanager.service
  workload                  list processes and holders
  workload start TARGET     a process [--name --memory-mib --activity --kind]
  workload hold TARGET      somebody who keeps the device file open [--name]
  workload stop PID|all
  fault                     list the orders
  fault fail|delay|hang CALL  for an NVML call [--gpu --code --seconds --skip --times]
  fault release [ORDER]     withdraw it; what hangs goes on
  fault lose GPU            it falls off the bus
  fault xid TARGET CODE
  fault reset possible|impossible
TARGET is GPU, GPU/GI or GPU/GI/CI by number, or the UUID of a MIG device."""


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}\n\n{_SIMULATE}"
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "describe", "node-file", "reboot", "reset", "unit", "workload", "fault"),
        metavar="ACTION",
        help="one of those above",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the action is about")
    load = parser.add_argument_group("of workload")
    load.add_argument("--name", help="command name of the process or holder")
    load.add_argument("--memory-mib", type=int, metavar="MIB", help="what it allocates (1024)")
    load.add_argument("--activity", type=float, metavar="RATIO", help="how busy it is, 0 to 1 (0.6)")
    load.add_argument("--kind", choices=("compute", "graphics", "mps"), help="compute unless given")
    fault = parser.add_argument_group("of fault")
    fault.add_argument("--gpu", metavar="GPU", help="only calls about this GPU")
    fault.add_argument("--code", type=int, help="NVML's return code (999; with hang 0: it completes when released)")
    fault.add_argument("--seconds", type=_seconds, help="how long a delay is")
    fault.add_argument("--skip", type=int, metavar="N", help="let so many calls pass first")
    fault.add_argument("--times", type=int, metavar="N", help="hit so many, 0 is all (1; with delay 0)")


def _support_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", metavar="FILE", help="write the bundle here (gpunode-support-DATE.tar.gz unless given; - is stdout)"
    )


_ARGUMENTS = {
    "run": _run_arguments,
    "apply": _apply_arguments,
    "plan": _force,
    "status": _status_arguments,
    "explain": _explain_arguments,
    "export": _export_arguments,
    "simulate": _simulate_arguments,
    "support": _support_arguments,
}


def parse(argv: "list[str]", environ: "dict[str, str]") -> argparse.Namespace:
    """Return the verb (as `verb`) and its flags. Flags may also stand before the verb.

    Raises UsageError; SystemExit(0) after printing a verb's help.
    """
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        position += 2 if argv[position] in _TAKES_VALUE else 1
    if position >= len(argv):
        raise errors.UsageError(f"which verb? one of {', '.join(VERBS)} (see `gpunode --help`)")
    verb = argv[position]
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        guess = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(VERBS)}"
        raise errors.UsageError(f'gpunode has no verb "{verb}"; {guess}')
    found = build(verb, environ).parse_intermixed_args(argv[:position] + argv[position + 1 :])
    found.verb = verb
    found.verbose = found.verbose or _truth("GPUNODE_VERBOSE", environ)
    found.settings = found.settings or []
    if "" in found.settings or found.mig_config == "":
        raise errors.UsageError(f"{'--settings' if '' in found.settings else '--mig-config'} needs the name of a file")
    if verb == "apply":
        found.yes = found.yes or _truth("GPUNODE_YES", environ)
    if found.sim_state is not None and found.simulate is None:
        raise errors.UsageError("--sim-state keeps a simulated node: say which with --simulate NODE")
    return found


def tell(error: errors.GpunodeError) -> str:
    """Return an error as it is printed: one line, or for settings one line a problem."""
    if isinstance(error, errors.SettingsError) and error.problems:
        return "\n".join(f"{problem.severity}: {problem}" for problem in error.problems)
    return f"{PROGRAM}: {error}"


def _dispatch(argv: "list[str]", environ: "dict[str, str]") -> int:
    if not argv:
        print(overview())
        return errors.EXIT_USAGE
    if argv[0] in ("-h", "--help", "help"):
        if len(argv) > 1 and argv[1] in VERBS:
            build(argv[1], environ).print_help()
            return errors.EXIT_OK
        print(overview())
        return errors.EXIT_OK
    if argv[0] in ("-V", "--version"):
        argv = ["version", *argv[1:]]
    try:
        found = parse(argv, environ)
    except SystemExit as ended:  # argparse has printed a verb's help
        return ended.code if isinstance(ended.code, int) else errors.EXIT_USAGE
    import importlib

    verb = importlib.import_module(f"agent.cli.{found.verb}")
    code: int = verb.main(found)
    return code


def run(argv: "list[str]") -> int:
    """Run the command line and return its exit code; prints every error, raises none."""
    _reopen_closed_streams()
    environ = dict(os.environ)
    verbose = "-v" in argv or "--verbose" in argv
    try:
        code = _dispatch(list(argv), environ)
        sys.stdout.flush()
    except errors.GpunodeError as error:
        _say(tell(error))
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            pass  # whoever read our output has left, and knows
        elif error.filename is None and error.errno in _FULL:
            _say(f"{PROGRAM}: cannot write: {error.strerror} (where does standard output go?)")
        else:
            return _internal(error, verbose=verbose)
        # What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_FAILED
    except KeyboardInterrupt:
        _say(f"{PROGRAM}: interrupted")
        return errors.EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # the last line of defence: a sentence instead of a traceback
        return _internal(error, verbose=verbose)
    return code


def _reopen_closed_streams() -> None:
    """Put the null device where our caller has closed stdout or stderr: Python then has none, and the
    next file that is opened would take the number and receive what is printed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # ours until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # the same


def _internal(error: Exception, *, verbose: bool) -> int:
    if verbose:
        import traceback

        _say("".join(traceback.format_exception(error)).rstrip())
    text = " ".join(str(error).split())
    hint = "" if verbose else "; -v shows where, and `gpunode support` gathers what a bug report needs"
    _say(f"{PROGRAM}: internal error: {type(error).__name__}: {text}{hint}")
    return errors.EXIT_FAILED


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except OSError:
        pass  # nobody is there to read it
