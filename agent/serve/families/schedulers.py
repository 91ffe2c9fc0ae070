"""What schedulers will see of the node, and what around it will hurt somebody."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View


def _advertised(view: View) -> Iterator[Row]:
    if view.advertised is None:
        return
    plugin = view.advertised.device_plugin
    for strategy, resources in (("none", plugin.none), ("single", plugin.single), ("mixed", plugin.mixed)):
        for resource, count in sorted((resources or {}).items()):
            yield (strategy, resource), float(count)
    kinds = collections.Counter(f"{device.attributes['type']}.nvidia.com" for device in view.advertised.dra)
    # NVIDIA's device class of whole GPUs is called gpu.nvidia.com, of MIG devices mig.nvidia.com.
    for kind, count in sorted(kinds.items()):
        yield ("dra", kind), float(count)
    if view.advertised.ecs.refused is None:
        yield ("ecs", "GPU"), float(view.advertised.ecs.gpus)


def _findings(view: View) -> Iterator[Row]:
    for code, count in sorted(collections.Counter(finding.code for finding in view.health.findings).items()):
        yield (code,), float(count)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="advertised_resource",
        kind="gauge",
        help="How many of a resource a scheduler will see: none, single and mixed are the device plugin's strategies, "
        "dra its device classes, ecs GPUs; absent where it refuses.",
        labels=("strategy", "resource"),
        source="agent",
        rows=_advertised,
    ),
    Family(
        name="finding",
        kind="gauge",
        help="How many facts of this code around the GPUs will hurt somebody; absent when there is none.",
        labels=("code",),
        source="agent, files of the host",
        rows=_findings,
    ),
)
