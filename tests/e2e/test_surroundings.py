"""What stands around the GPUs of a node, found by the verbs and by the daemon that runs there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agent.host import pods
from tests.e2e import daemons
from tests.host import kubelet


def node(place: Path) -> tuple[str | Path, ...]:
    return ("--simulate", "p4d.24xlarge", "--sim-state", place / "state")


def document(*argv: str | Path) -> Any:
    return json.loads(daemons.command(*argv, "--output", "json").stdout)


def test_a_split_node_with_ecs_on_it_and_files_that_lag_behind(tmp_path: Path) -> None:
    flags = node(tmp_path)
    daemons.command("apply", "--yes", *flags, "--settings", daemons.EXAMPLE)
    daemons.command("simulate", "unit", "ecs.service", "start", *flags)
    spec = tmp_path / "state.root/var/run/cdi/nvidia.yaml"
    spec.parent.mkdir(parents=True)
    spec.write_text('cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n')
    os.utime(spec, (1, 1))
    with daemons.run(tmp_path, *flags, "--settings", daemons.EXAMPLE) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric('gpunode_finding{code="ecs-mig-on"} 8')
        gpunode.wait_metric('gpunode_finding{code="cdi-behind"} 1')
        gpunode.wait_metric('gpunode_advertised_resource{resource="nvidia.com/gpu",strategy="single"} 24')
        health = gpunode.get("/healthz")
        verdict = health.json()
        assert (health.status, verdict["ready"], verdict["degraded"]) == (200, True, True)
        reasons = verdict["reasons"]
        assert isinstance(reasons, list)
        assert {reason["code"] for reason in reasons} == {"ecs-mig-on"}
        status = gpunode.get("/status").json()
        noticed = status["findings"]
        assert isinstance(noticed, list)
        assert {f["code"] for f in noticed} == {"ecs-mig-on", "cdi-behind", "no-peer-to-peer"}


def test_resources_compares_with_what_the_kubelet_has(tmp_path: Path) -> None:
    flags = node(tmp_path)
    daemons.command("apply", "--yes", *flags, "--settings", daemons.EXAMPLE)
    socket = tmp_path / "state.root" / pods.SOCKET.lstrip("/")
    with kubelet.serving(socket) as served:
        served.allocatable = {"nvidia.com/gpu": [f"GPU-{n}" for n in range(8)]}
        assert document("resources", *flags)["differences"] == [], "under none the plugin advertises just that"
        labels = tmp_path / "state.root/etc/kubernetes/node-feature-discovery/features.d/gfd"
        labels.parent.mkdir(parents=True)
        labels.write_text("nvidia.com/mig.strategy=single\n")
        told = document("resources", *flags)
        assert told["observed"]["kubelet"] == {"nvidia.com/gpu": 8}
        assert [d["code"] for d in told["differences"]] == ["kubelet-differs"]
        assert "8 nvidia.com/gpu" in told["differences"][0]["message"]
        assert "24 nvidia.com/gpu" in told["differences"][0]["message"]
        served.allocatable = {"nvidia.com/gpu": [f"MIG-{n}" for n in range(24)]}
        assert document("resources", *flags)["differences"] == []
