"""Do one step on one GPU and verify it by reading back what it touched, in at most ten calls.

A call that answers OK proves nothing: a mode change may stay pending, a destroy may leave remains.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, assert_never

import pynvml

from agent import errors
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import calls, catalog, observe
from agent.nvml import errors as codes

_BUSY_TRIES = 5
_BUSY_WAIT = 0.2
"""A destroy may answer "in use" for a moment after the last process has gone: other clients hold handles."""


def perform(
    card: observe.Card, step: plans.Step, offers: catalog.Catalog, *, wait: Callable[[float], None] = time.sleep
) -> None:
    """Do `step` on the GPU of `card`. Raises CallError kinds; the GPU may then be between two states."""
    match step:
        case plans.SetMigMode(enabled=enabled):
            _set_mode(card, enabled)
        case plans.DestroyComputeInstance():
            _destroy_compute(card, step, wait)
        case plans.DestroyGpuInstance():
            _destroy_instance(card, step, wait)
        case plans.CreateGpuInstance():
            _create_instance(card, step)
        case plans.CreateComputeInstance():
            _create_compute(card, step, offers)
        case plans.ResetGpu():
            raise errors.GpunodeError("a reset is no step of a single GPU's lane")
        case _:
            assert_never(step)


def _fail(
    call: str, card: observe.Card, text: str, kind: type[errors.CallError] = errors.CallError
) -> errors.CallError:
    return kind(text, call=call, code=0, gpu=card.uuid)


def _set_mode(card: observe.Card, enabled: bool) -> None:
    """Set the mode; success is that it is recorded. Whether it took effect is for the caller to read."""
    call = "nvmlDeviceSetMigMode"
    status = int(calls.call(call, card.handle, 1 if enabled else 0))
    _, pending = calls.call("nvmlDeviceGetMigMode", card.handle)
    if bool(pending) is not enabled:
        why = codes.meaning(status) if status else "the driver said yes and the mode reads unchanged"
        raise _fail(
            call,
            card,
            f"cannot turn MIG {'on' if enabled else 'off'} on GPU {card.uuid}: {why}",
            errors.InUse if status == 19 else errors.CallError,
        )


def _while_busy(job: Callable[[], None], wait: Callable[[float], None]) -> None:
    for attempt in range(_BUSY_TRIES):
        try:
            job()
        except errors.InUse:
            if attempt == _BUSY_TRIES - 1:
                raise
            wait(_BUSY_WAIT)
        else:
            return


def _instance(card: observe.Card, number: int) -> Any:
    return calls.call("nvmlDeviceGetGpuInstanceById", card.handle, number)


def _destroy_compute(card: observe.Card, step: plans.DestroyComputeInstance, wait: Callable[[float], None]) -> None:
    instance = _instance(card, step.gpu_instance_id)
    compute = calls.call("nvmlGpuInstanceGetComputeInstanceById", instance, step.id)
    _while_busy(lambda: calls.call("nvmlComputeInstanceDestroy", compute), wait)
    try:
        calls.call("nvmlGpuInstanceGetComputeInstanceById", instance, step.id)
    except errors.NotFound:
        return
    raise _fail(
        "nvmlComputeInstanceDestroy",
        card,
        f"cannot destroy compute instance {step.id} of GPU instance {step.gpu_instance_id} on GPU {card.uuid}: "
        "the driver said yes and it is still there",
    )


def _destroy_instance(card: observe.Card, step: plans.DestroyGpuInstance, wait: Callable[[float], None]) -> None:
    instance = _instance(card, step.id)
    _while_busy(lambda: calls.call("nvmlGpuInstanceDestroy", instance), wait)
    try:
        _instance(card, step.id)
    except errors.NotFound:
        return
    raise _fail(
        "nvmlGpuInstanceDestroy",
        card,
        f"cannot destroy GPU instance {step.id} ({step.profile}) on GPU {card.uuid}: the driver said yes and it is still there",
    )


def _create_instance(card: observe.Card, step: plans.CreateGpuInstance) -> None:
    placement = pynvml.c_nvmlGpuInstancePlacement_t()
    placement.start, placement.size = step.placement.start, step.placement.size
    call = "nvmlDeviceCreateGpuInstanceWithPlacement"
    instance = calls.call(call, card.handle, int(step.profile_id), ctypes.byref(placement))
    info = calls.call("nvmlGpuInstanceGetInfo", instance)
    got = nodes.Placement(int(info.placement.start), int(info.placement.size))
    if got != step.placement or int(info.profileId) != step.profile_id:
        text = f"cannot create {step.profile} at {step.placement} on GPU {card.uuid}: the driver made it at {got}"
        raise _fail(call, card, text)
    card.made[got] = int(info.id)


def _create_compute(card: observe.Card, step: plans.CreateComputeInstance, offers: catalog.Catalog) -> None:
    whole = step.profile.gpu_instance
    offer = next((o for o in offers.offers(card.handle, card.kind(mig=True), card.model) if o.profile == whole), None)
    if offer is None:
        text = f"cannot create {step.profile} on GPU {card.uuid}: it offers no such profile"
        raise _fail("nvmlGpuInstanceCreateComputeInstance", card, text)
    instance = _find(card, offer, step.gpu_instance)
    choices = _choices(step, offers.compute_offers(card.kind(mig=True), offer, instance), offer)
    if not choices:
        raise _fail(
            "nvmlGpuInstanceCreateComputeInstance",
            card,
            f"cannot create {step.profile} on GPU {card.uuid}: its GPU instance offers no such compute instance",
        )
    refused: errors.CallError | None = None
    for choice in choices:
        try:
            made = _create(instance, choice, step)
        except (errors.NotSupported, errors.InvalidArgument) as cause:
            refused = refused or cause
            continue
        info = calls.call("nvmlComputeInstanceGetInfo_v2", made)
        if int(info.profileId) != choice.id:
            text = f"cannot create {step.profile} on GPU {card.uuid}: the driver made another one"
            raise _fail("nvmlGpuInstanceCreateComputeInstance", card, text)
        return
    assert refused is not None
    raise refused


def _find(card: observe.Card, offer: nodes.ProfileOffer, placement: nodes.Placement) -> Any:
    """Return the handle of the GPU instance at `placement`."""
    made = card.made.get(placement)
    if made is not None:
        try:
            handle = _instance(card, made)
            info = calls.call("nvmlGpuInstanceGetInfo", handle)
            if int(info.profileId) == offer.id and int(info.placement.start) == placement.start:
                return handle
        except (errors.NotFound, errors.InvalidArgument):
            pass  # it has gone meanwhile
    for handle in observe.handles(card.handle, offer):
        info = calls.call("nvmlGpuInstanceGetInfo", handle)
        if int(info.placement.start) == placement.start and int(info.placement.size) == placement.size:
            return handle
    text = f"cannot find GPU instance {offer.profile} at {placement} on GPU {card.uuid}: there is none"
    raise _fail("nvmlDeviceGetGpuInstances", card, text, errors.NotFound)


def _choices(
    step: plans.CreateComputeInstance, told: tuple[nodes.ComputeOffer, ...], offer: nodes.ProfileOffer
) -> list[nodes.ComputeOffer]:
    """Return the compute profiles that would do, the best first.

    The default is the one over all SMs of the GPU instance: several tools take the first of as many
    slices and so get 16 of 26 SMs on Hopper.
    """
    if step.profile.is_gpu_instance:
        fitting = [c for c in told if c.profile.is_gpu_instance or c.slices == offer.slices]
        return sorted(fitting, key=lambda c: (abs(c.multiprocessors - offer.multiprocessors), c.index))
    return [c for c in told if c.profile == step.profile]


def _create(instance: Any, choice: nodes.ComputeOffer, step: plans.CreateComputeInstance) -> Any:
    if step.start is not None and not step.profile.is_gpu_instance:
        size = choice.placements[0].size if choice.placements else choice.slices
        placement = pynvml.c_nvmlComputeInstancePlacement_t()
        placement.start, placement.size = step.start, size
        try:
            return calls.call(
                "nvmlGpuInstanceCreateComputeInstanceWithPlacement", instance, int(choice.id), ctypes.byref(placement)
            )
        except errors.NotSupported as cause:
            if cause.code != 13:
                raise
            # Before 535 the driver places them itself, in the order of creation.
    return calls.call("nvmlGpuInstanceCreateComputeInstance", instance, int(choice.id))
