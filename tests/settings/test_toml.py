"""gpunode's own tables: what is valid, and every slip with its line and the nearest word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import errors
from agent.settings import model

Load = Callable[..., model.Settings]

FULL = """
[gpunode]
enforcement = "continuous"
mode-change = ["reset", "reboot"]
live-mode-change = true
release-before-reset = []
on-failure = "leave"
unlisted-gpus = "disable"
not-capable = "ignore"
owner = "gpunode"
allow-mig-on-ecs = true
listen = ["127.0.0.1:19400", ":19401", "[::1]:0", "unix:/run/gpunode/http"]
web-config-file = "web.yml"
sample-interval = 1
dcgm-metrics = true
period = 30.5

[[gpunode.after-change]]
command = ["systemctl", "--no-block", "restart", "x.service"]

[[gpunode.after-change]]
command = ["/bin/true"]
timeout-seconds = 5
"""


def test_every_option(load: Load, tmp_path: Path) -> None:
    settings = load(FULL)
    assert settings == dataclasses.replace(
        model.Settings(
            enforcement="continuous",
            mode_change=("reset", "reboot"),
            live_mode_change=True,
            release_before_reset=(),
            on_failure="leave",
            unlisted_gpus="disable",
            not_capable="ignore",
            owner="gpunode",
            allow_mig_on_ecs=True,
            listen=("127.0.0.1:19400", ":19401", "[::1]:0", "unix:/run/gpunode/http"),
            web_config_file=tmp_path / "web.yml",
            sample_interval=1.0,
            dcgm_metrics=True,
            period=30.5,
            after_change=(
                model.AfterChange(("systemctl", "--no-block", "restart", "x.service"), 30.0),
                model.AfterChange(("/bin/true",), 5.0),
            ),
        ),
        provenance=settings.provenance,
        sources=settings.sources,
        digest=settings.digest,
    )
    assert settings.provenance["after-change"].line == 18
    assert settings.provenance["ec2-user-data"].source == "default"


def test_an_empty_document_is_the_defaults(load: Load) -> None:
    settings = load("")
    assert settings.enforcement == "boot"
    assert settings.mode_change == ("reset",)
    assert settings.declaration is None
    assert settings.sources == ()
    assert settings.problems == ()


def layouts(settings: model.Settings) -> list[model.LayoutEntry]:
    assert isinstance(settings.declaration, model.LayoutDeclaration)
    return list(settings.declaration.entries)


LAYOUT = "[[gpunode.layout]]\n"


def test_the_forms_of_a_layout(load: Load) -> None:
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    text = (
        f'{LAYOUT}gpus = [0, "{uuid}", "0000:10:1c.0", "10:1c.0"]\ninstances = {{ "1g.5gb" = 2, "2g.10gb" = 0 }}\n'
        f'{LAYOUT}model = "a100.40gb"\ninstances = [{{ profile = "3g.20gb", start = 4, compute = ["1c.3g.20gb"] }}]\n'
        f'{LAYOUT}gpus = "all"\nmig = true\n'
        f"{LAYOUT}gpus = [1]\nmig = false\ninstances = {{}}\n"
    )
    first, second, third, fourth = layouts(load(text))
    assert first.gpus == (0, uuid, "0000:10:1c.0", "10:1c.0")
    assert [(str(i.profile), i.count) for i in first.instances] == [("1g.5gb", 2)]
    assert second.model == "a100.40gb"
    assert (second.instances[0].start, str(second.instances[0].compute[0])) == (4, "1c.3g.20gb")
    assert (third.gpus, third.mig, third.instances) == ("all", True, ())
    assert not fourth.mig


@pytest.mark.parametrize(
    ("text", "code", "line", "says"),
    [
        ("gpunode = 1", "wrong-type", 1, "must be a table, and is 1"),
        ("[gpunod]\nx = 1", "unknown-key", 1, 'did you mean "gpunode"?'),
        ("[setting]\nx = 1", "unknown-key", 1, 'did you mean "settings"?'),
        ("[gpunode]\nenforcment = 1", "unknown-key", 2, 'did you mean "enforcement"?'),
        ("[gpunode]\nxyzzy = 1", "unknown-key", 2, "valid here: after-change, allow-mig-on-ecs"),
        ("[gpunode]\nmode_change = []", "unknown-key", 2, 'did you mean "mode-change"?'),
        ('[gpunode]\nenforcement = "bot"', "invalid-value", 2, 'use "observe", "boot" or "continuous"; did you mean'),
        ("[gpunode]\nenforcement = 5", "invalid-value", 2, '5 is not valid here; use "observe"'),
        ("[gpunode]\nmode-change = true", "wrong-type", 2, "must be a list, and is true"),
        ('[gpunode]\nmode-change = [\n  "reset",\n  "rebot",\n]', "invalid-value", 4, 'did you mean "reboot"?'),
        ("[gpunode]\nlive-mode-change = 1", "wrong-type", 2, "must be true or false, and is 1"),
        ('[gpunode]\nperiod = "5"', "wrong-type", 2, 'must be a number, and is "5"'),
        ("[gpunode]\nperiod = true", "wrong-type", 2, "must be a number, and is true"),
        ("[gpunode]\nperiod = inf", "invalid-value", 2, "inf"),
        ("[gpunode]\nperiod = 1979-05-27", "wrong-type", 2, "1979-05-27"),
        ("[gpunode]\nsample-interval = 0", "invalid-value", 2, "at least 0.05, and is 0"),
        ('[gpunode]\nlisten = ["127.0.0.1"]', "invalid-value", 2, "no address to listen on"),
        ('[gpunode]\nweb-config-file = ""', "invalid-value", 2, "must not be empty"),
        ("[[gpunode.after-change]]\ncommand = []", "invalid-value", 2, "must not be empty"),
        ("[[gpunode.after-change]]\ncomand = []", "missing-key", 1, '"command" is missing'),
        ('[[gpunode.after-change]]\ncommand = ["x"]\ntimeout-seconds = 0', "invalid-value", 3, "more than 0"),
        ('[gpunode.mig-parted]\nfile = "x"\nlabel = "y"', "unknown-key", 3, "valid here: config, file"),
        (f"{LAYOUT}gpu = [0]\nmig = false", "unknown-key", 2, 'did you mean "gpus"?'),
        (f"{LAYOUT}gpus = [-1]\nmig = false", "invalid-value", 2, "must be at least 0, and is -1"),
        (f"{LAYOUT}gpus = [1.5]\nmig = false", "wrong-type", 2, "must be a whole number, and is 1.5"),
        (f"{LAYOUT}gpus = [true]\nmig = false", "wrong-type", 2, "must be a whole number, and is true"),
        (f"{LAYOUT}gpus = []\nmig = false", "invalid-value", 2, "must not be empty"),
        (f"{LAYOUT}gpus = 3\nmig = false", "invalid-value", 2, 'must be "all" or a list like [0, 1], and is 3'),
        (f'{LAYOUT}gpus = "al"\nmig = false', "invalid-value", 2, 'must be "all" or a list like [0, 1], and is "al"'),
        (f'{LAYOUT}gpus = ["0"]\nmig = false', "selector", 2, '"0" names no GPU'),
        (f'{LAYOUT}gpus = ["MIG-1"]\nmig = false', "selector", 2, "is a MIG device; name the GPU"),
        (f'{LAYOUT}model = "A100"\nmig = false', "model-key", 2, "not a GPU model key"),
        (f'{LAYOUT}gpus = [0]\nmodel = "a100.40gb"\nmig = false', "selector", 1, "names GPUs twice"),
        (f"{LAYOUT}mig = false", "selector", 1, "names no GPU"),
        (f"{LAYOUT}gpus = [0]", "missing-key", 1, "says nothing to do"),
        (f"{LAYOUT}gpus = [0]\nmig = false\ninstances = {{'1g.5gb' = 1}}", "instances-without-mig", 4, "mig = false"),
        (f"{LAYOUT}gpus = [0]\ninstances = 5", "wrong-type", 3, "must be a table, and is 5"),
        (f"{LAYOUT}gpus = [0]\ninstances = {{'1g.5gb' = -1}}", "invalid-value", 3, "at least 0, and is -1"),
        (f"{LAYOUT}gpus = [0]\ninstances = {{'1g.5gb' = 65}}", "invalid-value", 3, "at most 64, and is 65"),
        (f"{LAYOUT}gpus = [0]\ninstances = {{1g.5gb = 1}}", "wrong-type", 3, "must be a whole number, and is a table"),
        (f"{LAYOUT}gpus = [0]\ninstances = {{'1g5gb' = 1}}", "profile-syntax", 3, '"1g5gb" is not a MIG profile'),
        (f"{LAYOUT}gpus = [0]\ninstances = [\n{{}},\n]", "missing-key", 4, '"profile" is missing'),
        (f"{LAYOUT}gpus = [0]\ninstances = [{{profil = 'x'}}]", "missing-key", 3, '"profile" is missing'),
        (f"{LAYOUT}gpus = [0]\ninstances = [{{profile = 'x'}}]", "profile-syntax", 3, '"x" is not a MIG profile'),
        (
            f"{LAYOUT}gpus = [0]\ninstances = [{{profile = '1c.3g.20gb'}}]",
            "profile-kind",
            3,
            'write profile = "3g.20gb" with compute = ["1c.3g.20gb"]',
        ),
        (
            f"{LAYOUT}gpus = [0]\ninstances = [{{profile = '3g.20gb', compute = ['1c.2g.10gb']}}]",
            "profile-kind",
            3,
            "1c.2g.10gb is no part of a 3g.20gb; its parts are named like 1c.3g.20gb",
        ),
        (
            f"{LAYOUT}gpus = [0]\ninstances = [{{profile = '3g.20gb', compute = ['x', '1c.3g.20gb']}}]",
            "profile-syntax",
            3,
            '"x" is not',
        ),
        (f"{LAYOUT}gpus = [0]\ninstances = [{{profile = '3g.20gb', start = 99}}]", "invalid-value", 3, "at most 63"),
        ("[gpunode]\nlayout = 1", "wrong-type", 2, "must be a list"),
        ("[gpunode]\nlayout = [1]", "wrong-type", 2, "must be a table"),
    ],
)  # fmt: skip
def test_a_slip(load: Load, text: str, code: str, line: int, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        load(text)
    problem = caught.value.problems[0]
    assert (problem.code, problem.line) == (code, line), str(problem)
    assert says in problem.message
    assert str(problem.file).endswith("settings.toml")
    assert problem.key


def test_everything_wrong_is_told_at_once(load: Load) -> None:
    text = f'[gpunode]\nperiod = 0\nowner = "x"\n{LAYOUT}gpus = ["x"]\n{LAYOUT}gpu = 1\n'
    with pytest.raises(errors.SettingsError) as caught:
        load(text)
    assert [p.line for p in caught.value.problems] == [2, 3, 7]
    text = f'{LAYOUT}gpus = ["x"]\n{LAYOUT}gpus = [1]\ninstances = {{"y" = 1}}\n'
    with pytest.raises(errors.SettingsError) as caught:
        load(text)
    assert [(p.line, p.code) for p in caught.value.problems] == [
        (1, "missing-key"),
        (2, "selector"),
        (5, "profile-syntax"),
    ]


def test_a_file_of_something_else_is_told_in_a_hundred_lines(load: Load) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        load("[gpunode]\n" + "".join(f"key{n} = 1\n" for n in range(300)))
    assert len(caught.value.problems) == 101
    assert caught.value.problems[-1].message == "and 200 more like these"


def test_a_document_that_says_nothing_to_us_is_warned_about(load: Load) -> None:
    (problem,) = load("[other]\nx = 1").problems
    assert (problem.severity, problem.code) == ("warning", "nothing-said")
