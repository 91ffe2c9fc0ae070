"""Who has which device: the only families that name a pod, container or task.

Measurements never carry a pod: a series would change its identity whenever the pod does. Join
through `mig_device_info` instead; a device that several containers share has one series for each.
What the scheduler gave away is asked on the sampler's clock; who runs where is seen once a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent.mig import node as nodes
from agent.serve.families.family import Family, Row, View, scalar

_GIVEN = ("pod", "task")
"""Kinds of holders that a scheduler told of."""


def holders_of(
    view: View, seen: Iterable[nodes.Holder], *places: tuple[str, int | None, int | None]
) -> list[nodes.Holder]:
    """Return holders of one device: `seen` by the last cycle, what was given away as told since."""
    if view.given is None:
        return list(seen)
    return [holder for holder in seen if holder.kind not in _GIVEN] + [
        holder for place in places for holder in view.given.at(*place)
    ]


def _pods(device: str, holders: list[nodes.Holder]) -> Iterator[Row]:
    rows = dict.fromkeys(
        (device, holder.namespace or "", holder.pod or holder.name, holder.container or "")
        for holder in holders
        if holder.kind == "pod"
    )
    told = {labels[:3] for labels in rows}
    for holder in holders:
        # A process tells its pod and its container's id; where the kubelet told of that pod, that is the same.
        if holder.kind != "pod" and holder.pod is not None:
            labels = (device, holder.namespace or "", holder.pod, holder.container or "")
            if labels[:3] not in told:
                rows[labels] = None
    for labels in rows:
        yield labels, 1.0


def _tasks(device: str, holders: list[nodes.Holder]) -> Iterator[Row]:
    rows: dict[tuple[str, str, str, str], None] = {}
    for holder in holders:
        if holder.kind == "task":
            family = "" if holder.name == holder.task else holder.name  # only the ECS agent tells it
            rows[device, family, holder.task or "", holder.container or ""] = None
    for labels in rows:
        yield labels, 1.0


def _gpus(view: View) -> Iterator[nodes.Gpu]:
    if view.snapshot is not None and view.snapshot.node is not None:
        yield from view.snapshot.node.gpus


def _devices(view: View) -> Iterator[tuple[str, list[nodes.Holder]]]:
    for gpu in _gpus(view):
        for instance in gpu.instances:
            for compute in instance.compute:
                if compute.uuid is not None:
                    places = (gpu.uuid, instance.id, compute.id), (gpu.uuid, instance.id, None)
                    yield compute.uuid, holders_of(view, compute.holders + instance.holders, *places)


def _whole(view: View) -> Iterator[tuple[str, list[nodes.Holder]]]:
    for gpu in _gpus(view):
        yield gpu.uuid, holders_of(view, gpu.holders, (gpu.uuid, None, None))


def _device_pods(view: View) -> Iterator[Row]:
    for device, holders in _devices(view):
        yield from _pods(device, holders)


def _device_tasks(view: View) -> Iterator[Row]:
    for device, holders in _devices(view):
        yield from _tasks(device, holders)


def _gpu_pods(view: View) -> Iterator[Row]:
    for device, holders in _whole(view):
        yield from _pods(device, holders)


def _gpu_tasks(view: View) -> Iterator[Row]:
    for device, holders in _whole(view):
        yield from _tasks(device, holders)


def _kubelet(view: View) -> bool | None:
    if view.given is not None:
        return view.given.answered if view.given.who == "kubelet" else None
    node = None if view.snapshot is None else view.snapshot.node
    return node.allocations_known if node is not None and node.serving == "kubelet" else None


FAMILIES: tuple[Family, ...] = (
    scalar(
        "pod_resources_up",
        "Whether the kubelet told which pods have which devices when it was last asked.",
        _kubelet,
        source="kubelet PodResources",
        where="Kubernetes nodes",
    ),
    Family(
        name="mig_device_allocation_info",
        kind="gauge",
        help="A container that has a MIG device, always 1; join on mig_uuid.",
        labels=("mig_uuid", "namespace", "pod", "container"),
        source="kubelet PodResources, or process to cgroup",
        where="Kubernetes nodes",
        rows=_device_pods,
    ),
    Family(
        name="mig_device_task_info",
        kind="gauge",
        help="An ECS task that has a MIG device, always 1; join on mig_uuid.",
        labels=("mig_uuid", "task_family", "task_id", "container"),
        source="process to cgroup, ECS introspection",
        where="ECS instances",
        rows=_device_tasks,
    ),
    Family(
        name="gpu_allocation_info",
        kind="gauge",
        help="A container that has a whole GPU, always 1; join on gpu_uuid.",
        labels=("gpu_uuid", "namespace", "pod", "container"),
        source="kubelet PodResources, or process to cgroup",
        where="Kubernetes nodes",
        rows=_gpu_pods,
    ),
    Family(
        name="gpu_task_info",
        kind="gauge",
        help="An ECS task that has a whole GPU, always 1; join on gpu_uuid.",
        labels=("gpu_uuid", "task_family", "task_id", "container"),
        source="process to cgroup, ECS introspection",
        where="ECS instances",
        rows=_gpu_tasks,
    ),
)
