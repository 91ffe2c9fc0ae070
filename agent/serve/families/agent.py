"""About gpunode itself: its build, its driver, its sampler and collectors."""

from __future__ import annotations

from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View, scalar


def _build(view: View) -> Iterator[Row]:
    yield (view.build.version, view.build.revision, view.build.python), 1.0


def _versions(view: View) -> Iterator[Row]:
    sample = view.sample
    if sample is not None and sample.nvml_up:
        yield (sample.driver_version or "", sample.nvml_version or "", sample.cuda_version or ""), 1.0


def _collector(read: str) -> Family:
    names = {
        "success": ("collector_success", "Whether the last visit of a collector succeeded.", ""),
        "duration": ("collector_duration_seconds", "How long the last visit of a collector took.", "seconds"),
        "last_success": (
            "collector_last_success_timestamp_seconds",
            "When a collector last succeeded, in Unix time.",
            "seconds",
        ),
    }
    name, text, unit = names[read]

    def rows(view: View) -> Iterator[Row]:
        collectors = {} if view.sample is None else view.sample.collectors
        for label, collector in collectors.items():
            value = getattr(collector, read)
            if value is not None:
                yield (label,), float(value)

    return Family(name=name, kind="gauge", help=text, labels=("collector",), unit=unit, source="agent", rows=rows)


def _gpu_taken(view: View) -> Iterator[Row]:
    for gpu in view.up:
        yield (gpu.uuid,), gpu.taken


def _simulated(view: View) -> Iterator[Row]:
    if view.snapshot is not None and view.snapshot.simulated is not None:
        yield (view.snapshot.simulated,), 1.0


FAMILIES: tuple[Family, ...] = (
    Family(
        name="build_info",
        kind="gauge",
        help="The running gpunode, always 1.",
        labels=("version", "revision", "python_version"),
        source="agent",
        rows=_build,
    ),
    Family(
        name="simulated_info",
        kind="gauge",
        help="Present and 1 where the node is simulated; no figure is then about real hardware.",
        labels=("node",),
        source="agent",
        where="simulated nodes",
        rows=_simulated,
    ),
    scalar(
        "nvml_up",
        "Whether the NVIDIA driver answered in the last sampling cycle.",
        lambda view: view.sample is not None and view.sample.nvml_up,
        source="nvmlInit_v2",
    ),
    Family(
        name="nvml_info",
        kind="gauge",
        help="Versions of driver, NVML and CUDA, always 1.",
        labels=("driver_version", "nvml_version", "cuda_version"),
        source="nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion, nvmlSystemGetCudaDriverVersion_v2",
        where="nodes with a driver",
        rows=_versions,
    ),
    scalar(
        "nvml_initializations_total",
        "How often the NVML session was opened.",
        lambda view: None if view.sample is None else view.sample.nvml_initializations,
        source="agent",
        kind="counter",
    ),
    scalar(
        "gpus",
        "GPUs that answered in the last sampling cycle.",
        lambda view: sum(1 for _ in view.up),
        source="agent, by nvmlDeviceGetCount_v2",
    ),
    scalar(
        "gpus_expected",
        "GPUs this machine should have: what the bus had at boot or what the instance type has, whichever is more.",
        lambda view: None if view.snapshot is None else view.snapshot.gpus_expected,
        source="PCI scan of sysfs, EC2 instance type",
    ),
    scalar(
        "sample_timestamp_seconds",
        "When the figures on this page were taken, in Unix time; its age is the age of the page.",
        lambda view: None if view.sample is None else view.sample.taken,
        source="agent",
        unit="seconds",
    ),
    Family(
        name="gpu_sample_timestamp_seconds",
        kind="gauge",
        help="When the figures of one GPU were taken, in Unix time; a slow GPU lags behind the others.",
        labels=("gpu_uuid",),
        unit="seconds",
        source="agent",
        where="every GPU",
        rows=_gpu_taken,
    ),
    _collector("success"),
    _collector("duration"),
    _collector("last_success"),
    scalar(
        "event_watch_up",
        "Whether GPU events (XIDs, MIG changes) are being waited for.",
        lambda view: None if view.sample is None else view.sample.event_watch_up,
        source="nvmlEventSetWait_v2",
        where="nodes with a driver",
    ),
    scalar(
        "topology_generation",
        "Rises with every change of GPUs, MIG modes or instances.",
        lambda view: None if view.snapshot is None else view.snapshot.generation,
        source="agent",
    ),
)
