"""Framebuffer and BAR1, of GPUs and of GPU instances (once, however many share an instance)."""

from __future__ import annotations

from agent import measures
from agent.serve.families.family import Family, per_gpu, per_instance


def _of(memory: measures.Memory | None, field: str) -> int | None:
    value: int | None = None if memory is None else getattr(memory, field)
    return value


_FIELDS = (
    ("total", "Framebuffer of the {what}."),
    ("used", "Framebuffer in use in the {what}."),
    ("free", "Framebuffer free in the {what}."),
    ("reserved", "Framebuffer that the driver keeps for itself in the {what}."),
)

FAMILIES: tuple[Family, ...] = (
    *(
        per_gpu(
            f"gpu_memory_{field}_bytes",
            text.format(what="GPU"),
            lambda gpu, field=field: _of(gpu.memory, field),  # type: ignore[misc]
            source="nvmlDeviceGetMemoryInfo_v2",
            unit="bytes",
        )
        for field, text in _FIELDS
    ),
    per_gpu(
        "gpu_bar1_total_bytes",
        "BAR1 window of the GPU.",
        lambda gpu: gpu.bar1_total,
        source="nvmlDeviceGetBAR1MemoryInfo",
        unit="bytes",
    ),
    per_gpu(
        "gpu_bar1_used_bytes",
        "BAR1 window of the GPU in use.",
        lambda gpu: gpu.bar1_used,
        source="nvmlDeviceGetBAR1MemoryInfo",
        unit="bytes",
    ),
    *(
        per_instance(
            f"mig_memory_{field}_bytes",
            text.format(what="GPU instance"),
            lambda instance, field=field: _of(instance.memory, field),  # type: ignore[misc]
            source="nvmlDeviceGetMemoryInfo_v2 on a MIG device of the GPU instance",
            unit="bytes",
        )
        for field, text in _FIELDS
    ),
    per_instance(
        "mig_bar1_used_bytes",
        "BAR1 in use by the GPU instance (the window is shared by the whole GPU).",
        lambda instance: instance.bar1_used,
        source="nvmlDeviceGetBAR1MemoryInfo on a MIG device of the GPU instance",
        unit="bytes",
    ),
)
