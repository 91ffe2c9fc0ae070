"""Manifests and task definitions as people write them, and every way of writing them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import errors
from agent.workload import read

DATA = Path(__file__).parent.parent / "data" / "workloads"


def problem(text: str) -> errors.Problem:
    with pytest.raises(errors.SettingsError) as caught:
        read.read(text, file="w.yaml")
    (found,) = caught.value.problems
    assert found.file == "w.yaml"
    return found


def pods(text: str) -> list[read.Pod]:
    return [w for w in read.read(text, file="w.yaml") if isinstance(w, read.Pod)]


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.iterdir() if "comma" not in p.name))
def test_the_shipped_cases_are_read(name: str) -> None:
    assert read.read((DATA / name).read_text(), file=name)


def test_a_trailing_comma_is_told_at_the_comma() -> None:
    with pytest.raises(errors.SettingsError) as caught:
        read.read((DATA / "ecs-trailing-comma.json").read_text(), file="draft.json")
    (found,) = caught.value.problems
    assert found.line == 7
    assert "comma" in found.message


CONTAINERS = "containers: [{name: a, resources: {limits: {nvidia.com/gpu: 2}}}]"


@pytest.mark.parametrize(
    ("text", "kind", "replicas"),
    [
        (f"kind: Pod\nspec: {{{CONTAINERS}}}", "Pod", 1),
        (f"kind: PodTemplate\ntemplate: {{spec: {{{CONTAINERS}}}}}", "PodTemplate", 1),
        (f"kind: Deployment\nspec: {{replicas: 3, template: {{spec: {{{CONTAINERS}}}}}}}", "Deployment", 3),
        (f"kind: Deployment\nspec: {{replicas: 0, template: {{spec: {{{CONTAINERS}}}}}}}", "Deployment", 0),
        (f"kind: StatefulSet\nspec: {{template: {{spec: {{{CONTAINERS}}}}}}}", "StatefulSet", 1),
        (f"kind: DaemonSet\nspec: {{template: {{spec: {{{CONTAINERS}}}}}}}", "DaemonSet", 1),
        (f"kind: Job\nspec: {{parallelism: 4, template: {{spec: {{{CONTAINERS}}}}}}}", "Job", 4),
        (f"kind: CronJob\nspec: {{jobTemplate: {{spec: {{template: {{spec: {{{CONTAINERS}}}}}}}}}}}", "CronJob", 1),
        (f"kind: List\nitems: [{{kind: Pod, spec: {{{CONTAINERS}}}}}]", "Pod", 1),
    ],
)
def test_pods_and_what_makes_pods(text: str, kind: str, replicas: int) -> None:
    (pod,) = pods(text)
    assert (pod.kind, pod.replicas) == (kind, replicas)
    assert [(a.container, a.resource, a.count) for a in pod.asks] == [("a", "nvidia.com/gpu", 2)]


def test_documents_of_other_kinds_are_passed_over() -> None:
    text = f"kind: Service\nspec: {{}}\n---\nkind: Pod\nmetadata: {{name: p}}\nspec: {{{CONTAINERS}}}\n---\n"
    assert [p.name for p in pods(text)] == ["p"]


def test_lines_point_at_the_limit() -> None:
    text = "kind: Pod\nspec:\n  containers:\n    - name: a\n      resources:\n        limits:\n          nvidia.com/gpu: '1'\n"
    assert pods(text)[0].asks[0].line == 7


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        pytest.param("", None, "it is empty", id="empty"),
        pytest.param("kind: Service", None, "only Service", id="no workload"),
        pytest.param("- a", 1, "not a list", id="a list"),
        pytest.param("kind: Pod\nspec: {containers: 3}", 2, "must be a list, not a number", id="containers a number"),
        pytest.param("kind: Pod\nspec: {}", 2, "spec.containers is missing", id="no containers"),
        pytest.param("kind: Pod", 1, "Pod.spec is missing", id="no spec"),
        pytest.param(
            "kind: Pod\nspec: {containers: [x]}", 2, "must be a mapping, not a string", id="a container a string"
        ),
        pytest.param(
            "kind: Pod\nspec:\n  containers:\n  - resources: {limits: {nvidia.com/gpu: half}}",
            4,
            "whole number",
            id="half",
        ),
        pytest.param(
            "kind: Pod\nspec:\n  containers:\n  - resources: {requests: {nvidia.com/gpu: 1}}",
            4,
            "must stand in limits",
            id="request",
        ),
        pytest.param(
            "kind: Pod\nspec:\n  containers:\n  - resources:\n      limits: {nvidia.com/gpu: 1}\n"
            "      requests: {nvidia.com/gpu: 2}",
            6,
            "must be equal",
            id="request and limit differ",
        ),
        pytest.param("kind: Pod\nkind: Pod", 2, "duplicate key", id="duplicate key"),
        pytest.param("kind: [Pod", 1, "not valid YAML", id="open bracket"),
        pytest.param("a\x00b", 1, "NUL", id="NUL"),
        pytest.param(
            "kind: Pod\nspec: {containers: [], resourceClaims: [{name: x}]}", 2, "either", id="a claim of nothing"
        ),
        pytest.param('{"kind": "Pod", "kind": "Pod"}', 1, "twice", id="a key twice in JSON"),
        pytest.param('{"kind": }', 1, "not valid JSON", id="no value in JSON"),
        pytest.param('{"a": ' + "[" * 100_000, None, "nested too deeply", id="deep JSON"),
        pytest.param('{"containerDefinitions": [1]}', 1, "must be a mapping", id="a container that is a number"),
        pytest.param(
            '{"containerDefinitions":\n [{"resourceRequirements": [\n{"type": "GPU", "value": 1}]}]}',
            3,
            "must be a string",
            id="a number",
        ),
        pytest.param(
            '{"containerDefinitions":\n [{"resourceRequirements": [\n{"type": "gpu", "value": "1"}]}]}',
            3,
            'must be "GPU"',
            id="gpu",
        ),
        pytest.param(
            '{"containerDefinitions": [{"resourceRequirements": [{"type": "GPU"}]}]}', 1, "is missing", id="no value"
        ),
        pytest.param(
            '{"containerDefinitions": [{"resourceRequirements": [{"value": "1"}]}]}', 1, "type is missing", id="no type"
        ),
        pytest.param(
            '{"containerDefinitions": [{"resourceRequirements": [7]}]}', None, "must be a mapping", id="a number in it"
        ),
        *[
            pytest.param(
                '{"containerDefinitions": [{"resourceRequirements": [{"type": "GPU", "value": "VALUE"}]}]}'.replace(
                    "VALUE", value
                ),
                1,
                "none of",
                id=value,
            )
            for value in ("0", "-1", "1e1", "0.0", "all", "1.5", "", " 1")
        ],
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int | None, words: str) -> None:
    found = problem(text)
    assert words.replace("none of", "no whole number") in found.message
    assert found.line == line


CLAIM = (
    "kind: ResourceClaim\nspec:\n  devices:\n    requests:\n    - name: a\n"
    "      exactly: {deviceClassName: mig.nvidia.com%s}\n"
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        pytest.param(CLAIM % ", count: 0", 6, "at least 1", id="count 0"),
        pytest.param(CLAIM % ", allocationMode: Some", 6, "ExactCount or All", id="no such mode"),
        pytest.param(CLAIM % ", selectors: [{cel: {}}]", 6, "expression is missing", id="no expression"),
        pytest.param(CLAIM % ", selectors: [x]", None, "mapping with cel", id="a selector a string"),
        pytest.param(CLAIM % "" + "    constraints: [{}]", 7, "either matchAttribute", id="an empty constraint"),
        pytest.param(CLAIM % "" + "    constraints: [3]", None, "must be a mapping", id="a constraint a number"),
        pytest.param(
            CLAIM % "" + "    constraints:\n    - requests: [b]\n      matchAttribute: x/y",
            8,
            '"b"',
            id="an unknown request",
        ),
        pytest.param(
            CLAIM % "" + "    constraints:\n    - matchAttribute: parentUUID",
            8,
            "qualified",
            id="an unqualified attribute",
        ),
        pytest.param(
            "kind: ResourceClaim\nspec: {devices: {requests: [{name: a}]}}", 2, "needs exactly", id="no exactly"
        ),
        pytest.param(
            "kind: ResourceClaim\nspec: {devices: {requests: [3]}}", 2, "must be a mapping", id="a request a number"
        ),
        pytest.param(
            "kind: ResourceClaim\nspec: {devices: {requests: [{name: a, firstAvailable: []}]}}",
            2,
            "lists no alternative",
            id="no alternatives",
        ),
        pytest.param(
            "kind: ResourceClaim\nspec: {devices: {requests: [{name: a, firstAvailable: [3]}]}}",
            2,
            "must be a mapping",
            id="an alternative a number",
        ),
    ],
)
def test_what_is_wrong_with_a_claim(text: str, line: int | None, words: str) -> None:
    found = problem(text)
    assert words in found.message
    assert found.line == line


def test_a_claim_of_the_beta_form_and_all_mode() -> None:
    text = "kind: ResourceClaim\nspec: {devices: {requests: [{name: a, deviceClassName: gpu.nvidia.com, allocationMode: All}]}}"
    (claim,) = read.read(text, file="c")
    assert isinstance(claim, read.Claim)
    assert (claim.requests[0].device_class, claim.requests[0].count) == ("gpu.nvidia.com", None)


def test_other_requirements_of_a_task_ask_nothing() -> None:
    requirement = '{"type": "InferenceAccelerator", "value": "d"}'
    text = f'{{"taskDefinition": {{"containerDefinitions": [{{"resourceRequirements": [{requirement}]}}]}}}}'
    (task,) = read.read(text, file="t")
    assert isinstance(task, read.Task)
    assert task.values == ()


MPS = """\
{"family": "shared", "containerDefinitions": [
  {"name": "a", "resourceRequirements": [
    {"type": "GPU",
     "sharingStrategy": {"nvidiaMps": WISH}}]}]}
"""


def test_a_share_of_a_gpu_by_mps() -> None:
    (found,) = read.read(MPS.replace("WISH", '{"memory": 4096, "maxComputePercent": 50}'), file="t.json")
    assert isinstance(found, read.Task)
    assert found.shares == (read.Share("a", 4096, 50, 4),)
    assert found.values == ()


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("{}", "memory is missing"),
        ('{"memory": "4096"}', "must be a number, not a string"),
        ('{"memory": 0}', "at least 1 MiB"),
        ('{"memory": 1, "maxComputePercent": 101}', "1 to 100"),
        ("[]", "must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_share(wish: str, says: str) -> None:
    with pytest.raises(errors.SettingsError, match=says) as caught:
        read.read(MPS.replace("WISH", wish), file="t.json")
    assert caught.value.problems[0].line == 4


def test_a_share_and_a_value_exclude_each_other() -> None:
    text = MPS.replace("WISH", '{"memory": 1}').replace('"type": "GPU",', '"type": "GPU", "value": "1",')
    with pytest.raises(errors.SettingsError, match="both value and sharingStrategy"):
        read.read(text, file="t.json")


def test_alternatives_of_a_request() -> None:
    text = """\
kind: ResourceClaim
spec:
  devices:
    requests:
      - name: gpu
        firstAvailable:
          - {name: large, deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "true"}}]}
          - {name: small, deviceClassName: mig.nvidia.com, count: 2}
    constraints:
      - {requests: [gpu/small], matchAttribute: gpu.nvidia.com/parentUUID}
"""
    (claim,) = read.read(text, file="c")
    assert isinstance(claim, read.Claim)
    (request,) = claim.requests
    assert request.name == "gpu"
    assert [(a.name, a.count, len(a.selectors)) for a in request.alternatives] == [
        ("gpu/large", 1, 1),
        ("gpu/small", 2, 0),
    ]


@pytest.mark.parametrize(
    ("claims", "says"),
    [("[{name: other}]", '"other", which is no resourceClaim of this pod (mig)'), ("[x]", "needs the name")],
)
def test_a_container_names_claims_of_its_pod(claims: str, says: str) -> None:
    text = (
        "kind: Pod\nspec:\n  resourceClaims: [{name: mig, resourceClaimName: c}]\n"
        f"  containers:\n  - resources: {{claims: {claims}}}\n"
    )
    found = problem(text)
    assert says in found.message
    assert found.line == 5
    (pod,) = read.read(text.replace(claims, "[{name: mig}]"), file="p")
    assert isinstance(pod, read.Pod)
    assert [ref.target for ref in pod.claims] == ["c"]
