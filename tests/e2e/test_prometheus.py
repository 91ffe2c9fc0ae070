"""A real Prometheus scrapes a running gpunode and answers queries on what it serves."""

from __future__ import annotations

import contextlib
import json
import shutil
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
def prometheus(where: Path, target: int) -> Iterator[Prometheus]:
    port = daemons.free_port()
    config = where / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: gpunode, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
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
