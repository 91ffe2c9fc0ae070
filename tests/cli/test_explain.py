"""`gpunode explain` as a verb: files, standard input, and what it prints; the verdicts are `agent.workload`'s."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: infer}
spec:
  containers:
    - name: main
      resources: {limits: {nvidia.com/gpu: COUNT}}
"""
NODE = ("--simulate", "g4dn.12xlarge")


def test_pod_that_fits_and_one_that_does_not(gpunode: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(POD.replace("COUNT", "4"))
    (tmp_path / "large.yaml").write_text(POD.replace("COUNT", "5"))
    fits = gpunode("explain", tmp_path / "small.yaml", *NODE, "--strategy", "none")
    assert fits.code == 0, fits.err
    assert fits.out.startswith("SIMULATED NODE g4dn.12xlarge")
    assert "Pod infer" in fits.out
    assert "none: fits" in fits.out
    large = gpunode("explain", tmp_path / "large.yaml", *NODE, "--strategy", "none")
    assert large.code == 1
    assert "DOES NOT FIT" in large.out


def test_standard_input_is_a_file_too(gpunode: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Piped(io.StringIO):
        buffer = io.BytesIO(POD.replace("COUNT", "1").encode())

    monkeypatch.setattr(sys, "stdin", Piped())
    told = gpunode("explain", "-", *NODE, "--strategy", "none", "--output", "json").json()
    assert [(v["file"], v["kind"], v["fits"]) for v in told] == [("standard input", "Pod", True)]
    assert told[0].keys() >= {"file", "kind", "name", "fits", "strategy", "reasons", "warnings"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "not UTF-8"),
        (b"kind: Pod\nkind: Pod\n", "line 2"),
        (b"x" * (2 << 20), "larger than"),
    ],
    ids=["no file", "other encoding", "twice the same key", "huge"],
)
def test_what_cannot_be_read_names_the_file(gpunode: Run, tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "pod.yaml"
    if content is not None:
        file.write_bytes(content)
    ended = gpunode("explain", file, *NODE)
    assert ended.code == 2
    assert "pod.yaml" in ended.err
    assert says in ended.err
    assert not ended.out
