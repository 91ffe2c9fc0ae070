"""Metrics under dcgm-exporter's names, for dashboards and rules that were made for it.

Served apart at `/metrics/dcgm`, and only where asked for: these names break Prometheus's own rules
for names. Units are DCGM's (MiB, MHz, millijoules, percent). With MIG on, framebuffer, activity and
XIDs stand on the instances and everything else on the GPU, once: dcgm-exporter repeats the GPU's
power and temperature on each instance, and sums over them come out too high. The host's name is
given in both spellings, as releases differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from agent import measures, records
from agent.mig import node as nodes
from agent.serve.families import allocation
from agent.serve.families.family import Family, Row, View

LABELS = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "Hostname",
    "hostname",
    "DCGM_FI_DRIVER_VERSION",
    "container",
    "namespace",
    "pod",
)

_MIB = 2**20


@records.dataclass(frozen=True, slots=True)
class _Holder:
    container: str = ""
    namespace: str = ""
    pod: str = ""


def _pci(address: str) -> str:
    """Return a PCI address with DCGM's eight-digit domain, in capitals."""
    domain, _, rest = address.partition(":")
    return f"{domain.zfill(8)}:{rest}".upper() if rest else address


def _first_pod(holders: Iterable[nodes.Holder]) -> _Holder:
    for holder in holders:
        if holder.pod is not None:
            return _Holder(holder.container or "", holder.namespace or "", holder.pod)
    return _Holder()


def _pods(view: View) -> Mapping[tuple[str, int | None], _Holder]:
    """Return who has each GPU (id None) and GPU instance; where several share one, the first."""
    found: dict[tuple[str, int | None], _Holder] = {}
    if view.snapshot is None or view.snapshot.node is None:
        return found
    for gpu in view.snapshot.node.gpus:
        found[gpu.uuid, None] = _first_pod(allocation.holders_of(view, gpu.holders, (gpu.uuid, None, None)))
        for instance in gpu.instances:
            places = [(gpu.uuid, instance.id, compute.id) for compute in instance.compute]
            holders = allocation.holders_of(view, instance.in_use, (gpu.uuid, instance.id, None), *places)
            found[gpu.uuid, instance.id] = _first_pod(holders)
    return found


def _labels(
    view: View, gpu: measures.GpuSample, instance: measures.InstanceSample | None, holder: _Holder
) -> tuple[str, ...]:
    driver = "" if view.sample is None else view.sample.driver_version or ""
    return (
        str(gpu.index),
        gpu.uuid,
        _pci(gpu.pci_bus_id),
        "" if gpu.minor is None else f"nvidia{gpu.minor}",
        gpu.name,
        "" if instance is None else instance.profile,
        "" if instance is None else str(instance.id),
        view.build.hostname,
        view.build.hostname,
        driver,
        holder.container,
        holder.namespace,
        holder.pod,
    )


def _of_gpu(
    name: str, kind: str, text: str, read: Callable[[measures.GpuSample], float | bool | None], source: str
) -> Family:
    """Return a family that stands on GPUs only."""

    def rows(view: View) -> Iterator[Row]:
        pods = _pods(view)
        for gpu in view.up:
            value = read(gpu)
            if value is not None:
                yield _labels(view, gpu, None, pods.get((gpu.uuid, None), _Holder())), float(value)

    return Family(name=name, prefix="", kind=kind, help=text, labels=LABELS, source=source, rows=rows)


Read = Callable[[View, measures.GpuSample, measures.InstanceSample | None], float | None]


def _of_each(name: str, text: str, read: Read, source: str) -> Family:
    """Return a family that stands on the instances where MIG is on, else on the GPU."""

    def rows(view: View) -> Iterator[Row]:
        pods = _pods(view)
        for gpu in view.up:
            parts: tuple[measures.InstanceSample | None, ...] = gpu.instances if gpu.mig_enabled else (None,)
            for part in parts:
                value = read(view, gpu, part)
                if value is not None:
                    holder = pods.get((gpu.uuid, None if part is None else part.id), _Holder())
                    yield _labels(view, gpu, part, holder), float(value)

    return Family(name=name, prefix="", kind="gauge", help=text, labels=LABELS, source=source, rows=rows)


def _memory(pick: Callable[[measures.Memory], float | None]) -> Read:
    def read(_: View, gpu: measures.GpuSample, part: measures.InstanceSample | None) -> float | None:
        memory = gpu.memory if part is None else part.memory
        return None if memory is None else pick(memory)

    return read


def _mib(value: int | None) -> float | None:
    return None if value is None else float(value // _MIB)


def _used_share(memory: measures.Memory) -> float | None:
    usable = memory.total - (memory.reserved or 0)
    return memory.used / usable if usable > 0 else None


def _active(field: str) -> Read:
    def read(_: View, gpu: measures.GpuSample, part: measures.InstanceSample | None) -> float | None:
        activity = gpu.activity if part is None else part.activity
        value: float | None = None if activity is None else getattr(activity, field)
        return value

    return read


def _last_xid(view: View, gpu: measures.GpuSample, part: measures.InstanceSample | None) -> float | None:
    """Return the code of the last XID of a GPU or instance, 0 before the first."""
    sample = view.sample
    if sample is None:
        return None
    own = "" if part is None else str(part.id)
    seen = [
        (when, xid)
        for (uuid, instance, _, xid), when in sample.xid_last.items()
        # What hit the whole GPU hit each of its instances.
        if uuid == gpu.uuid and (part is None or instance in (own, ""))
    ]
    return float(max(seen)[1]) if seen else 0.0


def _percent(key: str) -> Callable[[measures.GpuSample], float | None]:
    return lambda gpu: None if key not in gpu.utilization else gpu.utilization[key] * 100


def _clock(domain: str) -> Callable[[measures.GpuSample], float | None]:
    return lambda gpu: None if domain not in gpu.clocks else gpu.clocks[domain] / 1e6


FAMILIES: tuple[Family, ...] = (
    _of_gpu("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", _clock("sm"), "gpunode_gpu_clock_hertz"),
    _of_gpu("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Memory clock (in MHz).", _clock("memory"), "gpunode_gpu_clock_hertz"),
    _of_gpu(
        "DCGM_FI_DEV_MEMORY_TEMP",
        "gauge",
        "Memory temperature (in C).",
        lambda gpu: gpu.temperatures.get("memory"),
        "gpunode_gpu_temperature_celsius",
    ),
    _of_gpu(
        "DCGM_FI_DEV_GPU_TEMP",
        "gauge",
        "GPU temperature (in C).",
        lambda gpu: gpu.temperatures.get("core"),
        "gpunode_gpu_temperature_celsius",
    ),
    _of_gpu(
        "DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", lambda gpu: gpu.power_watts, "gpunode_gpu_power_watts"
    ),
    _of_gpu(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "counter",
        "Energy used since the driver was loaded (in mJ).",
        lambda gpu: None if gpu.energy_joules is None else gpu.energy_joules * 1000,
        "gpunode_gpu_energy_joules_total",
    ),
    _of_gpu(
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "counter",
        "PCIe packets that had to be sent again.",
        lambda gpu: gpu.pcie_replays,
        "gpunode_gpu_pcie_replays_total",
    ),
    _of_gpu(
        "DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", _percent("gpu"), "gpunode_gpu_utilization_ratio"
    ),
    _of_gpu(
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "gauge",
        "Memory utilization (in %).",
        _percent("memory"),
        "gpunode_gpu_memory_utilization_ratio",
    ),
    _of_gpu(
        "DCGM_FI_DEV_ENC_UTIL",
        "gauge",
        "Encoder utilization (in %).",
        _percent("encoder"),
        "gpunode_gpu_encoder_utilization_ratio",
    ),
    _of_gpu(
        "DCGM_FI_DEV_DEC_UTIL",
        "gauge",
        "Decoder utilization (in %).",
        _percent("decoder"),
        "gpunode_gpu_decoder_utilization_ratio",
    ),
    _of_gpu(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped for uncorrectable errors.",
        lambda gpu: gpu.remapped_rows.get("uncorrectable"),
        "gpunode_gpu_remapped_rows",
    ),
    _of_gpu(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped for correctable errors.",
        lambda gpu: gpu.remapped_rows.get("correctable"),
        "gpunode_gpu_remapped_rows",
    ),
    _of_gpu(
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "gauge",
        "Whether remapping of rows has failed.",
        lambda gpu: gpu.remap_failed,
        "gpunode_gpu_remap_failed",
    ),
    _of_each(
        "DCGM_FI_DEV_XID_ERRORS",
        "Code of the last XID error, 0 before the first.",
        _last_xid,
        "gpunode_xid_errors_total",
    ),
    _of_each(
        "DCGM_FI_DEV_FB_TOTAL",
        "Framebuffer (in MiB).",
        _memory(lambda m: _mib(m.total)),
        "gpunode_*_memory_total_bytes",
    ),
    _of_each(
        "DCGM_FI_DEV_FB_FREE",
        "Framebuffer free (in MiB).",
        _memory(lambda m: _mib(m.free)),
        "gpunode_*_memory_free_bytes",
    ),
    _of_each(
        "DCGM_FI_DEV_FB_USED",
        "Framebuffer used (in MiB).",
        _memory(lambda m: _mib(m.used)),
        "gpunode_*_memory_used_bytes",
    ),
    _of_each(
        "DCGM_FI_DEV_FB_RESERVED",
        "Framebuffer reserved (in MiB).",
        _memory(lambda m: _mib(m.reserved)),
        "gpunode_*_memory_reserved_bytes",
    ),
    _of_each(
        "DCGM_FI_DEV_FB_USED_PERCENT",
        "Share of the framebuffer that is used (0 to 1, as DCGM has it).",
        _memory(_used_share),
        "gpunode_*_memory_used_bytes",
    ),
    *(
        _of_each(f"DCGM_FI_PROF_{name}", f"Ratio of time in which {text}.", _active(field), f"gpunode_*_{own}_ratio")
        for name, field, own, text in (
            ("GR_ENGINE_ACTIVE", "graphics", "graphics_active", "the graphics engine was active"),
            ("SM_ACTIVE", "sm", "sm_active", "SMs had a warp"),
            ("SM_OCCUPANCY", "sm_occupancy", "sm_occupancy", "warps were resident, against the most that fit"),
            ("PIPE_TENSOR_ACTIVE", "tensor", "tensor_active", "the tensor pipe was active"),
            ("DRAM_ACTIVE", "dram", "dram_active", "the memory interface was active"),
            ("PIPE_FP64_ACTIVE", "fp64", "fp64_active", "the fp64 pipe was active"),
            ("PIPE_FP32_ACTIVE", "fp32", "fp32_active", "the fp32 pipe was active"),
            ("PIPE_FP16_ACTIVE", "fp16", "fp16_active", "the fp16 pipe was active"),
        )
    ),
)
