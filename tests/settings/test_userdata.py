"""EC2 user data: our own part among everybody's, and nothing of the rest in any message."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from email.mime.multipart import MIMEMultipart
from email.mime.nonmultipart import MIMENonMultipart
from email.mime.text import MIMEText
from pathlib import Path

import pytest

from agent import errors
from agent.settings import document, source, userdata

Write = Callable[..., Path]
OURS = b"[gpunode]\nperiod = 7\n"
SECRET = "hunter2-is-the-password"


def part(content: bytes, *, encoding: str = "7bit") -> MIMENonMultipart:
    found = MIMENonMultipart("application", "gpunode+toml", charset="us-ascii")
    body = content.decode("latin-1")
    if encoding == "base64":
        body = base64.encodebytes(content).decode()
    elif encoding == "quoted-printable":
        body = content.decode().replace("=", "=3D")
    found.set_payload(body)
    del found["Content-Transfer-Encoding"]
    found["Content-Transfer-Encoding"] = encoding
    return found


def mime(*parts: MIMENonMultipart | MIMEMultipart) -> bytes:
    whole = MIMEMultipart("mixed", boundary="BOUNDARY")
    whole.attach(MIMEText(f"#!/bin/sh\necho {SECRET}\n", "x-shellscript"))
    node = MIMENonMultipart("application", "node.eks.aws")
    node.set_payload(f"kind: NodeConfig\ntoken: {SECRET}\n")
    for own in parts:
        whole.attach(own)
    whole.attach(node)
    return whole.as_bytes()


def period(write: Write, data: bytes, **environ: str) -> float:
    path = write("root/" + userdata.EC2_FILE, data)
    root = path.parents[4]
    request = source.Request(root=root, environ={"GPUNODE_EC2_USER_DATA": "true", **environ})
    return source.load(request).period


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(mime(part(OURS)), id="a plain part"),
        pytest.param(mime(part(OURS)).replace(b"\n", b"\r\n"), id="lines as mail has them"),
        pytest.param(mime(part(OURS, encoding="base64")), id="a part in base64"),
        pytest.param(mime(part(OURS, encoding="quoted-printable")), id="a part in quoted-printable"),
        pytest.param(mime(part(gzip.compress(OURS), encoding="base64")), id="a part in gzip and base64"),
        pytest.param(mime(part(base64.b64encode(gzip.compress(OURS)))), id="a part in base64 that nothing announces"),
        pytest.param(mime(part(base64.b64encode(OURS))), id="a part in base64, not gzip"),
        pytest.param(gzip.compress(mime(part(OURS))), id="all of it in gzip"),
        pytest.param(base64.b64encode(mime(part(OURS))), id="all of it in base64"),
        pytest.param(base64.encodebytes(gzip.compress(mime(part(OURS)))), id="all of it in gzip and base64"),
        pytest.param(mime(part(b"[gpunode]\nperiod = 9"), part(OURS)), id="two parts, the later wins"),
    ],
)
def test_our_part_is_found(write: Write, data: bytes) -> None:
    assert period(write, data) == 7.0


def test_our_part_is_found_in_a_nested_document(write: Write) -> None:
    inner = MIMEMultipart("mixed", boundary="INNER")
    inner.attach(part(OURS))
    assert period(write, mime(inner)) == 7.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#!/bin/bash\necho hello\n",
        b'[settings.kubernetes]\ncluster-name = "x"\n',
        b"kind: NodeConfig\n",
        mime(),
        base64.b64encode(b"#!/bin/sh\necho long enough to be seen as base64\n"),
        b"abcdefghijklmnopqrstuvwxyz",
        base64.encodebytes(base64.encodebytes(base64.encodebytes(base64.encodebytes(mime(part(OURS)))))),
    ],
)
def test_user_data_without_our_part_says_nothing(write: Write, data: bytes) -> None:
    assert period(write, data) == 60.0


def test_without_user_data_there_is_nothing(tmp_path: Path) -> None:
    request = source.Request(root=tmp_path, environ={"GPUNODE_EC2_USER_DATA": "1"})
    assert source.load(request).period == 60.0


def test_it_is_off_unless_enabled_and_the_highest_source_decides(write: Write, tmp_path: Path) -> None:
    path = write("root/" + userdata.EC2_FILE, mime(part(OURS)))
    root = path.parents[4]
    assert source.load(source.Request(root=root)).period == 60.0
    write("root/etc/gpunode/config.toml", "[gpunode]\nec2-user-data = true")
    settings = source.load(source.Request(root=root))
    assert settings.period == 7.0
    assert settings.provenance["period"].line == 2
    assert settings.sources[0].startswith("EC2 user data")
    assert source.load(source.Request(root=root, environ={"GPUNODE_EC2_USER_DATA": "off"})).period == 60.0


BROKEN = [
    ("boundaries", mime(part(OURS)).replace(b'boundary="BOUNDARY"', b'boundary="OTHER"'), "boundaries are broken"),
    ("no MIME", b"#!/bin/sh\n# application/gpunode+toml\n" + SECRET.encode(), "no MIME multipart"),
    ("base64", mime(part(b"!!!", encoding="7bit")).replace(b"Encoding: 7bit\n\n!!!", b"Encoding: base64\n\n!!!"), "base64"),
    ("gzip", mime(part(b"\x1f\x8bnot gzip", encoding="base64")), "gzip is broken"),
    ("half a gzip", gzip.compress(mime(part(OURS)))[:60], "cut off"),
    ("a bomb", gzip.compress(b"0" * (document.LIMIT + 1)), "more than 1 MiB"),
    ("TOML", mime(part(b"[gpunode\n")), "line 1: is not valid TOML"),
    ("a key", mime(part(b"[gpunode]\nperiodd = 1\n")), 'did you mean "period"?'),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_part_that_cannot_be_read_is_an_error_without_secrets(write: Write, data: bytes, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        period(write, data)
    assert says in str(caught.value)
    assert userdata.EC2_FILE in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", userdata.CONTAINER_FILES)
def test_the_container_s_user_data_is_toml(write: Write, tmp_path: Path, name: str) -> None:
    write(name, OURS)
    settings = source.load(source.Request(root=tmp_path))
    assert settings.period == 7.0
    assert settings.sources == (str(tmp_path / name),)
