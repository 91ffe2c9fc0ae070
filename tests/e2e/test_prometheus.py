"""A real Prometheus scrapes a running gpunode and answers queries on what it serves."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import daemons

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no prometheus here (Debian: apt-get install prometheus)"
    ),
]


class Prometheus:
    """A Prometheus that scrapes each second."""

    def __init__(self, port: int, log: Path) -> None:
        self._port = port
        self._log = log

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result vector of an instant query."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=10) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def wait(self, expression: str, count: int) -> list[dict[str, Any]]:
        """Ask until the answer has `count` series."""
        until = time.monotonic() + daemons.PATIENCE
        found: list[dict[str, Any]] = []
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                found = self.query(expression)
                if len(found) == count:
                    return found
            time.sleep(0.2)
        raise AssertionError(f"{expression} has {len(found)} series, not {count}\n{self._log.read_text()[-2000:]}")


@contextlib.contextmanager
def prometheus(where: Path, target: int, *, path: str = "/metrics") -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `path` of a port of this machine each second, until the block ends."""
    port = daemons.free_port()
    config = where / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: gpunode, metrics_path: {path}, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    log = where / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={where / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=where,
        )
    try:
        yield Prometheus(port, log)
    finally:
        process.terminate()
        process.wait(daemons.PATIENCE)


def test_prometheus_scrapes_and_answers(tmp_path: Path) -> None:
    node = ("--simulate", "p4d.24xlarge", "--settings", daemons.EXAMPLE)
    with daemons.run(tmp_path, *node) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_mig_memory_used_bytes{")
        with prometheus(tmp_path, gpunode.port) as server:
            used = server.wait("gpunode_mig_memory_used_bytes", 24)
            assert all(series["metric"]["gpu_uuid"].startswith("GPU-") for series in used)
            assert all(0 < float(series["value"][1]) < 10 * 2**30 for series in used)
            assert server.query('up{job="gpunode"}')[0]["value"][1] == "1"
            joined = server.query(
                "gpunode_mig_memory_used_bytes"
                " * on (instance, gpu_uuid, gpu_instance_id) group_left (profile) gpunode_mig_gpu_instance_info"
            )
            assert [series["metric"]["profile"] for series in joined] == ["2g.10gb"] * 24
            assert server.query("gpunode_mig_memory_used_bytes > gpunode_mig_memory_total_bytes") == []


OF_OTHERS = {
    # Grafana 12239, with its variables set to everything: query -> series on a GPU with two instances and a whole one
    'DCGM_FI_DEV_GPU_TEMP{instance=~".+",gpu=~".+"}': 2,
    'avg(DCGM_FI_DEV_GPU_TEMP{instance=~".+",gpu=~".+"})': 1,
    'DCGM_FI_DEV_POWER_USAGE{instance=~".+",gpu=~".+"}': 2,
    'sum(DCGM_FI_DEV_POWER_USAGE{instance=~".+",gpu=~".+"})': 1,
    'DCGM_FI_DEV_SM_CLOCK{instance=~".+",gpu=~".+"} * 1000000': 2,
    'DCGM_FI_DEV_GPU_UTIL{instance=~".+",gpu=~".+"}': 1,
    'DCGM_FI_DEV_FB_USED{instance=~".+",gpu=~".+"}': 3,
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~".+",gpu=~".+"}': 3,
    # OpenShift's console: used devices, and power not counted once for each instance
    'count(count by (UUID, GPU_I_ID) (DCGM_FI_PROF_GR_ENGINE_ACTIVE{exported_pod=~".+"}))': 0,
    "sum(max by (UUID) (DCGM_FI_DEV_POWER_USAGE))": 1,
    # a join by instance, as dashboards for MIG make it
    "DCGM_FI_DEV_FB_USED / on (UUID, GPU_I_ID) group_left (GPU_I_PROFILE) DCGM_FI_DEV_FB_TOTAL": 3,
    "max by (Hostname) (DCGM_FI_DEV_FB_USED_PERCENT)": 1,
    "max by (hostname) (DCGM_FI_DEV_XID_ERRORS)": 1,
    "increase(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[1m]) > 0": 2,
}


def test_queries_made_for_another_exporter_answer(tmp_path: Path) -> None:
    settings = tmp_path / "gpunode.toml"
    settings.write_text(
        "[gpunode]\nsample-interval = 1\ndcgm-metrics = true\n"
        '[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.40gb" = 2 }\n[[gpunode.layout]]\ngpus = [1]\nmig = false\n'
    )
    with daemons.run(tmp_path, "--simulate", "h100.80gb:2", "--settings", settings) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_mig_sm_active_ratio{")
        with prometheus(tmp_path, gpunode.port, path="/metrics/dcgm") as server:
            server.wait("count_over_time(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[1m]) >= 4", 2)
            assert {query: len(server.query(query)) for query in OF_OTHERS} == OF_OTHERS
            power = {one["metric"]["UUID"]: float(one["value"][1]) for one in server.query("DCGM_FI_DEV_POWER_USAGE")}
            assert 50 < sum(power.values()) < 2 * 750, "the power of two boards, not of three parts"


Series = dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]
SCRAPE = 1.0
"""Seconds between two scrapes of this Prometheus."""


def history(server: Prometheus, selector: str) -> Series:
    """Return every sample of the series that a selector matches: (time, value) by labels, the name among them."""
    return {
        tuple(sorted(series["metric"].items())): [(float(at), float(value)) for at, value in series["values"]]
        for series in server.query(f"{selector}[10m]")
    }


def repartition(gpunode: daemons.Running, settings: Path, instances: str, seconds: float) -> None:
    """Change the layout, wait until the page shows it, and go on for so many seconds."""
    settings.write_text(
        '[gpunode]\nenforcement = "continuous"\nsample-interval = 1\nperiod = 5\n'
        f'[[gpunode.layout]]\ngpus = "all"\ninstances = {{ {instances} }}\n'
    )
    profiles = sorted(part.split('"')[1] for part in instances.split(", ") for _ in range(int(part.rpartition("=")[2])))
    gpunode.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + daemons.PATIENCE
    while True:
        lines = gpunode.get("/metrics").body.decode().splitlines()
        infos = [line for line in lines if line.startswith("gpunode_mig_gpu_instance_info{")]
        shown = sorted(line.partition('profile="')[2].partition('"')[0] for line in infos)
        if shown == sorted(profiles * 2):
            break
        assert time.monotonic() < until, (shown, gpunode.said())
        time.sleep(0.1)
    time.sleep(seconds)  # what Prometheus sees meanwhile is what is looked at


def test_a_repartition_leaves_no_stale_series_no_gap_and_no_counter_that_falls(tmp_path: Path) -> None:
    settings = tmp_path / "gpunode.toml"
    settings.write_text('[gpunode]\nenforcement = "observe"\n')
    node = ("--simulate", "h100.80gb:2", "--sim-state", tmp_path / "state", "--settings", settings)
    with daemons.run(tmp_path, *node) as gpunode:
        gpunode.wait_ready()
        gpunode.wait_metric("gpunode_gpu_up{")
        with prometheus(tmp_path, gpunode.port) as server:
            server.wait("gpunode_gpu_up", 2)
            for instances in ('"3g.40gb" = 2', '"1g.10gb" = 7', '"3g.40gb" = 2', '"2g.20gb" = 2, "3g.40gb" = 1'):
                repartition(gpunode, settings, instances, 6.0)
            now = server.query("gpunode_mig_memory_used_bytes")
            assert len(now) == 6, "at once only what is there"
            scrapes = sorted(at for at, _ in next(iter(history(server, "up").values())))
            whole = history(server, '{__name__=~"gpunode_gpu_(memory_used_bytes|power_watts|up|energy_joules_total)"}')
            instance = history(server, '{__name__=~"gpunode_.*", gpu_instance_id!=""}')
            counters = history(server, '{__name__=~"gpunode_.*_total|process_.*_total"}')
            seen = history(server, "gpunode_mig_first_seen_timestamp_seconds")
        assert gpunode.stop() == 0
    # Both GPUs, all the time; instances, as long as they are there.
    assert len(whole) == 8
    allowed = 2 * SCRAPE + 0.5
    for labels, samples in whole.items():
        times = [scrapes[0], *(at for at, _ in samples), scrapes[-1]]
        assert max(b - a for a, b in itertools.pairwise(times)) <= allowed, labels
    # Nothing of two layouts in one scrape: what is shown together fits on the GPU together.
    placed: dict[tuple[float, str], list[tuple[int, int]]] = collections.defaultdict(list)
    for key, samples in instance.items():
        told = dict(key)
        if told["__name__"] == "gpunode_mig_gpu_instance_info":
            start, size = int(told["placement_start"]), int(told["placement_size"])
            for at, _ in samples:
                placed[at, told["gpu_uuid"]].append((start, start + size))
    for where, spans in placed.items():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), (where, spans)
    # Each family of an instance is there exactly when its info is.
    infos: dict[tuple[str, str], set[float]] = collections.defaultdict(set)
    for key, samples in instance.items():
        told = dict(key)
        if told["__name__"] == "gpunode_mig_gpu_instance_info":
            infos[told["gpu_uuid"], told["gpu_instance_id"]] |= {at for at, _ in samples}
    for key, samples in instance.items():
        told = dict(key)
        assert {at for at, _ in samples} <= infos[told["gpu_uuid"], told["gpu_instance_id"]], told
    # Counters only grow, but for an instance made again, which has a new time of being first seen.
    firsts = {(dict(k)["gpu_uuid"], dict(k)["gpu_instance_id"]): dict(v) for k, v in seen.items()}
    assert len(counters) > 50
    for key, samples in counters.items():
        for (before, low), (after, high) in itertools.pairwise(samples):
            if high < low:
                first = firsts[dict(key)["gpu_uuid"], dict(key)["gpu_instance_id"]]
                assert high == 0, (key, low, high)
                assert first[after] > first[before], (key, low, high)
    # The 3g.40gb of the first and the third layout have the same ids and are told apart.
    again = [values for values in firsts.values() if len(set(values.values())) > 1]
    assert len(again) >= 2
    assert all(len(set(values.values())) <= 4 for values in again)
