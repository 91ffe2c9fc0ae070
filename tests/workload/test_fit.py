"""Workloads packed onto what a node advertises, under every strategy."""

from __future__ import annotations

import dataclasses

import pytest

from agent.workload import dra, fit, read


def offer(
    *,
    mixed: dict[str, int] | None = None,
    single: dict[str, int] | None = None,
    gpus: int = 8,
    mig_on: bool = True,
    fraction: float | None = None,
    devices: tuple[dra.Device, ...] = (),
) -> fit.Offer:
    return fit.Offer(
        plugin={"none": {"nvidia.com/gpu": gpus}, "single": single, "mixed": mixed},
        refused={} if single else {"single": "more than one type of MIG device is on the node"},
        devices=devices,
        gpus=gpus,
        mig_on=mig_on,
        fraction=fraction,
    )


UNIFORM = offer(mixed={"nvidia.com/mig-2g.10gb": 24}, single={"nvidia.com/gpu": 24})
HALF = offer(mixed={"nvidia.com/mig-1g.5gb": 8, "nvidia.com/gpu": 4})
PLAIN = offer(mixed={"nvidia.com/gpu": 4}, single={"nvidia.com/gpu": 4}, gpus=4, mig_on=False)


SHARED = dataclasses.replace(offer(gpus=2, mig_on=False), gpu_memory_mib=16384)


def pod(
    resource: str = "nvidia.com/gpu", count: int = 1, *, name: str = "p", replicas: int = 1, kind: str = "Pod"
) -> read.Pod:
    return read.Pod(file="p.yaml", kind=kind, name=name, asks=(read.Ask("c", resource, count, 7),), replicas=replicas)


def task(
    *values: str, name: str = "t", managed: bool = False, fargate: bool = False, shares: tuple[int, ...] = ()
) -> read.Task:
    wanted = tuple(read.GpuValue(f"c{i}", v, 4 + i) for i, v in enumerate(values))
    parts = tuple(read.Share(f"s{i}", memory, 50, 20 + i) for i, memory in enumerate(shares))
    return read.Task(file="t.json", name=name, values=wanted, managed_instances=managed, fargate=fargate, shares=parts)


def one(workload: read.Workload, node: fit.Offer, strategy: str) -> fit.Verdict:
    (verdict,) = fit.judge([workload], node, strategy=strategy)
    return verdict


@pytest.mark.parametrize(
    ("workload", "node", "strategy", "fits", "word"),
    [
        pytest.param(pod(count=3), UNIFORM, "single", True, "one CUDA process", id="three of single, with a warning"),
        pytest.param(pod(count=25), UNIFORM, "single", False, "asks for 25", id="more than there are"),
        pytest.param(pod(), UNIFORM, "mixed", False, "no nvidia.com/gpu", id="gpu under mixed"),
        pytest.param(
            pod("nvidia.com/mig-1g.5gb"), UNIFORM, "mixed", False, "no nvidia.com/mig-1g.5gb", id="another profile"
        ),
        pytest.param(
            pod("nvidia.com/mig-1g.5gb"), UNIFORM, "single", False, "under single every", id="a profile under single"
        ),
        pytest.param(pod("nvidia.com/mig-1g.5gb"), HALF, "mixed", True, "", id="a profile that is there"),
        pytest.param(pod(), HALF, "single", False, "more than one type", id="a strategy the plugin refuses"),
        pytest.param(pod(), UNIFORM, "none", True, "cannot use it", id="none on a split GPU warns"),
        pytest.param(pod("nvidia.com/gpu.shared"), PLAIN, "none", False, "time-slicing", id="a shared resource"),
        pytest.param(
            pod(replicas=6, kind="Deployment"), PLAIN, "none", True, "4 of its 6", id="replicas beyond the node"
        ),
        pytest.param(pod(replicas=0, kind="Deployment"), PLAIN, "none", True, "no replicas", id="no replicas"),
        pytest.param(read.Pod("p", "Pod", "p", ()), PLAIN, "none", True, "no GPU", id="asks nothing"),
        pytest.param(task("2"), PLAIN, "ecs", True, "", id="two of four"),
        pytest.param(
            task("2", "3"), PLAIN, "ecs", False, "asks for 5 GPUs, the instance has 4", id="sums over containers"
        ),
        pytest.param(task("ALL"), PLAIN, "ecs", True, "", id="all"),
        pytest.param(task("ALL", "1"), PLAIN, "ecs", False, "no other container", id="all and one more"),
        pytest.param(task("ALL"), offer(gpus=0, mig_on=False), "ecs", False, "has none", id="all of none"),
        pytest.param(task("1"), UNIFORM, "ecs", False, "ECS does not support MIG", id="MIG under ECS"),
        pytest.param(task("0.25"), PLAIN, "ecs", False, "does not slice", id="a decimal on whole GPUs"),
        pytest.param(task("0.3"), PLAIN, "ecs", False, "no fraction that ECS offers", id="no such fraction"),
        pytest.param(
            task("0.25"), offer(gpus=1, mig_on=False, fraction=0.25), "ecs", True, "", id="the right fraction"
        ),
        pytest.param(
            task("0.25"),
            offer(gpus=1, mig_on=False, fraction=0.5),
            "ecs",
            False,
            "belongs to g6f.2xlarge; this is a 0.5",
            id="wrong",
        ),
        pytest.param(
            task("2"),
            offer(gpus=1, mig_on=False, fraction=0.25),
            "ecs",
            False,
            "a quarter of one",
            id="whole on a part",
        ),
        pytest.param(
            task(shares=(512,)), offer(gpus=1, mig_on=False, fraction=0.5), "ecs", False, "MPS", id="MPS on a part"
        ),
        pytest.param(task(shares=(9000, 9000)), SHARED, "ecs", True, "", id="two share two GPUs by MPS"),
        pytest.param(task("1", shares=(9000, 5000)), SHARED, "ecs", True, "", id="a whole GPU and two that share"),
        pytest.param(task("1", shares=(9000, 9000)), SHARED, "ecs", False, "no GPU has so much left", id="no room"),
        pytest.param(task(shares=(20000,)), SHARED, "ecs", False, "a GPU here has 16384 MiB", id="too much for MPS"),
        pytest.param(task(shares=(1,)), PLAIN, "ecs", False, "is not known", id="MPS and nobody knows the memory"),
        pytest.param(task("1", fargate=True), PLAIN, "ecs", False, "Fargate", id="Fargate"),
        pytest.param(task("1", managed=True), PLAIN, "ecs", True, "managed instances", id="managed instances are said"),
        pytest.param(task(), PLAIN, "ecs", True, "no GPU", id="a task without GPU"),
        pytest.param(task("1"), PLAIN, "single", False, "is for ECS", id="a task under a Kubernetes strategy"),
        pytest.param(pod(), PLAIN, "dra", False, "resourceClaims", id="an extended resource under DRA"),
        pytest.param(read.Pod("p", "Pod", "p", ()), PLAIN, "dra", True, "no GPU", id="asks nothing of DRA"),
    ],
)
def test_one_workload(workload: read.Workload, node: fit.Offer, strategy: str, fits: bool, word: str) -> None:
    verdict = one(workload, node, strategy)
    assert verdict.fits is fits
    assert word in " ".join((*verdict.reasons, *verdict.warnings))
    assert fits or verdict.reasons


def test_tasks_share_a_gpu_by_mps_one_after_another() -> None:
    tasks = [task(shares=(8192,), name=name) for name in ("a", "b", "c", "d", "e")]
    verdicts = fit.judge(tasks, SHARED, strategy="ecs")
    assert [v.fits for v in verdicts] == [True, True, True, True, False]
    assert verdicts[4].line == 20


def test_only_the_strategy_of_a_known_plugin_is_answered() -> None:
    verdicts = fit.judge([pod(), task("1"), claims("ResourceClaim")], PLAIN, plugin="single")
    assert [v.strategy for v in verdicts] == ["single", "ecs", "dra"]


def test_the_first_that_does_not_fit_is_named_with_who_is_in_its_way() -> None:
    verdicts = fit.judge([pod(count=3, name="a"), pod(count=2, name="b"), pod(name="c")], PLAIN, strategy="none")
    assert [v.fits for v in verdicts] == [True, False, True]
    assert "3 of 4 are taken by Pod a" in verdicts[1].reasons[0]


def test_ecs_tasks_are_packed_too() -> None:
    verdicts = fit.judge([task("3", name="a"), task("2", name="b")], PLAIN, strategy="ecs")
    assert [v.fits for v in verdicts] == [True, False]
    assert "3 taken by a" in verdicts[1].reasons[0]


def test_without_a_strategy_each_is_answered_under_all_that_apply() -> None:
    verdicts = fit.judge([pod(), task("1")], PLAIN)
    assert [(v.kind, v.strategy) for v in verdicts] == [
        ("Pod", "none"),
        ("Pod", "single"),
        ("Pod", "mixed"),
        ("TaskDefinition", "ecs"),
    ]


def test_init_containers_count_by_their_largest() -> None:
    workload = read.Pod(
        "p", "Pod", "p", (read.Ask("c", "nvidia.com/gpu", 1),), init_asks=(read.Ask("i", "nvidia.com/gpu", 5, 3),)
    )
    verdict = one(workload, PLAIN, "none")
    assert not verdict.fits
    assert "asks for 5" in verdict.reasons[0]


DEVICE = dra.Device("gpu-0-mig-1g5gb-19-0", {"type": "mig", "profile": "1g.5gb", "parentUUID": "GPU-0"}, {})
REQUEST = read.Request("a", "mig.nvidia.com", 1, ())


def claims(kind: str, name: str = "c") -> read.Claim:
    return read.Claim(file="c.yaml", kind=kind, name=name, requests=(REQUEST,))


def using(target: str, *, template: bool, name: str = "p") -> read.Pod:
    return read.Pod("p.yaml", "Pod", name, (), claims=(read.ClaimRef("gpu", target, template, 5),))


def test_each_pod_takes_its_own_of_a_template() -> None:
    node = offer(devices=(DEVICE,))
    verdicts = fit.judge(
        [claims("ResourceClaimTemplate"), using("c", template=True), using("c", template=True, name="q")], node
    )
    assert [(v.name, v.fits) for v in verdicts] == [("p", True), ("q", False)]


def test_pods_share_a_claim_by_name() -> None:
    node = offer(devices=(DEVICE,))
    verdicts = fit.judge(
        [claims("ResourceClaim"), using("c", template=False), using("c", template=False, name="q")], node
    )
    assert [(v.name, v.fits) for v in verdicts] == [("p", True), ("q", True)]


def test_a_claim_nobody_uses_is_judged_by_itself() -> None:
    (verdict,) = fit.judge([claims("ResourceClaimTemplate")], offer(devices=(DEVICE,)))
    assert (verdict.kind, verdict.fits) == ("ResourceClaimTemplate", True)


def test_a_claim_that_is_nowhere_is_said() -> None:
    (verdict,) = fit.judge([using("elsewhere", template=True)], offer(devices=(DEVICE,)))
    assert not verdict.fits
    assert "elsewhere" in verdict.reasons[0]
    assert verdict.line == 5


@pytest.mark.parametrize(
    ("workload", "node", "strategy", "change"),
    [
        (pod(count=25), UNIFORM, "single", "ask for at most 24 nvidia.com/gpu"),
        (pod(), UNIFORM, "mixed", "ask for nvidia.com/mig-2g.10gb, or change the layout"),
        (pod("nvidia.com/mig-1g.5gb"), UNIFORM, "none", "set the device plugin to mixed"),
        (pod("nvidia.com/mig-1g.5gb"), offer(mixed={}), "mixed", "split the GPUs"),
        (pod(), HALF, "single", "another strategy"),
        (pod(), PLAIN, "dra", "ResourceClaim"),
        (task("5"), PLAIN, "ecs", "ask for at most 4"),
    ],
)
def test_what_to_change_is_said(workload: read.Workload, node: fit.Offer, strategy: str, change: str) -> None:
    assert change in one(workload, node, strategy).change


def test_a_full_node_is_said_to_be_full() -> None:
    verdicts = fit.judge([pod(count=4, name="a"), pod(name="b")], PLAIN, strategy="none")
    assert "use another node" in verdicts[1].change
    verdicts = fit.judge([task("ALL", name="a"), task("1", name="b")], PLAIN, strategy="ecs")
    assert verdicts[1].change == "use another instance"


def test_a_pod_that_does_not_fit_leaves_its_claims_to_others() -> None:
    node = offer(devices=(DEVICE,))
    both = read.Pod(
        "p.yaml", "Pod", "p", (), claims=(read.ClaimRef("a", "c", False, 5), read.ClaimRef("b", "nowhere", False, 6))
    )
    verdicts = fit.judge([claims("ResourceClaim"), both, using("c", template=False, name="q")], node)
    assert [(v.name, v.fits) for v in verdicts] == [("p", False), ("q", True)]
