"""The rules that are shipped: promtool's own tests of them, and that they speak of metrics there are."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel import yaml

from agent.serve.families import every

HERE = Path(__file__).parents[2] / "packaging" / "prometheus"
OTHERS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
PROMISED = (
    *("GpunodeDown", "GpunodeNvmlDown", "GpunodeGpuMissing", "GpunodeXidFatal"),
    *("GpunodeLayoutNotInSync", "GpunodeSettingsInvalid", "GpunodeMigMemoryNearlyFull", "GpunodeSamplesStale"),
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian: apt-get install prometheus)"
)


def read(name: str) -> Any:
    return yaml.YAML(typ="safe", pure=True).load(HERE / name)


def promtool(*words: str | Path) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=60, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_every_alert_fires_and_clears() -> None:
    promtool("test", "rules", "rules.test.yml")


@needs_promtool
def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    promtool("check", "config", HERE / "scrape.yml")


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    groups = read("rules.yml")["groups"]
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    tested: dict[str, set[bool]] = {}
    for case in read("rules.test.yml")["tests"]:
        for one in case.get("alert_rule_test", ()):
            tested.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert tested.keys() == alerts.keys()
    for name, outcomes in tested.items():
        assert True in outcomes, f"{name} is never seen to fire"
        assert outcomes == {True, False}, f"{name} is never seen to be quiet"
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_alerts_that_were_promised_are_there() -> None:
    alerts = {rule.get("alert") for group in read("rules.yml")["groups"] for rule in group["rules"]}
    assert alerts >= set(PROMISED)


def seconds(text: str) -> int:
    """Return a time as promtool writes it, "2m" or "1h30m"."""
    return sum(int(n) * {"s": 1, "m": 60, "h": 3600}[unit] for n, unit in re.findall(r"(\d+)([smh])", text))


@pytest.mark.parametrize("alert", PROMISED)
def test_each_of_them_is_quiet_then_fires_then_clears_in_one_story(alert: str) -> None:
    stories = []
    for case in read("rules.test.yml")["tests"]:
        looks = [one for one in case.get("alert_rule_test", ()) if one["alertname"] == alert]
        looks.sort(key=lambda one: seconds(one["eval_time"]))
        stories.append([firing for firing, _ in itertools.groupby(bool(one["exp_alerts"]) for one in looks)])
    assert [False, True, False] in stories


def test_rules_use_only_metrics_and_labels_that_gpunode_serves() -> None:
    families = {declared.full_name: set(declared.labels) for declared in every.FAMILIES}
    text = json.dumps(read("rules.yml"))
    used = set(re.findall(r"\bgpunode_[a-z0-9_]+", text))
    assert used - families.keys() == set()
    for case in read("rules.test.yml")["tests"]:
        for series in case["input_series"]:
            name, _, labels = series["series"].partition("{")
            if name in OTHERS:
                continue
            names = set(re.findall(r"(\w+)=\"", labels)) - {"instance"}
            assert names == families[name], f"{name} has not these labels"
