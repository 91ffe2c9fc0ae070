"""From declarations to layouts: models, counts, selectors, aliases, lost cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from agent import errors
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.settings import model, resolve
from tests.settings import gpus

Load = Callable[..., model.Settings]
MIG = '[settings.kubelet-device-plugins.nvidia]\ndevice-partitioning-strategy = "mig"\n'
PROFILE = MIG + "[settings.kubelet-device-plugins.nvidia.mig.profile]\n"
LAYOUT = "[[gpunode.layout]]\n"


def names(resolution: resolve.Resolution, index: int = 0) -> list[str]:
    return [str(spec.profile) for spec in resolution.layout.gpus[index].instances]


def refused(settings: model.Settings, node: nodes.NodeState, **more: object) -> list[errors.Problem]:
    with pytest.raises(errors.SettingsError) as caught:
        resolve.resolve(settings, node, **more)  # type: ignore[arg-type]
    return list(caught.value.problems)


def test_nothing_declared_is_no_layout() -> None:
    assert resolve.resolve(model.Settings(), gpus.node()) == resolve.Resolution(layouts.Layout())


# --- Bottlerocket's profiles and counts -------------------------------------------------------------

# The manager's own tables: what each count makes of a GPU.
COUNTS = {
    "a100.40gb": ("7g.40gb", "3g.20gb", "2g.10gb", "1g.10gb", "1g.5gb"),
    "a100.80gb": ("7g.80gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"),
    "h100.80gb": ("7g.80gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"),
    "h200.141gb": ("7g.141gb", "3g.71gb", "2g.35gb", "1g.35gb", "1g.18gb"),
    "b200.180gb": ("7g.180gb", "3g.90gb", "2g.45gb", "1g.45gb", "1g.23gb"),
    "b300.269gb": ("7g.269gb", "3g.135gb", "2g.67gb", "1g.67gb", "1g.34gb"),
    "rtxpro6000.96gb": ("4g.96gb", "2g.48gb", None, "1g.24gb", None),
}


@pytest.mark.parametrize("key", sorted(COUNTS))
@pytest.mark.parametrize(("place", "count"), list(enumerate((1, 2, 3, 4, 7))))
def test_a_count_makes_what_bottlerocket_makes_of_it(load: Load, key: str, place: int, count: int) -> None:
    settings = load(f'{PROFILE}"{key}" = "{count}"')
    wanted = COUNTS[key][place]
    if wanted is None:
        (problem,) = refused(settings, gpus.node(key, 1))
        assert problem.code == "unknown-count"
        assert problem.message == f"no profile fits just {count} times on a {key}; possible counts are 1, 2, 4"
    else:
        resolution = resolve.resolve(settings, gpus.node(key, 1))
        assert names(resolution) == [wanted] * count
        assert resolution.problems == ()


@pytest.mark.parametrize(
    ("key", "asked", "near"),
    [
        ("a100.40gb", "2g.20gb", "2g.10gb"),
        ("b300.269gb", "1g.32gb", "1g.34gb"),
        ("b300.269gb", "7g.270gb", "7g.269gb"),
        ("h100.80gb", "5g.50gb", "4g.40gb"),
        ("rtxpro6000.96gb", "1g.22gb", "1g.24gb"),
    ],
)
def test_a_profile_that_a_model_lacks_is_refused_with_the_nearest_it_has(
    load: Load, key: str, asked: str, near: str
) -> None:
    (problem,) = refused(load(f'{PROFILE}"{key}" = "{asked}"'), gpus.node(key))
    assert problem.code == "unknown-profile"
    assert problem.line == 4
    assert problem.message.startswith(f"{key} has no profile {asked}; did you mean {near}? It has ")


def test_another_name_of_a_profile_is_understood_and_warned_about(load: Load) -> None:
    resolution = resolve.resolve(load(f'{PROFILE}"a100.80gb" = "7g.79gb"'), gpus.node("a100.80gb", 2))
    assert names(resolution) == ["7g.80gb"]
    (problem,) = resolution.problems
    assert (problem.severity, problem.code) == ("warning", "alias")
    assert "7g.79gb is called 7g.80gb on a a100.80gb" in problem.message


def test_each_gpu_uses_the_line_of_its_own_model(load: Load) -> None:
    node = nodes.NodeState((gpus.gpu(0), gpus.gpu(1, "h100.80gb"), gpus.incapable(2)))
    resolution = resolve.resolve(load(f'{PROFILE}"a100.40gb" = "3"\n"h100.80gb" = "1g.20gb"'), node)
    assert names(resolution, 0) == ["2g.10gb"] * 3
    assert names(resolution, 1) == ["1g.20gb"] * 4
    assert names(resolution, 2) == []
    assert resolution.layout.gpus[0].origin.endswith("settings.toml line 4")


def test_gpus_without_mig_are_left_out_when_asked_to(load: Load) -> None:
    node = nodes.NodeState((gpus.gpu(0), gpus.incapable(1)))
    resolution = resolve.resolve(load(MIG + '[gpunode]\nnot-capable = "ignore"'), node)
    assert [gpu.uuid for gpu in resolution.layout.gpus] == [node.gpus[0].uuid]
    assert {p.code for p in resolution.problems} == {"no-profile-for-model", "not-capable"}


def test_what_bottlerocket_takes_for_another_model_is_warned_about(load: Load) -> None:
    node = gpus.node("h100.94gb", 2)
    resolution = resolve.resolve(load(f'{PROFILE}"h100.94gb" = "1g.24gb"\n"h100.80gb" = "1g.20gb"'), node)
    assert names(resolution) == ["1g.24gb"] * 4
    (problem,) = resolution.problems
    assert problem.code == "bottlerocket-differs"
    assert 'it reads the line "h100.80gb", where gpunode makes 4 x 1g.24gb' in problem.message
    assert problem.line == 5
    resolution = resolve.resolve(load(f'{PROFILE}"h100.94gb" = "1g.24gb"'), node)
    assert "one instance of the whole GPU" in resolution.problems[0].message


def test_a_short_pci_id_is_the_same_part(load: Load) -> None:
    node = nodes.NodeState((gpus.gpu(0, "h100.94gb", pci_device_id=0x2321),))
    assert [p.code for p in resolve.resolve(load(f'{PROFILE}"h100.94gb" = "7"'), node).problems] == [
        "bottlerocket-differs"
    ]


def test_a_4g_asked_of_the_host_is_warned_about_and_one_asked_of_us_is_not(load: Load) -> None:
    settings = load(f'{PROFILE}"a100.40gb" = "4g.20gb"')
    assert resolve.resolve(settings, gpus.node()).problems == ()
    assert isinstance(settings.declaration, model.BottlerocketDeclaration)
    host = dataclasses.replace(settings, declaration=dataclasses.replace(settings.declaration, from_host=True))
    (problem,) = resolve.resolve(host, gpus.node()).problems
    assert "does not know 4g.20gb on a100.40gb" in problem.message


@pytest.mark.parametrize(
    ("line", "wanted"),
    [('"a100.40gb" = "2g.10gb"', ["2g.10gb"]), ('"a100.40gb" = "3"', []), ("", [])],
    ids=["a profile goes as it is", "a count waits", "the largest waits"],
)
def test_a_gpu_that_tells_its_profiles_only_with_mig_on(load: Load, line: str, wanted: Sequence[str]) -> None:
    resolution = resolve.resolve(load(PROFILE + line), nodes.NodeState((gpus.gpu(0, offers=()),)))
    assert names(resolution) == wanted
    assert resolution.layout.gpus[0].mig


def test_a_lost_gpu_is_asked_nothing_about_its_model(load: Load) -> None:
    lost = gpus.gpu(0, state=nodes.GpuState.LOST, model="", mode=None, offers=())
    resolution = resolve.resolve(load(f'{PROFILE}"a100.40gb" = "7"'), nodes.NodeState((lost, gpus.gpu(1))))
    assert names(resolution, 0) == []
    assert resolution.layout.gpus[0].mig
    assert names(resolution, 1) == ["1g.5gb"] * 7


# --- our own layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("gpus = [2, 0]", [0, 2]),
        ('gpus = "all"', [0, 1, 2, 3]),
        ('gpus = ["GPU-00000003-AAAA-bbbb-cccc-000000000000"]', [3]),
        ('gpus = ["00000000:11:1C.0"]', [1]),
        ('gpus = ["0000:11:1c.0", 2]', [1, 2]),
        ('gpus = ["12:1c.0"]', [2]),
        ('model = "a100.40gb"', [0, 1, 2, 3]),
    ],
)
def test_the_selectors(load: Load, selector: str, wanted: list[int]) -> None:
    node = gpus.node(count=4)
    resolution = resolve.resolve(load(f"{LAYOUT}{selector}\nmig = false"), node)
    assert [node.gpus.index(found) for gpu in resolution.layout.gpus if (found := node.gpu(gpu.uuid))] == wanted


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("gpus = [4]", "there is no GPU 4 (this node has 4 GPUs, 0 to 3)"),
        ('gpus = ["GPU-99999999-aaaa-bbbb-cccc-000000000000"]', "there is no GPU GPU-99999999-"),
        ('gpus = ["99:1c.0"]', "there is no GPU 99:1c.0 (this node has 4 GPUs, 0 to 3)"),
        ('model = "h100.80gb"', "there is no GPU of model h100.80gb (models on this node: a100.40gb)"),
    ],
)
def test_a_selector_that_matches_nothing(load: Load, selector: str, says: str) -> None:
    (problem,) = refused(load(f"{LAYOUT}{selector}\nmig = false"), gpus.node(count=4))
    assert problem.code == "no-such-gpu"
    assert problem.message.startswith(says)
    assert problem.line in (1, 2)


@pytest.mark.parametrize(("count", "says"), [(0, "this node has no GPUs"), (1, "this node has 1 GPU, 0")])
def test_how_few_gpus_are_told(load: Load, count: int, says: str) -> None:
    (problem,) = refused(load(f"{LAYOUT}gpus = [7]\nmig = false"), gpus.node(count=count))
    assert says in problem.message


def test_a_document_for_several_models_is_good_where_one_of_them_is(load: Load) -> None:
    text = (
        f'{LAYOUT}model = "a100.40gb"\ninstances = {{ "1g.5gb" = 7 }}\n'
        f'{LAYOUT}model = "h100.80gb"\ninstances = {{ "1g.10gb" = 7 }}\n'
    )
    settings = load(text)
    assert names(resolve.resolve(settings, gpus.node())) == ["1g.5gb"] * 7
    assert names(resolve.resolve(settings, gpus.node("h100.80gb"))) == ["1g.10gb"] * 7
    assert [p.line for p in refused(settings, gpus.node("h200.141gb"))] == [1, 4]
    assert "models on this node: none" in refused(settings, gpus.node(count=0))[0].message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{LAYOUT}gpus = [0, 0]\nmig = false", "GPU 0 is named twice in this layout"),
        (f'{LAYOUT}gpus = [0, "10:1c.0"]\nmig = false', "GPU 0 is named twice in this layout"),
        (
            f'{LAYOUT}gpus = "all"\nmig = false\n{LAYOUT}model = "a100.40gb"\nmig = false',
            "GPU 0 is named by two layouts: here, and at",
        ),
    ],
)
def test_a_gpu_named_twice(load: Load, text: str, says: str) -> None:
    problem = refused(load(text), gpus.node(count=1))[0]
    assert problem.code == "two-layouts"
    assert problem.message.startswith(says)


def test_all_means_those_that_can_do_mig(load: Load) -> None:
    mixed = nodes.NodeState((gpus.incapable(0), gpus.gpu(1)))
    settings = load(f'{LAYOUT}gpus = "all"\ninstances = {{ "7g.40gb" = 1 }}')
    assert [gpu.uuid for gpu in resolve.resolve(settings, mixed).layout.gpus] == [mixed.gpus[1].uuid]
    without = nodes.NodeState((gpus.incapable(0), gpus.incapable(1)))
    assert [gpu.mig for gpu in resolve.resolve(settings, without).layout.gpus] == [True, True]
    off = load(f'{LAYOUT}gpus = "all"\nmig = false')
    assert resolve.resolve(off, without).layout.gpus == ()


def test_compute_instances_and_fixed_places(load: Load) -> None:
    text = (
        f'{LAYOUT}gpus = [0]\ninstances = [{{ profile = "3g.20gb", start = 4, compute = ["1c.3g.20gb", "2c.3g.20gb"] }},'
        ' { profile = "2g.10gb", compute = ["2g.10gb"] }, { profile = "1g.5gb" }]'
    )
    resolution = resolve.resolve(load(text), gpus.node(count=1))
    first, second, third = resolution.layout.gpus[0].instances
    assert (first.start, [str(part) for part in first.compute]) == (4, ["1c.3g.20gb", "2c.3g.20gb"])
    assert second.compute == third.compute == ()
    assert second.start is None


def test_a_split_that_takes_more_than_there_is(load: Load) -> None:
    text = f'{LAYOUT}gpus = [0, 1]\ninstances = [{{ profile = "3g.20gb", compute = ["2c.3g.20gb", "2c.3g.20gb"] }}]'
    (problem,) = refused(load(text), gpus.node())
    assert problem.code == "too-much"
    assert problem.message == "2c.3g.20gb, 2c.3g.20gb take 4 compute slices together, and a 3g.20gb has 3"


def test_a_whole_beside_a_part_takes_more_than_there_is(load: Load) -> None:
    text = f'{LAYOUT}gpus = [0]\ninstances = [{{ profile = "3g.20gb", compute = ["3g.20gb", "1c.3g.20gb"] }}]'
    assert "take 4 compute slices" in refused(load(text), gpus.node())[0].message


def test_another_name_is_understood_in_parts_too(load: Load) -> None:
    text = f'{LAYOUT}gpus = [0]\ninstances = [{{ profile = "7g.79gb", compute = ["1c.7g.79gb", "2c.7g.79gb"] }}]'
    resolution = resolve.resolve(load(text), gpus.node("a100.80gb", 1))
    (spec,) = resolution.layout.gpus[0].instances
    assert str(spec.profile) == "7g.80gb"
    assert [str(part) for part in spec.compute] == ["1c.7g.80gb", "2c.7g.80gb"]


def test_a_place_that_does_not_exist(load: Load) -> None:
    (problem,) = refused(
        load(f'{LAYOUT}gpus = [0]\ninstances = [{{ profile = "3g.20gb", start = 2 }}]'), gpus.node(count=1)
    )
    assert problem.code == "too-much"
    assert "start" in problem.message
    assert "the same on GPU" not in problem.message


def test_attributes_are_part_of_the_name(load: Load) -> None:
    text = f'{LAYOUT}gpus = [0]\ninstances = {{ "1g.24gb+gfx" = 1, "1g.24gb-me" = 1, "1g.24gb+mee" = 1 }}'
    (problem,) = refused(load(text), gpus.node("rtxpro6000.96gb", 1))
    assert "has no profile 1g.24gb+mee; did you mean 1g.24gb" in problem.message


def test_a_gpu_whose_profiles_are_not_told_gets_the_names_as_they_are(load: Load) -> None:
    settings = load(f'{LAYOUT}gpus = [0]\ninstances = {{ "1g.99gb" = 9 }}')
    assert names(resolve.resolve(settings, nodes.NodeState((gpus.gpu(0, offers=()),)))) == ["1g.99gb"] * 9


# --- cards that have left the bus -------------------------------------------------------------------


ADDRESSES = {index: f"0000:{0x10 + index:02x}:1c.0" for index in range(4)}


def without(*gone: int) -> nodes.NodeState:
    """A node of four whose cards `gone` are off the bus, so that the rest are numbered anew."""
    left = [gpu for gpu in gpus.node(count=4).gpus if gpu.index not in gone]
    return nodes.NodeState(tuple(dataclasses.replace(gpu, index=rank) for rank, gpu in enumerate(left)))


SPLIT = f'{LAYOUT}gpus = [0]\nmig = false\n{LAYOUT}gpus = [1, 2]\ninstances = {{ "7g.40gb" = 1 }}\n'


def test_layouts_stay_on_their_cards_by_the_addresses_remembered(load: Load) -> None:
    node = without(1)
    resolution = resolve.resolve(load(SPLIT), node, remembered=ADDRESSES)
    assert {gpu.uuid[:12]: gpu.mig for gpu in resolution.layout.gpus} == {"GPU-00000000": False, "GPU-00000002": True}
    (blocked,) = resolution.blocked.items()
    assert blocked[0] == ADDRESSES[1]
    assert blocked[1].kind is plans.BlockedKind.LOST
    assert blocked[1].message == "GPU 1 (at 0000:11:1c.0) has left the bus, so its layout cannot be brought about"
    assert [(p.severity, p.code, p.line) for p in resolution.problems] == [("warning", "gpu-gone", 5)]


def test_nothing_moves_onto_other_cards_when_nothing_is_remembered(load: Load) -> None:
    node = without(1)
    resolution = resolve.resolve(load(SPLIT), node, expected=4)
    assert set(resolution.blocked) == {gpu.uuid for gpu in node.gpus}
    assert {b.kind for b in resolution.blocked.values()} == {plans.BlockedKind.LOST}
    assert {p.code for p in resolution.problems} == {"gpu-gone"}


def test_an_index_beyond_those_left_is_no_slip_while_one_is_missing(load: Load) -> None:
    settings = load(f"{LAYOUT}gpus = [3]\nmig = false\n")
    resolution = resolve.resolve(settings, without(1), expected=4)
    assert resolution.layout.gpus == ()
    assert [p.code for p in resolution.problems] == ["gpu-gone"]
    (problem,) = refused(load(f"{LAYOUT}gpus = [4]\nmig = false\n"), without(1), expected=4)
    assert "0 to 3" in problem.message


def test_names_and_addresses_go_on_working_while_a_card_is_missing(load: Load) -> None:
    settings = load(f'{LAYOUT}gpus = ["10:1c.0"]\nmig = false\n')
    assert resolve.resolve(settings, without(1), expected=4).blocked == {}


@pytest.mark.parametrize(
    "remembered",
    [
        pytest.param(
            {0: "0000:aa:00.0", 1: "0000:ab:00.0", 2: "0000:ac:00.0", 3: "0000:ad:00.0"}, id="another machine"
        ),
        pytest.param({0: "0000:10:1c.0"}, id="fewer cards than there are"),
        pytest.param({}, id="nothing"),
        pytest.param({0: "?"}, id="nonsense"),
    ],
)
def test_memory_of_something_else_is_not_used(load: Load, remembered: dict[int, str]) -> None:
    resolution = resolve.resolve(load(SPLIT), gpus.node(count=4), remembered=remembered)
    assert [gpu.uuid[:12] for gpu in resolution.layout.gpus] == ["GPU-00000000", "GPU-00000001", "GPU-00000002"]


def test_memory_of_a_larger_machine_is_not_used_when_the_count_is_right(load: Load) -> None:
    resolution = resolve.resolve(load(SPLIT), without(1), remembered=ADDRESSES, expected=3)
    assert [gpu.uuid[:12] for gpu in resolution.layout.gpus] == ["GPU-00000000", "GPU-00000002", "GPU-00000003"]
    assert resolution.problems == ()


def test_a_mig_parted_label_whose_only_card_is_gone_is_no_slip(load: Load) -> None:
    text = "version: v1\nmig-configs: {x: [{devices: [1], mig-enabled: false}]}"
    resolution = resolve.resolve(load(text, name="m.yaml"), without(1), remembered=ADDRESSES)
    assert set(resolution.blocked) == {ADDRESSES[1]}
