"""Bottlerocket's table, wherever it comes from; and its API in every state it can be in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import errors
from agent.settings import bottlerocket, document, model, source
from tests.settings import api as apis

Load = Callable[..., model.Settings]
Write = Callable[..., Path]

MIG = '[settings.kubelet-device-plugins.nvidia]\ndevice-partitioning-strategy = "mig"\n'
PROFILE = "[settings.kubelet-device-plugins.nvidia.mig.profile]\n"


def declared(settings: model.Settings) -> dict[str, str]:
    declaration = settings.declaration
    assert isinstance(declaration, model.BottlerocketDeclaration)
    return {c.key: str(c.profile) if c.count is None else str(c.count) for c in declaration.choices}


# --- the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (MIG, {}),
        (MIG + PROFILE + '"a100.40gb" = "2g.10gb"', {"a100.40gb": "2g.10gb"}),
        (MIG + PROFILE + '"a100.40gb" = "3"\n"h100.80gb" = "12"', {"a100.40gb": "3", "h100.80gb": "12"}),
        (MIG + "[settings.kubernetes]\ncluster-name = 1\n[other]\nx = 1", {}),
        (MIG + "enabled = true\nsome-new-key = 5", {}),
        ('[settings.kubelet-device-plugins]\nnvidia = { device-partitioning-strategy = "mig", mig = {} }', {}),
    ],
)
def test_a_table_that_asks_for_mig(load: Load, text: str, choices: dict[str, str]) -> None:
    settings = load(text)
    assert declared(settings) == choices
    assert settings.bottlerocket is None
    assert settings.problems == ()


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("", None),
        ("[settings.kubernetes]\nx = 1", None),
        ("[settings.kubelet-device-plugins.nvidia]", None),
        ('[settings.kubelet-device-plugins.nvidia]\ndevice-partitioning-strategy = "none"', None),
        (PROFILE + '"a100.40gb" = "7"', "profile-without-mig"),
        (MIG + "enabled = false", "disabled-with-mig"),
        ('[settings.kubelet-device-plugin.nvidia]\ndevice-partitioning-strategy = "mig"', "unknown-key"),
        ('[settings.kubelet-device-plugins.nvidia]\ndevice-partitionning-strategy = "mig"', "unknown-key"),
    ],
)
def test_a_table_that_asks_for_nothing(load: Load, text: str, warning: str | None) -> None:
    settings = load(text)
    assert settings.declaration is None
    assert [p.code for p in settings.problems] == ([] if warning is None else [warning])


@pytest.mark.parametrize(("sharing", "word"), [("mps", "does not start"), ("time-slicing", "share")])
def test_sharing_together_with_mig_is_warned_about(load: Load, sharing: str, word: str) -> None:
    (problem,) = load(MIG + f'device-sharing-strategy = "{sharing}"').problems
    assert problem.code == "sharing-with-mig"
    assert problem.line == 3
    assert word in problem.message


@pytest.mark.parametrize(
    ("text", "code", "line", "says"),
    [
        ("settings = 1", "wrong-type", 1, "must be a table"),
        ("[settings]\nkubelet-device-plugins = 1", "wrong-type", 2, "must be a table"),
        ("[settings.kubelet-device-plugins]\nnvidia = 1", "wrong-type", 2, "must be a table"),
        (MIG + "enabled = 1", "wrong-type", 3, "true or false"),
        (MIG + "device-sharing-strategy = 1", "wrong-type", 3, "text in quotes"),
        (MIG + 'device-sharing-strategy = "mpz"', "invalid-value", 3, 'did you mean "mps"?'),
        (MIG.replace("mig", "MIG"), "invalid-value", 2, 'did you mean "mig"?'),
        (MIG.replace('"mig"', '"vgpu-thing"'), "invalid-value", 2, 'use "none" or "mig"'),
        (MIG + "mig = 1", "wrong-type", 3, "must be a table"),
        (MIG + "mig = { profile = 1 }", "wrong-type", 3, "must be a table"),
        (MIG + PROFILE + 'a100.40gb = "7"', "model-key", 4, "keys with a dot need quotes"),
        (MIG + PROFILE + '"A100.40GB" = "7"', "model-key", 4, 'did you mean "a100.40gb"?'),
        (MIG + PROFILE + '"a100" = "7"', "model-key", 4, "not a GPU model key"),
        (MIG + PROFILE + '"a100.40gb" = 3', "profile-syntax", 4, 'write the count in quotes: "3"'),
        (MIG + PROFILE + '"a100.40gb" = 0', "profile-syntax", 4, "must be text"),
        (MIG + PROFILE + '"a100.40gb" = "0"', "profile-syntax", 4, "neither a profile"),
        (MIG + PROFILE + '"a100.40gb" = "1g10gb"', "profile-syntax", 4, "neither a profile"),
        (MIG + PROFILE + '"a100.40gb" = "1g.5gb+me"', "profile-syntax", 4, "[[gpunode.layout]]"),
        (MIG + PROFILE + '"a100.40gb" = "1c.3g.20gb"', "profile-syntax", 4, "[[gpunode.layout]]"),
    ],
)
def test_a_table_with_a_slip(load: Load, text: str, code: str, line: int, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        load(text)
    problem = caught.value.problems[0]
    assert (problem.code, problem.line) == (code, line)
    assert says in problem.message


# --- the manager's file -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", bottlerocket.MANAGER_FILES)
def test_the_file_of_the_mig_manager(write: Write, tmp_path: Path, name: str) -> None:
    write(name, 'device-partitioning-strategy = "mig"\nprofile = { "a100.40gb" = "1g.5gb" }\nnew-key = 1\n')
    settings = source.load(source.Request(root=tmp_path))
    assert declared(settings) == {"a100.40gb": "1g.5gb"}
    assert settings.bottlerocket is not None
    assert settings.bottlerocket.partitions
    assert settings.bottlerocket.profiles == (("a100.40gb", "1g.5gb"),)
    assert settings.sources == (str(tmp_path / name),)


def test_an_empty_file_of_the_mig_manager_means_no_mig(write: Write, tmp_path: Path) -> None:
    write(bottlerocket.MANAGER_FILES[0], "")
    settings = source.load(source.Request(root=tmp_path))
    assert settings.declaration is None
    assert settings.sources == ()
    assert settings.bottlerocket is not None
    assert not settings.bottlerocket.partitions


def test_a_broken_file_of_the_mig_manager_is_an_error(write: Write, tmp_path: Path) -> None:
    write(bottlerocket.MANAGER_FILES[0], "device-partitioning-strategy = 7")
    with pytest.raises(errors.SettingsError) as caught:
        source.load(source.Request(root=tmp_path))
    assert "nvidia-migmanager.toml, line 1, key device-partitioning-strategy" in str(caught.value)


# --- the API ----------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[apis.Api]:
    with apis.serving(tmp_path / "run" / "api.sock") as running:
        yield running


def ask(tmp_path: Path, **changes: object) -> model.Settings:
    return source.load(source.Request(root=tmp_path, timeout=0.3, **changes))  # type: ignore[arg-type]


GOOD = [
    ("nothing set", {}, None, "none", True),
    ("as it ships", apis.table(), None, "none", True),
    ("plugin off", apis.table(enabled=False), None, "none", False),
    ("mig", apis.MIG, {"a100.40gb": "2g.10gb"}, "mig", True),
    ("mig, wrapped", {"settings": apis.MIG}, {"a100.40gb": "2g.10gb"}, "mig", True),
    ("mig without profiles", apis.table(device_partitioning_strategy="mig"), {}, "mig", True),
    ("mig and off", apis.table(device_partitioning_strategy="mig", enabled=False), None, "mig", False),
    ("a strategy to come", apis.table(device_partitioning_strategy="dra"), None, "dra", True),
    ("profiles kept", apis.table(mig={"profile": {"a100.40gb": "7"}}), None, "none", True),
    ("other keys only", {"kubelet-device-plugins": {}}, None, "none", True),
    ("null", apis.table(device_partitioning_strategy=None, enabled=None), None, "none", True),
]


@pytest.mark.parametrize("mode", ["http", "close", "keep"])
@pytest.mark.parametrize(("answer", "choices", "strategy", "enabled"), [g[1:] for g in GOOD], ids=[g[0] for g in GOOD])
def test_what_the_api_answers(
    api: apis.Api,
    tmp_path: Path,
    mode: str,
    answer: object,
    choices: dict[str, str] | None,
    strategy: str,
    enabled: bool,
) -> None:
    api.mode = mode
    api.answer(answer)
    settings = ask(tmp_path)
    assert api.asked == ["/settings?prefix=kubelet-device-plugins.nvidia"]
    view = settings.bottlerocket
    assert view is not None
    assert (view.strategy, view.enabled, view.problem) == (strategy, enabled, None)
    assert view.partitions == (strategy == "mig" and enabled)
    if choices is None:
        assert settings.declaration is None
    else:
        assert declared(settings) == choices
        assert isinstance(settings.declaration, model.BottlerocketDeclaration)
        assert settings.declaration.from_host
        assert settings.provenance["layout"].source == f"Bottlerocket API {tmp_path}/run/api.sock"


def test_sharing_is_told_and_warned_about(api: apis.Api, tmp_path: Path) -> None:
    api.answer(apis.table(device_partitioning_strategy="mig", device_sharing_strategy="mps"))
    settings = ask(tmp_path)
    assert settings.bottlerocket is not None
    assert settings.bottlerocket.sharing == "mps"
    assert [p.code for p in settings.problems] == ["sharing-with-mig"]


@pytest.mark.parametrize(
    ("sharing", "text", "warned"),
    [
        ("time-slicing", '[[gpunode.layout]]\ngpus = "all"\ninstances = {}\n', True),
        ("mps", '[[gpunode.layout]]\ngpus = "all"\ninstances = {}\n', True),
        ("none", '[[gpunode.layout]]\ngpus = "all"\ninstances = {}\n', False),
        ("mps", '[[gpunode.layout]]\ngpus = "all"\nmig = false\n', False),
        ("mps", "[gpunode]\n", False),
    ],
)
def test_sharing_of_the_host_with_a_layout_of_ours(
    api: apis.Api, write: Write, tmp_path: Path, sharing: str, text: str, warned: bool
) -> None:
    api.answer(apis.table(device_sharing_strategy=sharing))
    write("etc/gpunode/config.toml", text)
    found = ask(tmp_path).problems
    assert [p.code for p in found] == (["sharing-with-mig"] if warned else [])


def test_a_model_key_that_the_host_took_is_only_a_warning(api: apis.Api, tmp_path: Path) -> None:
    api.answer(apis.table(device_partitioning_strategy="mig", mig={"profile": {"A9": "7", "a100.40gb": "7"}}))
    settings = ask(tmp_path)
    assert declared(settings) == {"a100.40gb": "7"}
    assert [(p.severity, p.code) for p in settings.problems] == [("warning", "model-key")]


BAD = [
    ("400", lambda a: a.answer("bad prefix", 400), "answered 400"),
    ("404", lambda a: a.answer("missing", 404), "answered 404"),
    ("423", lambda a: a.answer("locked", 423), "answered 423"),
    ("500", lambda a: a.answer("oops", 500), "answered 500"),
    ("503", lambda a: a.answer("", 503), "answered 503"),
    ("a hang", lambda a: setattr(a, "mode", "hang"), "no answer within 0.3 s"),
    ("a drip", lambda a: setattr(a, "mode", "drip"), "no answer within 0.3 s"),
    ("no JSON", lambda a: setattr(a, "body", b"<html>"), "not valid JSON"),
    ("a list", lambda a: a.answer([1]), "JSON object"),
    ("wrong types", lambda a: a.answer(apis.table(enabled="yes")), "true or false"),
    ("wrong strategy type", lambda a: a.answer(apis.table(device_partitioning_strategy=1)), "text in quotes"),
    ("wrong shape", lambda a: a.answer({"kubelet-device-plugins": 5}), "must be a table"),
    ("huge", lambda a: setattr(a, "body", b" " * (document.LIMIT + 9)), "larger than 1 MiB"),
]
RAW = [
    ("no HTTP", b"220 mail.example ESMTP\r\n", "no HTTP"),
    ("nothing", b"", "no HTTP"),
    ("cut off", b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{}", "cut off"),
    ("a bad status", b"HTTP/1.1 abc\r\n\r\n", "no HTTP"),
    ("bad chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP"),
]


def refused(tmp_path: Path, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        ask(tmp_path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"Bottlerocket API {tmp_path}/run/api.sock")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("spoil", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_an_api_that_cannot_be_read_is_an_error(
    api: apis.Api, tmp_path: Path, spoil: Callable[[apis.Api], None], says: str
) -> None:
    spoil(api)
    refused(tmp_path, says)


@pytest.mark.parametrize(("raw", "says"), [b[1:] for b in RAW], ids=[b[0] for b in RAW])
def test_an_answer_that_is_no_http_is_an_error(api: apis.Api, tmp_path: Path, raw: bytes, says: str) -> None:
    api.mode = "raw"
    api.body = raw
    refused(tmp_path, says)


def test_a_chunked_answer_is_read(api: apis.Api, tmp_path: Path) -> None:
    api.mode = "raw"
    api.body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert ask(tmp_path).declaration is None


def test_a_socket_that_nobody_serves_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "run" / "api.sock"))
    refused(tmp_path, "Connection refused")


def test_a_file_where_the_socket_should_be_is_an_error(write: Write, tmp_path: Path) -> None:
    write("run/api.sock", "")
    refused(tmp_path, "cannot read the host's settings")


def test_a_clock_that_has_run_out_ends_it(tmp_path: Path) -> None:
    with apis.serving(tmp_path / "s"):
        times = iter((0.0, 0.1, 5.0))
        with pytest.raises(document.Unreadable, match="no answer"):
            bottlerocket.ask(tmp_path / "s", timeout=1.0, clock=lambda: next(times))


def test_without_a_socket_there_is_nothing_and_one_that_appears_late_is_seen(tmp_path: Path) -> None:
    request = source.Request(root=tmp_path)
    before = source.fingerprint(request)
    assert source.load(request).bottlerocket is None
    with apis.serving(tmp_path / "run" / "api.sock") as api:
        api.answer(apis.MIG)
        assert source.fingerprint(request) != before
        assert source.load(request).declaration is not None
    assert source.fingerprint(request) == before


def test_a_changed_answer_changes_the_fingerprint_and_the_same_one_does_not(api: apis.Api, tmp_path: Path) -> None:
    request = source.Request(root=tmp_path)
    api.answer(apis.table())
    first = source.fingerprint(request)
    assert source.fingerprint(request) == first
    api.answer(apis.MIG)
    second = source.fingerprint(request)
    assert second != first
    api.answer("down", 500)
    assert source.fingerprint(request) not in (first, second)


def test_the_socket_is_found_below_the_host_s_root_too(tmp_path: Path) -> None:
    with apis.serving(tmp_path / ".bottlerocket" / "rootfs" / "run" / "api.sock") as api:
        api.answer(apis.MIG)
        assert ask(tmp_path).declaration is not None


def test_a_socket_may_be_named_and_its_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20) / ("er" * 30)
    folder.mkdir(parents=True)
    short = tmp_path / "s"
    with apis.serving(short) as api:
        api.answer(apis.MIG)
        (folder / "api.sock").symlink_to(short)
        assert ask(tmp_path, bottlerocket_socket=folder / "api.sock").declaration is not None
    assert ask(tmp_path, bottlerocket_socket=tmp_path / "gone").declaration is None


def test_settings_files_replace_the_api_but_the_host_is_still_looked_at(
    api: apis.Api, write: Write, tmp_path: Path
) -> None:
    api.answer(apis.MIG)
    path = write("own.toml", '[gpunode]\nowner = "gpunode"')
    settings = ask(tmp_path, files=(path,))
    assert settings.declaration is None
    assert settings.bottlerocket is not None
    assert settings.bottlerocket.partitions
    api.answer("down", 500)
    settings = ask(tmp_path, files=(path,))
    assert settings.bottlerocket is not None
    assert "answered 500" in str(settings.bottlerocket.problem)
    assert [(p.severity, p.code) for p in settings.problems] == [("warning", "bottlerocket-api")]
