"""What a metric family is, and the few ways rows are read off a sample.

Rules of the house: base units; identity only in `*_info`; memory and activity per GPU instance,
devices per compute instance; pods only in `*_allocation_info`; unsupported is absent, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from agent import measures, records
from agent.host import holders as host_holders
from agent.mig import advertise
from agent.reconcile import snapshot as snapshots
from agent.serve import health as verdicts

PREFIX = "gpunode_"

Row = tuple[tuple[str, ...], float]
"""Label values in the order of the family's label names, and the value."""


@records.dataclass(frozen=True, slots=True)
class Build:
    """What is running where: agent version, source revision ("" when not known), Python version, host."""

    version: str
    revision: str
    python: str
    hostname: str = ""


@records.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything metrics are read from, at `now` (Unix seconds). `cycles` and `steps` are counts over the
    daemon's life."""

    now: float
    snapshot: snapshots.Snapshot | None
    sample: measures.Sample | None
    health: verdicts.Health
    build: Build
    cycles: Mapping[str, int]
    steps: Mapping[tuple[str, str], int]
    advertised: advertise.Advertised | None = None
    given: host_holders.Given | None = None

    @property
    def gpus(self) -> tuple[measures.GpuSample, ...]:
        """All GPUs of the sample, also those that did not answer."""
        return () if self.sample is None else self.sample.gpus

    @property
    def up(self) -> Iterator[measures.GpuSample]:
        """The GPUs that answered."""
        return (gpu for gpu in self.gpus if gpu.up)

    @property
    def instances(self) -> Iterator[tuple[measures.GpuSample, measures.InstanceSample]]:
        """The GPU instances of GPUs that answered."""
        return ((gpu, instance) for gpu in self.up for instance in gpu.instances)


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric family. `name` is without prefix and, for a counter of ours, with `_total`.

    `source` names the NVML call or the part that knows; `where` says which GPUs have it;
    `rows(view)` yields nothing where there is nothing to say.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: str
    where: str = "every node"
    rows: Callable[[View], Iterable[Row]]
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """The name as it is scraped."""
        return self.prefix + self.name


def gauge_or_none(value: float | bool | None) -> Iterator[Row]:
    """Yield the one row of a family without labels, nothing for None."""
    if value is not None:
        yield (), float(value)


def scalar(
    name: str,
    text: str,
    read: Callable[[View], float | bool | None],
    *,
    source: str,
    where: str = "every node",
    unit: str = "",
    kind: str = "gauge",
) -> Family:
    """Return a family of one series without labels."""
    return Family(
        name=name,
        kind=kind,
        help=text,
        source=source,
        where=where,
        unit=unit,
        rows=lambda view: gauge_or_none(read(view)),
    )


def per_gpu(
    name: str,
    text: str,
    read: Callable[[measures.GpuSample], float | bool | None],
    *,
    source: str,
    where: str = "every GPU",
    unit: str = "",
    kind: str = "gauge",
) -> Family:
    """Return a family with one series a GPU that answers, labelled gpu_uuid."""

    def rows(view: View) -> Iterator[Row]:
        for gpu in view.up:
            value = read(gpu)
            if value is not None:
                yield (gpu.uuid,), float(value)

    return Family(
        name=name, kind=kind, help=text, labels=("gpu_uuid",), source=source, where=where, unit=unit, rows=rows
    )


def per_gpu_keyed(
    name: str,
    text: str,
    read: Callable[[measures.GpuSample], Mapping[str, float] | Mapping[str, int] | Mapping[str, bool]],
    *,
    label: str,
    source: str,
    where: str = "every GPU",
    unit: str = "",
    kind: str = "gauge",
) -> Family:
    """Return a family with one series a GPU and key of a mapping, labelled gpu_uuid and `label`."""

    def rows(view: View) -> Iterator[Row]:
        for gpu in view.up:
            for key, value in read(gpu).items():
                yield (gpu.uuid, key), float(value)

    return Family(
        name=name, kind=kind, help=text, labels=("gpu_uuid", label), source=source, where=where, unit=unit, rows=rows
    )


def per_instance(
    name: str,
    text: str,
    read: Callable[[measures.InstanceSample], float | bool | None],
    *,
    source: str,
    where: str = "GPUs with MIG on",
    unit: str = "",
    kind: str = "gauge",
) -> Family:
    """Return a family with one series a GPU instance, labelled gpu_uuid and gpu_instance_id."""

    def rows(view: View) -> Iterator[Row]:
        for gpu, instance in view.instances:
            value = read(instance)
            if value is not None:
                yield (gpu.uuid, str(instance.id)), float(value)

    labels = ("gpu_uuid", "gpu_instance_id")
    return Family(name=name, kind=kind, help=text, labels=labels, source=source, where=where, unit=unit, rows=rows)


def per_device(
    name: str,
    text: str,
    read: Callable[[measures.ComputeSample], float | bool | None],
    *,
    source: str,
    where: str = "GPUs with MIG on",
    unit: str = "",
    kind: str = "gauge",
) -> Family:
    """Return a family with one series a MIG device (compute instance), labelled mig_uuid."""

    def rows(view: View) -> Iterator[Row]:
        for _, instance in view.instances:
            for compute in instance.compute:
                value = read(compute)
                if value is not None and compute.uuid is not None:
                    yield (compute.uuid,), float(value)

    return Family(
        name=name, kind=kind, help=text, labels=("mig_uuid",), source=source, where=where, unit=unit, rows=rows
    )


def states(active: str | None, known: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Yield (state, 1 or 0) for every known state, the active one included even when it is a new word;
    nothing when it is None."""
    if active is None:
        return
    for state in dict.fromkeys((*known, active)):
        yield state, float(state == active)
