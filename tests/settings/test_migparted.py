"""mig-parted documents: what each means, and where we are stricter."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.settings import migparted, model, resolve, source, yaml
from tests.settings import gpus

Write = Callable[..., Path]
HEAD = "version: v1\nmig-configs:\n"


def label(*entries: str) -> str:
    """A document with one label `x`, whose entries are given in YAML's flow form."""
    return HEAD + "  x:\n" + "".join(f"    - {entry}\n" for entry in entries)


def layout(write: Write, text: str, node: nodes.NodeState, argument: str = "") -> dict[int, dict[str, int] | None]:
    path = write("configs.yaml", text)
    settings = source.load(source.Request(root=path.parent / "root", mig_config=f"{path}{argument}"))
    resolution = resolve.resolve(settings, node)
    indexes = {gpu.uuid: gpu.index for gpu in node.gpus}
    return {
        indexes[gpu.uuid]: dict(collections.Counter(str(i.profile) for i in gpu.instances)) if gpu.mig else None
        for gpu in resolution.layout.gpus
    }


def refusal(write: Write, text: str, node: nodes.NodeState | None = None, argument: str = "") -> list[errors.Problem]:
    with pytest.raises(errors.SettingsError) as caught:
        layout(write, text, node or gpus.node(count=2), argument)
    return list(caught.value.problems)


A100 = gpus.node(count=2)
BOTH = nodes.NodeState((gpus.gpu(0), gpus.gpu(1, "h100.80gb")))
WITH_L4 = nodes.NodeState((gpus.gpu(0), gpus.incapable(1)))


@pytest.mark.parametrize(
    ("text", "node", "wanted"),
    [
        pytest.param(
            label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}"),
            A100,
            {0: {"1g.5gb": 7}, 1: {"1g.5gb": 7}},
            id="all GPUs",
        ),
        pytest.param(label("{devices: all, mig-enabled: false}"), A100, {0: None, 1: None}, id="off"),
        pytest.param(
            label("{devices: all, mig-enabled: false, mig-devices: {}}"),
            A100,
            {0: None, 1: None},
            id="off, spelled out",
        ),
        pytest.param(
            label("{devices: all, mig-enabled: true, mig-devices: {}}"), A100, {0: {}, 1: {}}, id="on without instances"
        ),
        pytest.param(
            label("{devices: [1], mig-enabled: true, mig-devices: {7g.40gb: 1}}"),
            A100,
            {1: {"7g.40gb": 1}},
            id="GPUs that no entry names are left alone",
        ),
        pytest.param(
            label(
                "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}",
                "{devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 2}}",
            ),
            A100,
            {0: {"1g.5gb": 7}, 1: {"3g.20gb": 2}},
            id="the last entry that matches decides",
        ),
        pytest.param(
            label(
                "{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}",
                "{devices: all, mig-enabled: false}",
            ),
            A100,
            {0: None, 1: None},
            id="the last entry may turn it off again",
        ),
        pytest.param(
            label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7, 2g.10gb: 0}}"),
            A100,
            {0: {"1g.5gb": 7}, 1: {"1g.5gb": 7}},
            id="a count of zero beside others",
        ),
        pytest.param(
            label("{devices: [1, 1], mig-enabled: true, mig-devices: {1g.5gb: 7}}"),
            A100,
            {1: {"1g.5gb": 7}},
            id="an index twice is the same GPU",
        ),
        pytest.param(
            label('{device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}'),
            BOTH,
            {0: {"1g.5gb": 7}},
            id="a filter as text",
        ),
        pytest.param(
            label(
                '{device-filter: ["0x20b010de", "0x233010DE"], devices: [1], mig-enabled: true, '
                "mig-devices: {1g.10gb: 7}}"
            ),
            BOTH,
            {1: {"1g.10gb": 7}},
            id="filter and index must both match",
        ),
        pytest.param(
            label(
                '{device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}',
                '{device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}',
                '{device-filter: "0x290110DE", devices: all, mig-enabled: true, mig-devices: {1g.23gb: 7}}',
            ),
            BOTH,
            {0: {"1g.5gb": 7}, 1: {"1g.10gb": 7}},
            id="one entry a model, some not here",
        ),
        pytest.param(
            label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}"),
            WITH_L4,
            {0: {"1g.5gb": 7}},
            id="all means all that can do MIG",
        ),
        pytest.param(
            label("{devices: all, mig-enabled: false}"),
            nodes.NodeState((gpus.incapable(0),)),
            {},
            id="off where nothing can be on",
        ),
        pytest.param(
            label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}"),
            nodes.NodeState((gpus.incapable(0),)),
            {0: {"1g.5gb": 7}},
            id="on where nothing can be on is the planner's to refuse",
        ),
        pytest.param(
            label("{devices: [0, 1], mig-enabled: false}"), WITH_L4, {0: None, 1: None}, id="off for any GPU by index"
        ),
        pytest.param(
            label("{devices: [0], mig-enabled: yes, mig-devices: {1c.3g.20gb: 4, 2g.10gb: 0, 7g.40gb: 0}}"),
            A100,
            {0: {"3g.20gb": 2}},
            id="compute instances fill GPU instances in turn, and yes is true",
        ),
        pytest.param(
            "version: v1\n"
            "mig-configs:\n"
            "  x:\n"
            "    - &all {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}\n"
            "    - {<<: *all, devices: [1], mig-devices: {2g.10gb: 3}}\n",
            A100,
            {0: {"1g.5gb": 7}, 1: {"2g.10gb": 3}},
            id="anchors and merge keys",
        ),
        pytest.param(
            HEAD + "  x: [&a {devices: [0], mig-enabled: false}, &a {devices: [1], mig-enabled: false}, *a]",
            A100,
            {0: None, 1: None},
            id="an anchor used again",
        ),
        pytest.param(
            json.dumps(
                {
                    "version": "v1",
                    "mig-configs": {"x": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}]},
                },
                indent="\t",
            ),
            A100,
            {0: {"1g.5gb": 7}, 1: {"1g.5gb": 7}},
            id="JSON, indented by tabs",
        ),
        pytest.param(
            "{version: v1, mig-configs: {x: [{devices: all, mig-enabled: false}]}}",
            A100,
            {0: None, 1: None},
            id="YAML that begins like JSON",
        ),
    ],
)
def test_what_a_label_means(
    write: Write, text: str, node: nodes.NodeState, wanted: dict[int, dict[str, int] | None]
) -> None:
    assert layout(write, text, node) == wanted


def test_compute_instances_are_packed_largest_first(write: Write) -> None:
    text = label("{devices: [0], mig-enabled: true, mig-devices: {1c.3g.20gb: 2, 2c.3g.20gb: 1}}")
    path = write("configs.yaml", text)
    settings = source.load(source.Request(root=path.parent / "root", mig_config=str(path)))
    (gpu,) = resolve.resolve(settings, A100).layout.gpus
    assert [[str(part) for part in spec.compute] for spec in gpu.instances] == [
        ["2c.3g.20gb", "1c.3g.20gb"],
        ["1c.3g.20gb"],
    ]


ON = "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}"


@pytest.mark.parametrize(
    ("text", "code", "line", "says"),
    [
        ("mig-configs: {x: [{devices: all, mig-enabled: false}]}", "missing-key", None, '"version" is missing'),
        (HEAD.replace("v1", "v2") + "  x: [{devices: all, mig-enabled: false}]", "invalid-value", 1, "version v1"),
        ("version: v1", "missing-key", None, '"mig-configs" is missing'),
        ("version: v1\nmig-configs: {}", "wrong-type", 2, "at least one label"),
        ("version: v1\nmig-configs: 5", "wrong-type", 2, "at least one label"),
        (HEAD + "  x: []", "wrong-type", 3, "at least one entry"),
        (HEAD + "  x: 5", "wrong-type", 3, "at least one entry"),
        (label("5"), "wrong-type", 4, "must be a mapping"),
        ("extra: 1\n" + label(f"{{{ON}}}"), "unknown-key", 1, 'unknown key "extra"'),
        (label(f"{{{ON}, device-filters: [x]}}"), "unknown-key", 4, 'did you mean "device-filter"?'),
        (label("{mig-enabled: false}"), "missing-key", 4, '"devices" is missing'),
        (label("{devices: all}"), "missing-key", 4, '"mig-enabled" is missing'),
        (label("{devices: all, mig-enabled: 1}"), "wrong-type", 4, "true or false"),
        (label("{devices: all, mig-enabled: true}"), "missing-key", 4, '"mig-devices" is missing'),
        (label("{devices: 7, mig-enabled: false}"), "wrong-type", 4, 'a list like [7], and is 7'),
        (label("{devices: ALL, mig-enabled: false}"), "wrong-type", 4, 'a list like [0, 1], and is "ALL"'),
        (label("{devices: [], mig-enabled: false}"), "selector", 4, "the list is empty"),
        (label("{devices: [-1], mig-enabled: false}"), "wrong-type", 4, "and is -1"),
        (label("{devices: [true], mig-enabled: false}"), "wrong-type", 4, "and is true"),
        (label("{devices: all, mig-enabled: true, mig-devices: [1g.5gb]}"), "wrong-type", 4, "a mapping of profiles"),
        (label("{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 7}}"), "instances-without-mig", 4, "false"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0}}"), "invalid-value", 4, "all counts are 0"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}}"), "wrong-type", 4, "and is -1"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1.5}}"), "wrong-type", 4, "and is 1.5"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 999}}"), "wrong-type", 4, "0 to 64"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g5gb: 1}}"), "profile-syntax", 4, '"1g5gb" is not'),
        (label(f'{{{ON}, device-filter: "20B0"}}'), "device-filter", 4, "like 0x20B010DE"),
        (label(f'{{{ON}, device-filter: "0x20B0"}}'), "device-filter", 4, "the vendor, 10DE"),
        (label(f"{{{ON}, device-filter: 0x20B010DE}}"), "wrong-type", 4, 'write it in quotes: "0x20B010DE"'),
        (label(f"{{{ON}, device-filter: [[]]}}"), "wrong-type", 4, "must be text"),
        # where mig-parted says nothing
        (label("{devices: [2], mig-enabled: false}"), "no-such-gpu", 4, "no GPU 2 (this node has 2 GPUs, 0 to 1)"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}"), "too-much", 4, "1g.10gb"),
        (label("{devices: all, mig-enabled: true, mig-devices: {1g.18gb: 7}}"), "unknown-profile", 4, "did you mean"),
        (
            label(f'{{{ON}, device-filter: "0x233010DE"}}'),
            "no-such-gpu",
            3,
            'the label "x" matches no GPU of this node (device ids here: 0x20B010DE)',
        ),
        (label(f"{{{ON}, devices: [0]}}"), "duplicate-key", 4, '"devices" twice'),
    ],
)  # fmt: skip
def test_what_is_refused(write: Write, text: str, code: str, line: int | None, says: str) -> None:
    problem = refusal(write, text)[0]
    assert (problem.code, problem.line) == (code, line)
    assert says in problem.message
    assert str(problem.file).endswith("configs.yaml")


def test_every_label_is_checked_and_everything_wrong_is_told(write: Write) -> None:
    text = HEAD + "  a:\n    - {devices: 7, mig-enabled: 5}\n  b:\n    - {devices: all, mig-enabled: true}\n"
    assert [(p.line, p.key) for p in refusal(write, text, argument=":a")] == [
        (4, "mig-configs.a[0].devices"),
        (4, "mig-configs.a[0].mig-enabled"),
        (6, "mig-configs.b[0]"),
    ]


TWO = HEAD + "  half: [{devices: [0], mig-enabled: false}]\n  full: [{devices: all, mig-enabled: false}]\n"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("", "several labels"),
        (":fulll", 'did you mean "full"?'),
        (":zzz", "there is no label"),
        (":hal", 'did you mean "half"? There are half, full'),
        (":qqq", "; there are half, full"),
        (":", "several labels"),
    ],
)
def test_a_label_must_be_named_where_there_are_several(write: Write, argument: str, says: str) -> None:
    (problem,) = refusal(write, TWO, argument=argument)
    assert problem.code == "label"
    assert says in problem.message
    assert "half" in problem.message


def test_a_label_is_selected(write: Write) -> None:
    assert layout(write, TWO, A100, ":half") == {0: None}
    assert layout(write, TWO, A100, ":full") == {0: None, 1: None}


def test_a_file_with_a_colon_in_its_name(write: Write) -> None:
    path = write("a:b.yaml", TWO)
    assert migparted.split(str(path)) == (path, None)
    assert migparted.split(f"{path}:half") == (path, "half")


def test_a_document_that_does_not_exist(tmp_path: Path) -> None:
    request = source.Request(root=tmp_path, mig_config=str(tmp_path / "gone.yaml:x"))
    with pytest.raises(errors.SettingsError, match=r"gone\.yaml does not exist"):
        source.load(request)


def test_a_document_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="it is a directory"):
        source.load(source.Request(root=tmp_path, mig_config=str(tmp_path)))


def test_a_broken_json_document_is_not_taken_for_yaml(write: Write) -> None:
    path = write("configs.json", '{"version": "v1",\n "mig-configs": {,}}')
    with pytest.raises(errors.SettingsError, match=r"configs\.json, line 2: is not valid JSON"):
        source.load(source.Request(root=path.parent, mig_config=str(path)))


def test_a_json_document_with_a_key_twice_is_not_taken_for_yaml(write: Write) -> None:
    path = write("configs.yaml", '{"version": "v1", "version": "v1"}')
    with pytest.raises(errors.SettingsError, match="twice"):
        source.load(source.Request(root=path.parent, mig_config=str(path)))


SUBSYSTEM = label(
    '{device-filter: "0x20B010DE:0x134F10DE", devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}',
    '{device-filter: "0x20B010DE:0x999910DE", devices: all, mig-enabled: false}',
)


def test_a_filter_may_name_the_subsystem(write: Write) -> None:
    node = nodes.NodeState((gpus.gpu(0, pci_subsystem_id=0x134F10DE), gpus.gpu(1, pci_subsystem_id=0x999910DE)))
    assert layout(write, SUBSYSTEM, node) == {0: {"1g.5gb": 7}, 1: None}


def test_a_subsystem_that_is_not_told_is_warned_about(write: Write) -> None:
    path = write("configs.yaml", SUBSYSTEM)
    settings = source.load(source.Request(root=path.parent / "root", mig_config=str(path)))
    warnings = resolve.resolve(settings, A100).problems
    assert {p.code for p in warnings} == {"device-filter"}
    assert "0x20B010DE:0x134F10DE" in warnings[0].message


def test_a_document_is_selected_by_our_own_settings(write: Write, tmp_path: Path) -> None:
    write("root/etc/gpunode/config.toml", '[gpunode.mig-parted]\nfile = "configs.yaml"\nconfig = "half"\n')
    path = write("root/etc/gpunode/configs.yaml", TWO)
    request = source.Request(root=tmp_path / "root")
    settings = source.load(request)
    assert isinstance(settings.declaration, model.MigPartedDeclaration)
    assert settings.declaration.label == "half"
    assert settings.sources == (str(tmp_path / "root/etc/gpunode/config.toml"),)
    before = source.fingerprint(request)
    path.write_text(TWO + "\n# changed\n")
    assert source.fingerprint(request) != before


def test_a_document_named_by_an_absolute_path_lies_below_the_root(write: Write, tmp_path: Path) -> None:
    write("root/etc/gpunode/config.toml", '[gpunode.mig-parted]\nfile = "/srv/configs.yaml"\nconfig = "none"\n')
    write("root/srv/configs.yaml", TWO)
    with pytest.raises(errors.SettingsError) as caught:
        source.load(source.Request(root=tmp_path / "root"))
    (problem,) = caught.value.problems
    assert problem.file == str(tmp_path / "root/etc/gpunode/config.toml")
    assert problem.line == 1
    assert "there is no label" in problem.message


# --- YAML itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("[1, 2]", "must be a mapping"),
        ("a: [1", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ('a: "\\UFFFFFFFF"', "is not valid YAML"),
        ('a: "\\ud800"', "half a character"),
        ("a: 1\n---\nb: 2", "is not valid YAML"),
        ("a: 1\nb: 2\na: 3", '"a" twice'),
        ("a: *nothing", "is not valid YAML"),
        ("a: \x07", "is not valid YAML"),
        ("a: !!python/object:os.system x", "uses the tag"),
        ("a: &a [*a]", "an alias holds itself"),
        ("[1]: 2", "a key that is no plain word"),
        ("{a: {b}: c}: d", "is not valid YAML"),
        ("a: " + "[x, " * 70 + "]" * 70, "nests deeper than 64 levels"),
        ("a: " + "[" * 3000, "nests too deep"),
        ("".join(" " * n + "a:\n" for n in range(1000)), "nests too deep"),
        ("a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]\n" + "".join(
            f"{n}: &{n} [{', '.join(f'*{p}' for _ in range(9))}]\n" for p, n in zip("abcdef", "bcdefg", strict=True)
        ), "more than 100000 values"),
    ],
)  # fmt: skip
def test_yaml_that_is_refused(write: Write, text: str, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        layout(write, text, A100)
    assert says in str(caught.value)
    assert "configs.yaml" in str(caught.value)


def test_the_values_of_yaml() -> None:
    text = (
        "a: [1, -2, 0x1F, 1_000, 1.5, true, off, ~, 1g.5gb, '7', \"yes\"]\n"
        "b: {<<: [{x: 1, y: 1}, 5], y: 2}\n"
        "'<<': quoted\n"
    )
    doc = yaml.parse(text.encode(), name="x", source="x")
    assert doc.data == {
        "a": [1, -2, 31, 1000, 1.5, True, False, None, "1g.5gb", "7", "yes"],
        "b": {"x": 1, "y": 2},
        "<<": "quoted",
    }
    assert doc.positions[("b", "y")].line == 2


def test_how_often_a_document_is_parsed(write: Write) -> None:
    migparted.parse.cache_clear()
    for _ in range(3):
        layout(write, TWO, A100, ":half")
    assert migparted.parse.cache_info().misses == 1
