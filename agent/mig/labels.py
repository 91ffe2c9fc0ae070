"""The node labels that NVIDIA's GPU feature discovery will write for a node, by MIG strategy.

It reads the node as the device plugin does, but tells types apart by name, and it never refuses: where
`single` cannot be, it says MIG-INVALID and counts 0. Whoever selects nodes by label wants to know before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.mig import advertise
from agent.mig import node as nodes

_GPU = advertise.GPU_RESOURCE
_MIB = 1 << 20


def labels(node: nodes.NodeState, strategy: str) -> dict[str, str]:
    """Return the labels under `strategy` (none, single or mixed), {} on a node without GPUs.

    Shared resources (time-slicing) are not told here: gpunode does not configure them. Figures that
    nobody tells (engines of some parts) are left out.
    """
    gpus = [gpu for gpu in node.gpus if gpu.state is nodes.GpuState.OK]
    if not gpus:
        return {}
    split = [gpu for gpu in gpus if gpu.mode is not None and gpu.mode.current]
    whole = [gpu for gpu in gpus if gpu not in split]
    found = {"nvidia.com/mig.capable": "true" if any(gpu.mig_capable for gpu in gpus) else "false"}
    # A GPU with MIG on is labelled first and without sharing (replicas 0); a whole one overrides it.
    for gpu in (*split, *whole):
        count = sum(other.name == gpu.name for other in gpus)
        found |= _base(_GPU, [gpu.name], count, replicas=0 if gpu in split else 1)
        if gpu.memory_bytes:
            found[f"{_GPU}.memory"] = str(gpu.memory_bytes // _MIB)
    if strategy == "none":
        return found
    found["nvidia.com/mig.strategy"] = strategy
    devices = [
        (gpu, instance, compute)
        for gpu in split
        for instance in sorted(gpu.instances, key=lambda i: i.placement)
        for compute in sorted(instance.compute, key=lambda c: c.id)
    ]
    if strategy == "single":
        if not split:
            return found
        names = {advertise.device_name(compute) for _, _, compute in devices}
        empty = any(not any(instance.compute for instance in gpu.instances) for gpu in split)
        if empty or whole or len(names) != 1:
            found[f"{_GPU}.product"] = _product([split[0].name, "MIG", "INVALID"])
            return found | {f"{_GPU}.{word}": "0" for word in ("count", "replicas", "memory")}
    counts: dict[str, int] = {}
    for _, _, compute in devices:
        name = advertise.device_name(compute)
        counts[name] = counts.get(name, 0) + 1
    for gpu, instance, compute in reversed(devices):  # the first of a name is the one that is described
        name = advertise.device_name(compute)
        # Not the resource's name: here a plus stays a plus.
        resource = _GPU if strategy == "single" else f"nvidia.com/mig-{name}"
        found |= _base(resource, [gpu.name, "MIG", name], counts[name], replicas=1)
        found |= {f"{resource}.{word}": str(value) for word, value in _figures(gpu, instance, compute).items()}
    return found


def _base(resource: str, words: Iterable[str], count: int, *, replicas: int) -> dict[str, str]:
    return {
        f"{resource}.product": _product(words),
        f"{resource}.count": str(count),
        f"{resource}.replicas": str(replicas),
        f"{resource}.sharing-strategy": "none",
    }


def _product(words: Iterable[str]) -> str:
    return "-".join(word.replace(" ", "-") for word in words)


def _figures(gpu: nodes.Gpu, instance: nodes.GpuInstance, compute: nodes.ComputeInstance) -> Mapping[str, int]:
    offer = gpu.offer(instance.profile)
    engines = nodes.Engines() if offer is None else offer.engines
    told = {
        "memory": instance.memory_bytes // _MIB,
        "multiprocessors": compute.multiprocessors,
        "slices.gi": instance.profile.gpu_slices,
        "slices.ci": compute.slices,
        "engines.copy": engines.copy,
        "engines.decoder": engines.decoder,
        "engines.encoder": engines.encoder,
        "engines.jpeg": engines.jpeg,
        "engines.ofa": engines.ofa,
    }
    return {word: value for word, value in told.items() if value is not None}
