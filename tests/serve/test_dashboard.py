"""The dashboard that is shipped: every query speaks of metrics there are, and answers on a node with MIG
that is used and has had a fault."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from agent.host import pods
from agent.serve.families import every
from agent.sim import node as simulated
from tests.e2e import daemons, test_prometheus
from tests.host import kubelet

DASHBOARD = Path(__file__).parents[2] / "packaging" / "grafana" / "gpunode-mig.json"


def load() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def queries() -> list[tuple[str, str]]:
    """Return (where, expression) of every query, annotations included."""
    found = []
    for panel in load()["panels"]:
        found += [(f"{panel['title']} {target['refId']}", target["expr"]) for target in panel.get("targets", ())]
    found += [(one["name"], one["expr"]) for one in load()["annotations"]["list"]]
    return found


def test_it_has_the_rows_that_were_promised() -> None:
    rows = [panel["title"] for panel in load()["panels"] if panel["type"] == "row"]
    assert rows == ["Fleet", "GPUs", "GPU instances", "Slice map", "Faults"]


def test_panels_do_not_overlap_and_tell_what_they_show() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in load()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in load()["panels"]}) == len(load()["panels"])


def test_every_query_uses_only_metrics_and_labels_that_are_served() -> None:
    families = {declared.full_name: set(declared.labels) | {"instance", "job"} for declared in every.FAMILIES}
    families["process_cpu_seconds_total"] = {"instance", "job"}
    assert queries()
    for where, expression in queries():
        names = set(re.findall(r"\b(?:gpunode|process)_[a-z0-9_]+", expression))
        assert names, where
        assert names - families.keys() == set(), where
        for name, matchers in re.findall(r"\b(gpunode_[a-z0-9_]+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)=~?\"", matchers))
            assert labels <= families[name], f"{where}: {name} has not all of {labels}"


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here (Debian: apt-get install prometheus)"
)
def test_every_query_answers_on_a_simulated_node(tmp_path: Path) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text(
        '[[gpunode.layout]]\ngpus = [0, 1]\ninstances = { "1g.10gb" = 2, "2g.20gb" = 1, "3g.40gb" = 1 }\n'
        '[[gpunode.layout]]\ngpus = [2]\ninstances = { "1g.10gb" = 1 }\n'
        '[[gpunode.layout]]\ngpus = [3]\ninstances = { "7g.80gb" = 1 }\n'
    )
    state = tmp_path / "state"
    node: Any = simulated.open_node("p5.48xlarge", state=state)
    node.set_unit("kubelet.service", active=True)
    with (
        contextlib.closing(node),
        kubelet.serving(node.machine.path(pods.SOCKET)) as served,
        daemons.run(tmp_path, "--simulate", "p5.48xlarge", "--sim-state", state, "--settings", layout) as gpunode,
    ):
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_mig_sm_active_ratio{")
        status: Any = gpunode.get("/status").json()
        device = status["gpus"][0]["gpu_instances"][0]["compute_instances"][0]["uuid"]
        served.pods = [kubelet.pod("train", devices={"nvidia.com/gpu": [device]})]
        with test_prometheus.prometheus(tmp_path, gpunode.port) as server:
            server.wait("gpunode_mig_memory_used_bytes", 10)
            # Rates need two scrapes that differ in time, and changes something to have been before.
            server.wait("count_over_time(gpunode_build_info[1m]) >= 4", 1)
            node.xid(1, 94, gpu_instance=status["gpus"][1]["gpu_instances"][0]["id"])
            gpu = node.driver.gpus[2]
            (instance,) = gpu.state.instances.values()
            for compute in list(instance.compute.values()):
                node.driver.destroy_compute_instance(gpu, instance, compute)
            node.driver.destroy_gpu_instance(gpu, instance)
            silent = []
            for where, raw in queries():
                expression = raw.replace("$instance", ".*").replace("$gpu", ".*").replace("$__rate_interval", "1m")
                until = time.monotonic() + 20
                while not (result := server.query(expression)) and time.monotonic() < until:
                    time.sleep(0.5)
                if not result:
                    silent.append((where, expression))
            assert silent == []
            (who,) = server.query("gpunode_mig_device_allocation_info")
            assert (who["metric"]["mig_uuid"], who["metric"]["pod"]) == (device, "train")
            (trusted,) = server.query("gpunode_mig_healthy == 0")
            assert trusted["metric"]["gpu_uuid"] == status["gpus"][1]["uuid"]
