"""The web configuration file: every mistake with file, line and key; rotation; passwords."""

from __future__ import annotations

import asyncio
import base64
import builtins
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent import errors
from agent.serve import webconfig
from tests.serve import openssl

HASH = "$2y$04$x2fSrjEgMDUYdnBmAMRIBe4QWhmnfEICbByoeZJGznLqXlfSOA0Em"
PASSWORD = "correct horse"


def write(where: Path, text: str) -> Path:
    path = where / "web.yml"
    path.write_text(text)
    return path


def problems(where: Path, text: str) -> list[tuple[int | None, str | None, str]]:
    with pytest.raises(errors.SettingsError) as caught:
        webconfig.load(write(where, text))
    assert all(one.file == str(where / "web.yml") for one in caught.value.problems)
    return [(one.line, one.key, one.message) for one in caught.value.problems]


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate and its key, as text."""
    where = tmp_path_factory.mktemp("pair")
    openssl.make(where / "key", where / "cert", "x")
    return (where / "cert").read_text(), (where / "key").read_text()


@pytest.fixture
def folder(tmp_path: Path, pair: tuple[str, str]) -> Path:
    (tmp_path / "cert").write_text(pair[0])
    (tmp_path / "key").write_text(pair[1])
    return tmp_path


TLS = "tls_server_config:\n  cert_file: cert\n  key_file: key\n"


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("basic_auth_user: {}\n", 1, "basic_auth_user", "unknown key (known here: basic_auth_users, "),
        ("rate_limit:\n  burts: 3\n", 2, "rate_limit.burts", "unknown key (known here: burst, interval)"),
        ("http_server_config:\n  http3: true\n", 2, "http_server_config.http3", "unknown key"),
        ("- a\n", None, None, "the web configuration is not a table of keys"),
        ("a: [\n", 2, None, "not valid YAML"),
        ("rate_limit:\n  burst: 1\nrate_limit:\n  burst: 2\n", 3, None, "not valid YAML: found duplicate key"),
        ("tls_server_config: 3\n", 1, "tls_server_config", "must be a table of keys"),
        ("basic_auth_users:\n  ana: secret\n", 2, "basic_auth_users.ana", "is no bcrypt hash"),
        ("basic_auth_users: [ana]\n", 1, "basic_auth_users", "must be a table of user = bcrypt hash"),
        ("rate_limit:\n  interval: soon\n", 2, "rate_limit.interval", "must be a duration"),
        ("rate_limit:\n  interval: 1s\n  burst: 0\n", 3, "rate_limit.burst", "must be a whole number from 1"),
        ("http_server_config:\n  headers: [x]\n", 2, "http_server_config.headers", "must be a table of headers"),
        (
            "http_server_config:\n  headers:\n    Server: mine\n",
            3,
            "http_server_config.headers.Server",
            "only these headers can be set",
        ),
        (
            "http_server_config:\n  headers:\n    X-Frame-Options: allow\n",
            3,
            "http_server_config.headers.X-Frame-Options",
            "must be one of deny, sameorigin",
        ),
        (
            'http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nb: c"\n',
            3,
            "http_server_config.headers.X-XSS-Protection",
            "must be one line of plain text",
        ),
        ("tls_server_config:\n  key_file: key\n", None, "tls_server_config.cert_file", "TLS needs cert or cert_file"),
        (TLS + "  cert: x\n", 4, "tls_server_config.cert", "cert and cert_file exclude each other"),
        (
            TLS + "  min_version: SSL3\n",
            4,
            "tls_server_config.min_version",
            "must be one of TLS10, TLS11, TLS12, TLS13",
        ),
        (TLS + "  client_auth_type: Maybe\n", 4, "tls_server_config.client_auth_type", "must be one of NoClientCert"),
        (
            TLS + "  client_auth_type: RequireAnyClientCert\n",
            4,
            "tls_server_config.client_auth_type",
            "asks for certificates without checking them",
        ),
        (
            TLS + "  client_ca_file: cert\n",
            None,
            "tls_server_config.client_auth_type",
            "nothing says to check clients by it",
        ),
        (
            TLS + "  client_auth_type: RequireAndVerifyClientCert\n",
            4,
            "tls_server_config.client_auth_type",
            "needs client_ca or client_ca_file",
        ),
        (TLS + "  client_allowed_sans: [a]\n", 4, "tls_server_config.client_allowed_sans", "needs client_auth_type"),
        (TLS + "  client_allowed_sans: a\n", 4, "tls_server_config.client_allowed_sans", "must be a list of names"),
        (
            TLS + "  cipher_suites: [NONSENSE]\n",
            4,
            "tls_server_config.cipher_suites",
            "this OpenSSL knows none of them",
        ),
        (TLS + "  cipher_suites: NONSENSE\n", 4, "tls_server_config.cipher_suites", "must be a list"),
        (
            TLS + "  curve_preferences: [CurveP256, X25519]\n",
            4,
            "tls_server_config.curve_preferences",
            "must be a list of one",
        ),
        (
            TLS.replace("cert\n", "none\n"),
            2,
            "tls_server_config.cert_file",
            "cannot load certificate and key: No such file",
        ),
        (TLS.replace("cert\n", "key\n"), 2, "tls_server_config.cert_file", "cannot load certificate and key"),
        (
            TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: none\n",
            5,
            "tls_server_config.client_ca_file",
            "cannot load the client CA: No such file",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    folder: Path, text: str, line: int | None, key: str | None, says: str
) -> None:
    found = problems(folder, text)
    assert len(found) == 1, found
    assert found[0][:2] == (line, key)
    assert says in found[0][2]


def test_everything_wrong_is_told_at_once_and_no_password_is_repeated(tmp_path: Path) -> None:
    found = problems(tmp_path, "basic_auth_users:\n  ana: my-plain-password\n  bob: 7\nrate_limt: {}\n")
    assert [key for _, key, _ in found] == ["rate_limt", "basic_auth_users.ana", "basic_auth_users.bob"]
    assert "my-plain-password" not in str(found)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="cannot read the web configuration: No such file"):
        webconfig.load(tmp_path / "none.yml")
    with pytest.raises(errors.SettingsError, match="is larger than 1 MiB"):
        webconfig.load(write(tmp_path, "#" * (2**20 + 1)))
    (tmp_path / "web.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.SettingsError, match="not UTF-8"):
        webconfig.load(tmp_path / "web.yml")


def test_an_empty_file_guards_nothing(tmp_path: Path) -> None:
    web = webconfig.load(write(tmp_path, "# nothing yet\n"))
    assert (web.context, web.guarded, web.asks_password, dict(web.headers)) == (None, False, False, {})
    assert web.allows_certificate(None)


def test_all_that_can_be_set(folder: Path, pair: tuple[str, str]) -> None:
    def indented(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines())

    web = webconfig.load(
        write(
            folder,
            "tls_server_config:\n"
            f"  cert: |\n{indented(pair[0])}  key: |\n{indented(pair[1])}  client_ca: |\n{indented(pair[0])}"
            "  client_auth_type: VerifyClientCertIfGiven\n  min_version: TLS12\n  max_version: TLS13\n"
            "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_RSA_WITH_AES_256_CBC_SHA, TLS_AES_128_GCM_SHA256]\n"
            "  prefer_server_cipher_suites: true\n  curve_preferences: [CurveP256]\n"
            f"basic_auth_users:\n  ana: {HASH}\n"
            "http_server_config:\n  http2: false\n  headers:\n    X-Content-Type-Options: nosniff\n"
            "rate_limit:\n  interval: 500ms\n  burst: 2\n",
        )
    )
    assert web.context is not None
    names = {str(cipher["name"]) for cipher in web.context.get_ciphers()}
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in names
    assert "ECDHE-RSA-AES256-GCM-SHA384" not in names
    assert (web.guarded, web.asks_password) == (True, True)
    assert dict(web.headers) == {"X-Content-Type-Options": "nosniff"}


def test_no_descriptor_is_left_open_by_inline_material(folder: Path, pair: tuple[str, str]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a folder of links that come and go
    text = "".join(
        f"  {name}: |\n" + "".join(f"    {line}\n" for line in one.splitlines())
        for name, one in zip(("cert", "key"), pair, strict=True)
    )
    for _ in range(3):
        webconfig.load(write(folder, "tls_server_config:\n" + text))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "ECDHE-RSA-AES256-GCM-SHA384"),
        ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305"),
        ("TLS_RSA_WITH_AES_128_CBC_SHA", "AES128-SHA"),
        ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", "ECDHE-RSA-AES128-SHA"),
        ("TLS_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"),
    ],
)
def test_cipher_suites_are_named_as_in_go_and_known_to_openssl(suite: str, name: str) -> None:
    assert webconfig._openssl_name(suite) == name


async def test_passwords(tmp_path: Path) -> None:
    web = webconfig.load(write(tmp_path, f"basic_auth_users:\n  ana: {HASH}\n"))
    for _ in range(2):  # the second time it is remembered
        assert await web.knows(basic("ana", PASSWORD)) is True
    for wrong in (
        None,
        "",
        "Basic",
        "Basic !!!",
        "Bearer abc",
        basic("ana", "wrong"),
        basic("ana", PASSWORD + "x"),
        basic("eve", PASSWORD),
        basic("eve", "nobody has this"),
        "Basic " + base64.b64encode(b"no colon").decode(),
        "Basic " + base64.b64encode(b"\xff:x").decode(),
        basic("ana", "x" * 500),
    ):
        assert await web.knows(wrong) is False, wrong


async def test_a_flood_of_wrong_passwords_is_turned_away(tmp_path: Path) -> None:
    web = webconfig.load(write(tmp_path, f"basic_auth_users:\n  ana: {HASH}\n"))
    answers = await asyncio.gather(*(web.knows(basic("ana", f"guess {number}")) for number in range(40)))
    assert answers.count(None) == 40 - webconfig._WAITING
    assert answers.count(False) == webconfig._WAITING


def test_the_rate_limit_lets_a_burst_through_and_then_one_an_interval(tmp_path: Path) -> None:
    web = webconfig.load(write(tmp_path, "rate_limit:\n  interval: 2s\n  burst: 3\n"))
    assert [web.admits(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert [web.admits(102.0) for _ in range(2)] == [True, False]
    assert [web.admits(1000.0) for _ in range(4)] == [True, True, True, False]


def test_without_bcrypt_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> ModuleType:
        if name == "bcrypt":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    found = problems(tmp_path, f"basic_auth_users:\n  ana: {HASH}\n")
    assert "need the Python package bcrypt" in found[0][2]


async def test_changed_users_are_taken_up_and_a_bad_file_keeps_the_last_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"basic_auth_users:\n  ana: {HASH}\n")
    web = webconfig.load(path)
    assert await web.knows(basic("ana", PASSWORD)) is True
    write(tmp_path, f"basic_auth_users:\n  bob: {HASH}\n")
    web.refresh()
    assert await web.knows(basic("ana", PASSWORD)) is False
    assert await web.knows(basic("bob", PASSWORD)) is True
    write(tmp_path, "basic_auth_userz: {}\n# longer than before\n")
    web.refresh()
    assert await web.knows(basic("bob", PASSWORD)) is True
    assert "the last good one stays in force" in capsys.readouterr().err
    path.unlink()
    web.refresh()
    assert await web.knows(basic("bob", PASSWORD)) is True
    web.refresh()  # nothing new: nothing is said again
    assert capsys.readouterr().err.count("the last good one stays in force") == 1


def test_a_new_certificate_is_used_for_new_connections(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web = webconfig.load(write(folder, TLS))
    context = web.context
    assert context is not None
    (folder / "cert").write_text("nonsense")
    web.refresh()
    assert "the last good one stays in force" in capsys.readouterr().err
    openssl.make(folder / "key", folder / "cert", "renewed")
    web.refresh()
    assert web.context is context
    assert "web configuration taken up" in capsys.readouterr().err
    write(folder, "basic_auth_users: {}\n")
    web.refresh()
    assert "that needs a restart" in capsys.readouterr().err
    assert web.context is context
