"""What a GPU is, whether it answers, and its MIG mode."""

from __future__ import annotations

from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View, per_gpu, per_gpu_keyed


def _info(view: View) -> Iterator[Row]:
    for gpu in view.gpus:
        yield (
            (
                gpu.uuid,
                str(gpu.index),
                "" if gpu.minor is None else str(gpu.minor),
                gpu.pci_bus_id,
                gpu.name,
                gpu.architecture or "",
                gpu.vbios_version or "",
            ),
            1.0,
        )


def _up(view: View) -> Iterator[Row]:
    for gpu in view.gpus:
        yield (gpu.uuid,), float(gpu.up)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="gpu_info",
        kind="gauge",
        help="A GPU, always 1; join on gpu_uuid. The label gpu is the rank by PCI address.",
        labels=("gpu_uuid", "gpu", "minor_number", "pci_bus_id", "name", "architecture", "vbios_version"),
        source="nvmlDeviceGetUUID, GetPciInfo_v3, GetMinorNumber, GetName, GetArchitecture, GetVbiosVersion",
        where="every GPU",
        rows=_info,
    ),
    Family(
        name="gpu_up",
        kind="gauge",
        help="Whether the GPU answered when it was last visited; 0 for a lost or hung one, which has no other figures.",
        labels=("gpu_uuid",),
        source="agent",
        where="every GPU",
        rows=_up,
    ),
    per_gpu(
        "gpu_mig_enabled",
        "Whether MIG is on.",
        lambda gpu: gpu.mig_enabled,
        source="nvmlDeviceGetMigMode",
        where="GPUs that can do MIG",
    ),
    per_gpu(
        "gpu_mig_pending_enabled",
        "Whether MIG will be on after the next reset.",
        lambda gpu: gpu.mig_pending,
        source="nvmlDeviceGetMigMode",
        where="GPUs that can do MIG",
    ),
    per_gpu(
        "gpu_mig_instances_max",
        "The most MIG devices the GPU can have.",
        lambda gpu: gpu.mig_instances_max,
        source="nvmlDeviceGetMaxMigDeviceCount",
        where="GPUs that can do MIG",
    ),
    per_gpu(
        "gpu_mig_gpu_instances",
        "GPU instances there are now.",
        lambda gpu: None if gpu.mig_enabled is None else len(gpu.instances),
        source="nvmlDeviceGetGpuInstances",
        where="GPUs that can do MIG",
    ),
    per_gpu_keyed(
        "gpu_mig_creatable_instances",
        "How many more GPU instances of a profile still fit.",
        lambda gpu: gpu.creatable,
        label="profile",
        source="nvmlDeviceGetGpuInstanceRemainingCapacity",
        where="GPUs with MIG on (root)",
    ),
    per_gpu(
        "gpu_compute_processes",
        "Processes that compute on the GPU.",
        lambda gpu: gpu.processes,
        source="nvmlDeviceGetComputeRunningProcesses_v3",
    ),
    per_gpu(
        "gpu_performance_state",
        "Performance state, 0 the fastest.",
        lambda gpu: gpu.performance_state,
        source="nvmlDeviceGetPerformanceState",
    ),
)
