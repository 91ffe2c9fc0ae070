"""Files that cannot be settings: each ends as one clear error that names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.settings import document

Write = Callable[..., Path]


def problem_of(path: Path) -> tuple[str, int | None, str]:
    def parse() -> None:
        data = document.read(path)
        assert data is not None
        document.parse_toml(data, name=str(path), source="test")

    with pytest.raises(document.Unreadable) as caught:
        parse()
    problem = caught.value.problem
    assert problem.file == str(path)
    assert problem.is_error
    return problem.code, problem.line, problem.message


@pytest.mark.parametrize(
    ("content", "code", "line", "says"),
    [
        (b"a = 1\nb = \xe9\n", "encoding", 2, "0xe9"),
        ("a = 1".encode("utf-16"), "encoding", None, "UTF-16"),
        (b"a = 1\n\n\0", "nul-byte", 3, "NUL"),
        (b"#" * (document.LIMIT + 1), "too-large", None, "1 MiB"),
        (b"a = " + b"[" * 100 + b"]" * 100, "too-deep", None, "64 levels"),
        (b"a = 1\na = 2\n", "duplicate-key", 2, "given twice"),
        (b"[a]\nb = 1\n\n[a]\n", "duplicate-key", 4, "given twice"),
        (b"[a\n", "syntax", 1, "Expected ']'"),
        (b"a = ", "syntax", 1, "not valid TOML"),
        (b"a = " + b"9" * 5000, "syntax", None, "4300 digits"),
        (b".".join([b"a"] * 2000) + b" = 1", "syntax", None, "not valid TOML"),
    ],
    ids=[
        "latin-1", "utf-16", "NUL", "huge", "deep", "key twice", "table twice", "syntax", "no value", "huge number",
        "long key",
    ],
)  # fmt: skip
def test_a_file_that_is_no_toml(write: Write, content: bytes, code: str, line: int | None, says: str) -> None:
    found = problem_of(write("bad.toml", content))
    assert found[:2] == (code, line)
    assert says in found[2]


def test_a_directory(tmp_path: Path) -> None:
    assert problem_of(tmp_path)[0] == "unreadable"
    assert "directory" in problem_of(tmp_path)[2]


def test_a_link_that_goes_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "circle" in problem_of(tmp_path / "a")[2]


def test_a_link_to_nothing_is_not_the_same_as_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "gone")
    assert "symbolic link" in problem_of(tmp_path / "a")[2]
    assert document.read(tmp_path / "gone") is None


def test_a_pipe_does_not_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in problem_of(tmp_path / "pipe")[2]


def test_a_path_through_a_file(write: Write) -> None:
    assert "not a directory" in problem_of(write("file", "") / "below")[2]


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    assert "too long" in problem_of(tmp_path / ("x" * 300))[2]


def test_a_name_with_a_nul_byte() -> None:
    with pytest.raises(document.Unreadable) as caught:
        document.read(Path("a\0b"))
    assert "NUL" in str(caught.value)


def test_a_file_that_may_not_be_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("secret.toml", "")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root reads everything, so a mode would refuse nothing here
    assert problem_of(path)[2] == "cannot read it: permission denied"


def test_an_error_of_the_disk_while_reading(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("bad-disk.toml", "a = 1")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "read", fail)
    assert "Input/output error" in problem_of(path)[2]


def test_a_byte_order_mark_and_dos_lines_are_no_trouble(write: Write) -> None:
    data = document.read(write("dos.toml", b"\xef\xbb\xbfa = 1\r\nb = 2\r\n"))
    assert data is not None
    doc = document.parse_toml(data, name="dos.toml", source="test")
    assert doc.data == {"a": 1, "b": 2}
    assert doc.line(("b",)) == 2


@pytest.mark.parametrize(
    ("content", "code", "line", "says"),
    [
        (b'{"a": 1,}', "syntax", 1, "not valid JSON"),
        (b'{"a": 1,\n "a": 2}', "duplicate-key", 2, '"a" twice'),
        (b'{"a": {"c": 1},\n "b": [{"c": 1,\n "c": {"c": 1}}],\n "b": 1}', "duplicate-key", 3, '"c" twice'),
        (b"[1]", "wrong-type", 1, "JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "syntax", None, "4300 digits"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "too-deep", None, "64 levels"),
    ],
)
def test_a_file_that_is_no_json(content: bytes, code: str, line: int | None, says: str) -> None:
    with pytest.raises(document.Unreadable) as caught:
        document.parse_json(content, name="bad.json", source="test")
    problem = caught.value.problem
    assert (problem.code, problem.line, problem.file) == (code, line, "bad.json")
    assert says in problem.message


def test_the_line_of_something_without_one_is_that_of_what_is_around_it() -> None:
    doc = document.parse_toml(b"\n[a]\nb = 1\n", name="x", source="x")
    assert doc.line(("a", "missing")) == 2
    assert doc.line(("nowhere",)) is None
    assert doc.problem("code", "text", ()).key is None


def test_how_key_paths_are_written() -> None:
    assert document.dotted(("gpunode", "layout", 0, "instances", "1g.5gb")) == 'gpunode.layout[0].instances."1g.5gb"'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", '"plain"'),
        ("x" * 100, '"' + "x" * 57 + '..."'),
        ("\ud800\n", '"\\ud800\\n"'),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        ({}, "a table"),
        ([1], "a list"),
        (None, "None"),
    ],
)
def test_how_values_are_quoted(value: object, text: str) -> None:
    assert document.quote(value) == text


def test_a_number_with_more_digits_than_python_prints() -> None:
    assert document.quote(10**5000) == "a huge number"
