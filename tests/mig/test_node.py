"""What was observed answers the questions that the planner and the pages ask of it."""

from __future__ import annotations

import dataclasses

from agent.mig import node, profile
from tests.mig import parts


def test_places_that_share_a_slice_overlap() -> None:
    assert node.Placement(0, 4).overlaps(node.Placement(3, 1))
    assert not node.Placement(0, 4).overlaps(node.Placement(4, 4))
    assert not node.Placement(4, 4).overlaps(node.Placement(0, 4))
    assert str(node.Placement(4, 2)) == "4:2"
    assert node.Placement(4, 2).end == 6


def test_a_holder_is_told_in_words() -> None:
    assert str(node.Holder("process", "python")) == "process python"
    assert str(node.Holder("process", "python", pid=7, pod="train", namespace="ml")) == (
        "process python (pid 7) in pod ml/train"
    )
    assert str(node.Holder("process", "python", pod="train")) == "process python in pod train"
    assert str(node.Holder("process", "python", container="c0ffee")) == "process python in container c0ffee"
    assert str(node.Holder("pod", "train", pod="train", namespace="ml")) == "pod train"


def test_a_mode_that_waits_is_changing() -> None:
    assert node.ModeState(current=False, pending=True).changing
    assert not node.ModeState(current=True, pending=True).changing


def test_a_gpu_knows_its_slices_from_its_offers() -> None:
    a100 = parts.gpu("a100-40gb")
    assert (a100.memory_slices, a100.compute_slices) == (8, 7)
    rtx = parts.gpu("rtxpro6000-server-96gb")
    assert (rtx.memory_slices, rtx.compute_slices) == (12, 4)
    bare = dataclasses.replace(a100, offers=(), mode=None)
    assert (bare.memory_slices, bare.compute_slices) == (0, 0)
    assert a100.mig_capable
    assert not bare.mig_capable


def test_offers_are_found_by_profile_and_by_id() -> None:
    a100 = parts.gpu("a100-40gb")
    offer = a100.offer(profile.parse("3g.20gb"))
    assert offer is not None
    assert (offer.id, offer.size) == (9, 4)
    assert a100.offer_by_id(node.ProfileId(9)) is offer
    assert a100.offer(profile.parse("3g.40gb")) is None
    assert a100.offer_by_id(node.ProfileId(99)) is None
    assert dataclasses.replace(offer, placements=()).size == 0


def test_in_use_gathers_everybody_on_the_gpu() -> None:
    holders = [node.Holder("process", name) for name in ("on-gpu", "on-instance", "on-compute")]
    one = parts.gpu("a100-40gb", "3g.20gb@4", holders=(holders[0],))
    one = parts.hold(one, 4, holders[2], compute=0)
    one = dataclasses.replace(one, instances=(dataclasses.replace(one.instances[0], holders=(holders[1],)),))
    assert one.in_use == tuple(holders)
    assert one.instances[0].in_use == tuple(holders[1:])


def test_a_node_finds_its_gpus_by_uuid() -> None:
    one = parts.gpu("a100-40gb")
    state = node.NodeState(gpus=(one,))
    assert state.gpu(parts.UUID) is one
    assert state.gpu("GPU-other") is None
