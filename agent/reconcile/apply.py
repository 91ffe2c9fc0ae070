"""Carry out a plan: GPUs side by side, on each its steps in order, each verified by the door.

A GPU whose step fails is rolled back to what it was, unless that cannot be done or was not asked
for; then what is there now is said exactly. No GPU waits for another, except that all resets are
done at one time, because a reset needs our own library session closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, assert_never

from agent import errors, log, records, threads
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.reconcile import gpus as doors
from agent.reconcile import snapshot

RESETS = 3
"""How often a reset is tried: somebody may have looked at the GPUs just then, as nvidia-smi or a monitor does."""
PATIENCE = 10.0
"""Seconds after which a refused reset is not tried again: what takes so long is not somebody's short look."""


class Units(Protocol):
    """The part of the machine that a reset needs: services that keep the GPUs open."""

    def stop_units(self, units: Sequence[str]) -> tuple[str, ...]:
        """Stop those that are active and return them."""

    def start_units(self, units: Sequence[str]) -> None:
        """Start them again."""


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a plan is to be carried out.

    `release` names the units stopped around a reset. `stop()` is asked between steps. `progress`
    is told every step in words. `recheck(uuid, step)` returns holders that appeared since the plan
    was made, asked before a destroy or a mode change. `rollback` False leaves a failed GPU as it is.
    `again` is how many seconds pass before a reset that somebody was in the way of is tried again.
    """

    release: tuple[str, ...] = ()
    rollback: bool = True
    stop: Callable[[], bool] = lambda: False
    progress: Callable[[str], None] = lambda _: None
    recheck: Callable[[str, plans.Step], Awaitable[tuple[nodes.Holder, ...]]] | None = None
    pause: Callable[[], Awaitable[None]] | None = None
    resume: Callable[[], Awaitable[None]] | None = None
    again: float = 0.0


@dataclasses.dataclass(slots=True)
class _Work:
    """One GPU's share of the plan, and how far it has come."""

    gpu: nodes.Gpu
    steps: list[plans.Step]
    done: list[plans.Step] = dataclasses.field(default_factory=list)
    failure: snapshot.Failure | None = None
    stopped: bool = False
    wants_reset: bool = False
    was_reset: bool = False


def describe(step: plans.Step, gpu: nodes.Gpu) -> str:
    """Return a step in words: "GPU 3: create GPU instance 2g.10gb at 0:2"."""
    match step:
        case plans.SetMigMode(enabled=enabled):
            what = f"turn MIG {'on' if enabled else 'off'}"
        case plans.ResetGpu():
            what = "reset, so that the MIG mode takes effect"
        case plans.DestroyComputeInstance():
            what = f"destroy compute instance {step.id} ({step.profile}) of GPU instance {step.gpu_instance_id}"
        case plans.DestroyGpuInstance():
            what = f"destroy GPU instance {step.id} ({step.profile}) at {step.placement}"
        case plans.CreateGpuInstance():
            what = f"create GPU instance {step.profile} at {step.placement}"
        case plans.CreateComputeInstance():
            what = f"create compute instance {step.profile} in the GPU instance at {step.gpu_instance}"
        case _:
            assert_never(step)
    return f"GPU {gpu.index}: {what}"


async def apply(
    plan: plans.Plan, node: nodes.NodeState, gpus: doors.Gpus, units: Units, order: Order
) -> snapshot.Outcome:
    """Carry out `plan` on `node` and return what was done and what failed. Raises nothing for a
    single GPU: its failure is in the outcome."""
    works = []
    for gpu_plan in plan.gpus:
        gpu = node.gpu(gpu_plan.uuid)
        if gpu is not None and gpu_plan.steps and gpu_plan.blocked is None:
            works.append(_Work(gpu=gpu, steps=list(gpu_plan.steps)))
    await asyncio.gather(*(_run(work, gpus, order) for work in works))
    waiting = [work for work in works if work.wants_reset]
    if waiting and order.stop():
        for work in waiting:
            work.stopped, work.wants_reset = True, False
    elif waiting:
        await _reset(waiting, gpus, units, order)
        await asyncio.gather(
            *(_run(work, gpus, order) for work in waiting if work.failure is None and not work.stopped)
        )
    failed = [work for work in works if work.failure is not None]
    if failed:
        await asyncio.gather(*(_roll_back(work, node, gpus, order) for work in failed))
    return snapshot.Outcome(
        done=tuple((work.gpu.uuid, tuple(work.done)) for work in works if work.done),
        failures=tuple(work.failure for work in works if work.failure is not None),
        rolled_back=tuple(
            work.gpu.uuid for work in works if work.failure is not None and work.failure.rolled_back and work.done
        ),
        stopped=any(work.stopped for work in works),
    )


async def _run(work: _Work, gpus: doors.Gpus, order: Order) -> None:
    """Do the steps of one GPU up to its end, its first failure, a stop request or a reset."""
    uuid = work.gpu.uuid
    while work.steps:
        if order.stop():
            work.stopped = True
            return
        step = work.steps[0]
        if isinstance(step, plans.ResetGpu):
            try:
                mode = (await gpus.observe_gpu(uuid)).mode
            except errors.GpunodeError as cause:
                work.failure = _failure(work, step, cause)
                return
            if mode is not None and not mode.changing:
                work.steps.pop(0)
                continue
            work.wants_reset = True
            return
        if order.recheck is not None and isinstance(
            step, plans.DestroyComputeInstance | plans.DestroyGpuInstance | plans.SetMigMode
        ):
            holders = await order.recheck(uuid, step)
            if holders:
                who = ", ".join(str(holder) for holder in holders)
                work.failure = snapshot.Failure(
                    uuid=uuid,
                    step=step,
                    message=f"cannot {describe(step, work.gpu)}: it came into use meanwhile, by {who}",
                    rolled_back=False,
                )
                return
        order.progress(describe(step, work.gpu))
        try:
            await gpus.perform(uuid, step)
        except errors.GpunodeError as cause:
            work.failure = _failure(work, step, cause)
            log.error("step failed", gpu=uuid, step=step.kind, cause=cause)
            return
        work.steps.pop(0)
        work.done.append(step)
        log.info("step done", gpu=uuid, step=step.kind, what=describe(step, work.gpu))


def _failure(work: _Work, step: plans.Step, cause: Exception) -> snapshot.Failure:
    return snapshot.Failure(uuid=work.gpu.uuid, step=step, message=str(cause), rolled_back=False)


async def _reset(works: list[_Work], gpus: doors.Gpus, units: Units, order: Order) -> None:
    """Reset the GPUs of `works` together, with our session closed and the units out of the way."""
    uuids = [work.gpu.uuid for work in works]
    names = ", ".join(str(work.gpu.index) for work in works)
    order.progress(f"GPU {names}: reset, so that the MIG mode takes effect")
    cause: Exception | None = None
    stopped: tuple[str, ...] = ()
    if order.pause is not None:
        await order.pause()
    try:
        await gpus.release()
        try:
            stopped = await threads.run(lambda: units.stop_units(order.release))
            await _reset_once_free(uuids, gpus, order)
        except errors.GpunodeError as refused:
            cause = refused
        finally:
            if stopped:
                try:
                    await threads.run(lambda: units.start_units(stopped))
                except errors.GpunodeError as problem:
                    log.error("cannot start services again after the reset", units=" ".join(stopped), cause=problem)
            await gpus.retake()
    except errors.GpunodeError as broken:
        cause = cause or broken
    finally:
        if order.resume is not None:
            await order.resume()
    for work in works:
        work.wants_reset = False
        step = work.steps[0]
        if cause is not None:
            work.failure = _failure(work, step, cause)
            continue
        try:
            mode = (await gpus.observe_gpu(work.gpu.uuid)).mode
        except errors.GpunodeError as problem:
            work.failure = _failure(work, step, problem)
            continue
        if mode is None or mode.changing:
            work.failure = snapshot.Failure(
                uuid=work.gpu.uuid,
                step=step,
                message=f"cannot switch MIG mode on GPU {work.gpu.index}: the reset was done and the change is still pending",
                rolled_back=False,
            )
            continue
        work.steps.pop(0)
        work.done.append(step)
        work.was_reset = True


async def _reset_once_free(uuids: list[str], gpus: doors.Gpus, order: Order) -> None:
    """Reset the GPUs; try again shortly when it is refused at once. Raises ResetRefused."""
    began = time.monotonic()
    for attempt in range(1, RESETS + 1):
        try:
            await gpus.reset(uuids)
        except errors.ResetRefused as refused:
            if attempt == RESETS or not refused.holders or order.stop() or time.monotonic() - began > PATIENCE:
                raise
            log.info("a reset was refused, trying again", cause=refused)
            await asyncio.sleep(order.again)
        else:
            return


async def _roll_back(work: _Work, before: nodes.NodeState, gpus: doors.Gpus, order: Order) -> None:
    """Bring a failed GPU back to what it was, and say in its failure what became of it."""
    failure = work.failure
    assert failure is not None
    uuid = work.gpu.uuid
    if isinstance(failure.step, plans.ResetGpu):
        # The mode stays pending on purpose: whatever reset or reboot comes next will finish it.
        work.failure = dataclasses.replace(failure, remains=await _remains(uuid, gpus))
        return
    if not order.rollback:
        work.failure = dataclasses.replace(failure, remains=await _remains(uuid, gpus))
        return
    try:
        now = await gpus.observe_gpu(uuid)
        if now.state is not nodes.GpuState.OK:
            work.failure = dataclasses.replace(failure, remains=describe_gpu(now))
            return
        plan = plans.compute(
            layouts.Layout(gpus=(as_layout(work.gpu),)),
            dataclasses.replace(before, gpus=(now,), serving=None, allocations_known=True),
            plans.Policy(reset=False, reboot=False),
        )
        steps = plan.gpus[0].steps
        blocked = plan.gpus[0].blocked
        if blocked is not None:
            work.failure = dataclasses.replace(failure, remains=f"{describe_gpu(now)}; {blocked.message}")
            return
        for step in steps:
            order.progress(f"{describe(step, work.gpu)} (rolling back)")
            await gpus.perform(uuid, step)
        after = await gpus.observe_gpu(uuid) if steps else now
        restored = same(work.gpu, after)
        remains = describe_gpu(after)
        if not restored:  # as a GPU instance without compute instance, which is nothing one can ask for
            remains += f"; before, {describe_gpu(work.gpu)}"
        work.failure = dataclasses.replace(failure, rolled_back=restored, remains=remains)
        log.warning("rolled back", gpu=uuid, as_before=restored)
    except errors.GpunodeError as cause:
        remains = await _remains(uuid, gpus)
        work.failure = dataclasses.replace(failure, remains=f"{remains}; rolling back failed: {cause}")
        log.error("rolling back failed", gpu=uuid, cause=cause)


async def _remains(uuid: str, gpus: doors.Gpus) -> str:
    try:
        return describe_gpu(await gpus.observe_gpu(uuid))
    except errors.GpunodeError as cause:
        return f"not known, as the GPU cannot be read: {cause}"


def as_layout(gpu: nodes.Gpu) -> layouts.GpuLayout:
    """Return what `gpu` is as something to be wanted, every instance at its place."""
    return layouts.GpuLayout(
        uuid=gpu.uuid,
        mig=gpu.mode is not None and gpu.mode.pending,
        instances=tuple(
            layouts.InstanceSpec(
                profile=instance.profile,
                compute=()
                if [c.profile for c in instance.compute] == [instance.profile]
                else tuple(c.profile for c in instance.compute),
                start=instance.placement.start,
            )
            for instance in gpu.instances
        ),
        origin="before this change",
    )


def same(one: nodes.Gpu, other: nodes.Gpu) -> bool:
    """Whether two observations of a GPU show the same mode and instances (ids and UUIDs apart)."""

    def shape(gpu: nodes.Gpu) -> object:
        instances = sorted(
            (i.placement, str(i.profile), sorted(str(c.profile) for c in i.compute)) for i in gpu.instances
        )
        return gpu.mode, instances

    return shape(one) == shape(other)


def describe_gpu(gpu: nodes.Gpu) -> str:
    """Return in words what is on a GPU now."""
    if gpu.state is not nodes.GpuState.OK:
        return f"GPU {gpu.index} is {gpu.state.value}" + (f": {gpu.problem}" if gpu.problem else "")
    if gpu.mode is None:
        return f"GPU {gpu.index} is whole (it has no MIG)"
    words = f"MIG {'on' if gpu.mode.current else 'off'}"
    if gpu.mode.changing:
        words += f", {'on' if gpu.mode.pending else 'off'} after the next reset"
    if gpu.mode.current:
        parts = []
        for instance in sorted(gpu.instances, key=lambda i: i.placement):
            compute = "" if instance.compute else " without compute instance"
            parts.append(f"{instance.profile} at {instance.placement}{compute}")
        words += ", " + (", ".join(parts) if parts else "no instances")
    return f"GPU {gpu.index} has {words}"
