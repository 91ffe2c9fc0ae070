"""Who has which device: the only families that name a pod, container or task.

Measurements never carry a pod: a series would change its identity whenever the pod does. Join
through `mig_device_info` instead; a device that several containers share has one series for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.mig import node as nodes
from agent.serve.families.family import Family, Row, View


def _pods(device: str, holders: tuple[nodes.Holder, ...]) -> Iterator[Row]:
    seen = set()
    for holder in holders:
        pod = holder.pod if holder.pod is not None else holder.name if holder.kind == "pod" else None
        if pod is None:
            continue
        labels = (device, holder.namespace or "", pod, holder.container or "")
        if labels not in seen:
            seen.add(labels)
            yield labels, 1.0


def _tasks(device: str, holders: tuple[nodes.Holder, ...]) -> Iterator[Row]:
    seen = set()
    for holder in holders:
        labels = (device, holder.name, holder.container or "")
        if holder.kind == "task" and labels not in seen:
            seen.add(labels)
            yield labels, 1.0


def _gpus(view: View) -> Iterator[nodes.Gpu]:
    if view.snapshot is not None and view.snapshot.node is not None:
        yield from view.snapshot.node.gpus


def _devices(view: View) -> Iterator[tuple[str, tuple[nodes.Holder, ...]]]:
    for gpu in _gpus(view):
        for instance in gpu.instances:
            for compute in instance.compute:
                if compute.uuid is not None:
                    yield compute.uuid, compute.holders + instance.holders


def _device_pods(view: View) -> Iterator[Row]:
    for device, holders in _devices(view):
        yield from _pods(device, holders)


def _device_tasks(view: View) -> Iterator[Row]:
    for device, holders in _devices(view):
        yield from _tasks(device, holders)


def _gpu_pods(view: View) -> Iterator[Row]:
    for gpu in _gpus(view):
        yield from _pods(gpu.uuid, gpu.holders)


def _gpu_tasks(view: View) -> Iterator[Row]:
    for gpu in _gpus(view):
        yield from _tasks(gpu.uuid, gpu.holders)


FAMILIES: tuple[Family, ...] = (
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
        labels=("mig_uuid", "task", "container"),
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
        labels=("gpu_uuid", "task", "container"),
        source="process to cgroup, ECS introspection",
        where="ECS instances",
        rows=_gpu_tasks,
    ),
)
