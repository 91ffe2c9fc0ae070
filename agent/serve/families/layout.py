"""Is the node as its layout wants it, and what has been done for that."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from agent.reconcile import snapshot as snapshots
from agent.serve import health, tally
from agent.serve.families.family import Family, Row, View, scalar, states


def _phase(view: View) -> Iterator[Row]:
    active = snapshots.Phase.STARTING if view.snapshot is None else view.snapshot.phase
    for state, value in states(active.value, (phase.value for phase in snapshots.Phase)):
        yield (state,), value


def _reasons(view: View) -> Iterator[Row]:
    for code, count in collections.Counter(reason.code for reason in view.health.reasons).items():
        yield (code,), float(count)


def _sound(view: View) -> Iterator[Row]:
    sample = view.sample
    if sample is not None:
        for gpu, instance in view.instances:
            yield (gpu.uuid, str(instance.id)), float(health.sound(sample, gpu, instance, now=view.now))


def _config(view: View) -> Iterator[Row]:
    if view.snapshot is not None and view.snapshot.settings.declared:
        yield (view.snapshot.settings.digest, "+".join(view.snapshot.settings.sources)), 1.0


def _cycles(view: View) -> Iterator[Row]:
    for result in tally.RESULTS:
        yield (result,), float(view.cycles.get(result, 0))


def _steps(view: View) -> Iterator[Row]:
    for (kind, result), count in sorted(view.steps.items()):
        yield (kind, result), float(count)


def _in_sync(view: View) -> Iterator[Row]:
    if view.snapshot is None or view.snapshot.node is None:
        return
    for plan in view.snapshot.plan.gpus:
        if plan.managed or plan.blocked is not None or plan.drift:
            yield (plan.uuid,), float(plan.in_sync and plan.blocked is None)


FAMILIES: tuple[Family, ...] = (
    scalar(
        "healthy",
        "1 where the node is live, ready and not degraded: the one number for a fleet.",
        lambda view: view.health.healthy,
        source="agent",
    ),
    scalar(
        "ready",
        "1 where every GPU that a layout needs is in force, settings are valid and the driver answers.",
        lambda view: view.health.ready,
        source="agent",
    ),
    Family(
        name="health_reason",
        kind="gauge",
        help="How many reasons of this code keep the node from being healthy; absent when none does.",
        labels=("code",),
        source="agent",
        rows=_reasons,
    ),
    Family(
        name="mig_healthy",
        kind="gauge",
        help="0 while a GPU instance is not to be trusted: a fatal XID of its own or of its whole GPU within "
        "10 minutes, or the driver asks for a reset or a reboot.",
        labels=("gpu_uuid", "gpu_instance_id"),
        source="agent, by XIDs and NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        where="GPUs with MIG on",
        rows=_sound,
    ),
    Family(
        name="phase",
        kind="gauge",
        help="Where the node stands: 1 for the one phase that holds.",
        labels=("phase",),
        source="agent",
        rows=_phase,
    ),
    scalar(
        "settings_valid",
        "Whether the newest settings could be used; where not, the last good ones stay in force.",
        lambda view: None if view.snapshot is None or view.snapshot.cycle == 0 else view.snapshot.settings.valid,
        source="agent",
    ),
    Family(
        name="mig_desired_config_info",
        kind="gauge",
        help="The settings that declare a layout, always 1.",
        labels=("config", "sources"),
        source="agent",
        where="nodes with a layout declared",
        rows=_config,
    ),
    Family(
        name="gpu_mig_in_sync",
        kind="gauge",
        help="Whether a GPU with a layout is as the layout wants it.",
        labels=("gpu_uuid",),
        source="agent",
        where="GPUs with a layout",
        rows=_in_sync,
    ),
    Family(
        name="mig_reconciles_total",
        kind="counter",
        help="Enforcement cycles by how they ended.",
        labels=("result",),
        source="agent",
        rows=_cycles,
    ),
    Family(
        name="mig_steps_total",
        kind="counter",
        help="Steps carried out on GPUs, by kind and result.",
        labels=("kind", "result"),
        source="agent",
        where="nodes where something was changed",
        rows=_steps,
    ),
    scalar(
        "mig_reconcile_last_success_timestamp_seconds",
        "When the layout was last found in force, in Unix time.",
        lambda view: None if view.snapshot is None else view.snapshot.last_success,
        source="agent",
        unit="seconds",
    ),
    scalar(
        "mig_reconcile_duration_seconds",
        "How long the last enforcement cycle took.",
        lambda view: None if view.snapshot is None or view.snapshot.cycle == 0 else view.snapshot.duration,
        source="agent",
        unit="seconds",
    ),
)
