"""GPUs for the tests of the core, made from the facts that the project ships: no driver, no simulator."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.mig import advance, layout, node, plan, profile

FACTS = Path(__file__).parents[2] / "packaging" / "facts" / "mig-geometry.json"
UUID = "GPU-00000000-0000-0000-0000-000000000000"
# Compute slices at which a compute instance may start, as drivers print them: (slices of the GPU
# instance, slices of the compute instance) to starts.
COMPUTE_STARTS = {
    (1, 1): (0,),
    (2, 1): (0, 1),
    (2, 2): (0,),
    (3, 1): (0, 1, 2),
    (3, 2): (0,),
    (3, 3): (0,),
    (4, 1): (0, 1, 2, 3),
    (4, 2): (0, 2),
    (4, 4): (0,),
    (7, 1): (0, 1, 2, 3, 4, 5, 6),
    (7, 2): (0, 2, 4),
    (7, 3): (0, 4),
    (7, 4): (0,),
    (7, 7): (0,),
}


@functools.cache
def models() -> dict[str, dict[str, Any]]:
    """Return every model whose places are published, by id."""
    document = json.loads(FACTS.read_text())
    return {
        model["id"]: model
        for model in document["models"]
        if model["gi_profiles"] and all((p["placements"] or {}).get("starts") for p in model["gi_profiles"])
    }


@functools.cache
def offers(model_id: str, *, told: bool = True) -> tuple[node.ProfileOffer, ...]:
    """Return what a GPU of this model offers; `told` False leaves the compute profiles unknown."""
    return tuple(_offer(entry, told=told) for entry in models()[model_id]["gi_profiles"])


def _offer(entry: dict[str, Any], *, told: bool) -> node.ProfileOffer:
    compute = tuple(
        node.ComputeOffer(
            profile=profile.parse(inner["name"]),
            index=node.ProfileIndex(inner["nvml_profile_index"]),
            id=node.ProfileId(inner["profile_id"]),
            slices=inner["compute_slices"],
            multiprocessors=inner["sm_count"] or 0,
            max_instances=inner["max_instances"],
            placements=tuple(
                node.Placement(start, inner["compute_slices"])
                for start in COMPUTE_STARTS[entry["compute_slices"], inner["compute_slices"]]
            ),
        )
        for inner in entry["ci_profiles"]
    )
    return node.ProfileOffer(
        profile=profile.parse(entry["name"]),
        index=node.ProfileIndex(entry["nvml_profile_index"]),
        id=node.ProfileId(entry["profile_id"]),
        slices=entry["compute_slices"],
        memory_bytes=(entry["memory_mib"] or 0) * 2**20,
        multiprocessors=entry["sm_count"] or 0,
        max_instances=entry["max_instances"],
        placements=tuple(node.Placement(start, entry["placements"]["size"]) for start in entry["placements"]["starts"]),
        engines=node.Engines(entry["copy_engines"], entry["decoders"], entry["encoders"], entry["jpeg"], entry["ofa"]),
        compute=compute if told else None,
    )


def gpu(model_id: str = "a100-40gb", *held: str, told: bool = True, **fields: Any) -> node.Gpu:
    """Return an idle GPU of this model with MIG on and `held` on it, each "2g.10gb@0" with the
    default compute instance, "3g.20gb@4/1c+2c" split, or "1g.5gb@0/" without any."""
    model = models()[model_id]
    empty = node.Gpu(
        index=0,
        uuid=UUID,
        pci_bus_id="00000000:10:1C.0",
        name=model["nvml_names"][0]["name"] if model["nvml_names"] else model["title"],
        model=model["model_key"],
        architecture=model["architecture"],
        minor=0,
        memory_bytes=(model["memory_total_mib"]["nvml"] or 0) * 2**20,
        mode=node.ModeState(current=True, pending=True),
        resetless=model["architecture"] != "Ampere",
        offers=offers(model_id, told=told),
    )
    state = node.NodeState(gpus=(empty,))
    for text in held:
        name, _, rest = text.partition("@")
        start, slash, split = rest.partition("/")
        offer = empty.offer(profile.parse(name))
        assert offer is not None, f"{model_id} does not offer {name}"
        place = node.Placement(int(start), offer.size)
        state = advance.advance(state, UUID, plan.CreateGpuInstance(offer.profile, offer.id, place))
        parts = [profile.parse(f"{word}.{name}") for word in split.split("+") if word]
        for part in parts or ([] if slash else [offer.profile]):
            state = advance.advance(state, UUID, plan.CreateComputeInstance(place, part))
    return dataclasses.replace(state.gpus[0], **fields)


def spec(text: str) -> layout.InstanceSpec:
    """Return a wanted instance: "2g.10gb", "2g.10gb@4" at a place, "3g.20gb/1c+2c" split."""
    head, _, split = text.partition("/")
    name, at, start = head.partition("@")
    parts = tuple(profile.parse(f"{word}.{name}") for word in split.split("+") if word)
    return layout.InstanceSpec(profile.parse(name), compute=parts, start=int(start) if at else None)


def specs(*texts: str) -> tuple[layout.InstanceSpec, ...]:
    """Return wanted instances, each as `spec` reads it."""
    return tuple(spec(text) for text in texts)


def wanted(*texts: str, mig: bool = True, uuid: str = UUID) -> layout.Layout:
    """Return a layout of one GPU."""
    return layout.Layout((layout.GpuLayout(uuid, mig=mig, instances=specs(*texts), origin="test.toml, line 1"),))


def node_of(*gpus: node.Gpu, **fields: Any) -> node.NodeState:
    """Return a node of these GPUs."""
    return node.NodeState(gpus=gpus, **fields)


def hold(one: node.Gpu, start: int, *holders: node.Holder, compute: int | None = None) -> node.Gpu:
    """Return the GPU with `holders` on the instance at `start`, or on its compute instance with this id."""

    def held(instance: node.GpuInstance) -> node.GpuInstance:
        if instance.placement.start != start:
            return instance
        if compute is None:
            return dataclasses.replace(instance, holders=holders)
        return dataclasses.replace(
            instance,
            compute=tuple(dataclasses.replace(c, holders=holders) if c.id == compute else c for c in instance.compute),
        )

    return dataclasses.replace(one, instances=tuple(held(instance) for instance in one.instances))


def walk(state: node.NodeState, steps: Iterable[plan.Step], uuid: str = UUID) -> node.NodeState:
    """Return the node after `steps`; raises advance.IllegalStep when a device would refuse one."""
    for step in steps:
        state = advance.advance(state, uuid, step)
    return state


def shape(one: node.Gpu) -> list[str]:
    """Return what is on a GPU in the words of `gpu`, sorted by place."""
    words = []
    for instance in sorted(one.instances, key=lambda i: i.placement):
        compute = sorted(c.profile.compute_slices or 0 for c in instance.compute)
        split = "" if compute == [0] else "/" + "+".join(f"{slices}c" for slices in compute)
        words.append(f"{instance.profile}@{instance.placement.start}{split}")
    return words
