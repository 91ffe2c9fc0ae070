"""Which revision of the source is running, for `gpunode_build_info`.

A package carries it in a file beside the code; a checkout has it in its .git; an installation by pip
from a repository notes it in its metadata. Read once, without a child process.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import agent

FILE = "REVISION"
"""In the folder of the package `agent`; `packaging/build.py` writes it."""
_SHA = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def find(package: Path | None = None) -> str:
    """Return the commit's id, "" where nothing tells it."""
    folder = package if package is not None else Path(agent.__file__).parent
    return _id(_text(folder / FILE)) or _checkout(folder.parent / ".git") or (_installed() if package is None else "")


def _checkout(git: Path) -> str:
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return _id(head)
    name = head.removeprefix("ref: ").strip()
    found = _id(_text(git / name))
    if found:
        return found
    for line in _text(git / "packed-refs").splitlines():
        commit, _, ref = line.partition(" ")
        if ref == name:
            return _id(commit)
    return ""


def _installed() -> str:
    """Return what pip noted of the repository it installed from (PEP 610)."""
    from importlib import metadata  # brings the parsers of archives and mail with it, and is seldom wanted

    try:
        noted = metadata.distribution("gpunode").read_text("direct_url.json")
        return _id(json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""


def _id(text: str) -> str:
    return text.strip() if _SHA.fullmatch(text.strip()) else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
