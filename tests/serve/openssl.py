"""Certificates made on the spot, with the openssl of the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make(key: Path, certificate: Path, name: str, *more: str) -> None:
    """Write a new key and a certificate of `name` signed by itself; skip the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make certificates with")
    kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", *kind, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate), *more]
    subprocess.run(command, check=True, capture_output=True)
