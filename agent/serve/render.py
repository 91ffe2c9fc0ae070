"""A node, a plan and what schedulers see, as documents (for JSON) and as text (for people).

One place for both, so that the command line, the page and `/status` never tell different things.
Everything here is pure: values in, dictionaries and strings out. Documents hold only what JSON
knows; a figure that is not known is None and never 0.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

from agent import errors, findings, measures
from agent.host import facts as hosts
from agent.mig import advance, advertise, labels, placement
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.reconcile import snapshot as snapshots
from agent.serve import health as healths
from agent.settings import shown

Document = dict[str, Any]


# --- documents --------------------------------------------------------------------------------------


def status_document(
    snapshot: snapshots.Snapshot, sample: measures.Sample | None = None, health: healths.Health | None = None
) -> Document:
    """Return the node as it is. Without a driver `gpus` is empty and a reason says why.

    Shape: `simulated` (name or None), `phase`, `reasons` [{code, message, gpu}], `findings`
    [{code, severity, message, advice, gpu}], `settings`
    {sources, digest, valid, problems, values}, `gpus`, and beside these `health` {live, ready, degraded},
    `owner`, `versions`, `instance_type`, `serving`. Memory in bytes, ratios 0 to 1, watts, Celsius.
    """
    reasons = snapshot.reasons if health is None else health.reasons
    node = snapshot.node
    measured = {} if sample is None else {gpu.uuid: gpu for gpu in sample.gpus}
    return {
        "simulated": snapshot.simulated,
        "phase": snapshot.phase.value,
        "health": None if health is None else {"live": health.live, "ready": health.ready, "degraded": health.degraded},
        "reasons": [{"code": r.code, "message": r.message, "gpu": r.gpu} for r in reasons],
        "findings": [] if health is None else [finding_document(f) for f in health.findings],
        "settings": {
            "sources": list(snapshot.settings.sources),
            "digest": snapshot.settings.digest,
            "valid": snapshot.settings.valid,
            "declared": snapshot.settings.declared,
            "problems": [problem_document(p) for p in snapshot.settings.problems],
            "values": {key: dict(said) for key, said in snapshot.settings.values.items()},
        },
        "owner": snapshot.owner,
        "instance_type": None if node is None else node.instance_type,
        "serving": None if node is None else node.serving,
        "versions": None
        if node is None
        else {"driver": node.driver_version, "nvml": node.nvml_version, "cuda": node.cuda_version},
        "gpus_expected": snapshot.gpus_expected,
        "gpus": []
        if node is None
        else [_gpu_document(gpu, snapshot.plan.gpu(gpu.uuid), measured.get(gpu.uuid)) for gpu in node.gpus],
    }


def finding_document(finding: findings.Finding) -> Document:
    """Return a finding: code, severity, message, advice, gpu."""
    return dataclasses.asdict(finding)


def _gpu_document(gpu: nodes.Gpu, plan: plans.GpuPlan | None, sample: measures.GpuSample | None) -> Document:
    told = sample if sample is not None and sample.up else None
    instances = {} if told is None else {instance.id: instance for instance in told.instances}
    used = None if told is None or told.memory is None else told.memory.used
    total = gpu.memory_bytes or (told.memory.total if told is not None and told.memory is not None else 0)
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "name": gpu.name,
        "model": gpu.model,
        "state": gpu.state.value,
        "problem": gpu.problem,
        "mig": mig_document(gpu),
        "memory": {"total_bytes": total or None, "used_bytes": used},
        "activity": None if told is None else activity_document(told.activity),
        "utilization": None if told is None else told.utilization.get("gpu"),
        "power_watts": None if told is None else told.power_watts,
        "temperature_celsius": None if told is None else told.temperatures.get("core"),
        "in_use": [holder_document(holder) for holder in gpu.holders],
        "gpu_instances": [
            _instance_document(instance, instances.get(instance.id))
            for instance in sorted(gpu.instances, key=lambda i: i.placement)
        ],
        "drift": [] if plan is None else [{"kind": d.kind, "message": d.message} for d in plan.drift],
        "managed": plan is not None and plan.managed,
    }


def activity_document(activity: measures.Activity | None) -> Document | None:
    """Return what GPM measured, by name, or None when it measured nothing."""
    if activity is None:
        return None
    told = {key: value for key, value in dataclasses.asdict(activity).items() if value is not None}
    return told or None


def _instance_document(instance: nodes.GpuInstance, sample: measures.InstanceSample | None) -> Document:
    memory = None if sample is None else sample.memory
    return {
        "id": instance.id,
        "profile": str(instance.profile),
        "placement": _span(instance.placement),
        "memory": {
            "total_bytes": instance.memory_bytes if memory is None else memory.total,
            "used_bytes": None if memory is None else memory.used,
        },
        "activity": None if sample is None else activity_document(sample.activity),
        "in_use": [holder_document(holder) for holder in _unique(instance.in_use)],
        "compute_instances": [
            {
                "id": compute.id,
                "profile": str(compute.profile),
                "uuid": compute.uuid,
                "multiprocessors": compute.multiprocessors,
                "in_use": [holder_document(holder) for holder in compute.holders],
            }
            for compute in sorted(instance.compute, key=lambda c: c.id)
        ],
    }


def _unique(holders: Iterable[nodes.Holder]) -> list[nodes.Holder]:
    return list(dict.fromkeys(holders))


def holder_document(holder: nodes.Holder) -> Document:
    """Return who uses something: kind and name, and pid, container and pod where they are known."""
    told = dataclasses.asdict(holder)
    return {key: value for key, value in told.items() if value is not None}


def problem_document(problem: errors.Problem) -> Document:
    """Return a problem of the settings as `check` and `status` print it."""
    return {
        "severity": problem.severity,
        "code": problem.code,
        "message": problem.message,
        "where": {"file": problem.file, "line": problem.line, "key": problem.key},
    }


def plan_document(plan: plans.Plan, node: nodes.NodeState) -> Document:
    """Return what would be done: `in_sync`, and per GPU kept, steps, blocked, needs and drift."""
    return {
        "simulated": node.simulated,
        "in_sync": plan.in_sync,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "managed": gpu.managed,
                "in_sync": gpu.in_sync,
                "kept": [
                    {"id": k.id, "profile": str(k.profile), "placement": _span(k.placement), "why": k.why}
                    for k in gpu.kept
                ],
                "steps": [step_document(step) for step in gpu.steps],
                "blocked": None
                if gpu.blocked is None
                else {
                    "kind": gpu.blocked.kind.value,
                    "message": gpu.blocked.message,
                    "holders": [holder_document(holder) for holder in gpu.blocked.holders],
                },
                "needs": gpu.needs,
                "partial": gpu.partial,
                "drift": [{"kind": d.kind, "message": d.message} for d in gpu.drift],
            }
            for gpu in plan.gpus
        ],
    }


def step_document(step: plans.Step) -> Document:
    """Return a step: `kind` and `why`, and what the kind needs. Placements are in memory slices."""
    told: Document = {"kind": step.kind}
    match step:
        case plans.SetMigMode():
            told["enabled"] = step.enabled
        case plans.ResetGpu():
            pass
        case plans.DestroyComputeInstance():
            told |= {
                "id": step.id,
                "gpu_instance_id": step.gpu_instance_id,
                "profile": str(step.profile),
                "gpu_instance": _span(step.gpu_instance),
            }
        case plans.DestroyGpuInstance():
            told |= {"id": step.id, "profile": str(step.profile), "placement": _span(step.placement)}
        case plans.CreateGpuInstance():
            told |= {"profile": str(step.profile), "profile_id": step.profile_id, "placement": _span(step.placement)}
        case plans.CreateComputeInstance():
            told |= {"profile": str(step.profile), "gpu_instance": _span(step.gpu_instance), "start": step.start}
        case _:
            assert_never(step)
    told["why"] = step.why
    return told


def _span(place: nodes.Placement) -> Document:
    return {"start": place.start, "size": place.size}


def outcome_document(outcome: snapshots.Outcome | None, node: nodes.NodeState | None) -> Document:
    """Return what was done: `changed`, `failed` [{gpu, index, step, message, rolled_back, remains}],
    `rolled_back` (UUIDs), `done` (steps per UUID) and whether a stop request ended it."""
    if outcome is None:
        return {"changed": False, "failed": [], "rolled_back": [], "done": {}, "stopped": False}
    indexes = {} if node is None else {gpu.uuid: gpu.index for gpu in node.gpus}
    return {
        "changed": outcome.changed,
        "failed": [
            {
                "gpu": failure.uuid or None,
                "index": indexes.get(failure.uuid),
                "step": None if failure.step is None else step_document(failure.step),
                "message": failure.message,
                "rolled_back": failure.rolled_back,
                "remains": failure.remains,
            }
            for failure in outcome.failures
        ],
        "rolled_back": list(outcome.rolled_back),
        "done": {uuid: [step_document(step) for step in steps] for uuid, steps in outcome.done},
        "stopped": outcome.stopped,
    }


def resources_document(
    advertised: advertise.Advertised, node: nodes.NodeState | None = None, facts: hosts.HostFacts | None = None
) -> Document:
    """Return what the device plugin, the DRA driver and ECS will see.

    With `node` also per GPU which MIG devices it carries (`parents`), the labels of feature discovery
    by strategy (`labels`) and what a Karpenter NodeOverlay would have to say (`node_overlay`: capacity as
    quantities, by strategy). With `facts` also what the kubelet and the ECS agent really have
    (`observed`, None where they do not tell) and how that differs (`differences`, findings).
    """
    plugin = advertised.device_plugin
    ecs = advertised.ecs
    return {
        "device_plugin": {
            "none": dict(plugin.none),
            "single": None if plugin.single is None else dict(plugin.single),
            "mixed": None if plugin.mixed is None else dict(plugin.mixed),
            "refused": dict(plugin.refused),
        },
        "dra": [
            {"name": device.name, "attributes": dict(device.attributes), "capacity": dict(device.capacity)}
            for device in advertised.dra
        ],
        "ecs": {"gpus": ecs.gpus, "values": list(ecs.values)} if ecs.refused is None else {"refused": ecs.refused},
        "notes": list(advertised.notes),
        **({} if node is None else _around_resources(advertised, node, facts)),
    }


DIFFERENCES = frozenset({"kubelet-differs", "ecs-gpu-info-missing", "ecs-gpu-info-differs"})
"""Codes of the findings that compare what is with what should be advertised."""


def _around_resources(
    advertised: advertise.Advertised, node: nodes.NodeState, facts: hosts.HostFacts | None
) -> Document:
    told: Document = {
        "parents": [
            {"index": gpu.index, "uuid": gpu.uuid, "devices": devices}
            for gpu in node.gpus
            for uuid, devices in advertise.per_parent(node).items()
            if uuid == gpu.uuid
        ],
        "labels": {strategy: labels.labels(node, strategy) for strategy in ("none", "single", "mixed")},
        "node_overlay": {
            strategy: {"capacity": {name: str(count) for name, count in counts.items() if count}}
            for strategy, counts in findings.expected(advertised, None).items()
        },
    }
    if facts is not None:
        info = facts.ecs_gpu_info
        told["observed"] = {
            "strategy": facts.strategy,
            "strategy_source": facts.strategy_source,
            "kubelet": None if facts.allocatable is None else dict(facts.allocatable),
            "kubelet_problem": facts.allocatable_problem,
            "ecs": None if info is None or info.problem is not None else list(info.gpu_ids),
            "ecs_problem": None if info is None else info.problem,
        }
        told["differences"] = [finding_document(f) for f in _differences(advertised, node, facts)]
    return told


def _differences(
    advertised: advertise.Advertised, node: nodes.NodeState, facts: hosts.HostFacts
) -> list[findings.Finding]:
    return [f for f in findings.find(node, facts, seen=advertised) if f.code in DIFFERENCES]


def profiles_document(node: nodes.NodeState) -> list[Document]:
    """Return per GPU what it can be split into. `remaining` is how many more fit beside what is there
    now, None while MIG is off (the driver does not tell then either)."""
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "model": gpu.model,
            "name": gpu.name,
            "mig": mig_document(gpu),
            "problem": gpu.problem or gpu.geometry_unknown,
            "profiles": [
                {
                    "name": str(offer.profile),
                    "profile_id": offer.id,
                    "memory_bytes": offer.memory_bytes,
                    "multiprocessors": offer.multiprocessors,
                    "compute_slices": offer.slices,
                    "placements": {"starts": sorted(p.start for p in offer.placements), "size": offer.size},
                    "max_instances": offer.max_instances,
                    "remaining": placement.remaining(gpu, offer.profile)
                    if gpu.mode is not None and gpu.mode.current
                    else None,
                    "aliases": [str(alias) for alias in offer.aliases],
                }
                for offer in gpu.offers
            ],
        }
        for gpu in node.gpus
    ]


# --- text -------------------------------------------------------------------------------------------


def columns(rows: Sequence[Sequence[str]], *, indent: str = "", right: frozenset[int] = frozenset()) -> list[str]:
    """Return rows as lines with aligned columns; those in `right` are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (
            indent
            + "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in rows
    ]


def size(count: int | None) -> str:
    """Return bytes for people: "39.5 GiB", "12 MiB", "-" when not known."""
    if count is None:
        return "-"
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB"


def share(ratio: float | None) -> str:
    """Return a ratio as percent, "-" when not known."""
    return "-" if ratio is None else f"{ratio * 100:.0f}%"


def slices(gpu: nodes.Gpu) -> str:
    """Draw the instances of a GPU to scale, `|3g.20gb        |1g.5gb |free   |`; "" where there is no scale."""
    geometry = placement.geometry_of(gpu.offers)
    if not geometry.slots or gpu.mode is None or not gpu.mode.current:
        return ""
    drawn = placement.slice_map(
        geometry, [(str(i.profile), i.placement.start, i.placement.size) for i in gpu.instances]
    )
    return drawn[drawn.index("|") :]


def mig_document(gpu: nodes.Gpu) -> dict[str, bool | None]:
    """Return whether a GPU can do MIG and its mode; None is what cannot be read."""
    return {
        "capable": gpu.mig_capable if gpu.mig_capable or gpu.state is nodes.GpuState.OK else None,
        "current": None if gpu.mode is None else gpu.mode.current,
        "pending": None if gpu.mode is None else gpu.mode.pending,
    }


def mode_words(gpu: nodes.Gpu) -> str:
    """Return the MIG mode in a word or two: "on", "off, on after a reset", "none", "-" where it cannot be read."""
    if gpu.mode is None:
        return "none" if gpu.state is nodes.GpuState.OK else "-"
    words = "on" if gpu.mode.current else "off"
    if gpu.mode.changing:
        words += f", {'on' if gpu.mode.pending else 'off'} after a reset"
    return words


def status_table(
    snapshot: snapshots.Snapshot, sample: measures.Sample | None = None, health: healths.Health | None = None
) -> str:
    """Return the node for people: a head, then per GPU one line, its slice map and a line an instance."""
    lines = _head(snapshot, health)
    node = snapshot.node
    # What is critical stands among the reasons already.
    rest = [f for f in (() if health is None else health.findings) if f.severity != findings.CRITICAL]
    for severity in (findings.WARNING, findings.HINT):
        said = [snapshots.Reason(f.code, f"{f.message}; {f.advice}", f.gpu) for f in rest if f.severity == severity]
        lines += [f"{severity} {line}" for line in reason_lines(said, node)]
    if node is None:
        lines.append(f"no GPUs: {snapshot.driver_problem or 'they could not be read'}")
        return "\n".join(lines)
    measured = {} if sample is None else {gpu.uuid: gpu for gpu in sample.gpus if gpu.up}
    rows = [("GPU", "NAME", "MODEL", "MIG", "MEMORY", "USED", "SM", "POWER", "STATE")]
    rows += [_gpu_row(gpu, snapshot.plan.gpu(gpu.uuid), measured.get(gpu.uuid)) for gpu in node.gpus]
    drawn = columns(rows, right=frozenset({4, 5, 6, 7}))
    blocks = [_gpu_block(gpu, measured.get(gpu.uuid)) for gpu in node.gpus]
    widths = [max((len(row[i]) for rows, _ in blocks for row in rows), default=0) for i in range(7)]
    lines.append(drawn[0])
    for line, (instances, notes) in zip(drawn[1:], blocks, strict=True):
        lines.append(line)
        lines += [
            "     " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in instances
        ]
        lines += [f"     {note}" for note in notes]
    return "\n".join(lines)


def _head(snapshot: snapshots.Snapshot, health: healths.Health | None) -> list[str]:
    words = [snapshot.phase.value]
    if health is not None:
        words.append("ready" if health.ready else "not ready")
        if health.degraded:
            words.append("degraded")
    node = snapshot.node
    if node is not None:
        words.append(f"{len(node.gpus)} GPU{'' if len(node.gpus) == 1 else 's'}")
        if node.instance_type and node.instance_type != snapshot.simulated:
            words.append(node.instance_type)
        if node.driver_version:
            words.append(f"driver {node.driver_version}")
        if node.serving:
            words.append(f"{node.serving} is active")
    lines = []
    if snapshot.simulated:
        lines.append(f"SIMULATED NODE {snapshot.simulated}: these GPUs are not there")
    lines.append("  ".join(words))
    if snapshot.settings.sources:
        source = f"settings from {', '.join(snapshot.settings.sources)}"
        lines.append(source + ("" if snapshot.settings.declared else " (no layout declared)"))
    else:
        lines.append("settings: the defaults, no layout declared")
    lines += [
        f"  {key} = {shown.words(said['value'])}, from {said['from']}"
        for key, said in snapshot.settings.values.items()
        if said["source"] != "default"
    ]
    if snapshot.owner not in ("gpunode", ""):
        lines.append(f"the layout belongs to {snapshot.owner}; gpunode observes")
    reasons = snapshot.reasons if health is None else health.reasons
    lines += [f"! {line}" for line in reason_lines(reasons, node)]
    return lines


def reason_lines(reasons: Iterable[snapshots.Reason], node: nodes.NodeState | None) -> list[str]:
    """Return reasons as "code: message", those that say the same of several GPUs as one line."""
    known = {} if node is None else {gpu.uuid: gpu.index for gpu in node.gpus}
    groups: dict[tuple[str, str], list[tuple[str, int | None]]] = collections.defaultdict(list)
    for reason in reasons:
        index = None if reason.gpu is None else known.get(reason.gpu)
        said = reason.message if index is None else _of_any(reason.message, index)
        groups[reason.code, said].append((reason.message, index))
    lines = []
    for (code, said), members in groups.items():
        numbers = [index for _, index in members if index is not None]
        if len(set(numbers)) > 1:
            lines.append(f"{code}: GPU {indexes(numbers)}: {said.removeprefix('the GPU: ')}")
        else:
            lines.append(f"{code}: {members[0][0]}")
    return lines


def _of_any(text: str, index: int) -> str:
    """Return what is said of one GPU as it would be said of any."""
    return re.sub(rf"\bGPU {index}\b", "the GPU", text)


def _gpu_row(
    gpu: nodes.Gpu, plan: plans.GpuPlan | None, sample: measures.GpuSample | None
) -> tuple[str, str, str, str, str, str, str, str, str]:
    state = gpu.state.value
    if gpu.state is nodes.GpuState.OK and plan is not None:
        if plan.blocked is not None:
            state = "blocked"
        elif plan.drift:
            state = "drift"
    used = None if sample is None or sample.memory is None else sample.memory.used
    sm = None if sample is None or sample.activity is None else sample.activity.sm
    if sm is None and sample is not None:
        sm = sample.utilization.get("gpu")
    power = None if sample is None else sample.power_watts
    return (
        str(gpu.index),
        gpu.name,
        gpu.model,
        mode_words(gpu),
        size(gpu.memory_bytes or None),
        size(used),
        share(sm),
        "-" if power is None else f"{power:.0f} W",
        state,
    )


def _gpu_block(gpu: nodes.Gpu, sample: measures.GpuSample | None) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the instance rows under a GPU, and notes (map, problem, users) behind them."""
    measured = {} if sample is None else {instance.id: instance for instance in sample.instances}
    rows: list[tuple[str, ...]] = []
    for instance in sorted(gpu.instances, key=lambda i: i.placement):
        told = measured.get(instance.id)
        memory = None if told is None else told.memory
        sm = None if told is None or told.activity is None else told.activity.sm
        whole = instance.compute if len(instance.compute) == 1 else ()
        if not instance.compute:
            uuid = "no compute instance: nothing can use it"
        elif whole and whole[0].profile == instance.profile:
            uuid = whole[0].uuid or "no UUID"
        else:
            uuid = f"{len(instance.compute)} compute instances"
        sms = f"{sum(c.multiprocessors for c in instance.compute)} SM"
        users = ", ".join(str(holder) for holder in _unique(instance.holders))
        rows.append(
            (
                str(instance.profile),
                str(instance.placement),
                f"GI {instance.id}",
                f"{size(None if memory is None else memory.used)} of {size(instance.memory_bytes)}",
                sms if sm is None else f"{sms} {share(sm)}",
                uuid,
                f"used by {users}" if users else "",
            )
        )
        split = not (whole and whole[0].profile == instance.profile)
        for compute in sorted(instance.compute, key=lambda c: c.id):
            users = ", ".join(str(holder) for holder in _unique(compute.holders))
            if split:
                name = f"  {compute.profile}"
                rows.append(
                    (name, "", f"CI {compute.id}", "", f"{compute.multiprocessors} SM", compute.uuid or "no UUID", "")
                )
            if users:
                rows[-1] = (*rows[-1][:-1], f"used by {users}")
    notes = []
    drawn = slices(gpu)
    if drawn:
        notes.append(drawn)
    if gpu.problem:
        notes.append(f"! {gpu.problem}")
    if gpu.geometry_unknown:
        notes.append(f"! {gpu.geometry_unknown}")
    if gpu.holders:
        notes.append(f"used by {', '.join(str(holder) for holder in _unique(gpu.holders))}")
    return rows, notes


def nvidia_smi(node: nodes.NodeState) -> str:
    """Return the node as `nvidia-smi -L` prints it: MIG devices in the driver's order, by ids.

    A GPU instance without a compute instance is no device and is not printed, as there.
    """
    lines = []
    for gpu in node.gpus:
        if gpu.state is not nodes.GpuState.OK:
            continue
        lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
        number = 0
        for instance in sorted(gpu.instances, key=lambda i: i.id):
            for compute in sorted(instance.compute, key=lambda c: c.id):
                lines.append(f"  MIG {compute.profile!s:<12}Device{number:>3}: (UUID: {compute.uuid})")
                number += 1
    return "\n".join(lines)


_SIGNS: Mapping[str, str] = {
    "set-mig-mode": "~",
    "reset-gpu": "~",
    "destroy-compute-instance": "-",
    "destroy-gpu-instance": "-",
    "create-gpu-instance": "+",
    "create-compute-instance": "+",
}


def step_words(step: plans.Step) -> str:
    """Return a step in words, without the GPU it is done on.

    GPU instances are told by their place: their ids differ between cards of one model.
    """
    match step:
        case plans.SetMigMode():
            return f"turn MIG {'on' if step.enabled else 'off'}"
        case plans.ResetGpu():
            return "reset the GPU"
        case plans.DestroyComputeInstance():
            return f"destroy compute instance {step.id} ({step.profile}) in the one at {step.gpu_instance}"
        case plans.DestroyGpuInstance():
            return f"destroy GPU instance {step.profile} at {step.placement}"
        case plans.CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case plans.CreateComputeInstance():
            where = "" if step.start is None else f" at compute slice {step.start}"
            return f"create compute instance {step.profile}{where} in the one at {step.gpu_instance}"
        case _:
            assert_never(step)


def plan_table(plan: plans.Plan, node: nodes.NodeState) -> str:
    """Return a plan for people: per group of GPUs with the same plan what is kept, destroyed and
    created, each with its why, what is in the way, and the slices before and after; then the sum."""
    lines = []
    if node.simulated:
        lines.append(f"SIMULATED NODE {node.simulated}: these GPUs are not there")
    groups: dict[tuple[str, ...], list[plans.GpuPlan]] = collections.defaultdict(list)
    for gpu in plan.gpus:
        observed = node.gpu(gpu.uuid)
        what = "" if observed is None else f"{observed.name} {observed.model}"
        groups[what, *(_of_any(line, gpu.index) for line in _plan_block(gpu, node))].append(gpu)
    for (_, *told), members in groups.items():
        block = told if len(members) > 1 else _plan_block(members[0], node)
        observed = node.gpu(members[0].uuid)
        name = f"{observed.name} ({observed.model})" if observed is not None else members[0].uuid
        count = "" if len(members) == 1 else f"{len(members)} x "
        lines.append(f"GPU {indexes([gpu.index for gpu in members])}: {count}{name}")
        lines += [f"  {line}" for line in block]
    lines.append(_summary(plan))
    return "\n".join(lines)


def _plan_block(plan: plans.GpuPlan, node: nodes.NodeState) -> tuple[str, ...]:
    gpu = node.gpu(plan.uuid)
    lines: list[str] = []
    if gpu is not None and gpu.state is not nodes.GpuState.OK:
        lines.append(f"! {gpu.state.value}" + (f": {gpu.problem}" if gpu.problem else ""))
    if not plan.managed and not plan.steps and plan.blocked is None:
        return (*lines, "nothing is declared for it: left as it is")
    rows = [("=", f"keep GPU instance {k.profile} at {k.placement}", k.why) for k in plan.kept]
    rows += [(_SIGNS[step.kind], step_words(step), step.why) for step in plan.steps]
    width = max((len(words) for _, words, _ in rows), default=0)
    lines += [f"{sign} {words.ljust(width)}  {why}".rstrip() for sign, words, why in rows]
    if plan.in_sync and plan.blocked is None and not plan.steps:
        lines.append("is as wanted")
    if plan.blocked is not None:
        lines.append(f"! {plan.blocked.kind.value}: {plan.blocked.message}")
        lines += [f"    {holder}" + (f": {holder.hint}" if holder.hint else "") for holder in plan.blocked.holders]
        lines += [f"  {drift.kind}: {drift.message}" for drift in plan.drift]
    if plan.needs is not None:
        lines.append(f"needs a {'GPU reset' if plan.needs == 'reset' else plan.needs} for the MIG mode to take effect")
    if plan.partial:
        lines.append("the driver tells its profiles only with MIG on: the rest is planned after that")
    if gpu is not None and plan.steps:
        before, after = slices(gpu), _after(plan, node)
        if before:
            lines.append(f"now   {before}")
        if after:
            lines.append(f"then  {after}")
    return tuple(lines)


def _after(plan: plans.GpuPlan, node: nodes.NodeState) -> str:
    state = node
    try:
        for step in plan.steps:
            state = advance.advance(state, plan.uuid, step)
    except advance.IllegalStep:
        return ""  # the driver offers no profiles yet, so there is nothing to draw them on
    gpu = state.gpu(plan.uuid)
    return "" if gpu is None else slices(gpu)


def indexes(numbers: Sequence[int]) -> str:
    """Return GPU numbers in short: "0-3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _summary(plan: plans.Plan) -> str:
    if plan.in_sync and not plan.blocked:
        return "in sync: nothing to do"
    changing = [gpu for gpu in plan.gpus if gpu.steps]
    destroyed = sum(isinstance(s, plans.DestroyGpuInstance) for gpu in plan.gpus for s in gpu.steps)
    created = sum(isinstance(s, plans.CreateGpuInstance) for gpu in plan.gpus for s in gpu.steps)
    kept = sum(len(gpu.kept) for gpu in plan.gpus)
    words = [
        f"{plan.steps} step{'' if plan.steps == 1 else 's'} on {len(changing)} GPU{'' if len(changing) == 1 else 's'}"
    ]
    words.append(f"{kept} instance{'' if kept == 1 else 's'} kept, {destroyed} destroyed, {created} created")
    if plan.blocked:
        words.append(f"blocked: GPU {indexes([gpu.index for gpu in plan.blocked])}")
    return "; ".join(words)


def resources_table(
    advertised: advertise.Advertised,
    *,
    simulated: str | None = None,
    node: nodes.NodeState | None = None,
    facts: hosts.HostFacts | None = None,
) -> str:
    """Return what schedulers will see, for people; with `node` and `facts` also what they really have."""
    lines = [f"SIMULATED NODE {simulated}: these GPUs are not there"] if simulated else []
    plugin = advertised.device_plugin
    lines.append("Kubernetes device plugin, by MIG strategy")
    rows: list[tuple[str, str, str]] = []
    for strategy, resources in (("none", plugin.none), ("single", plugin.single), ("mixed", plugin.mixed)):
        if resources is None:
            rows.append((strategy, "refused", plugin.refused.get(strategy, "")))
            continue
        rows += [
            (strategy if n == 0 else "", name, str(count)) for n, (name, count) in enumerate(sorted(resources.items()))
        ] or [(strategy, "nothing", "")]
    lines += columns(rows, indent="  ")
    lines.append(f"DRA driver: {len(advertised.dra)} device{'' if len(advertised.dra) == 1 else 's'}")
    kinds = collections.Counter(
        (device.attributes.get("type", ""), device.attributes.get("profile", "")) for device in advertised.dra
    )
    lines += columns(
        [(f"{count} x", f"type {kind}", profile) for (kind, profile), count in sorted(kinds.items())], indent="  "
    )
    ecs = advertised.ecs
    if ecs.refused is not None:
        lines.append(f"ECS: refused, {ecs.refused}")
    else:
        lines.append(
            f"ECS: {ecs.gpus} GPU{'' if ecs.gpus == 1 else 's'}; a task may ask for {', '.join(ecs.values) or 'none'}"
        )
    if node is not None:
        lines += _parents(node)
    if facts is not None:
        lines += _observed(facts)
    lines += [f"! {note}" for note in advertised.notes]
    if node is not None and facts is not None:
        lines += [f"! {f.code}: {f.message}; {f.advice}" for f in _differences(advertised, node, facts)]
    return "\n".join(lines)


def _parents(node: nodes.NodeState) -> list[str]:
    groups: dict[tuple[tuple[str, int], ...], list[int]] = collections.defaultdict(list)
    for uuid, devices in advertise.per_parent(node).items():
        gpu = node.gpu(uuid)
        if devices and gpu is not None:
            groups[tuple(sorted(devices.items()))].append(gpu.index)
    rows = [
        (f"GPU {indexes(members)}", ", ".join(f"{count} x {name}" for name, count in devices))
        for devices, members in groups.items()
    ]
    return ["MIG devices on one GPU (claims that must share a parent):", *columns(rows, indent="  ")] if rows else []


def _observed(facts: hosts.HostFacts) -> list[str]:
    lines = []
    if facts.strategy is not None:
        lines.append(f"the device plugin is set to {facts.strategy} ({facts.strategy_source})")
    if facts.allocatable is not None:
        told = ", ".join(f"{count} {name}" for name, count in sorted(facts.allocatable.items()))
        lines.append(f"the kubelet has {told or 'no nvidia.com resource'}")
    elif facts.allocatable_problem is not None:
        lines.append(f"what the kubelet has is not known: {facts.allocatable_problem}")
    if facts.ecs_gpu_info is not None and facts.ecs_gpu_info.problem is None:
        lines.append(f"the ECS agent was told of {len(facts.ecs_gpu_info.gpu_ids)} GPUs")
    return lines


def profiles_table(node: nodes.NodeState) -> str:
    """Return what each GPU can be split into, equal GPUs together."""
    lines = [f"SIMULATED NODE {node.simulated}: these GPUs are not there"] if node.simulated else []
    groups: dict[tuple[object, ...], list[nodes.Gpu]] = collections.defaultdict(list)
    for gpu in node.gpus:
        present = tuple(sorted((i.placement, str(i.profile)) for i in gpu.instances))
        groups[(gpu.name, gpu.model, gpu.mode, gpu.problem, gpu.offers, present)].append(gpu)
    documents = {document["uuid"]: document for document in profiles_document(node)}
    for members in groups.values():
        gpu = members[0]
        count = "" if len(members) == 1 else f"{len(members)} x "
        lines.append(
            f"GPU {indexes([g.index for g in members])}: {count}{gpu.name} ({gpu.model}), MIG {mode_words(gpu)}"
        )
        if gpu.problem or gpu.geometry_unknown:
            lines.append(f"  ! {gpu.problem or gpu.geometry_unknown}")
        rows = [("PROFILE", "ID", "MEMORY", "SM", "STARTS", "SIZE", "MAX", "FITS NOW")]
        for told in documents[gpu.uuid]["profiles"]:
            remaining = told["remaining"]
            rows.append(
                (
                    told["name"],
                    str(told["profile_id"]),
                    size(told["memory_bytes"]),
                    str(told["multiprocessors"]),
                    ",".join(str(start) for start in told["placements"]["starts"]),
                    str(told["placements"]["size"]),
                    str(told["max_instances"]),
                    "-" if remaining is None else str(remaining),
                )
            )
        if len(rows) > 1:
            lines += columns(rows, indent="  ", right=frozenset({1, 2, 3, 5, 6, 7}))
        elif gpu.state is not nodes.GpuState.OK:
            lines.append(f"  its profiles cannot be read: it is {gpu.state.value}")
        elif not gpu.mig_capable:
            lines.append("  it cannot be split by MIG; time-slicing or MPS share it instead")
        elif not gpu.geometry_unknown:
            lines.append("  the driver tells its profiles only with MIG on")
        drawn = slices(gpu)
        if drawn:
            lines.append(f"  {drawn}")
    return "\n".join(lines)
