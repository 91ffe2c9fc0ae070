"""Random and mutated documents: settings or a SettingsError that names the file, and nothing else.

The seeds are documents that people write. A mutation cuts, doubles, swaps or replaces pieces, so
that most results are nearly right, which is where parsers stumble.
"""

from __future__ import annotations

import base64
import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import errors
from agent.mig import node as nodes
from agent.settings import migparted, resolve, source, userdata
from tests.settings import gpus

DATA = Path(__file__).parent / "data" / "cases"
TOML = [path.read_bytes() for path in sorted(DATA.glob("*/*.toml"))]
YAML = [path.read_bytes() for path in sorted(DATA.glob("*/*.yaml"))]
MIME = [
    b'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="B"\n\n--B\nContent-Type: text/x-shellscript\n\n'
    b"#!/bin/sh\n\n--B\nContent-Type: application/gpunode+toml\n\n" + text + b"\n--B--\n"
    for text in TOML[:4]
] + [
    b'Content-Type: multipart/mixed; boundary="B"\n\n--B\nContent-Type: application/gpunode+toml\n'
    b"Content-Transfer-Encoding: base64\n\n" + base64.encodebytes(gzip.compress(TOML[0])) + b"\n--B--\n"
]
PIECES = [
    b"[", b"]", b"{", b"}", b'"', b"'", b'"""', b"=", b",", b"\n", b"\n\n", b" ", b"\t", b"#", b".", b"-", b"\0", b"\xff",
    b"\xed\xa0\x80", b"\\", b"\\u0000", b"\\ud800", b"&a ", b"*a", b"<<: *a", b"!!x ", b"true", b"null", b"1e999", b"nan",
    b"99999999999999999999", b"-1", b"0x20B010DE", b"1979-05-27T07:32:00Z", b"[[gpunode.layout]]\n", b"[gpunode]\n",
    b"gpus = [0]\n", b'"all"', b"1g.5gb", b"1c.3g.20gb", b"--B", b"Content-Type: multipart/mixed", b"\x1f\x8b", b"\xef\xbb\xbf",
    b"mig-configs:\n", b"- ", b": ", b"? ", b"| ", b"> ", b"---\n", b"%YAML 9\n", b"[[[[[[[[", b"a.b.c.d.e=1\n",
]  # fmt: skip
NODE = nodes.NodeState((gpus.gpu(0), gpus.gpu(1, "h100.80gb"), gpus.incapable(2), gpus.gpu(3, offers=())))


@st.composite
def mutated(draw: Callable[..., object], seeds: list[bytes]) -> bytes:
    """A seed with a few changes."""
    text = draw(st.sampled_from(seeds))
    assert isinstance(text, bytes)
    for _ in range(draw(st.integers(0, 6))):  # type: ignore[call-overload]
        a = draw(st.integers(0, len(text)))
        b = draw(st.integers(0, len(text)))
        assert isinstance(a, int)
        assert isinstance(b, int)
        a, b = min(a, b), min(max(a, b), min(a, b) + 40)
        piece = draw(st.sampled_from(PIECES))
        assert isinstance(piece, bytes)
        match draw(st.integers(0, 4)):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:a] + piece + text[a:]
            case 2:
                text = text[:a] + piece + text[b:]
            case 3:
                text = text[:b] + text[a:b] + text[b:]
            case _:
                text = text + text[a:b]
    return text


def documents(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    return mutated(seeds) | st.binary(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join)


def survive(request: source.Request, name: str) -> None:
    try:
        loaded = source.load(request)
        resolve.resolve(loaded, NODE)
    except errors.SettingsError as refusal:
        found = [problem for problem in refusal.problems if problem.is_error]
        assert found
        for problem in found:
            assert name in str(problem)
            str(problem).encode()  # it can be printed
            assert "\n" not in str(problem)
    source.fingerprint(request)


def check(data: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if kind == "mime":
            path = root / userdata.EC2_FILE
            path.parent.mkdir(parents=True)
            request = source.Request(root=root, environ={"GPUNODE_EC2_USER_DATA": "1"})
        else:
            path = root / f"document.{kind}"
            request = source.Request(root=root / "none", files=(path,))
            if kind == "mig-parted":
                request = source.Request(root=root / "none", mig_config=f"{path}:half-balanced")
        path.write_bytes(data)
        migparted.parse.cache_clear()
        survive(request, path.name)


SEEDS = {"toml": TOML, "yaml": YAML, "mig-parted": YAML, "json": TOML, "mime": MIME}
QUICK = settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", sorted(SEEDS))
def test_no_document_ends_in_a_traceback(kind: str) -> None:
    @QUICK
    @given(documents(SEEDS[kind]))
    def run(data: bytes) -> None:
        check(data, kind)

    run()


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(SEEDS))
def test_no_document_of_very_many_ends_in_a_traceback(kind: str) -> None:
    @LONG
    @given(documents(SEEDS[kind]))
    def run(data: bytes) -> None:
        check(data, kind)

    run()
