"""The Makefile says what it can do, and CI runs what the README tells."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in told.splitlines() if line.startswith("  make ")] == phony.split()


def test_readme_tells_two_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    run, test = blocks[0].strip(), blocks[1].strip()
    assert run.startswith("make setup && .venv/bin/gpunode run --simulate p4d.24xlarge ")
    assert " --settings " in run
    assert (ROOT / run.rpartition(" ")[2]).is_file()
    assert test == "make test"
    assert test in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_leads_to_every_page() -> None:
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"}
    reached, next_ = set[Path](), [ROOT / "README.md"]
    while next_:
        page = next_.pop()
        for link in re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            assert target.is_file(), f"{page.name} names {link}, which is not there"
            if target not in reached:
                reached.add(target)
                next_.append(target)
    assert pages <= reached
