"""`status --output nvidia-smi` against what `nvidia-smi -L` printed on real GPUs, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.mig import node, profile
from agent.serve import render

PRINTS = sorted((Path(__file__).parents[1] / "data" / "nvidia-smi").glob("*.txt"))


def read(text: str) -> node.NodeState:
    """Build the node that a print is about: names, numbers and UUIDs, none of its blanks."""
    gpus: list[node.Gpu] = []
    for line in text.splitlines():
        words = line.split()
        uuid = words[-1].rstrip(")")
        if words[0] == "GPU":
            name = " ".join(words[2:-2])
            gpus.append(node.Gpu(int(words[1].rstrip(":")), uuid, "", name, "", mode=node.ModeState(True, True)))
            continue
        if not gpus:
            gpus.append(node.Gpu(0, "GPU-?", "", "?", "", mode=node.ModeState(True, True)))
        kind = profile.parse(words[1])
        number = int(words[3].rstrip(":"))
        compute = node.ComputeInstance(0, kind, node.ProfileId(0), uuid, 14, 1)
        instance = node.GpuInstance(number, kind, node.ProfileId(0), node.Placement(number, 1), 0, (compute,))
        gpus[-1] = node.Gpu(
            gpus[-1].index,
            gpus[-1].uuid,
            "",
            gpus[-1].name,
            "",
            mode=gpus[-1].mode,
            instances=(*gpus[-1].instances, instance),
        )
    return node.NodeState(gpus=tuple(gpus))


@pytest.mark.parametrize("path", PRINTS, ids=lambda path: path.stem)
def test_ours_is_theirs_to_the_byte(path: Path) -> None:
    theirs = path.read_text()
    ours = render.nvidia_smi(read(theirs)) + "\n"
    if not theirs.startswith("GPU"):
        ours = ours.split("\n", 1)[1]  # the print was published without the line of its GPU
    assert ours == theirs


def test_every_print_has_its_source() -> None:
    told = (Path(__file__).parents[1] / "data" / "nvidia-smi" / "README.md").read_text()
    assert {path.name for path in PRINTS} == set(re.findall(r"^\| `([^`]+)`", told, re.MULTILINE))
