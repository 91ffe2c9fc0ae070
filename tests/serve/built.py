"""Snapshots and samples built by hand: small nodes whose every figure is known."""

from __future__ import annotations

import dataclasses
import random

from agent import errors, measures
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.reconcile import snapshot as snapshots

NOW = 1_700_000_000.0
FATAL = (48, 62, 64, 74, 79, 94, 95, 119, 120)


def uuid(index: int) -> str:
    return f"GPU-5a1c7e10-0000-4000-8000-{index:012d}"


def mig_uuid(index: int, instance: int, compute: int = 0) -> str:
    return f"MIG-5a1c7e10-{index:04d}-5000-8{compute:03d}-{instance:012d}"


def gpu(index: int = 0, **more: object) -> nodes.Gpu:
    """An H100 with MIG on and no instances."""
    base = nodes.Gpu(
        index=index,
        uuid=uuid(index),
        pci_bus_id=f"0000:{0x10 + index:02x}:00.0",
        name="NVIDIA H100 80GB HBM3",
        model="h100.80gb",
        architecture="hopper",
        minor=index,
        memory_bytes=80 * 2**30,
        mode=nodes.ModeState(current=True, pending=True),
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def instance(index: int, number: int, *, start: int = 0, holders: tuple[nodes.Holder, ...] = ()) -> nodes.GpuInstance:
    profile = profiles.parse("1g.10gb")
    device = nodes.ComputeInstance(
        id=0,
        profile=profile,
        profile_id=nodes.ProfileId(0),
        uuid=mig_uuid(index, number),
        multiprocessors=16,
        slices=1,
        holders=holders,
    )
    return nodes.GpuInstance(
        id=number,
        profile=profile,
        profile_id=nodes.ProfileId(19),
        placement=nodes.Placement(start, 1),
        memory_bytes=10 * 2**30,
        compute=(device,),
    )


def layout_of(*indexes: int) -> layouts.Layout:
    wanted = layouts.InstanceSpec(profiles.parse("1g.10gb"))
    return layouts.Layout(tuple(layouts.GpuLayout(uuid(index), mig=True, instances=(wanted,)) for index in indexes))


def plan_of(*gpus: plans.GpuPlan) -> plans.Plan:
    return plans.Plan(gpus)


def snapshot(**more: object) -> snapshots.Snapshot:
    """A node of two H100 that is as its layout wants it."""
    base = snapshots.Snapshot(
        phase=snapshots.Phase.CONVERGED,
        cycle=3,
        generation=2,
        started=NOW - 20,
        duration=0.25,
        settings=snapshots.SettingsView(sources=("/etc/gpunode/config.toml",), digest="abc123", declared=True),
        layout=layout_of(0, 1),
        node=nodes.NodeState(
            gpus=tuple(gpu(i, instances=(instance(i, 7),)) for i in (0, 1)),
            driver_version="550.90.07",
            nvml_version="12.550.90.07",
            cuda_version="12.4",
        ),
        plan=plan_of(plans.GpuPlan(uuid(0), 0), plans.GpuPlan(uuid(1), 1)),
        gpus_expected=2,
        last_success=NOW - 20,
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def drifted(index: int, *, managed: bool = True) -> plans.GpuPlan:
    return plans.GpuPlan(
        uuid(index), index, drift=(plans.Drift("missing", "1g.10gb at 0:1 is missing"),), managed=managed
    )


def blocked(index: int, kind: plans.BlockedKind = plans.BlockedKind.IN_USE, **more: object) -> plans.GpuPlan:
    return dataclasses.replace(drifted(index), blocked=plans.Blocked(kind, f"GPU {index} may not change"), **more)  # type: ignore[arg-type]


def bad_settings(good: bool = True) -> snapshots.Snapshot:
    """Newest settings invalid; with `good`, older ones stay in force."""
    problem = errors.Problem("error", "unknown-key", "unknown key", file="config.toml", line=3, key="gpunode.layot")
    view = snapshots.SettingsView(valid=False, declared=good, problems=(problem,))
    return snapshot(settings=view, reasons=(snapshots.Reason("settings-invalid", str(problem)),))


def instance_sample(
    index: int, number: int, *, start: int = 0, seed: int = 0, activity: bool = True
) -> measures.InstanceSample:
    chance = random.Random(f"{index}/{number}/{seed}")
    used = chance.randrange(1, 10 * 2**30)
    total = 10 * 2**30
    return measures.InstanceSample(
        id=number,
        profile="1g.10gb",
        start=start,
        size=1,
        first_seen=NOW - 100,
        memory=measures.Memory(total=total, used=used, free=total - used, reserved=0),
        bar1_used=2**20,
        activity=measures.Activity(*(round(chance.random(), 3) for _ in range(9))) if activity else None,
        memory_slices=1,
        engines={"copy": 1, "decoder": 1, "encoder": 0, "jpeg": 1, "ofa": 0},
        ecc_sram_uncorrected=0,
        compute=(
            measures.ComputeSample(
                id=0, uuid=mig_uuid(index, number), profile="1g.10gb", multiprocessors=16, slices=1, processes=1
            ),
        ),
    )


def gpu_sample(index: int = 0, *, instances: int = 1, seed: int = 0, **more: object) -> measures.GpuSample:
    """An H100 with MIG on, every figure of the table filled that such a GPU has."""
    chance = random.Random(f"{index}/{seed}")
    used = chance.randrange(1, 80 * 2**30)
    base = measures.GpuSample(
        index=index,
        uuid=uuid(index),
        pci_bus_id=f"0000:{0x10 + index:02x}:00.0",
        name="NVIDIA H100 80GB HBM3",
        up=True,
        taken=NOW - 1,
        minor=index,
        architecture="hopper",
        vbios_version="96.00.61.00.01",
        memory=measures.Memory(total=80 * 2**30, used=used, free=80 * 2**30 - used, reserved=600 * 2**20),
        bar1_total=128 * 2**30,
        bar1_used=2**21,
        activity=measures.Activity(*(round(chance.random(), 3) for _ in range(9))),
        power_watts=350.5 + index,
        power_limit_watts=700.0,
        energy_joules=1234567.5 + seed * 1000,
        temperatures={"core": 45.0, "memory": 52.0},
        temperature_limits={"slowdown": 87.0, "shutdown": 92.0},
        clocks={"graphics": 1.98e9, "sm": 1.98e9, "memory": 2.619e9, "video": 1.545e9},
        clocks_max={"graphics": 1.98e9, "sm": 1.98e9, "memory": 2.619e9, "video": 1.545e9},
        performance_state=0,
        clock_events={"gpu_idle": False, "sw_power_cap": True},
        clock_event_seconds={"sw_power_cap": 12.5},
        pcie_replays=0,
        pcie_transmit_bytes=5 * 2**30,
        pcie_receive_bytes=6 * 2**30,
        pcie_link_generation=5,
        pcie_link_width=16,
        nvlink_transmit_bytes=2**40,
        nvlink_receive_bytes=2**40,
        nvlinks_active=18,
        ecc={
            (severity, memory, lifetime): 0
            for severity in ("corrected", "uncorrected")
            for memory in ("dram", "sram")
            for lifetime in ("volatile", "aggregate")
        },
        remap_banks={"max": 640, "high": 0, "partial": 0, "low": 0, "none": 0},
        recovery_action="none",
        fabric_state="completed",
        processes=instances,
        mig_enabled=True,
        mig_pending=True,
        mig_instances_max=7,
        creatable={"1g.10gb": 7 - instances, "7g.80gb": 0},
        instances=tuple(instance_sample(index, 7 + i, start=i, seed=seed) for i in range(instances)),
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def whole_sample(index: int = 0, **more: object) -> measures.GpuSample:
    """An H100 with MIG off."""
    off: dict[str, object] = {
        "mig_enabled": False,
        "mig_pending": False,
        "creatable": {},
        "utilization": {"gpu": 0.75, "memory": 0.25, "encoder": 0.0, "decoder": 0.125},
        "remapped_rows": {"correctable": 1, "uncorrectable": 0},
        "remap_pending": False,
        "remap_failed": False,
    }
    return dataclasses.replace(gpu_sample(index, instances=0), **{**off, **more})  # type: ignore[arg-type]


def silent(index: int) -> measures.GpuSample:
    """A GPU that did not answer."""
    return measures.GpuSample(
        index=index,
        uuid=uuid(index),
        pci_bus_id="",
        name="NVIDIA H100 80GB HBM3",
        up=False,
        taken=NOW - 1,
        problem="a call hangs",
    )


def sample(*gpus: measures.GpuSample, **more: object) -> measures.Sample:
    found = gpus or (gpu_sample(0), gpu_sample(1))
    base = measures.Sample(
        taken=NOW - 1,
        generation=2,
        nvml_up=True,
        gpus=found,
        driver_version="550.90.07",
        nvml_version="12.550.90.07",
        cuda_version="12.4",
        nvml_initializations=1,
        collectors={
            "gpu": measures.Collector(True, 0.012, NOW - 1),
            "gpu-slow": measures.Collector(True, 0.02, NOW - 40),
        },
        event_watch_up=True,
        xid_errors={(one.uuid, "", "", xid): 0 for one in found for xid in FATAL},
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]
