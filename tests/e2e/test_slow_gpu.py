"""One GPU whose driver calls take two seconds each: scrapes stay quick, and the other GPUs' figures stay fresh."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from prometheus_client import parser

from agent.sim import node as simulated
from tests.e2e import daemons

SETTINGS = """
[gpunode]
sample-interval = 1
[[gpunode.layout]]
gpus = "all"
instances = { "3g.40gb" = 2 }
"""
SPEC = "h100.80gb:4"


def test_scrapes_take_milliseconds_and_the_others_are_fresh(tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = tmp_path / "gpunode.toml"
    settings.write_text(SETTINGS)
    flags = ("--simulate", SPEC, "--sim-state", state, "--settings", settings)
    sim: Any = simulated.open_node(SPEC, state=state)
    try:
        with daemons.run(tmp_path, *flags) as gpunode:
            gpunode.wait_ready()
            gpunode.wait_metric("gpunode_gpu_temperature_celsius{")
            slow = sim.driver.gpus[2].spec.uuid
            others = {gpu.spec.uuid for gpu in sim.driver.gpus} - {slow}
            order = sim.delay("nvmlDevice*", 2.0, gpu=2)
            end = time.monotonic() + daemons.PATIENCE
            while not any(fault.id == order and fault.seen for fault in sim.faults.listed()):
                assert time.monotonic() < end
                time.sleep(0.05)
            took, ages = [], []
            until = time.monotonic() + 8.0
            while time.monotonic() < until:
                began = time.monotonic()
                text = gpunode.get("/metrics").body.decode()
                took.append(time.monotonic() - began)
                taken = {
                    sample.labels["gpu_uuid"]: sample.value
                    for family in parser.text_string_to_metric_families(text)
                    for sample in family.samples
                    if sample.name == "gpunode_gpu_sample_timestamp_seconds"
                }
                assert taken.keys() >= others
                ages.append(time.time() - min(taken[uuid] for uuid in others))
                time.sleep(0.02)
            sim.release(order)
            assert gpunode.stop() == 0, gpunode.said()
    finally:
        sim.close()
    assert statistics.median(took) < 0.03, "milliseconds"
    assert max(took) < 1.0
    assert max(ages) < 4.0, "a second between samples, a second for who is late, and what the machine is slow by"
