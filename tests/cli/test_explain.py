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


CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: whole}
spec:
  devices:
    requests:
      - name: gpu
        exactly:
          deviceClassName: gpu.nvidia.com
          selectors:
            - cel:
                expression: "EXPRESSION"
"""


@pytest.mark.parametrize(
    ("expression", "code", "says"),
    [
        ("device.driver == 'gpu.nvidia.com'", 0, "fits"),
        ("device.driver = 'x'", 2, "claim.yaml, line 12: not a CEL expression"),
        ("colour('red')", 2, "claim.yaml, line 12: not a CEL expression"),
        ("device.attributes['gpu.nvidia.com'].colour == 'red'", 1, "line 12: the selector of request gpu fails"),
    ],
)
def test_selectors_are_judged_with_their_line(
    expression: str, code: int, says: str, gpunode: Run, tmp_path: Path
) -> None:
    file = tmp_path / "claim.yaml"
    file.write_text(CLAIM.replace("EXPRESSION", expression))
    ended = gpunode("explain", *NODE, file)
    assert ended.code == code, ended.err
    assert says in ended.out + ended.err


def test_claims_with_selectors_need_the_evaluator_and_nothing_else_does(
    gpunode: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cel", None)
    file = tmp_path / "claim.yaml"
    file.write_text(CLAIM.replace("EXPRESSION", "true"))
    ended = gpunode("explain", *NODE, file)
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert 'pip install "gpunode[kubernetes]"' in ended.err
    (tmp_path / "pod.yaml").write_text(POD.replace("COUNT", "1"))
    assert gpunode("explain", *NODE, tmp_path / "pod.yaml").code == 0
