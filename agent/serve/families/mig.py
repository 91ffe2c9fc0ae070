"""GPU instances and MIG devices: identity, shares of the GPU, processes, errors."""

from __future__ import annotations

from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View, per_device, per_instance


def _instances(view: View) -> Iterator[Row]:
    for gpu, instance in view.instances:
        yield (gpu.uuid, str(instance.id), instance.profile, str(instance.start), str(instance.size)), 1.0


def _devices(view: View) -> Iterator[Row]:
    for gpu, instance in view.instances:
        for compute in instance.compute:
            if compute.uuid is not None:
                yield (compute.uuid, gpu.uuid, str(instance.id), str(compute.id), compute.profile), 1.0


def _engines(view: View) -> Iterator[Row]:
    for gpu, instance in view.instances:
        for engine, count in instance.engines.items():
            yield (gpu.uuid, str(instance.id), engine), float(count)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="mig_gpu_instance_info",
        kind="gauge",
        help="A GPU instance, always 1; join on gpu_uuid and gpu_instance_id. Placement counts memory slices.",
        labels=("gpu_uuid", "gpu_instance_id", "profile", "placement_start", "placement_size"),
        source="nvmlGpuInstanceGetInfo",
        where="GPUs with MIG on (root)",
        rows=_instances,
    ),
    Family(
        name="mig_device_info",
        kind="gauge",
        help="A MIG device (compute instance), always 1; join on mig_uuid.",
        labels=("mig_uuid", "gpu_uuid", "gpu_instance_id", "compute_instance_id", "profile"),
        source="nvmlDeviceGetUUID, GetGpuInstanceId, GetComputeInstanceId on a MIG device",
        where="GPUs with MIG on",
        rows=_devices,
    ),
    per_device(
        "mig_multiprocessors",
        "SMs of the MIG device.",
        lambda compute: compute.multiprocessors,
        source="nvmlDeviceGetAttributes_v2",
    ),
    per_device(
        "mig_compute_slices",
        "Compute slices of the MIG device.",
        lambda compute: compute.slices,
        source="nvmlDeviceGetAttributes_v2",
    ),
    per_device(
        "mig_compute_processes",
        "Processes that compute on the MIG device.",
        lambda compute: compute.processes,
        source="nvmlDeviceGetComputeRunningProcesses_v3, by instance id",
    ),
    per_instance(
        "mig_memory_slices",
        "Memory slices of the GPU instance.",
        lambda instance: instance.memory_slices,
        source="nvmlGpuInstanceGetInfo (size of the placement)",
    ),
    Family(
        name="mig_engines",
        kind="gauge",
        help="Copy and media engines of the GPU instance.",
        labels=("gpu_uuid", "gpu_instance_id", "engine"),
        source="nvmlDeviceGetAttributes_v2",
        where="GPUs with MIG on",
        rows=_engines,
    ),
    per_instance(
        "mig_ecc_sram_uncorrected_errors_total",
        "Uncorrected SRAM errors in the GPU instance since the driver was loaded.",
        lambda instance: instance.ecc_sram_uncorrected,
        source="nvmlDeviceGetMemoryErrorCounter on a MIG device (volatile)",
        kind="counter",
    ),
    per_instance(
        "mig_first_seen_timestamp_seconds",
        "When gpunode first saw this GPU instance, in Unix time; a new one under the same ids has a new time.",
        lambda instance: instance.first_seen,
        source="agent",
        unit="seconds",
    ),
)
