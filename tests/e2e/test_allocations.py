"""A kubelet's socket, or an ECS task's control group, to the metrics of a running daemon: who has which device,
whatever becomes of the socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpclib.const
import grpclib.exceptions
import pytest
from prometheus_client import parser

from agent.host import pods
from agent.sim import node as simulated
from tests.e2e import daemons
from tests.host import kubelet

SETTINGS = """
[gpunode]
sample-interval = 1
[[gpunode.layout]]
gpus = [0]
instances = { "3g.40gb" = 2 }
[[gpunode.layout]]
gpus = [1]
mig = false
"""
SPEC = "h100.80gb:2"
FAMILIES = ("gpunode_mig_device_allocation_info", "gpunode_gpu_allocation_info")
Rows = set[tuple[str, str, str, str]]


class Node:
    """A daemon on a node with a kubelet, the node, and the socket's place."""

    def __init__(self, gpunode: daemons.Running, sim: Any) -> None:
        self.gpunode = gpunode
        self.sim = sim
        self.socket: Path = sim.machine.path(pods.SOCKET)
        self.gpus = [gpu.spec.uuid for gpu in sim.driver.gpus]

    def devices(self) -> list[tuple[int, str]]:
        """GPU instance ids of the first GPU with their MIG UUIDs, by place."""
        status = self.gpunode.get("/status").json()
        gpus: Any = status["gpus"]
        return [(i["id"], i["compute_instances"][0]["uuid"]) for i in gpus[0]["gpu_instances"]]

    def page(self) -> tuple[float | None, Rows]:
        """Whether the kubelet told, and (device, namespace, pod, container) of all allocations."""
        up: float | None = None
        rows: Rows = set()
        for family in parser.text_string_to_metric_families(self.gpunode.get("/metrics").body.decode()):
            for sample in family.samples:
                if sample.name == "gpunode_pod_resources_up":
                    up = sample.value
                if sample.name in FAMILIES:
                    told = sample.labels
                    device = told.get("mig_uuid") or told["gpu_uuid"]
                    rows.add((device, told["namespace"], told["pod"], told["container"]))
        return up, rows

    def wait(self, true: Callable[[float | None, Rows], bool]) -> float:
        """Wait for a page; return the seconds that took."""
        began = time.monotonic()
        while True:
            up, rows = self.page()
            if true(up, rows):
                return time.monotonic() - began
            assert time.monotonic() - began < daemons.PATIENCE, (up, rows, self.gpunode.said())
            time.sleep(0.05)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    state = tmp_path / "state"
    sim: Any = simulated.open_node(SPEC, state=state)
    settings = tmp_path / "gpunode.toml"
    settings.write_text(SETTINGS)
    flags = ("--simulate", SPEC, "--sim-state", state, "--settings", settings)
    try:
        daemons.command("apply", "--yes", *flags)
        sim.set_unit("kubelet.service", active=True)
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            gpunode.wait_metric("gpunode_gpu_up")
            yield Node(gpunode, sim)
            assert gpunode.stop() == 0
            assert "Traceback" not in gpunode.said()
    finally:
        sim.close()


def test_every_form_of_a_device_id_reaches_the_metrics(node: Node) -> None:
    (first, mig), (second, other) = node.devices()
    whole = node.gpus[1]
    cases: list[tuple[Any, Rows]] = [
        (kubelet.pod("uuid", devices={"nvidia.com/mig-3g.40gb": [mig]}), {(mig, "default", "uuid", "main")}),
        (kubelet.pod("single", devices={"nvidia.com/gpu": [other]}), {(other, "default", "single", "main")}),
        (
            kubelet.pod("legacy", devices={"nvidia.com/gpu": [f"MIG-{node.gpus[0]}/{second}/0"]}),
            {(other, "default", "legacy", "main")},
        ),
        (kubelet.pod("gke", devices={"nvidia.com/gpu": [f"nvidia0/gi{first}"]}), {(mig, "default", "gke", "main")}),
        (kubelet.pod("whole", devices={"nvidia.com/gpu": [whole]}), {(whole, "default", "whole", "main")}),
        (
            kubelet.pod("slice-a", devices={"nvidia.com/gpu.shared": [f"{whole}::0"]}),
            {(whole, "default", "slice-a", "main")},
        ),
        (
            kubelet.pod("slice-b", namespace="ml", devices={"nvidia.com/gpu.shared": [f"{whole}::1", f"{whole}::2"]}),
            {(whole, "ml", "slice-b", "main")},
        ),
        (
            kubelet.pod("mig-slice", devices={"nvidia.com/mig-3g.40gb.shared": [f"{mig}::3"]}),
            {(mig, "default", "mig-slice", "main")},
        ),
        (
            kubelet.pod("claim", claimed=[("gpu.nvidia.com", "gpu-0-mig-3g40gb-9-0")]),
            {(mig, "default", "claim", "main")},
        ),
        (kubelet.pod("claim-gpu", claimed=[("gpu.nvidia.com", "gpu-1")]), {(whole, "default", "claim-gpu", "main")}),
        (kubelet.pod("other-driver", claimed=[("dra.example.com", "gpu-0")]), set()),
        (kubelet.pod("gone", devices={"nvidia.com/gpu": ["MIG-00000000-0000-5000-8000-000000000000"]}), set()),
    ]
    wanted = set().union(*(rows for _, rows in cases))
    with kubelet.serving(node.socket) as served:
        served.pods = [pod for pod, _ in cases]
        node.wait(lambda up, rows: up == 1 and rows == wanted)
        # A pod that has ended is gone with the next sample, not with the next cycle a minute later.
        served.pods = [cases[0][0]]
        took = node.wait(lambda up, rows: up == 1 and rows == cases[0][1])
        assert took < 5.0


@pytest.mark.full
def test_the_socket_is_missing_replaced_slow_and_broken(node: Node) -> None:
    (_, mig), _ = node.devices()
    there: Rows = {(mig, "default", "p", "main")}
    pod = kubelet.pod("p", devices={"nvidia.com/gpu": [mig]})
    node.wait(lambda up, rows: (up, rows) == (0, set()))
    with kubelet.serving(node.socket) as served:
        served.pods = [pod]
        node.wait(lambda up, rows: (up, rows) == (1, there))
    node.wait(lambda up, rows: (up, rows) == (0, set()))
    with kubelet.serving(node.socket) as served:  # another socket under the same name
        served.pods = [pod]
        node.wait(lambda up, rows: (up, rows) == (1, there))
        served.delay = 60.0
        began = time.monotonic()
        slowest = 0.0
        while node.page() != (0, set()):
            asked = time.monotonic()
            node.gpunode.get("/metrics")
            slowest = max(slowest, time.monotonic() - asked)
            assert time.monotonic() - began < daemons.PATIENCE
            time.sleep(0.05)
        assert slowest < 1.0, "a kubelet that is slow slows no scrape"
        served.delay = 0.0
        node.wait(lambda up, rows: (up, rows) == (1, there))
        served.error = grpclib.exceptions.GRPCError(grpclib.const.Status.UNAVAILABLE, "restarting")
        node.wait(lambda up, rows: (up, rows) == (0, set()))
        served.error = None
        node.wait(lambda up, rows: (up, rows) == (1, there))
    with contextlib.suppress(FileNotFoundError):
        node.socket.unlink()
    node.socket.write_text("not a socket")
    node.wait(lambda up, rows: (up, rows) == (0, set()))
    assert "gpunode_gpu_up" in node.gpunode.get("/metrics").body.decode()


TASK = "0123456789abcdef0123456789abcdef"
CONTAINER = "ab" * 32


def test_an_ecs_task_reaches_the_metrics_and_leaves_them_with_its_last_process(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with contextlib.closing(simulated.open_node("g4dn.12xlarge", state=state)) as opened:
        sim: Any = opened
        sim.set_unit("ecs.service", active=True)
        uuids = [gpu.spec.uuid for gpu in sim.driver.gpus]
        group = sim.machine.path(
            f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{TASK}.slice/docker-{CONTAINER}.scope/cgroup.procs"
        )
        process = sim.machine.path("/proc/70")
        for folder in (group.parent, process):
            folder.mkdir(parents=True)
        (process / "environ").write_text(f"X=1\0NVIDIA_VISIBLE_DEVICES={uuids[1]},{uuids[3]}\0TOKEN=s3cret\0")
        settings = tmp_path / "gpunode.toml"
        settings.write_text("[gpunode]\nsample-interval = 0.5\n")
        flags = ("--simulate", "g4dn.12xlarge", "--sim-state", state, "--settings", settings)
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            gpunode.wait_metric("gpunode_gpu_up")

            def tasks() -> dict[str, tuple[str, str]]:
                families = parser.text_string_to_metric_families(gpunode.get("/metrics").body.decode())
                samples = [
                    sample.labels for family in families for sample in family.samples if "task_id" in sample.labels
                ]
                return {told["gpu_uuid"]: (told["task_id"], told["container"]) for told in samples}

            def wait(wanted: dict[str, tuple[str, str]]) -> None:
                until = time.monotonic() + daemons.PATIENCE
                while tasks() != wanted:
                    assert time.monotonic() < until, (tasks(), gpunode.said())
                    time.sleep(0.05)

            assert tasks() == {}
            group.write_text("70\n")
            wait(dict.fromkeys((uuids[1], uuids[3]), (TASK, CONTAINER[:12])))
            group.write_text("")
            wait({})
            assert gpunode.stop() == 0
            assert "s3cret" not in gpunode.said()
