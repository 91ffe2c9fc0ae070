"""What goes wrong on a GPU: ECC errors, rows remapped, recovery asked for, XIDs."""

from __future__ import annotations

from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View, per_gpu, per_gpu_keyed, states

RECOVERY_ACTIONS = ("none", "gpu-reset", "node-reboot", "drain-p2p", "drain-and-reset")


def _ecc(view: View) -> Iterator[Row]:
    for gpu in view.up:
        for (severity, memory, lifetime), count in gpu.ecc.items():
            yield (gpu.uuid, severity, memory, lifetime), float(count)


def _recovery(view: View) -> Iterator[Row]:
    for gpu in view.up:
        word = None if gpu.recovery_action is None else gpu.recovery_action.replace("_", "-")
        for action, value in states(word, RECOVERY_ACTIONS):
            yield (gpu.uuid, action), value


def _xids(view: View) -> Iterator[Row]:
    if view.sample is not None:
        for (uuid, instance, compute, xid), count in view.sample.xid_errors.items():
            yield (uuid, instance, compute, str(xid)), float(count)


def _xid_last(view: View) -> Iterator[Row]:
    if view.sample is not None:
        newest: dict[tuple[str, int], float] = {}
        for (uuid, _, _, xid), when in view.sample.xid_last.items():
            newest[uuid, xid] = max(when, newest.get((uuid, xid), when))
        for (uuid, xid), when in newest.items():
            yield (uuid, str(xid)), when


FAMILIES: tuple[Family, ...] = (
    Family(
        name="gpu_ecc_errors_total",
        kind="counter",
        help="ECC errors by severity, memory and lifetime (volatile: since the driver was loaded; aggregate: of the board).",
        labels=("gpu_uuid", "severity", "memory", "lifetime"),
        source="nvmlDeviceGetMemoryErrorCounter",
        where="GPUs with ECC",
        rows=_ecc,
    ),
    per_gpu_keyed(
        "gpu_remapped_rows",
        "Memory rows replaced by spare ones, by cause.",
        lambda gpu: gpu.remapped_rows,
        label="cause",
        source="NVML_FI_DEV_REMAPPED_COR, NVML_FI_DEV_REMAPPED_UNC",
        where="Ampere and later, while there are no GPU instances",
    ),
    per_gpu(
        "gpu_remap_pending",
        "Whether a row is remapped with the next reset.",
        lambda gpu: gpu.remap_pending,
        source="NVML_FI_DEV_REMAPPED_PENDING",
        where="Ampere and later, while there are no GPU instances",
    ),
    per_gpu(
        "gpu_remap_failed",
        "Whether a row could not be remapped.",
        lambda gpu: gpu.remap_failed,
        source="NVML_FI_DEV_REMAPPED_FAILURE",
        where="Ampere and later, while there are no GPU instances",
    ),
    per_gpu_keyed(
        "gpu_remap_banks",
        "Memory banks by how many spare rows they have left.",
        lambda gpu: gpu.remap_banks,
        label="availability",
        source="nvmlDeviceGetRowRemapperHistogram",
        where="Ampere and later",
    ),
    Family(
        name="gpu_recovery_action",
        kind="gauge",
        help="What the driver asks for to bring the GPU back: 1 for the one that holds.",
        labels=("gpu_uuid", "action"),
        source="NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        where="drivers that tell",
        rows=_recovery,
    ),
    Family(
        name="xid_errors_total",
        kind="counter",
        help="XID errors since gpunode started; ids are empty where the whole GPU is meant. Fatal codes start at 0, and an "
        "instance's go with it.",
        labels=("gpu_uuid", "gpu_instance_id", "compute_instance_id", "xid"),
        source="nvmlEventSetWait_v2, kernel log",
        where="every GPU",
        rows=_xids,
    ),
    Family(
        name="xid_last_timestamp_seconds",
        kind="gauge",
        help="When an XID was last reported, in Unix time.",
        labels=("gpu_uuid", "xid"),
        unit="seconds",
        source="agent",
        where="GPUs that reported one",
        rows=_xid_last,
    ),
)
