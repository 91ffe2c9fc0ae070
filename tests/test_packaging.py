"""The wheel carries what it must, and works from a virtual environment that knows nothing of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from agent import __version__

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without an isolated environment (hatchling is a tool of ours)."""
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(target),
            str(ROOT),
        ],
        check=True,
        timeout=300,
    )
    (built,) = target.glob("gpunode-*.whl")
    return built


def test_wheel_carries_the_package_and_its_tables(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "agent/py.typed" in names
    shipped = {
        str(path.relative_to(ROOT)) for path in (ROOT / "agent").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert shipped <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "typings/"))]


def test_wheel_names_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "License: Apache-2.0" in text or "License-Expression: Apache-2.0" in text
    assert f"Version: {__version__}" in text


def test_command_works_from_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE"))}
    subprocess.run(
        [home / "bin" / "pip", "install", "--quiet", str(wheel)], check=True, timeout=600, env=environ, cwd=tmp_path
    )
    said = subprocess.run(
        [home / "bin" / "gpunode", "version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environ,
        cwd=tmp_path,
    )
    assert __version__ in said.stdout
    listed = subprocess.run(
        [home / "bin" / "gpunode", "simulate"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environ,
        cwd=tmp_path,
    )
    assert "p4d.24xlarge" in listed.stdout
