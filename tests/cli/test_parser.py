"""The command line itself: what it takes, what it says of mistakes, and how everything ends."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import __version__, errors
from agent.cli import parser, version
from tests.cli.conftest import Run


def parse(*words: str, **environ: str) -> argparse.Namespace:
    return parser.parse(list(words), environ)


# --- help -------------------------------------------------------------------------------------------


def test_alone_it_prints_help_and_ends_with_usage(gpunode: Run) -> None:
    ended = gpunode()
    assert ended.code == 2
    assert "usage: gpunode VERB" in ended.out


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("help",)])
def test_help_teaches_every_verb_with_an_example(gpunode: Run, words: tuple[str, ...]) -> None:
    ended = gpunode(*words)
    assert ended.code == 0
    for verb, (what, example) in parser.VERBS.items():
        assert f"  {verb:<10} {what}" in ended.out
        assert f"$ {example}" in ended.out
    for variable in (
        "GPUNODE_SETTINGS",
        "GPUNODE_MIG_CONFIG",
        "GPUNODE_SIMULATE",
        "GPUNODE_SIM_STATE",
        "GPUNODE_OUTPUT",
    ):
        assert variable in ended.out
    assert max(map(len, ended.out.splitlines())) <= 118


@pytest.mark.parametrize("verb", parser.VERBS)
def test_help_of_a_verb_tells_flags_example_and_exit_codes(gpunode: Run, verb: str) -> None:
    for words in ((verb, "--help"), ("help", verb)):
        ended = gpunode(*words)
        assert ended.code == 0
        assert ended.out.startswith(f"usage: gpunode {verb}")
        assert parser.VERBS[verb][1] in ended.out
        assert "4 blocked" in ended.out
        assert "[GPUNODE_SIMULATE]" in " ".join(ended.out.split())


@pytest.mark.parametrize("verb", parser.VERBS)
def test_example_of_a_verb_can_be_parsed(verb: str) -> None:
    words = parser.VERBS[verb][1].partition(" > ")[0].split()
    assert words[0] == "gpunode"
    assert parse(*words[1:]).verb == verb


@pytest.mark.parametrize("verb", parser.VERBS)
def test_each_verb_has_a_file(verb: str) -> None:
    assert Path(parser.__file__).with_name(f"{verb}.py").is_file()


# --- flags ------------------------------------------------------------------------------------------


def test_flags_may_stand_before_and_behind_the_verb() -> None:
    before = parse("--simulate", "p4d.24xlarge", "-v", "status", "--output", "json")
    behind = parse("status", "--simulate", "p4d.24xlarge", "-v", "--output", "json")
    assert vars(before) == vars(behind)
    assert before.simulate == "p4d.24xlarge"
    assert before.verbose


def test_value_that_looks_like_a_verb_is_a_value() -> None:
    found = parse("--simulate", "run", "status")
    assert (found.verb, found.simulate) == ("status", "run")


def test_settings_may_be_given_more_than_once() -> None:
    assert parse("plan", "--settings", "a.toml", "--settings", "b.toml").settings == ["a.toml", "b.toml"]
    assert parse("plan").settings == []


def test_environment_names_flags_and_flags_win() -> None:
    environ = {
        "GPUNODE_SIMULATE": "p5.48xlarge",
        "GPUNODE_OUTPUT": "json",
        "GPUNODE_SIM_STATE": "S",
        "GPUNODE_VERBOSE": "yes",
    }
    found = parse("status", **environ)
    assert (found.simulate, found.output, found.sim_state, found.verbose) == ("p5.48xlarge", "json", "S", True)
    assert parse("status", "--simulate", "p4d.24xlarge", **environ).simulate == "p4d.24xlarge"
    assert parse("apply", GPUNODE_YES="1").yes
    assert not parse("apply", GPUNODE_YES="0").yes


def test_empty_variable_says_nothing() -> None:
    assert parse("status", GPUNODE_SIMULATE="").simulate is None


def test_output_of_another_verb_in_the_environment_stops_nothing() -> None:
    assert parse("status", GPUNODE_OUTPUT="nvidia-smi").output == "nvidia-smi"
    assert parse("plan", GPUNODE_OUTPUT="nvidia-smi").output == "table"


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (("statsu",), {}, 'did you mean "status"'),
        (("status", "--chek"), {}, "--chek; did you mean --check?"),
        (("plan", "--setings=a.toml"), {}, "did you mean --settings?"),
        (("plan", "extra"), {}, "unrecognized arguments: extra (see"),
        (("plan",), {"GPUNODE_OUTPUT": "yaml"}, "GPUNODE_OUTPUT=yaml is no output (use table, json, nvidia-smi)"),
        (("run",), {"GPUNODE_SIM_HOST": "privat"}, "GPUNODE_SIM_HOST=privat is neither private nor real"),
        (("xyzzy",), {}, "there are run, apply"),
        (("--verbose",), {}, "which verb?"),
        (("status", "--wiat", "3"), {}, "--wiat"),
        (("status", "--wait", "soon", "--check"), {}, "no number of seconds"),
        (("status", "--wait", "-1", "--check"), {}, "no number of seconds"),
        (("status", "--output", "yaml"), {}, "nvidia-smi"),
        (("plan", "--output", "nvidia-smi"), {}, "json"),
        (("status", "--sim-state", "S"), {}, "--simulate"),
        (("status", "extra"), {}, "extra"),
        (("status", "--check", "--watch", "--simulate", "p4d.24xlarge"), {}, "one of them"),
        (("status", "--wait", "3", "--simulate", "p4d.24xlarge"), {}, "--check"),
        (("status", "--interval", "3", "--simulate", "p4d.24xlarge"), {}, "--watch"),
        (("export", "--exact", "--format", "bottlerocket"), {}, "--exact belongs to --format gpunode"),
        (("plan", "--settings", ""), {}, "--settings needs the name of a file"),
        (("plan", "--mig-config="), {}, "--mig-config needs the name of a file"),
        (("export", "--label", "x"), {}, "--label belongs to --format mig-parted"),
        (("status", "--sim"), {}, "--sim"),
        (("apply",), {"GPUNODE_YES": "perhaps"}, "neither yes nor no"),
        (("status", "--simulate", "p4d.24xlarg"), {}, "did you mean p4d.24xlarge"),
    ],
)
def test_mistakes_end_with_usage_and_one_line(
    gpunode: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], environ: dict[str, str], says: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ended = gpunode(*words)
    assert ended.code == 2
    assert not ended.out
    assert says in ended.err
    assert len(ended.err.splitlines()) == 1


# --- how everything ends ----------------------------------------------------------------------------


def breaking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Let the verb `version` do `act` instead."""

    def main(_: argparse.Namespace) -> int:
        act()
        return 0

    monkeypatch.setattr(version, "main", main)


@pytest.mark.parametrize(
    "error",
    [
        errors.GpunodeError("it failed"),
        errors.BlockedError("in use"),
        errors.DriverError("no driver"),
        errors.UsageError("what?"),
    ],
    ids=["failed", "blocked", "no driver", "usage"],
)
def test_error_is_told_in_a_line_and_by_its_code(
    gpunode: Run, monkeypatch: pytest.MonkeyPatch, error: errors.GpunodeError
) -> None:
    def act() -> None:
        raise error

    breaking(monkeypatch, act)
    ended = gpunode("version")
    assert ended.code == error.exit_code
    assert ended.err == f"gpunode: {error}\n"


def test_settings_error_tells_every_problem_with_its_place(gpunode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = (
        errors.Problem("error", "unknown-key", "no such key", file="a.toml", line=2, key="gpunode.x"),
        errors.Problem("warning", "odd", "are you sure", file="b.toml"),
    )

    def act() -> None:
        raise errors.SettingsError(problems)

    breaking(monkeypatch, act)
    ended = gpunode("version")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        "error: a.toml, line 2, key gpunode.x: no such key",
        "warning: b.toml: are you sure",
    ]


def test_surprise_is_a_sentence_and_a_traceback_only_when_asked_for(
    gpunode: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        raise ZeroDivisionError("a\nb")

    breaking(monkeypatch, act)
    short = gpunode("version")
    assert short.code == 1
    assert short.err.startswith("gpunode: internal error: ZeroDivisionError: a b; -v shows where")
    assert len(short.err.splitlines()) == 1
    long = gpunode("version", "-v")
    assert long.code == 1
    assert "Traceback" in long.err
    assert long.err.splitlines()[-1] == "gpunode: internal error: ZeroDivisionError: a b"


def test_interrupt_is_told(gpunode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        raise KeyboardInterrupt

    breaking(monkeypatch, act)
    ended = gpunode("version")
    assert (ended.code, ended.err) == (1, "gpunode: interrupted\n")


def test_reader_that_left_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert parser.run(["--help"]) == 1


def ended_with(words: str, streams: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a shell that hands it these streams."""
    shell = ["sh", "-c", f'"$0" -c "$1" {words} {streams}']
    program = "import sys; from agent.cli import parser; sys.exit(parser.run(sys.argv[1:]))"
    return subprocess.run([*shell, sys.executable, program], capture_output=True, text=True, timeout=60, check=False)


def test_closed_output_stops_nothing() -> None:
    assert ended_with("version", ">&-").returncode == 0
    assert ended_with("version", "2>&-").stdout == f"gpunode {__version__}\n"
    both = ended_with("simulate list", ">&- 2>&-")
    assert (both.returncode, both.stdout, both.stderr) == (0, "", "")


def test_output_that_takes_nothing_is_told() -> None:
    ended = ended_with("simulate list", ">/dev/full")
    assert ended.returncode == 1
    assert ended.stderr.endswith("gpunode: cannot write: No space left on device (where does standard output go?)\n")
    assert "internal error" not in ended.stderr


# --- version ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("version",), ("--version",), ("-V",)])
def test_version_is_that_of_the_package(gpunode: Run, words: tuple[str, ...]) -> None:
    assert gpunode(*words).out == f"gpunode {__version__}\n"


def test_version_as_json(gpunode: Run) -> None:
    assert gpunode("version", "--output", "json").json() == {"version": __version__}


def test_version_tells_libraries_and_driver_when_asked(gpunode: Run) -> None:
    told = gpunode("version", "-v", "--simulate", "p4d.24xlarge", "--output", "json").json()
    assert told["simulated"] == "p4d.24xlarge"
    assert told["driver"] == "590.48.01"
    assert told["libraries"]["nvidia-ml-py"]
    assert {"bcrypt", "common-expression-language"} <= told["libraries"].keys()
    text = gpunode("version", "-v", "--simulate", "p4d.24xlarge").out
    assert "driver 590.48.01" in text
    assert "aiohttp " in text
