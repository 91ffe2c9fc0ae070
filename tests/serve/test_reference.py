from __future__ import annotations

import re
from pathlib import Path

from agent.serve import reference
from agent.serve.families import every

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_in_docs_is_the_one_the_code_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.page(), (
        "run: python -m agent.serve.reference > docs/metrics.md"
    )


def test_every_family_is_on_it_once() -> None:
    assert reference.complete()
    names = re.findall(r"^\| `(gpunode_\w+)` ", reference.page(), re.MULTILINE)
    assert sorted(names) == sorted(declared.full_name for declared in every.FAMILIES)


def test_declarations_keep_the_rules_of_the_house() -> None:
    names = [declared.name for declared in every.FAMILIES]
    assert len(names) == len(set(names))
    for declared in every.FAMILIES:
        assert declared.kind in ("gauge", "counter"), declared.name
        assert declared.name.endswith("_total") is (declared.kind == "counter"), declared.name
        assert declared.help.endswith("."), declared.name
        if declared.unit:
            assert declared.unit in re.sub("_total$", "", declared.name), declared.name
        named = {"pod", "namespace", "container", "task_family", "task_id"} & set(declared.labels)
        assert not named or declared.name.endswith(("_allocation_info", "_task_info")), declared.name
        identity = {"name", "profile", "pci_bus_id"} & set(declared.labels)
        assert not identity or declared.name.endswith("_info") or declared.name == "gpu_mig_creatable_instances"
