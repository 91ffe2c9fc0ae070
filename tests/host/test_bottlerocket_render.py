"""The user data that bottlerocket/render.py makes: what Bottlerocket takes, what gpunode reads, what is refused."""

from __future__ import annotations

import base64
import importlib.util
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.settings import model, source

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bottlerocket/render.py"
IMAGE = "example.com/gpunode@sha256:0"
MIXED = """# kept word for word
[[gpunode.layout]]
gpus = "all"
instances = { "1g.10gb" = 3, "3g.40gb" = 1 }
"""
# What the host's API takes in a container's table (bottlerocket-settings-models).
CONTAINER_KEYS = {
    "bootstrap-containers": {"source", "mode", "user-data", "essential", "command"},
    "host-containers": {"source", "enabled", "superpowered", "user-data", "command"},
}


def _module() -> Any:
    specification = importlib.util.spec_from_file_location("bottlerocket_render", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


render = _module()


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, *words: str) -> tuple[int, str, str]:
    argv = ["--image", IMAGE, *words]
    if text is not None:
        (tmp_path / "layout.toml").write_text(text)
        argv.append(str(tmp_path / "layout.toml"))
    code = render.main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


def user_data(document: dict[str, Any], kind: str) -> str:
    return base64.b64decode(document["settings"][kind]["gpunode"]["user-data"], validate=True).decode()


def read(tmp_path: Path, text: str) -> model.Settings:
    """Return the settings that gpunode makes of a container's user data."""
    path = tmp_path / "user-data"
    path.write_text(text)
    return source.load(source.Request(root=tmp_path / "empty", files=(path,), environ={}, flags={}))


def parsed(text: str) -> dict[str, Any]:
    document = tomllib.loads(text)
    assert set(document) == {"settings"}
    for kind, keys in CONTAINER_KEYS.items():
        for table in document["settings"].get(kind, {}).values():
            assert set(table) <= keys
            assert table["source"].startswith("example.com/gpunode")
    return document


def test_hopper_is_applied_before_the_kubelet_and_watched_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(tmp_path, capsys, MIXED, "--gpu", "hopper")
    assert code == 0
    document = parsed(out)
    nvidia = document["settings"]["kubelet-device-plugins"]["nvidia"]
    assert nvidia == {"enabled": False, "device-partitioning-strategy": "none"}
    bootstrap = document["settings"]["bootstrap-containers"]["gpunode"]
    assert (bootstrap["mode"], bootstrap["essential"]) == ("always", False)
    host = document["settings"]["host-containers"]["gpunode"]
    assert (host["enabled"], host["superpowered"]) == (True, True)
    applied, watched = (read(tmp_path, user_data(document, kind)) for kind in CONTAINER_KEYS)
    assert (applied.enforcement, applied.mode_change) == ("boot", ())
    assert watched.enforcement == "observe"
    assert applied.declaration is not None
    assert watched.declaration is not None
    assert "# kept word for word" in user_data(document, "bootstrap-containers")


def test_an_a100_keeps_the_hosts_own_mode_change_and_must_be_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(tmp_path, capsys, MIXED, "--gpu", "ampere")
    assert (code, out) == (2, "")
    assert "turns the mode off and reboots at every boot" in err
    code, out, _ = run(tmp_path, capsys, MIXED, "--gpu", "ampere", "--accept-single-plugin")
    assert code == 0
    document = parsed(out)
    assert document["settings"]["kubelet-device-plugins"]["nvidia"] == {"device-partitioning-strategy": "mig"}
    applied = read(tmp_path, user_data(document, "bootstrap-containers"))
    assert (applied.owner, applied.mode_change) == ("gpunode", ())


def test_uniform_is_the_hosts_own_and_only_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--uniform", "a100.40gb=2g.10gb", "--uniform", "h100.80gb=3")
    code, out, _ = run(tmp_path, capsys, None, *words)
    assert code == 0
    document = parsed(out)
    nvidia = document["settings"]["kubelet-device-plugins"]["nvidia"]
    assert nvidia["device-partitioning-strategy"] == "mig"
    assert nvidia["mig"]["profile"] == {"a100.40gb": "2g.10gb", "h100.80gb": "3"}
    assert "bootstrap-containers" not in document["settings"]
    assert read(tmp_path, user_data(document, "host-containers")).enforcement == "observe"
    host = read(tmp_path, out)  # the host's part is what gpunode reads from the API
    assert isinstance(host.declaration, model.BottlerocketDeclaration)


def test_ecs_is_only_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(tmp_path, capsys, None, "--variant", "ecs")
    assert code == 0
    document = parsed(out)
    assert set(document["settings"]) == {"host-containers"}


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ('[gpunode]\nmode-change = ["reset"]\n' + MIXED, ("--gpu", "hopper"), "cannot reset a GPU"),
        ('[gpunode]\nmode-change = ["reboot"]\n' + MIXED, ("--gpu", "hopper"), "lose the mode at every boot"),
        ('[gpunode]\nmode-change = ["reboot"]\n' + MIXED, ("--gpu", "ampere"), "reboot in turns"),
        ('[[gpunode.after-change]]\ncommand = ["x"]\n' + MIXED, ("--gpu", "hopper"), "cannot start units"),
        ('[gpunode]\nrelease-before-reset = ["a.service"]\n' + MIXED, ("--gpu", "hopper"), "cannot stop units"),
        ('[gpunode]\nenforcement = "observe"\n' + MIXED, ("--gpu", "hopper"), "does nothing"),
        ('[gpunode]\nenforcement = "continuous"\n' + MIXED, ("--gpu", "hopper"), "ends before the node serves"),
        ('[gpunode]\nowner = "migmanager"\n' + MIXED, ("--gpu", "hopper"), "only watches"),
        ("[gpunode]\n", ("--gpu", "hopper"), "no layout is declared"),
        ("[settings.x]\n" + MIXED, ("--gpu", "hopper"), "belong into the node's user data"),
        (MIXED, (), "--gpu hopper"),
        (MIXED, ("--variant", "ecs"), "ECS has no MIG"),
        (MIXED, ("--uniform", "a100.40gb=2g.10gb"), "only one of"),
        (None, ("--uniform", "a100.40gb=1g.5gb+me"), "one plain profile"),
        (None, ("--uniform", "A100=2g.10gb"), "one plain profile"),
        (None, ("--uniform", "a100.40gb=5"), "1, 2, 3, 4 or 7"),
        (None, (), "say what the node is to be"),
        ("not toml [", ("--gpu", "hopper"), "line 1"),
    ],
)
def test_what_loops_or_cannot_be_done_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: tuple[str, ...], why: str
) -> None:
    code, out, err = run(tmp_path, capsys, text, *words)
    assert (code, out) == (2, "")
    assert why in err


@pytest.mark.parametrize(
    "text",
    [
        MIXED,
        "[gpunode]\n" + MIXED,
        '[gpunode]\nenforcement = "boot"   # why\nperiod = 30\n' + MIXED,
        MIXED + '\n[gpunode.mig-parted]\nfile = "x"\nconfig = "y"\n',
        '# first\n\n[gpunode]  # options\nperiod = 30\n\n[[gpunode.layout]]\ngpus = "all"\ninstances = {}\n',
    ],
)
def test_one_option_is_set_and_nothing_else_changes(text: str) -> None:
    changed = render.with_option(text, "enforcement", '"observe"')
    wanted = tomllib.loads(text)
    wanted["gpunode"]["enforcement"] = "observe"
    assert tomllib.loads(changed) == wanted


def test_a_document_it_cannot_change_by_text_is_refused() -> None:
    with pytest.raises(render.Refused, match="cannot be set"):
        render.with_option(
            'gpunode = { period = 30, layout = [{ gpus = "all", instances = {} }] }', "enforcement", '"observe"'
        )


def test_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text(MIXED)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--image", IMAGE, "--gpu", "hopper", str(tmp_path / "layout.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    parsed(done.stdout)


@pytest.mark.parametrize("path", sorted((ROOT / "bottlerocket/user-data").glob("*.toml")), ids=lambda path: path.stem)
def test_the_user_data_we_ship_is_what_its_first_line_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, rest = path.read_text().partition("\n")
    prompt, script, *words = shlex.split(first.removeprefix("# "))
    assert (prompt, script) == ("$", "bottlerocket/render.py")
    assert render.main([str(ROOT / word) if word.startswith("bottlerocket/") else word for word in words]) == 0
    assert capsys.readouterr().out == rest
    parsed(rest)


def test_user_data_is_shipped_for_each_way_to_decide() -> None:
    assert {path.stem for path in (ROOT / "bottlerocket/user-data").iterdir()} == {
        "hopper-mixed",
        "a100-mixed",
        "uniform-verified",
        "ecs-watched",
    }
