"""Metrics as text: clean, complete, absent where unsupported, rendered once, and never on a request's time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gzip
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from agent import measures
from agent.host import facts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.reconcile import snapshot as snapshots
from agent.serve import board as boards
from agent.serve import exposition
from agent.serve.families import every, family
from tests.serve import built, simulated

GOLDEN = Path(__file__).parent / "golden"
BUILD = family.Build(version="1.2.3", revision="", python="3.11.7")


def view(snapshot: snapshots.Snapshot | None, sample: measures.Sample | None) -> family.View:
    board = boards.Board(now=built.NOW)
    if snapshot is not None:
        board.publish_snapshot(snapshot)
    if sample is not None:
        board.publish_sample(sample)
    return exposition.view_of(board, now=built.NOW, what=BUILD)


def render(
    snapshot: snapshots.Snapshot | None, sample: measures.Sample | None, form: exposition.Format = exposition.TEXT
) -> str:
    return exposition.Renderer(process=False).render(view(snapshot, sample), form).decode()


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(text: str) -> Series:
    found: Series = {}
    for metric in parser.text_string_to_metric_families(text):
        for one in metric.samples:
            key = (one.name, tuple(sorted(one.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = one.value
    return found


def names(text: str) -> set[str]:
    return {name for name, _ in series(text)}


WAITING = snapshots.Snapshot(
    phase=snapshots.Phase.WAITING,
    cycle=1,
    reasons=(snapshots.Reason("driver", "no driver"),),
    driver_problem="no driver",
)
Case = tuple[snapshots.Snapshot | None, measures.Sample | None]

# Nodes of the simulator, as the sampler sees them at a time that stands: type, and the instances of GPUs by index.
SIMULATED: dict[str, tuple[str, dict[int, simulated.Instances]]] = {
    "h100-8x7": ("p5.48xlarge", dict.fromkeys(range(8), tuple(("1g.10gb", start) for start in range(7)))),
    "a100-mixed": ("p4d.24xlarge", {0: (("3g.20gb", 4), ("2g.10gb", 2), ("1g.5gb", 0)), 1: (("7g.40gb", 0),), 2: ()}),
    "no-mig": ("g5.12xlarge", {}),
    "g6f": ("g6f.large", {}),
}
CASES = (*SIMULATED, "one-silent", "no-driver", "starting")


async def _sampled(spec: str, wanted: dict[int, simulated.Instances]) -> Case:
    async with simulated.sampled(spec, wanted) as made:
        for index in range(len(made.bench.uuids)):
            there = (await made.gpus.observe_gpu(made.bench.uuids[index])).instances
            if there or index not in wanted:
                made.node.start_process(index, gpu_instance=min((i.id for i in there), default=None), memory_mib=900)
        await made.cycle()
        sample = await made.cycle()
        return await made.snapshot(wanted=wanted), sample


async def _without_driver() -> Case:
    async with simulated.sampled("p4d.24xlarge") as made:
        await made.gpus.release()
        sample = await made.cycle()
    assert not sample.nvml_up
    return WAITING, sample


@functools.cache
def case(name: str) -> Case:
    """Return the snapshot and the sample of a case, made once."""
    if name in SIMULATED:
        return asyncio.run(_sampled(*SIMULATED[name]))
    if name == "no-driver":
        return asyncio.run(_without_driver())
    if name == "one-silent":
        return built.snapshot(), built.sample(built.gpu_sample(0), built.silent(1))
    return None, None


each_case = pytest.mark.parametrize("name", CASES)
each_format = pytest.mark.parametrize("form", exposition.FORMATS, ids=lambda form: form.name)


@each_case
@each_format
def test_golden(name: str, form: exposition.Format) -> None:
    text = render(*case(name), form)
    path = GOLDEN / f"{name}.{form.name}"
    if name == "h100-8x7":
        # 2,300 series say nothing to a reviewer that the first GPU does not.
        sample = case(name)[1]
        assert sample is not None
        others = [gpu.uuid for gpu in sample.gpus[1:]]
        others += [str(c.uuid) for gpu in sample.gpus[1:] for i in gpu.instances for c in i.compute]
        text = "".join(line for line in text.splitlines(keepends=True) if not any(uuid in line for uuid in others))
    if os.environ.get("REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "run pytest with REWRITE_GOLDEN=1 and look at the diff"


@each_case
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian: apt-get install prometheus)")
def test_promtool_finds_nothing(name: str) -> None:
    text = exposition.Renderer().render(view(*case(name)), exposition.TEXT)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@each_case
def test_openmetrics_says_the_same_and_its_own_parser_agrees(name: str) -> None:
    text = render(*case(name), exposition.OPENMETRICS)
    assert text.endswith("# EOF\n")
    assert text.count("# EOF") == 1
    found: Series = {}
    for metric in openmetrics.text_string_to_metric_families(text):
        for one in metric.samples:
            found[one.name, tuple(sorted(one.labels.items()))] = one.value
    assert found == series(render(*case(name)))


@each_case
def test_no_value_is_nan_and_no_family_is_empty(name: str) -> None:
    text = render(*case(name))
    assert not any(math.isnan(value) for value in series(text).values())
    declared = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(declared) == len(set(declared))
    assert set(declared) == names(text)


def test_every_family_is_seen_in_some_case() -> None:
    shared = built.snapshot(
        simulated="p5.48xlarge",
        node=dataclasses.replace(
            _node(),
            serving="kubelet",
            gpus=(
                built.gpu(0, instances=(built.instance(0, 7, holders=(_pod("train"), _task("render"))),)),
                built.gpu(1, holders=(_pod("whole"), _task("all"))),
            ),
        ),
        outcome=_outcome(),
        reasons=(snapshots.Reason("after-change", "a hook failed"),),
        facts=facts.HostFacts(ecs="/etc/ecs is there"),
    )
    gpu = built.whole_sample(0, remapped_rows={"correctable": 1})
    full = built.sample(gpu, built.gpu_sample(1), xid_last={(built.uuid(0), "", "", 79): built.NOW - 5})
    seen = names(render(shared, full))
    assert {one.full_name for one in every.FAMILIES} - seen == set()


def test_parent_and_instances_are_both_there_and_figures_of_the_board_are_not_repeated() -> None:
    text = render(*case("h100-8x7"))
    found = series(text)
    for base in ("memory_used_bytes", "sm_active_ratio", "dram_active_ratio"):
        assert sum(name == f"gpunode_gpu_{base}" for name, _ in found) == 8
        assert sum(name == f"gpunode_mig_{base}" for name, _ in found) == 56
    for name in names(text):
        if name.startswith("gpunode_mig_"):
            assert not re.search(r"power|energy|celsius|clock|pcie|remap|bar1_total|dram_corrected", name)


def test_values_are_those_of_the_sample() -> None:
    found = series(render(*case("h100-8x7")))
    sample = case("h100-8x7")[1]
    assert sample is not None
    for gpu in sample.gpus:
        own = (("gpu_uuid", gpu.uuid),)
        assert gpu.memory is not None
        assert gpu.activity is not None
        assert found["gpunode_gpu_memory_used_bytes", own] == gpu.memory.used
        assert found["gpunode_gpu_power_watts", own] == gpu.power_watts
        assert found["gpunode_gpu_energy_joules_total", own] == gpu.energy_joules
        assert found["gpunode_gpu_fp32_active_ratio", own] == gpu.activity.fp32
        for instance in gpu.instances:
            labels = (("gpu_instance_id", str(instance.id)), ("gpu_uuid", gpu.uuid))
            assert instance.memory is not None
            assert instance.activity is not None
            assert found["gpunode_mig_memory_used_bytes", labels] == instance.memory.used
            assert found["gpunode_mig_tensor_active_ratio", labels] == instance.activity.tensor
            assert found["gpunode_mig_first_seen_timestamp_seconds", labels] == instance.first_seen


def test_pods_are_named_in_allocation_families_alone() -> None:
    node = dataclasses.replace(
        _node(), gpus=(built.gpu(0, instances=(built.instance(0, 7, holders=(_pod("train"), _pod("infer"))),)),)
    )
    found = series(render(built.snapshot(node=node), built.sample(built.gpu_sample(0))))
    named = {
        (name, labels) for name, labels in found if any(key in ("pod", "container", "namespace") for key, _ in labels)
    }
    device = built.mig_uuid(0, 7)
    assert named == {
        (
            "gpunode_mig_device_allocation_info",
            (("container", "main"), ("mig_uuid", device), ("namespace", "ml"), ("pod", pod)),
        )
        for pod in ("train", "infer")
    }


def test_tasks_are_named_in_their_own_families_with_what_is_known_of_them() -> None:
    task = "0123456789abcdef0123456789abcdef"
    told = nodes.Holder(kind="task", name="render:3", container="main", task=task)
    untold = nodes.Holder(kind="task", name=task, container="ab" * 6, task=task)
    gpus = (
        built.gpu(0, instances=(built.instance(0, 7, holders=(told, told)),)),
        built.gpu(1, holders=(untold, told)),
    )
    node = dataclasses.replace(_node(), serving="ecs", gpus=gpus)
    found = series(render(built.snapshot(node=node), built.sample(built.gpu_sample(0))))
    keys = ("task_family", "task_id", "container")
    named = {
        (name, *(dict(labels).get(key, "") for key in ("mig_uuid", "gpu_uuid", *keys)))
        for name, labels in found
        if any(key in dict(labels) for key in (*keys, "pod"))
    }
    assert named == {
        ("gpunode_mig_device_task_info", built.mig_uuid(0, 7), "", "render:3", task, "main"),
        ("gpunode_gpu_task_info", "", built.uuid(1), "render:3", task, "main"),
        ("gpunode_gpu_task_info", "", built.uuid(1), "", task, "ab" * 6),
    }


def test_a_gpu_that_does_not_answer_has_identity_and_nothing_else() -> None:
    found = series(render(*case("one-silent")))
    about = {name for name, labels in found if ("gpu_uuid", built.uuid(1)) in labels}
    assert about == {"gpunode_gpu_info", "gpunode_gpu_up", "gpunode_gpu_mig_in_sync", "gpunode_xid_errors_total"}
    assert found["gpunode_gpu_up", (("gpu_uuid", built.uuid(1)),)] == 0
    assert found["gpunode_gpus", ()] == 1


def test_series_of_instances_that_are_gone_vanish_with_the_next_sample() -> None:
    renderer = exposition.Renderer(process=False)
    before = renderer.render(
        view(built.snapshot(), built.sample(built.gpu_sample(0, instances=7))), exposition.TEXT
    ).decode()
    after = renderer.render(
        view(built.snapshot(), built.sample(built.gpu_sample(0, instances=2))), exposition.TEXT
    ).decode()
    assert built.mig_uuid(0, 13) in before
    assert built.mig_uuid(0, 13) not in after
    assert after == render(built.snapshot(), built.sample(built.gpu_sample(0, instances=2)))


@each_format
def test_a_renderer_that_remembers_says_what_a_fresh_one_says(form: exposition.Format) -> None:
    renderer = exposition.Renderer(process=False)
    for name in (*CASES, *reversed(CASES)):
        snapshot, sample = case(name)
        assert renderer.render(view(snapshot, sample), form).decode() == render(snapshot, sample, form)


def test_label_values_of_any_kind_survive() -> None:
    name = 'NVIDIA "X"\\\n7'
    found = series(render(None, built.sample(built.gpu_sample(0, name=name))))
    assert [dict(labels)["name"] for metric, labels in found if metric == "gpunode_gpu_info"] == [name]


def test_phases_are_one_hot() -> None:
    for phase in snapshots.Phase:
        found = series(render(built.snapshot(phase=phase), None))
        active = [
            dict(labels)["phase"] for (name, labels), value in found.items() if name == "gpunode_phase" and value == 1
        ]
        assert active == [phase.value]


@pytest.mark.parametrize(
    ("accept", "name"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/plain;version=0.0.4", "text"),
        ("application/openmetrics-text", "openmetrics"),
        ("text/plain;version=0.0.4;q=0.5, application/openmetrics-text;version=1.0.0;q=0.6", "openmetrics"),
        ("application/openmetrics-text;version=1.0.0;q=0.4,text/plain;q=0.9", "text"),
        ("application/openmetrics-text;q=0,text/plain;q=0.1", "text"),
        ("application/openmetrics-text;q=x,text/plain", "text"),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;q=0.9,*/*;q=0.1", "text"),
        (
            # what Prometheus 3 sends, protobuf apart
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            "openmetrics",
        ),
        ("text/html", "text"),
    ],
)
def test_the_format_is_what_the_client_likes_best(accept: str, name: str) -> None:
    assert exposition.choose(accept).name == name


class Ticking:
    """A monotonic clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def idle(kept: exposition.Exposition) -> None:
    """Wait until nothing is being rendered."""
    while kept._worker is not None:
        await asyncio.shield(kept._worker)


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


@pytest.fixture
def board() -> boards.Board:
    board = boards.Board(now=built.NOW)
    board.publish_snapshot(built.snapshot())
    return board


async def test_nothing_is_rendered_while_nobody_asks(board: boards.Board, ticking: Ticking) -> None:
    kept = exposition.Exposition(board, clock=lambda: built.NOW, monotonic=ticking)
    board.publish_sample(built.sample())
    await idle(kept)
    assert kept.renders == 0
    await kept.close()


async def test_a_version_is_rendered_once_a_format_that_was_asked_for(board: boards.Board, ticking: Ticking) -> None:
    kept = exposition.Exposition(board, clock=lambda: built.NOW, monotonic=ticking)
    board.publish_sample(built.sample(built.gpu_sample(0, seed=1)))
    first = await kept.page(exposition.TEXT)
    assert [await kept.page(exposition.TEXT) for _ in range(5)] == [first] * 5
    assert kept.renders == 1
    board.publish_sample(built.sample(built.gpu_sample(0, seed=2)))
    await idle(kept)
    assert kept.renders == 2
    second = kept.ready(exposition.TEXT)
    assert second is not None
    assert second.version == first.version + 1
    assert second.plain != first.plain
    assert gzip.decompress(second.gzipped) == second.plain
    await kept.page(exposition.OPENMETRICS)
    board.publish_sample(built.sample())
    await idle(kept)
    assert kept.renders == 2 + 2 + 2  # to answer the first wish for OpenMetrics both were made, and both anew
    await kept.close()


async def test_bytes_at_hand_are_served_while_newer_ones_are_made(board: boards.Board, ticking: Ticking) -> None:
    kept = exposition.Exposition(board, clock=lambda: built.NOW, monotonic=ticking)
    first = await kept.page(exposition.TEXT)
    board.publish_sample(built.sample())
    assert kept.ready(exposition.TEXT) is first
    await idle(kept)
    assert kept.ready(exposition.TEXT) is not first
    await kept.close()


async def test_many_changes_while_rendering_end_with_the_newest(board: boards.Board, ticking: Ticking) -> None:
    kept = exposition.Exposition(board, clock=lambda: built.NOW, monotonic=ticking)
    await kept.page(exposition.TEXT)
    for seed in range(20):
        board.publish_sample(built.sample(built.gpu_sample(0, seed=seed)))
    await idle(kept)
    page = kept.ready(exposition.TEXT)
    assert page is not None
    assert page.version == board.version
    assert kept.renders <= 4
    await kept.close()


async def test_a_format_nobody_asked_for_lately_is_rendered_no_more(board: boards.Board, ticking: Ticking) -> None:
    kept = exposition.Exposition(board, clock=lambda: built.NOW, monotonic=ticking)
    await kept.page(exposition.TEXT)
    ticking.now += exposition.WANTED_FOR
    board.publish_sample(built.sample())
    await idle(kept)
    assert kept.renders == 1
    page = await kept.page(exposition.TEXT)  # who comes back gets fresh figures
    assert (page.version, kept.renders) == (board.version, 2)
    await kept.close()


async def test_when_the_board_stops_changing_health_still_moves_on(board: boards.Board, ticking: Ticking) -> None:
    now = built.NOW
    kept = exposition.Exposition(board, clock=lambda: now, monotonic=ticking)
    board.publish_sample(built.sample())
    board.turned(now)
    assert "gpunode_healthy 1.0" in (await kept.page(exposition.TEXT)).plain.decode()
    now += 60
    ticking.now += 60
    board.turned(now)
    late = (await kept.page(exposition.TEXT)).plain.decode()
    assert "gpunode_healthy 0.0" in late
    assert 'gpunode_health_reason{code="samples-stale"} 1.0' in late
    await kept.close()


def _node() -> nodes.NodeState:
    node = built.snapshot().node
    assert node is not None
    return node


def _pod(name: str) -> nodes.Holder:
    return nodes.Holder(kind="pod", name=name, pod=name, namespace="ml", container="main")


def _task(name: str) -> nodes.Holder:
    return nodes.Holder(kind="task", name=name, container="0123456789ab")


def _outcome() -> snapshots.Outcome:
    mode = plans.SetMigMode(enabled=True)
    failure = snapshots.Failure(uuid=built.uuid(1), step=mode, message="refused", rolled_back=True)
    return snapshots.Outcome(done=((built.uuid(0), (mode,)),), failures=(failure,))
