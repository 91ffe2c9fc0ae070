"""Every source of settings through `check` and `status`: who wins, who is named, and documents that are scrap."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as rules

from agent.settings import migparted, model, source, userdata
from tests import verbs
from tests.settings import api as apis
from tests.settings import test_random as scrap

MIME = (
    'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="B"\n\n--B\n'
    "Content-Type: application/node.eks.aws\n\n"
    "apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\n--B\n"
    "Content-Type: application/gpunode+toml\n\n{}\n--B--\n"
)
FILES = {
    "EC2 user data": userdata.EC2_FILE,
    "container user data": userdata.CONTAINER_FILES[0],
    "config.toml": source.CONFIG_FILE,
    "a drop-in": source.CONFIG_DIRECTORY + "/10-a.toml",
    "a later drop-in": source.CONFIG_DIRECTORY + "/20-b.toml",
}
CHAIN = ["default", *FILES, "environment"]
# Two different values a key, as TOML and as the environment has them.
KEYS: dict[str, tuple[tuple[str, str, object], tuple[str, str, object]]] = {
    "enforcement": (('"observe"', "observe", "observe"), ('"continuous"', "continuous", "continuous")),
    "mode-change": (("[]", "none", []), ('["reset", "reboot"]', "reset,reboot", ["reset", "reboot"])),
    "live-mode-change": (("true", "1", True), ("false", "0", False)),
    "release-before-reset": (('["a.service"]', "a.service", ["a.service"]), ("[]", "none", [])),
    "on-failure": (('"leave"', "leave", "leave"), ('"rollback"', "rollback", "rollback")),
    "unlisted-gpus": (('"disable"', "disable", "disable"), ('"ignore"', "ignore", "ignore")),
    "not-capable": (('"ignore"', "ignore", "ignore"), ('"refuse"', "refuse", "refuse")),
    "owner": (('"gpunode"', "gpunode", "gpunode"), ('"auto"', "auto", "auto")),
    "allow-mig-on-ecs": (("true", "yes", True), ("false", "no", False)),
    "listen": (('["[::1]:9"]', "[::1]:9", ["[::1]:9"]), ('["unix:/s"]', "unix:/s", ["unix:/s"])),
    "sample-interval": (("2.5", "2.5", 2.5), ("7", "7", 7.0)),
    "dcgm-metrics": (("true", "on", True), ("false", "off", False)),
    "period": (("30", "30", 30.0), ("45", "45", 45.0)),
}


@dataclasses.dataclass(slots=True)
class Host:
    """A simulated host with files on it."""

    place: Path
    flags: tuple[object, ...]
    monkeypatch: pytest.MonkeyPatch

    def path(self, name: str) -> Path:
        return self.place / "state.root" / name

    def say(self, where: str, text: str) -> Path:
        """Have a source say `text`; return the file."""
        path = self.path(FILES[where])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MIME.format(text) if where == "EC2 user data" else text)
        return path

    def values(self, *words: object, verb: str = "check") -> dict[str, dict[str, object]]:
        ended = verbs.run(verb, *self.flags, *words, "--output", "json")
        told = ended.json()
        found = told["values"] if verb == "check" else told["settings"]["values"]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("GPUNODE_EC2_USER_DATA", "1")
    return Host(tmp_path, ("--simulate", "a100.40gb:1", "--sim-state", tmp_path / "state"), monkeypatch)


def test_the_table_has_every_key_that_may_be_set_everywhere() -> None:
    keys = {field.replace("_", "-") for field in model.OPTIONS}
    assert keys - set(KEYS) == {"after-change", "web-config-file", "ec2-user-data"}


@pytest.mark.parametrize("key", KEYS)
def test_every_source_overrides_the_one_before_it_and_check_names_it(key: str, host: Host) -> None:
    assert host.values()[key]["source"] == "default"
    path = Path()
    for rank, where in enumerate(CHAIN[1:]):
        toml, text, value = KEYS[key][rank % 2]
        if where == "environment":
            host.monkeypatch.setenv("GPUNODE_" + key.upper().replace("-", "_"), text)
        else:
            path = host.say(where, f"[gpunode]\n{key} = {toml}\n")
        found = host.values()[key]
        assert found["value"] == value, where
        if where == "environment":
            assert found["source"] == "environment"
        else:
            assert str(path) in str(found["source"])
            assert found["line"] is not None
        row = next(line for line in verbs.run("check", *host.flags).out.splitlines() if line.startswith(key + " "))
        assert ("environment" if where == "environment" else str(path)) in row


def layout(count: int) -> str:
    return f'[[gpunode.layout]]\ngpus = "all"\ninstances = {{ "1g.5gb" = {count} }}\n'


def test_the_last_source_with_a_layout_decides_it_alone(host: Host) -> None:
    with apis.serving(host.path("run/api.sock")) as api:
        api.answer(apis.MIG)
        found = host.values()["layout"]
        assert (found["value"], found["source"]) == ("bottlerocket", f"Bottlerocket API {host.path('run/api.sock')}")
        for where in ("EC2 user data", "container user data", "config.toml"):
            path = host.say(where, layout(2))
            found = host.values()["layout"]
            assert found["value"] == "gpunode"
            assert str(path) in str(found["source"])
        parted = host.place / "parted.yaml"
        parted.write_text(
            "version: v1\nmig-configs:\n"
            "  one:\n  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1}}\n"
            "  two:\n  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 3}}\n"
        )
        host.monkeypatch.setenv("GPUNODE_MIG_CONFIG", f"{parted}:one")
        found = host.values()["layout"]
        assert (found["value"], found["file"]) == ("mig-parted:one", str(parted))
        found = host.values("--mig-config", f"{parted}:two")["layout"]
        assert (found["value"], found["file"]) == ("mig-parted:two", str(parted))
        plan = verbs.run("plan", *host.flags, "--mig-config", f"{parted}:two", "--output", "json").json()
        made = [s["profile"] for g in plan["gpus"] for s in g["steps"] if s["kind"] == "create-gpu-instance"]
        assert made in ([], ["2g.10gb"] * 3), "with MIG off the driver tells no profiles yet"
        assert verbs.run("apply", "--yes", *host.flags, "--mig-config", f"{parted}:two").code == 0
        status = verbs.run("status", *host.flags, "--output", "json").json()
        assert [i["profile"] for i in status["gpus"][0]["gpu_instances"]] == ["2g.10gb"] * 3


def test_the_document_may_be_named_in_the_configuration(host: Host) -> None:
    (host.path("etc/gpunode")).mkdir(parents=True, exist_ok=True)
    host.path("etc/gpunode/parted.yaml").write_text(
        "version: v1\nmig-configs:\n"
        "  one:\n  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1}}\n"
        "  two:\n  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}\n"
    )
    host.say("config.toml", '[gpunode.mig-parted]\nfile = "parted.yaml"\nconfig = "two"\n')
    assert host.values()["layout"]["value"] == "mig-parted:two"
    assert verbs.run("apply", "--yes", *host.flags).code == 0
    status = verbs.run("status", *host.flags, "--output", "json").json()
    assert [i["profile"] for i in status["gpus"][0]["gpu_instances"]] == ["3g.20gb"] * 2
    host.say("config.toml", '[gpunode.mig-parted]\nfile = "parted.yaml"\nconfig = "tow"\n')
    ended = verbs.run("check", *host.flags)
    assert ended.code == 2
    assert 'did you mean "two"' in ended.out
    host.say("config.toml", '[gpunode.mig-parted]\nfile = "parted.yaml"\n')
    assert "one" in verbs.run("check", *host.flags).out, "with several labels, one must be named"


def test_settings_files_replace_files_and_api_but_not_the_environment(host: Host) -> None:
    host.say("config.toml", "[gpunode]\nperiod = 30\n" + layout(1))
    host.monkeypatch.setenv("GPUNODE_ON_FAILURE", "leave")
    own = host.place / "own.toml"
    own.write_text(layout(2))
    found = host.values("--settings", own)
    assert found["period"]["source"] == "default"
    assert found["on-failure"]["source"] == "environment"
    assert found["layout"]["file"] == str(own)


def test_status_tells_where_each_value_comes_from_like_check(host: Host) -> None:
    path = host.say("config.toml", '[gpunode]\nunlisted-gpus = "disable"\n')
    host.monkeypatch.setenv("GPUNODE_PERIOD", "30")
    assert host.values(verb="status") == host.values()
    lines = verbs.run("status", *host.flags).out.splitlines()
    assert f"  unlisted-gpus = disable, from {path} line 2" in lines
    assert "  period = 30.0, from environment, key GPUNODE_PERIOD" in lines
    assert not any("on-failure" in line for line in lines), "defaults are not told one by one"


def test_arguments_of_commands_are_nobody_elses_business_in_status(host: Host) -> None:
    host.say("config.toml", '[[gpunode.after-change]]\ncommand = ["/usr/bin/true", "--token=s3cret"]\n')
    assert "s3cret" in verbs.run("check", *host.flags).out
    for output in ("table", "json"):
        said = verbs.run("status", *host.flags, "--output", output).out
        assert "s3cret" not in said
        assert "/usr/bin/true" in said


@pytest.mark.parametrize("sharing", ["time-slicing", "mps"])
@pytest.mark.parametrize("declared", ["by Bottlerocket", "by us", "by us alone"])
def test_sharing_together_with_mig_is_warned_about(host: Host, sharing: str, declared: str) -> None:
    if declared != "by Bottlerocket":
        host.say("config.toml", layout(1))
    with apis.serving(host.path("run/api.sock")) as api:
        strategy = "none" if declared == "by us alone" else "mig"
        api.answer(apis.table(device_partitioning_strategy=strategy, device_sharing_strategy=sharing))
        ended = verbs.run("check", *host.flags)
    assert ended.code == 0
    (told,) = [line for line in ended.out.splitlines() if "together with MIG" in line]
    assert told.startswith("warning: ")


# --- scrap ------------------------------------------------------------------------------------------

QUICK = rules(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = rules(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def document(data: bytes, kind: str) -> Iterator[tuple[tuple[object, ...], str]]:
    """Put a document where a verb finds it; yield the flags, and the name that messages must have."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        node = ("--simulate", "a100.40gb:1", "--sim-state", place / "state")
        path = place / f"document.{kind}"
        words: tuple[object, ...] = ("--settings", path)
        if kind == "mig-parted":
            words = ("--mig-config", f"{path}:half-balanced")
        elif kind == "mime":
            path = place / "state.root" / userdata.EC2_FILE
            path.parent.mkdir(parents=True)
            words = ()
        path.write_bytes(data)
        migparted.parse.cache_clear()
        yield (*node, *words), path.name


def refused_or_good(data: bytes, kind: str) -> None:
    with document(data, kind) as (flags, name):
        for output in ("table", "json"):
            ended = verbs.run("check", *flags, "--output", output)
            assert ended.code in (0, 2), ended
            assert "Traceback" not in ended.err + ended.out
            assert "internal error" not in ended.err
            if ended.code == 2:
                assert name in ended.out
        if kind == "toml":
            assert verbs.run("plan", *flags).code in (0, 2, 3, 4)


@pytest.mark.parametrize("kind", sorted(scrap.SEEDS))
def test_no_document_ends_a_verb_with_a_traceback(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_EC2_USER_DATA", "1")

    @QUICK
    @given(scrap.documents(scrap.SEEDS[kind]))
    def run(data: bytes) -> None:
        refused_or_good(data, kind)

    run()


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(scrap.SEEDS))
def test_none_of_very_many_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_EC2_USER_DATA", "1")

    @LONG
    @given(scrap.documents(scrap.SEEDS[kind]))
    def run(data: bytes) -> None:
        refused_or_good(data, kind)

    run()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("a key twice", lambda p: p.write_text("[gpunode]\nperiod = 3\nperiod = 4\n"), "line 3"),
    ("a wrong type", lambda p: p.write_text("[gpunode]\nperiod = 'x'\n"), "a number"),
    ("a slip", lambda p: p.write_text("[gpunode]\nenforcment = 'boot'\n"), 'did you mean "enforcement"'),
    ("a wrong word", lambda p: p.write_text("[gpunode]\nenforcement = 'bot'\n"), 'did you mean "boot"'),
    ("too large", lambda p: p.write_bytes(b"#" * (1 << 21)), "1 MiB"),
    ("too deep", lambda p: p.write_text("a = " + "[" * 200 + "]" * 200), "deep"),
    ("a NUL byte", lambda p: p.write_bytes(b"[gpunode]\n\0"), "NUL"),
    ("another encoding", lambda p: p.write_bytes("[gpunode]\n".encode("utf-16")), "UTF-"),
    ("a circle of links", loop, "link"),
    ("a directory", lambda p: p.mkdir(), "directory"),
    ("nothing there", lambda _: None, "no such file"),
]


@pytest.mark.parametrize(("spoil", "says"), [s[1:] for s in SPOILED], ids=[s[0] for s in SPOILED])
def test_one_clear_error_each(host: Host, spoil: Callable[[Path], object], says: str) -> None:
    path = host.place / "own.toml"
    spoil(path)
    ended = verbs.run("check", *host.flags, "--settings", path)
    assert ended.code == 2
    told = [line for line in ended.out.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, told
    assert str(path) in told[0]
    assert says in told[0]
