"""The page with dcgm-exporter's names: labels, units, and what stands on the GPU and what on its instances."""

from __future__ import annotations

import asyncio
import dataclasses

import aiohttp
import pytest
from prometheus_client import parser

from agent import measures
from agent.mig import node as nodes
from agent.reconcile import snapshot as snapshots
from agent.serve import board as boards
from agent.serve import exposition, server
from agent.serve.families import dcgm, family
from tests.serve import built

BUILD = family.Build(version="1", revision="", python="3", hostname="node-7")

# What the dashboards and rules in use ask for (12239, OpenShift's console, the CloudWatch agent).
ASKED = {
    *("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL"),
    *("DCGM_FI_DEV_FB_USED", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    *("DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_MEMORY_TEMP"),
    *("DCGM_FI_DEV_FB_TOTAL", "DCGM_FI_DEV_FB_USED_PERCENT", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_XID_ERRORS"),
}


def rows(snapshot: snapshots.Snapshot, sample: measures.Sample) -> dict[str, list[tuple[dict[str, str], float]]]:
    board = boards.Board(now=built.NOW)
    board.publish_snapshot(snapshot)
    board.publish_sample(sample)
    view = exposition.view_of(board, now=built.NOW, what=BUILD)
    text = exposition.Renderer(dcgm.FAMILIES, process=False).render(view, exposition.TEXT).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for metric in parser.text_string_to_metric_families(text):
        for one in metric.samples:
            # The parser, too, puts the suffix to counters that lack it.
            found.setdefault(one.name.removesuffix("_total"), []).append((one.labels, one.value))
    return found


def mixed(**more: object) -> measures.Sample:
    return built.sample(built.gpu_sample(0, instances=2), built.whole_sample(1), **more)


def test_what_dashboards_ask_for_is_there() -> None:
    assert rows(built.snapshot(), mixed()).keys() >= ASKED


def test_labels_are_those_of_dcgm_exporter_with_the_host_in_both_spellings() -> None:
    labels = rows(built.snapshot(), mixed())["DCGM_FI_DEV_FB_USED"][0][0]
    assert labels == {
        "gpu": "0",
        "UUID": built.uuid(0),
        "pci_bus_id": "00000000:10:00.0",
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "GPU_I_PROFILE": "1g.10gb",
        "GPU_I_ID": "7",
        "Hostname": "node-7",
        "hostname": "node-7",
        "DCGM_FI_DRIVER_VERSION": "550.90.07",
        "container": "",
        "namespace": "",
        "pod": "",
    }


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("DCGM_FI_DEV_POWER_USAGE", [("0", ""), ("1", "")]),
        ("DCGM_FI_DEV_GPU_TEMP", [("0", ""), ("1", "")]),
        ("DCGM_FI_DEV_FB_USED", [("0", "7"), ("0", "8"), ("1", "")]),
        ("DCGM_FI_PROF_SM_ACTIVE", [("0", "7"), ("0", "8"), ("1", "")]),
        ("DCGM_FI_DEV_XID_ERRORS", [("0", "7"), ("0", "8"), ("1", "")]),
        ("DCGM_FI_DEV_GPU_UTIL", [("1", "")]),
    ],
)
def test_what_stands_where(name: str, places: list[tuple[str, str]]) -> None:
    found = rows(built.snapshot(), mixed())[name]
    assert [(labels["gpu"], labels["GPU_I_ID"]) for labels, _ in found] == places


def test_units_are_dcgms() -> None:
    memory = measures.Memory(total=80 * 2**30, used=20 * 2**30 + 5, free=59 * 2**30, reserved=2**30)
    gpu = built.whole_sample(0, memory=memory, energy_joules=12.5, clocks={"sm": 1.98e9}, utilization={"gpu": 0.75})
    found = {name: one[0][1] for name, one in rows(built.snapshot(), built.sample(gpu)).items()}
    assert found["DCGM_FI_DEV_FB_TOTAL"] == 81920
    assert found["DCGM_FI_DEV_FB_USED"] == 20480
    assert found["DCGM_FI_DEV_FB_RESERVED"] == 1024
    assert found["DCGM_FI_DEV_FB_USED_PERCENT"] == pytest.approx(20 / 79, abs=1e-6)
    assert found["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == 12500
    assert found["DCGM_FI_DEV_SM_CLOCK"] == 1980
    assert found["DCGM_FI_DEV_GPU_UTIL"] == 75


def test_the_last_xid_stands_on_the_instance_it_hit_and_a_gpus_own_on_all_of_them() -> None:
    errors = {(built.uuid(0), "7", "0", 31): 2, (built.uuid(0), "", "", 48): 1, (built.uuid(1), "", "", 79): 0}
    last = {(built.uuid(0), "7", "0", 31): 20.0, (built.uuid(0), "", "", 48): 10.0}
    found = rows(built.snapshot(), mixed(xid_errors=errors, xid_last=last))["DCGM_FI_DEV_XID_ERRORS"]
    assert [value for _, value in found] == [31, 48, 0]


def test_the_pod_that_has_an_instance_is_on_its_rows() -> None:
    node = built.snapshot().node
    assert node is not None
    holder = nodes.Holder(kind="pod", name="train", pod="train", namespace="ml", container="main")
    gpus = (built.gpu(0, instances=(built.instance(0, 7, holders=(holder,)),)), node.gpus[1])
    found = rows(built.snapshot(node=dataclasses.replace(node, gpus=gpus)), mixed())["DCGM_FI_DEV_FB_USED"]
    assert [(labels["namespace"], labels["pod"], labels["container"]) for labels, _ in found] == [
        ("ml", "train", "main"),
        ("", "", ""),
        ("", "", ""),
    ]


def test_counters_keep_the_names_that_dcgm_exporter_gives_them() -> None:
    board = boards.Board(now=built.NOW)
    board.publish_sample(mixed())
    view = exposition.view_of(board, now=built.NOW, what=BUILD)
    text = exposition.Renderer(dcgm.FAMILIES, process=False).render(view, exposition.TEXT).decode()
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n" in text
    assert "_total" not in text


@pytest.mark.parametrize("wanted", [True, False])
async def test_it_is_served_only_where_asked_for(*, wanted: bool) -> None:
    board = boards.Board(now=built.NOW)
    board.publish_sample(mixed())
    running = await server.start(board, listen=("127.0.0.1:0",), clock=lambda: built.NOW, dcgm=wanted)
    try:
        async with asyncio.timeout(10), aiohttp.ClientSession() as client:
            url = f"http://{running.addresses[0]}/metrics/dcgm"
            async with client.get(url, headers={"Accept": "application/openmetrics-text"}) as answer:
                text = await answer.text()
                assert answer.status == (200 if wanted else 404)
                assert ("DCGM_FI_DEV_FB_USED{" in text) is wanted
    finally:
        await running.close()
