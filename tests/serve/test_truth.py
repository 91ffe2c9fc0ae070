"""Every series of a sample against the driver itself: asked call by call, at the same moment, and compared.

What is expected is written down here once more, straight from NVML's calls, without the meter, the
batches of fields, the generations and the lanes that stand between them and the exposition.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterator
from typing import Any

import pynvml as wrapper
import pytest
from prometheus_client import parser

from agent import measures
from agent.serve import board as boards
from agent.serve import exposition
from agent.serve.families import activity, every, faults, gpu, links, memory, mig, power
from tests.serve import simulated

nvml: Any = wrapper
"""pynvml, of which the types that are known to this project are only what gpunode itself uses."""
SEVEN = tuple(("1g.10gb", start) for start in range(7))
MIXED = {
    0: (("3g.20gb", 4), ("2g.10gb", 2), ("1g.5gb", 0)),
    1: (("7g.40gb", 0),),
    2: (),
    3: tuple(("1g.5gb", start) for start in range(7)),
}
GPM = {
    "graphics_active": 1,
    "sm_active": 2,
    "sm_occupancy": 3,
    "integer_active": 4,
    "tensor_active": 5,
    "dram_active": 10,
    "fp64_active": 11,
    "fp32_active": 12,
    "fp16_active": 13,
}
REASONS = (
    (1, "gpu_idle"), (2, "applications_clocks_setting"), (4, "sw_power_cap"), (8, "hw_slowdown"), (16, "sync_boost"),
    (32, "sw_thermal_slowdown"), (64, "hw_thermal_slowdown"), (128, "hw_power_brake_slowdown"),
    (256, "display_clock_setting"),
)  # fmt: skip
HELD_BACK = {
    "sw_power_cap": 74, "thermal": 75, "sync_boost": 76, "board_limit": 77, "low_utilization": 78, "reliability": 79,
    "sw_thermal_slowdown": 269, "hw_thermal_slowdown": 270, "hw_power_brake_slowdown": 271,
}  # fmt: skip
FATAL = (48, 62, 64, 74, 79, 94, 95, 119, 120)
ALL_LINKS = 0xFFFFFFFF

Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]


def ask(call: str, *arguments: Any) -> Any:
    """Call NVML; None for what this driver, this GPU or this mode does not offer."""
    try:
        return getattr(nvml, call)(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoData):
        return None


def scaled(value: Any, factor: float) -> Any:
    """Return a figure in the base unit; None where there is none."""
    return None if value is None else value * factor


def field(handle: Any, number: int, scope: int = 0) -> float | None:
    """Ask for one field alone."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])
    if answer.nvmlReturn != 0:
        return None
    return float({1: answer.value.uiVal, 3: answer.value.ullVal}[answer.valueType])


class Expected:
    """Collects what has to be on the page."""

    def __init__(self) -> None:
        self.series: Series = {}

    def put(self, name: str, value: Any, /, **labels: Any) -> None:
        if value is not None:
            key = (f"gpunode_{name}", tuple(sorted((label, str(text)) for label, text in labels.items())))
            assert key not in self.series
            self.series[key] = float(value)


class Windows:
    """GPM samples of a test's own, taken when the sampler's were: of a GPU (None) or a GPU instance."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int | None], list[Any]] = collections.defaultdict(list)

    def take(self, gpus: list[tuple[str, Any]]) -> None:
        for uuid, handle in gpus:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                continue
            for instance in (None, *sorted({g for g, _, _ in devices(handle)})):
                sample = nvml.nvmlGpmSampleAlloc()
                if instance is None:
                    nvml.nvmlGpmSampleGet(handle, sample)
                else:
                    nvml.nvmlGpmMigSampleGet(handle, instance, sample)
                self._taken[uuid, instance].append(sample)

    def ratio(self, uuid: str, instance: int | None, metric: int) -> float | None:
        taken = self._taken.get((uuid, instance), [])
        if len(taken) < 2:
            return None
        question = nvml.c_nvmlGpmMetricsGet_t()
        question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = 1
        question.sample1, question.sample2 = taken[-2:]
        question.metrics[0].metricId = metric
        nvml.nvmlGpmMetricsGet(question)
        return None if question.metrics[0].nvmlReturn else float(question.metrics[0].value) / 100


def cards() -> list[tuple[str, Any]]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [(nvml.nvmlDeviceGetUUID(handle), handle) for handle in handles]


def devices(handle: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield (GPU instance, compute instance, handle) of each MIG device of a GPU."""
    for index in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue
        yield nvml.nvmlDeviceGetGpuInstanceId(device), nvml.nvmlDeviceGetComputeInstanceId(device), device


def profiles_of(handle: Any) -> dict[str, Any]:
    found = {}
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = ask("nvmlDeviceGetGpuInstanceProfileInfoV", handle, number, 2)
        if info is not None:
            name = info.name
            found[(name.decode() if isinstance(name, bytes) else name).removeprefix("MIG ")] = info
    return found


def of_gpu(put: Any, uuid: str, handle: Any, rank: int, windows: Windows) -> None:
    """Ask one GPU for everything that stands on GPUs."""
    g = {"gpu_uuid": uuid}
    mode = ask("nvmlDeviceGetMigMode", handle)
    on = mode is not None and bool(mode[0])
    split = sorted({instance for instance, _, _ in devices(handle)})
    architectures = {7: "ampere", 8: "ada", 9: "hopper", 10: "blackwell"}
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    put(
        "gpu_info", 1, **g, gpu=rank, minor_number=nvml.nvmlDeviceGetMinorNumber(handle),
        pci_bus_id=bus.decode() if isinstance(bus, bytes) else bus,
        name=nvml.nvmlDeviceGetName(handle),
        architecture=architectures[nvml.nvmlDeviceGetArchitecture(handle)],
        vbios_version=nvml.nvmlDeviceGetVbiosVersion(handle),
    )  # fmt: skip
    put("gpu_up", 1, **g)
    info = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    for word in ("total", "used", "free", "reserved"):
        put(f"gpu_memory_{word}_bytes", getattr(info, word), **g)
    bar = ask("nvmlDeviceGetBAR1MemoryInfo", handle)
    if bar is not None:
        put("gpu_bar1_total_bytes", bar.bar1Total, **g)
        put("gpu_bar1_used_bytes", bar.bar1Used, **g)
    rates = ask("nvmlDeviceGetUtilizationRates", handle)
    if rates is not None:
        assert not on
        put("gpu_utilization_ratio", rates.gpu / 100, **g)
        put("gpu_memory_utilization_ratio", rates.memory / 100, **g)
        for word in ("Encoder", "Decoder"):
            told = ask(f"nvmlDeviceGet{word}Utilization", handle)
            put(f"gpu_{word.lower()}_utilization_ratio", None if told is None else told[0] / 100, **g)
    for name, metric in GPM.items():
        put(f"gpu_{name}_ratio", windows.ratio(uuid, None, metric), **g)
    # The meter reads these as fields in one batch; here each is asked by its own call.
    put("gpu_power_watts", scaled(ask("nvmlDeviceGetPowerUsage", handle), 1 / 1000), **g)
    put("gpu_energy_joules_total", scaled(ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1 / 1000), **g)
    put("gpu_power_limit_watts", scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1 / 1000), **g)
    put("gpu_temperature_celsius", ask("nvmlDeviceGetTemperature", handle, 0), **g, sensor="core")
    put("gpu_temperature_celsius", field(handle, 82), **g, sensor="memory")
    for word, number in (("slowdown", 1), ("shutdown", 0)):
        put(
            "gpu_temperature_limit_celsius",
            ask("nvmlDeviceGetTemperatureThreshold", handle, number),
            **g,
            threshold=word,
        )
    for number, word in enumerate(("graphics", "sm", "memory", "video")):
        put("gpu_clock_hertz", scaled(ask("nvmlDeviceGetClockInfo", handle, number), 1e6), **g, domain=word)
        put("gpu_clock_max_hertz", scaled(ask("nvmlDeviceGetMaxClockInfo", handle, number), 1e6), **g, domain=word)
    put("gpu_performance_state", ask("nvmlDeviceGetPerformanceState", handle), **g)
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    for bit, word in REASONS:
        put("gpu_clock_event_active", None if bits is None else bool(bits & bit), **g, reason=word)
    for word, number in HELD_BACK.items():
        nanoseconds = field(handle, number)
        put("gpu_clock_event_seconds_total", None if nanoseconds is None else nanoseconds / 1e9, **g, reason=word)
    put("gpu_pcie_replays_total", ask("nvmlDeviceGetPcieReplayCounter", handle), **g)
    put("gpu_pcie_transmit_bytes_total", field(handle, 197), **g)
    put("gpu_pcie_receive_bytes_total", field(handle, 198), **g)
    put("gpu_pcie_link_generation", ask("nvmlDeviceGetCurrPcieLinkGeneration", handle), **g)
    put("gpu_pcie_link_width", ask("nvmlDeviceGetCurrPcieLinkWidth", handle), **g)
    states = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(18)]
    if states[0] is not None:
        put("gpu_nvlink_links_active", sum(state or 0 for state in states), **g)
        for word, number in (("transmit", 138), ("receive", 139)):
            each = [field(handle, number, link) for link, state in enumerate(states) if state is not None]
            put(f"gpu_nvlink_{word}_bytes_total", 1024 * sum(kib for kib in each if kib is not None), **g)
    fabric = nvml.c_nvmlGpuFabricInfo_v3_t()
    fabric.version = nvml.nvmlGpuFabricInfo_v3  # the meter asks in the second version
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric))
    except nvml.NVMLError_NotSupported:
        pass
    else:
        for number, word in enumerate(("not-supported", "not-started", "in-progress", "completed")):
            put("gpu_fabric_state", fabric.state == number, **g, state=word)
    for severity, a in (("corrected", 0), ("uncorrected", 1)):
        for lifetime, b in (("volatile", 0), ("aggregate", 1)):
            for place, c in (("dram", 2), ("sram", 7)):
                count = ask("nvmlDeviceGetMemoryErrorCounter", handle, a, b, c)
                put("gpu_ecc_errors_total", count, **g, severity=severity, memory=place, lifetime=lifetime)
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    assert rows is None or not split
    if rows is not None:
        put("gpu_remapped_rows", rows[0], **g, cause="correctable")
        put("gpu_remapped_rows", rows[1], **g, cause="uncorrectable")
        put("gpu_remap_pending", rows[2], **g)
        put("gpu_remap_failed", rows[3], **g)
    banks = ask("nvmlDeviceGetRowRemapperHistogram", handle)
    for word in ("max", "high", "partial", "low", "none"):
        put("gpu_remap_banks", None if banks is None else getattr(banks, word), **g, availability=word)
    wanted = field(handle, 230)
    if wanted is not None:
        for number, word in enumerate(("none", "gpu-reset", "node-reboot", "drain-p2p", "drain-and-reset")):
            put("gpu_recovery_action", wanted == number, **g, action=word)
    put("gpu_compute_processes", len({p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}), **g)
    for xid in FATAL:
        put("xid_errors_total", 0, **g, gpu_instance_id="", compute_instance_id="", xid=xid)
    if mode is None:
        return
    put("gpu_mig_enabled", mode[0], **g)
    put("gpu_mig_pending_enabled", mode[1], **g)
    put("gpu_mig_gpu_instances", len(split), **g)
    if on:
        put("gpu_mig_instances_max", nvml.nvmlDeviceGetMaxMigDeviceCount(handle), **g)
        for name, profile in profiles_of(handle).items():
            left = nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile.id)
            put("gpu_mig_creatable_instances", left, **g, profile=name)


def of_instances(put: Any, uuid: str, handle: Any, windows: Windows) -> None:
    """Ask the MIG devices of a GPU for everything that stands on instances and devices."""
    done = set()
    by_id = {profile.id: (name, profile) for name, profile in profiles_of(handle).items()}
    for gi, ci, device in devices(handle):
        identity = nvml.nvmlDeviceGetUUID(device)
        name = nvml.nvmlDeviceGetName(device).partition(" MIG ")[2]
        share = nvml.nvmlDeviceGetAttributes(device)
        d = {"mig_uuid": identity}
        for xid in (48, 94, 95):
            put("xid_errors_total", 0, gpu_uuid=uuid, gpu_instance_id=gi, compute_instance_id=ci, xid=xid)
        put("mig_device_info", 1, **d, gpu_uuid=uuid, gpu_instance_id=gi, compute_instance_id=ci, profile=name)
        put("mig_multiprocessors", share.multiprocessorCount, **d)
        put("mig_compute_slices", share.computeInstanceSliceCount, **d)
        put("mig_compute_processes", len(nvml.nvmlDeviceGetComputeRunningProcesses(device)), **d)
        if gi in done:
            continue
        done.add(gi)
        i = {"gpu_uuid": uuid, "gpu_instance_id": gi}
        told = nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(handle, gi))
        put(
            "mig_gpu_instance_info", 1, **i, profile=by_id[told.profileId][0],
            placement_start=told.placement.start, placement_size=told.placement.size,
        )  # fmt: skip
        info = nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2)
        for word in ("total", "used", "free", "reserved"):
            put(f"mig_memory_{word}_bytes", getattr(info, word), **i)
        put("mig_bar1_used_bytes", nvml.nvmlDeviceGetBAR1MemoryInfo(device).bar1Used, **i)
        for metric, number in GPM.items():
            put(f"mig_{metric}_ratio", windows.ratio(uuid, gi, number), **i)
        put("mig_memory_slices", told.placement.size, **i)
        for engine, word in (
            ("copy", "sharedCopyEngineCount"), ("decoder", "sharedDecoderCount"), ("encoder", "sharedEncoderCount"),
            ("jpeg", "sharedJpegCount"), ("ofa", "sharedOfaCount"),
        ):  # fmt: skip
            put("mig_engines", getattr(share, word), **i, engine=engine)
        put("mig_ecc_sram_uncorrected_errors_total", nvml.nvmlDeviceGetMemoryErrorCounter(device, 1, 0, 7), **i)


def page(sample: measures.Sample) -> Series:
    board = boards.Board(now=sample.taken)
    board.publish_sample(sample)
    view = exposition.view_of(board, now=sample.taken, what=exposition.build())
    text = exposition.Renderer(process=False).render(view, exposition.TEXT).decode()
    found: Series = {}
    for metric in parser.text_string_to_metric_families(text):
        for one in metric.samples:
            found[one.name, tuple(sorted(one.labels.items()))] = one.value
    return found


MEASURED = {
    family.full_name
    for part in (activity, faults, gpu, links, memory, mig, power)
    for family in part.FAMILIES
    if family.name != "mig_first_seen_timestamp_seconds"
}


@pytest.mark.parametrize(
    ("spec", "wanted", "least"),
    [
        ("p5.48xlarge", dict.fromkeys(range(8), SEVEN), 2200),
        ("p4d.24xlarge", MIXED, 900),
        ("g5.12xlarge", {}, 250),
        ("g6f.large", {}, 20),
    ],
    ids=["8x7 H100", "A100 mixed", "no MIG", "G6f"],
)
async def test_every_series_of_a_sample_is_what_the_driver_answers(
    spec: str, wanted: dict[int, simulated.Instances], least: int
) -> None:
    async with simulated.sampled(spec, wanted) as made:
        for index in range(len(made.bench.uuids)):
            split = sorted({i.id for i in (await made.gpus.observe_gpu(made.bench.uuids[index])).instances})
            for place in split[:3] or (None,):
                if place is not None or index not in wanted:
                    made.node.start_process(index, gpu_instance=place, memory_mib=1500 + index, activity=0.7)
        made.node.damage(
            len(made.bench.uuids) // 2 + 1 if len(made.bench.uuids) > 1 else 0,
            ecc={"corrected/dram": 4, "uncorrected/sram": 1},
            remapped_correctable=2,
            remap_pending=True,
            replays=9,
        )
        windows = Windows()
        await made.cycle()
        there = cards()
        windows.take(there)
        sample = await made.cycle()
        windows.take(there)
        assert all(gpu.up for gpu in sample.gpus)
        found = page(sample)
        expected = Expected()
        for rank, (uuid, handle) in enumerate(there):
            of_gpu(expected.put, uuid, handle, rank, windows)
            of_instances(expected.put, uuid, handle, windows)
        measured = {key: value for key, value in found.items() if key[0] in MEASURED}
        assert sorted(measured.keys() - expected.series.keys()) == [], "nothing the driver did not say"
        assert sorted(expected.series.keys() - measured.keys()) == [], "nothing the driver said is left out"
        wrong = {
            key: (value, expected.series[key])
            for key, value in measured.items()
            if value != pytest.approx(expected.series[key], rel=1e-12)
        }
        assert wrong == {}
        assert len(measured) > least
        versions = dict(next(labels for name, labels in found if name == "gpunode_nvml_info"))
        assert versions["driver_version"] == nvml.nvmlSystemGetDriverVersion()
        assert versions["nvml_version"] == nvml.nvmlSystemGetNVMLVersion()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        assert versions["cuda_version"] == f"{cuda // 1000}.{cuda % 1000 // 10}"
        assert found["gpunode_gpus", ()] == nvml.nvmlDeviceGetCount()
        seen = [value for (name, _), value in found.items() if name == "gpunode_mig_first_seen_timestamp_seconds"]
        assert seen == [simulated.START + simulated.INTERVAL] * sum(map(len, wanted.values()))


def test_no_measured_family_is_left_out() -> None:
    """A family added to the parts above is compared by itself; one in a new part has to be taken up here."""
    others = {"agent", "allocation", "layout", "schedulers"}
    assert {family.full_name for family in every.FAMILIES} >= MEASURED
    rest = {family.name for family in every.FAMILIES if family.full_name not in MEASURED}
    assert {family.rows.__module__.rpartition(".")[2] for family in every.FAMILIES if family.name in rest} <= others | {
        "mig",
        "family",
    }
