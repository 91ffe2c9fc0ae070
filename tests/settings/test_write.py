"""Writing what is there, and reading it back."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from agent import errors
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.settings import model, resolve, write
from tests.settings import gpus

Load = Callable[..., model.Settings]
ON = nodes.ModeState(current=True, pending=True)


def split(gpu: nodes.Gpu, *wanted: tuple[str, int, Sequence[str]]) -> nodes.Gpu:
    """Return the GPU with MIG on and these instances: profile, start, compute instances ("" for the whole)."""
    instances = []
    for number, (name, start, parts) in enumerate(wanted):
        offer = gpu.offer(profiles.parse(name))
        assert offer is not None
        compute = []
        at = 0
        for n, part in enumerate(parts):
            profile = offer.profile if part == "" else profiles.parse(part)
            width = profile.compute_slices or offer.slices
            compute.append(
                nodes.ComputeInstance(
                    id=n,
                    profile=profile,
                    profile_id=nodes.ProfileId(n),
                    uuid=f"MIG-{gpu.index}-{number}-{n}",
                    multiprocessors=14 * width,
                    slices=width,
                    placement=nodes.Placement(at, width),
                )
            )
            at += width
        instances.append(
            nodes.GpuInstance(
                id=number + 1,
                profile=offer.profile,
                profile_id=offer.id,
                placement=nodes.Placement(start, offer.size),
                memory_bytes=offer.memory_bytes,
                compute=tuple(compute),
            )
        )
    return dataclasses.replace(gpu, mode=ON, instances=tuple(instances))


THREE = (("2g.10gb", 0, [""]), ("2g.10gb", 2, [""]), ("2g.10gb", 4, [""]))
MIXED = nodes.NodeState(
    (
        split(gpus.gpu(0), ("3g.20gb", 4, ["2c.3g.20gb", "1c.3g.20gb"]), ("2g.10gb", 0, [""]), ("1g.5gb+me", 2, [""])),
        split(gpus.gpu(1), *THREE),
        split(gpus.gpu(2), *THREE),
        gpus.gpu(3),
        split(gpus.gpu(4)),
    )
)
UNIFORM = nodes.NodeState((split(gpus.gpu(0), *THREE), split(gpus.gpu(1), *THREE)))


def test_gpunode_toml() -> None:
    assert write.to_gpunode(MIXED) == (
        "# What was on this node, written by gpunode export.\n"
        "\n"
        "[[gpunode.layout]]\n"
        "gpus = [0]\n"
        "instances = [\n"
        '  { profile = "2g.10gb" },\n'
        '  { profile = "1g.5gb+me" },\n'
        '  { profile = "3g.20gb", compute = ["2c.3g.20gb", "1c.3g.20gb"] },\n'
        "]\n"
        "\n"
        "[[gpunode.layout]]\n"
        "gpus = [1, 2]\n"
        'instances = { "2g.10gb" = 3 }\n'
        "\n"
        "[[gpunode.layout]]\n"
        "gpus = [3]\n"
        "mig = false\n"
        "\n"
        "[[gpunode.layout]]\n"
        "gpus = [4]\n"
        "instances = {}\n"
    )


def test_exact_places_are_written_when_asked_for() -> None:
    text = write.to_gpunode(MIXED, exact=True)
    assert '  { profile = "3g.20gb", start = 4, compute = ["2c.3g.20gb", "1c.3g.20gb"] },' in text
    assert text.count('{ profile = "2g.10gb", start = 2 }') == 1


def test_mig_parted() -> None:
    assert write.to_mig_parted(MIXED, label="now") == (
        "# What was on this node, written by gpunode export.\n"
        "version: v1\n"
        "mig-configs:\n"
        '  "now":\n'
        "    - devices: [0]\n"
        "      mig-enabled: true\n"
        "      mig-devices:\n"
        '        "2g.10gb": 1\n'
        '        "1g.5gb+me": 1\n'
        '        "2c.3g.20gb": 1\n'
        '        "1c.3g.20gb": 1\n'
        "    - devices: [1, 2]\n"
        "      mig-enabled: true\n"
        "      mig-devices:\n"
        '        "2g.10gb": 3\n'
        "    - devices: [3]\n"
        "      mig-enabled: false\n"
        "    - devices: [4]\n"
        "      mig-enabled: true\n"
        "      mig-devices: {}\n"
    )
    assert "devices: all" in write.to_mig_parted(UNIFORM)


def test_bottlerocket() -> None:
    assert write.to_bottlerocket(UNIFORM) == (
        "# What was on this node, written by gpunode export.\n"
        "[settings.kubelet-device-plugins.nvidia]\n"
        'device-partitioning-strategy = "mig"\n'
        "\n"
        "[settings.kubelet-device-plugins.nvidia.mig.profile]\n"
        '"a100.40gb" = "2g.10gb"\n'
    )
    assert 'device-partitioning-strategy = "none"' in write.to_bottlerocket(gpus.node())
    assert 'device-partitioning-strategy = "none"' in write.to_bottlerocket(gpus.node(count=0))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (split(gpus.gpu(0), *THREE), gpus.gpu(1), "on for some GPUs and off for others"),
        (split(gpus.gpu(0), *THREE), split(gpus.gpu(1), ("7g.40gb", 0, [""])), "split in different ways"),
        (split(gpus.gpu(0)), split(gpus.gpu(1)), "MIG on and no instances"),
        (split(gpus.gpu(0), ("3g.20gb", 0, [""]), ("2g.10gb", 4, [""])), None, "different profiles (3g.20gb, 2g.10gb)"),
        (split(gpus.gpu(0), ("1g.5gb+me", 0, [""])), None, "without attributes"),
        (split(gpus.gpu(0), ("7g.40gb", 0, ["1c.7g.40gb"])), None, "split compute instances"),
        (split(gpus.gpu(0), *THREE[:2]), None, "2 x 2g.10gb, and as many as fit are always made (3)"),
        (
            split(gpus.gpu(0, "rtxpro6000.96gb"), ("1g.24gb-me", 0, [""])),
            None,
            "GPU 0 (rtxpro6000.96gb) has 1g.24gb-me",
        ),
    ],
)
def test_what_bottlerocket_cannot_say_is_refused_with_why(
    first: nodes.Gpu, second: nodes.Gpu | None, says: str
) -> None:
    node = nodes.NodeState((first,) if second is None else (first, second))
    with pytest.raises(errors.GpunodeError, match="cannot write this layout as Bottlerocket settings") as caught:
        write.to_bottlerocket(node)
    assert says in str(caught.value)


def test_a_profile_that_is_not_offered_any_more_is_still_written() -> None:
    gpu = dataclasses.replace(split(gpus.gpu(0), *THREE[:2]), offers=())
    assert '"a100.40gb" = "2g.10gb"' in write.to_bottlerocket(nodes.NodeState((gpu,)))


def test_gpus_that_cannot_be_written_are_left_out_and_said_so() -> None:
    node = nodes.NodeState(
        (
            gpus.incapable(0),
            dataclasses.replace(gpus.gpu(1), state=nodes.GpuState.LOST),
            split(gpus.gpu(2), ("7g.40gb", 0, [])),
        ),
        simulated="p4d.24xlarge",
    )
    text = write.to_gpunode(node)
    assert text.startswith("# What was on this node (simulated: p4d.24xlarge)")
    assert "# GPU 0 (NVIDIA L4) has no MIG and is left out." in text
    assert "# GPU 1 is lost and left out." in text
    assert "# GPU 2 has a 7g.40gb at 0 without a compute instance; read back, it gets one." in text
    assert "devices: [2]" in write.to_mig_parted(node)


def test_a_label_may_not_be_empty() -> None:
    with pytest.raises(errors.GpunodeError, match="no GPU of this node can do MIG"):
        write.to_mig_parted(nodes.NodeState((gpus.incapable(0),)))


@pytest.mark.parametrize("node", [MIXED, UNIFORM, gpus.node()], ids=["mixed", "uniform", "off"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        (write.to_gpunode, "back.toml"),
        (lambda node: write.to_gpunode(node, exact=True), "exact.toml"),
        (write.to_mig_parted, "back.yaml"),
    ],
    ids=["gpunode", "exact", "mig-parted"],
)
def test_what_is_written_asks_for_what_is_there(
    load: Load, node: nodes.NodeState, form: Callable[[nodes.NodeState], str], name: str
) -> None:
    resolution = resolve.resolve(load(form(node), name=name), node)
    assert resolution.problems == ()
    for gpu in node.gpus:
        wanted = resolution.layout.gpu(gpu.uuid)
        assert wanted is not None
        assert gpu.mode is not None
        assert wanted.mig is gpu.mode.current
        assert collections.Counter(s.profile for s in wanted.instances) == collections.Counter(
            i.profile for i in gpu.instances
        )
    assert plans.compute(resolution.layout, node, plans.Policy()).in_sync


def test_what_bottlerocket_reads_back_asks_for_what_is_there(load: Load) -> None:
    resolution = resolve.resolve(load(write.to_bottlerocket(UNIFORM)), UNIFORM)
    assert plans.compute(resolution.layout, UNIFORM, plans.Policy()).in_sync
