"""How busy GPUs and GPU instances are: GPM ratios on both, utilisation where MIG is off."""

from __future__ import annotations

from collections.abc import Callable

from agent import measures
from agent.serve.families.family import Family, per_gpu, per_instance

_RATIOS = (
    ("graphics_active", "graphics", "the graphics or compute engine was in use", 1),
    ("sm_active", "sm", "SMs had at least one warp, averaged over all SMs", 2),
    ("sm_occupancy", "sm_occupancy", "warps were resident, against the most that fit", 3),
    ("tensor_active", "tensor", "tensor cores were in use", 5),
    ("dram_active", "dram", "memory was read or written, against the most that it does", 10),
    ("fp64_active", "fp64", "FP64 pipes were in use", 11),
    ("fp32_active", "fp32", "FP32 pipes were in use", 12),
    ("fp16_active", "fp16", "FP16 pipes were in use", 13),
    ("integer_active", "integer", "integer pipes were in use", 4),
)


def _of_gpu(field: str) -> Callable[[measures.GpuSample], float | None]:
    def read(gpu: measures.GpuSample) -> float | None:
        value: float | None = None if gpu.activity is None else getattr(gpu.activity, field)
        return value

    return read


def _of_instance(field: str) -> Callable[[measures.InstanceSample], float | None]:
    def read(instance: measures.InstanceSample) -> float | None:
        value: float | None = None if instance.activity is None else getattr(instance.activity, field)
        return value

    return read


def _utilization(key: str) -> Callable[[measures.GpuSample], float | None]:
    return lambda gpu: gpu.utilization.get(key)


FAMILIES: tuple[Family, ...] = (
    per_gpu(
        "gpu_utilization_ratio",
        "Share of time in which a kernel ran on the GPU.",
        _utilization("gpu"),
        source="nvmlDeviceGetUtilizationRates",
        where="GPUs with MIG off",
        unit="ratio",
    ),
    per_gpu(
        "gpu_memory_utilization_ratio",
        "Share of time in which the memory of the GPU was read or written.",
        _utilization("memory"),
        source="nvmlDeviceGetUtilizationRates",
        where="GPUs with MIG off",
        unit="ratio",
    ),
    per_gpu(
        "gpu_encoder_utilization_ratio",
        "Share of time in which the video encoder was in use.",
        _utilization("encoder"),
        source="nvmlDeviceGetEncoderUtilization",
        where="GPUs with an encoder, MIG off",
        unit="ratio",
    ),
    per_gpu(
        "gpu_decoder_utilization_ratio",
        "Share of time in which the video decoder was in use.",
        _utilization("decoder"),
        source="nvmlDeviceGetDecoderUtilization",
        where="GPUs with a decoder, MIG off",
        unit="ratio",
    ),
    *(
        per_gpu(
            f"gpu_{name}_ratio",
            f"Share of the last sampling window of the GPU in which {text}.",
            _of_gpu(field),
            source=f"nvmlGpmMetricsGet, metric {metric}",
            where="Hopper and later",
            unit="ratio",
        )
        for name, field, text, metric in _RATIOS
    ),
    *(
        per_instance(
            f"mig_{name}_ratio",
            f"Share of the last sampling window of the GPU instance in which {text}.",
            _of_instance(field),
            source=f"nvmlGpmMigSampleGet, metric {metric}",
            where="Hopper and later with MIG on",
            unit="ratio",
        )
        for name, field, text, metric in _RATIOS
    ),
)
