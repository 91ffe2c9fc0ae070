"""The node after a step: for dry runs, and for checking that every prefix of a plan is legal.

It refuses what a device refuses, so a plan that passes here asks for nothing impossible. Ids are
the lowest free ones: only a device knows its own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import assert_never

from agent.mig import compute as cis
from agent.mig import node as nodes
from agent.mig import placement
from agent.mig import plan as plans
from agent.mig import profile as profiles


class IllegalStep(ValueError):
    """The step cannot be done on the node in this state; the message says why."""


def advance(node: nodes.NodeState, uuid: str, step: plans.Step) -> nodes.NodeState:
    """Return `node` after `step` on the GPU with this UUID. Raises IllegalStep.

    Where MIG needs a reset a mode change stays pending until `ResetGpu`; a reset without a pending
    change does nothing, as the plan says of it. New instances have no UUID.
    """
    gpu = node.gpu(uuid)
    if gpu is None:
        raise IllegalStep(f"there is no GPU {uuid}")
    if gpu.mode is None:
        raise IllegalStep(f"GPU {gpu.index} has no MIG")
    match step:
        case plans.SetMigMode():
            after = _set_mode(gpu, gpu.mode, step.enabled)
        case plans.ResetGpu():
            after = gpu
            if gpu.mode.changing:
                mode = nodes.ModeState(gpu.mode.pending, gpu.mode.pending)
                after = dataclasses.replace(gpu, mode=mode, instances=())
        case plans.DestroyComputeInstance():
            after = _destroy_compute(gpu, step)
        case plans.DestroyGpuInstance():
            after = _destroy(gpu, step)
        case plans.CreateGpuInstance():
            after = _create(gpu, step)
        case plans.CreateComputeInstance():
            after = _create_compute(gpu, step)
        case _:
            assert_never(step)
    return dataclasses.replace(node, gpus=tuple(after if g.uuid == uuid else g for g in node.gpus))


def _set_mode(gpu: nodes.Gpu, mode: nodes.ModeState, enabled: bool) -> nodes.Gpu:
    if not enabled and gpu.instances:
        raise IllegalStep(f"GPU {gpu.index} still has GPU instances")
    current = enabled if plans.is_resetless(gpu) else mode.current
    return dataclasses.replace(gpu, mode=nodes.ModeState(current, enabled))


def _instance(gpu: nodes.Gpu, matches: Callable[[nodes.GpuInstance], bool], what: str) -> nodes.GpuInstance:
    for instance in gpu.instances:
        if matches(instance):
            return instance
    raise IllegalStep(f"GPU {gpu.index} has no GPU instance {what}")


def _exchange(gpu: nodes.Gpu, instance: nodes.GpuInstance) -> nodes.Gpu:
    return dataclasses.replace(gpu, instances=tuple(instance if i.id == instance.id else i for i in gpu.instances))


def _destroy_compute(gpu: nodes.Gpu, step: plans.DestroyComputeInstance) -> nodes.Gpu:
    instance = _instance(gpu, lambda i: i.id == step.gpu_instance_id, str(step.gpu_instance_id))
    left = tuple(compute for compute in instance.compute if compute.id != step.id)
    if len(left) == len(instance.compute):
        raise IllegalStep(f"GPU instance {instance.id} of GPU {gpu.index} has no compute instance {step.id}")
    return _exchange(gpu, dataclasses.replace(instance, compute=left))


def _destroy(gpu: nodes.Gpu, step: plans.DestroyGpuInstance) -> nodes.Gpu:
    instance = _instance(gpu, lambda i: i.id == step.id, str(step.id))
    if instance.compute:
        raise IllegalStep(f"GPU instance {step.id} of GPU {gpu.index} still has compute instances")
    return dataclasses.replace(gpu, instances=tuple(i for i in gpu.instances if i.id != step.id))


def _create(gpu: nodes.Gpu, step: plans.CreateGpuInstance) -> nodes.Gpu:
    if gpu.mode is None or not gpu.mode.current:
        raise IllegalStep(f"MIG is off on GPU {gpu.index}")
    geometry = placement.geometry_of(gpu.offers)
    number = geometry.number(step.profile)
    if number is None or geometry.offers[number].id != step.profile_id:
        raise IllegalStep(f"GPU {gpu.index} does not offer {step.profile} as profile {step.profile_id}")
    offer = geometry.offers[number]
    if step.placement not in offer.placements:
        raise IllegalStep(f"{step.profile} has no place {step.placement} on GPU {gpu.index}")
    for other in gpu.instances:
        if other.placement.overlaps(step.placement):
            raise IllegalStep(f"{step.placement} overlaps GPU instance {other.id} of GPU {gpu.index}")
    counts = collections.Counter(n for i in gpu.instances if (n := geometry.number(i.profile)) is not None)
    counts[number] += 1
    shortage = geometry.shortage(counts)
    if shortage is not None:
        raise IllegalStep(f"{shortage.resource} ran out on GPU {gpu.index} ({shortage.detail})")
    instance = nodes.GpuInstance(
        id=_free(i.id for i in gpu.instances),
        profile=offer.profile,
        profile_id=offer.id,
        placement=step.placement,
        memory_bytes=offer.memory_bytes,
    )
    return dataclasses.replace(gpu, instances=(*gpu.instances, instance))


def _create_compute(gpu: nodes.Gpu, step: plans.CreateComputeInstance) -> nodes.Gpu:
    instance = _instance(gpu, lambda i: i.placement == step.gpu_instance, f"at {step.gpu_instance}")
    offer = gpu.offer(instance.profile)
    if offer is None or step.profile.gpu_instance != instance.profile:
        raise IllegalStep(f"GPU instance {instance.id} of GPU {gpu.index} does not offer {step.profile}")
    base = placement.geometry_of(gpu.offers).base_multiprocessors
    kind = cis.kind_of(offer, step.profile, base_multiprocessors=base)
    width = offer.slices if kind == cis.WHOLE else kind
    taken = [compute.placement for compute in instance.compute if compute.placement is not None]
    for start in cis.starts_of(offer, kind):
        place = nodes.Placement(start, width)
        if step.start in (None, start) and not any(place.overlaps(other) for other in taken):
            break
    else:
        where = "" if step.start is None else f" at {step.start}"
        raise IllegalStep(f"GPU instance {instance.id} of GPU {gpu.index} has no room for {step.profile}{where}")
    made = nodes.ComputeInstance(
        id=_free(compute.id for compute in instance.compute),
        profile=cis.name_of(offer, kind),
        profile_id=_compute_id(offer, cis.name_of(offer, kind)),
        uuid=None,
        multiprocessors=_multiprocessors(offer, kind, base),
        slices=width,
        placement=place,
    )
    return _exchange(gpu, dataclasses.replace(instance, compute=(*instance.compute, made)))


def _compute_id(offer: nodes.ProfileOffer, name: profiles.Profile) -> nodes.ProfileId:
    for told in offer.compute or ():
        if told.profile == name:
            return told.id
    # Not told yet: NVML numbers the plain ones 1, 2, 3, 4, 7, 8, 6 slices from 0 on.
    slices = offer.slices if name.compute_slices is None else name.compute_slices
    return nodes.ProfileId({1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}.get(slices, slices))


def _multiprocessors(offer: nodes.ProfileOffer, kind: int, base: int) -> int:
    """Return the SMs of a kind: as told, else so many of the GPU's plain one-slice instance."""
    for told in offer.compute or ():
        if told.profile == cis.name_of(offer, kind):
            return told.multiprocessors
    return offer.multiprocessors if kind == cis.WHOLE else base * kind


def _free(ids: Iterable[int]) -> int:
    """Return the lowest number that is not among `ids`."""
    taken = set(ids)
    return next(number for number in range(len(taken) + 1) if number not in taken)
