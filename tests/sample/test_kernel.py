"""XIDs of the kernel's log: each once in a boot, over restarts too, and matched with the driver's events."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import errors, measures
from agent.sample import kernel, loop
from tests.sample import fakes

XID_79 = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_94 = "NVRM: Xid (PCI:0000:00:00 GPU-I:05 GPU-CI:01): 94, pid=77, name=python, Contained"


class Host:
    """A machine in a folder, with a log that a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boot = "boot-1"
        self._records = 0
        self.log = root / "dev/kmsg"
        for name in ("dev", "proc", "run"):
            (root / name).mkdir()
        self.log.touch()
        (root / "proc/stat").write_text("cpu 1 2 3\nbtime 5000\n")

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def boot_id(self) -> str:
        return self.boot

    def write(self, text: str, *, at: float = 10.0) -> None:
        with self.log.open("a") as stream:
            stream.write(f"4,{self._records},{int(at * 1e6)},-;{text}\n SUBSYSTEM=pci\n")
        self._records += 1

    def reboot(self) -> None:
        self.boot = "boot-2"
        self.log.write_text("")
        self._records = 0


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def read(reader: kernel.KernelLog) -> list[int]:
    """Return what is new to this boot."""
    lines = reader.read()
    assert lines is not None
    return [line.xid for line in lines if not line.known]


def test_each_record_is_told_once_with_its_place_and_time(host: Host) -> None:
    clock = fakes.Clock(5020.0)
    reader = kernel.KernelLog(host, clock=clock)
    host.write("usb 1-1: new device")
    host.write(XID_79, at=12.5)
    host.write(XID_94, at=13.0)
    assert reader.read() == (
        kernel.Line("0000:01:00.0", 79, 5012.5),
        kernel.Line("0000:00:00.0", 94, 5013.0, gpu_instance_id=5, compute_instance_id=1),
    )
    assert reader.read() == ()
    host.write(XID_79)
    assert read(reader) == [79]


@pytest.mark.parametrize(
    ("at", "when"), [(3.0, 5020.0), (23.0, 5023.0), (900.0, 5025.0)], ids=["behind", "right", "ahead"]
)
def test_a_log_whose_clock_has_drifted_is_held_to_the_time_since_the_last_look(
    host: Host, at: float, when: float
) -> None:
    clock = fakes.Clock(5020.0)
    reader = kernel.KernelLog(host, clock=clock)
    assert reader.read() == ()
    clock.now = 5025.0
    host.write(XID_79, at=at)
    assert reader.read() == (kernel.Line("0000:01:00.0", 79, when, doubt=5.0),)


def test_a_restart_tells_nothing_again_and_a_reboot_begins_anew(host: Host) -> None:
    host.write(XID_79)
    assert read(kernel.KernelLog(host, clock=fakes.Clock())) == [79]
    host.write(XID_94)
    assert read(kernel.KernelLog(host, clock=fakes.Clock())) == [94]
    assert read(kernel.KernelLog(host, clock=fakes.Clock())) == []
    host.reboot()
    host.write(XID_94)
    assert read(kernel.KernelLog(host, clock=fakes.Clock())) == [94]


def test_after_a_restart_what_was_told_is_told_as_known(host: Host) -> None:
    host.write(XID_79, at=12.0)
    assert read(kernel.KernelLog(host, clock=fakes.Clock(5020.0))) == [79]
    host.write(XID_94, at=16.0)
    reader = kernel.KernelLog(host, clock=fakes.Clock(5020.0))
    assert reader.read() == (
        kernel.Line("0000:01:00.0", 79, 5012.0, known=True),
        kernel.Line("0000:00:00.0", 94, 5016.0, gpu_instance_id=5, compute_instance_id=1),
    )
    assert reader.read() == ()


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"boot_id": "boot-1"}', '{"boot_id": "boot-1", "sequence": "x"}'])
def test_a_record_of_the_place_that_cannot_be_used_is_none(host: Host, kept: str) -> None:
    path = host.path(kernel.KEPT)
    path.parent.mkdir(parents=True)
    path.write_text(kept)
    host.write(XID_79)
    assert read(kernel.KernelLog(host, clock=fakes.Clock())) == [79]


@pytest.mark.parametrize(("uptime", "when"), [("100.5 50.0", 1000.0 - 100.5 + 10.0), ("", 1000.0)])
def test_without_a_boot_time_the_uptime_serves(host: Host, uptime: str, when: float) -> None:
    host.path("/proc/stat").write_text("cpu 1\n")
    host.path("/proc/uptime").write_text(uptime)
    host.write(XID_79)
    lines = kernel.KernelLog(host, clock=fakes.Clock()).read()
    assert lines is not None
    assert lines[0].when == when


def test_where_there_is_no_log_it_says_none(host: Host) -> None:
    host.log.unlink()
    assert kernel.KernelLog(host, clock=fakes.Clock()).read() is None


class Bench:
    """A sampler that reads a kernel log, with clocks that stand."""

    def __init__(self, host: Host) -> None:
        self.source = fakes.FakeSource(2)
        self.clock = fakes.Clock(5020.0)
        self.monotonic = fakes.Clock(50.0)
        self.sampler = loop.Sampler(
            self.source,
            clock=self.clock,
            monotonic=self.monotonic,
            interval=5.0,
            publish=lambda _: None,
            kernel_log=kernel.KernelLog(host, clock=self.clock),
        )

    async def later(self, seconds: float) -> measures.Sample:
        self.clock.now += seconds
        self.monotonic.now += seconds
        return await self.sampler.cycle()


async def test_the_sampler_counts_what_only_the_log_tells(host: Host) -> None:
    bench = Bench(host)
    host.write(XID_79, at=10.0)
    host.write(XID_94.replace("0000:00:00", "0000:77:00"), at=10.0)
    await bench.later(0)
    sample = await bench.later(5)
    assert sample.xid_errors["GPU-1", "", "", 79] == 1
    assert sum(sample.xid_errors.values()) == 1, "a card that is not known here counts nowhere"
    assert sample.xid_last == {("GPU-1", "", "", 79): 5010.0}
    assert sample.collectors["kernel-log"].success
    host.write(XID_94, at=25.0)
    sample = await bench.later(5)
    assert ("GPU-0", "5", "1", 94) not in sample.xid_errors
    sample = await bench.later(5.0)
    assert sample.xid_errors["GPU-0", "5", "1", 94] == 1


async def test_what_hit_a_card_that_has_not_answered_yet_counts_once_it_does(host: Host) -> None:
    bench = Bench(host)
    bench.source.errors["GPU-1"] = errors.DriverError("it hangs")
    host.write(XID_79, at=10.0)
    for _ in range(3):
        assert not any((await bench.later(5)).xid_errors.values())
    del bench.source.errors["GPU-1"]
    await bench.later(5)
    assert (await bench.later(5)).xid_errors["GPU-1", "", "", 79] == 1
    assert bench.sampler._unplaced == []


async def test_after_a_restart_nothing_is_counted_again_and_nothing_is_forgotten(host: Host) -> None:
    bench = Bench(host)
    host.write(XID_79, at=18.0)
    await bench.later(0)
    assert (await bench.later(5)).xid_errors["GPU-1", "", "", 79] == 1
    bench = Bench(host)
    for _ in range(3):
        sample = await bench.later(5)
        assert not any(sample.xid_errors.values())
        assert sample.xid_last == {("GPU-1", "", "", 79): 5018.0}
    host.write(XID_79, at=34.0)
    await bench.later(5)
    assert (await bench.later(5)).xid_errors["GPU-1", "", "", 79] == 1


async def test_what_the_driver_told_too_is_one(host: Host) -> None:
    bench = Bench(host)
    await bench.later(0)
    bench.sampler._heard(measures.Event("xid", "GPU-0", gpu_instance_id=5, compute_instance_id=1, xid=94))
    host.write(XID_94, at=20.5)
    bench.monotonic.now += 5.0
    sample = await bench.later(1)
    sample = await bench.later(60)
    assert {key: count for key, count in sample.xid_errors.items() if count} == {("GPU-0", "5", "1", 94): 1}


@pytest.mark.parametrize("drift", [-40.0, -3.0, 0.0, 2.0, 700.0])
@pytest.mark.parametrize("first", ["event", "line"])
async def test_what_the_driver_told_too_is_one_however_far_the_log_s_clock_has_drifted(
    host: Host, drift: float, first: str
) -> None:
    bench = Bench(host)
    await bench.later(0)
    bench.clock.now += 4.5
    told = measures.Event("xid", "GPU-0", gpu_instance_id=5, compute_instance_id=1, xid=94)
    if first == "event":
        bench.sampler._heard(told)
    host.write(XID_94, at=24.4 + drift)
    await bench.later(0.5)
    if first == "line":
        bench.sampler._heard(told)
    await bench.later(5)
    await bench.later(5)
    sample = await bench.later(5)
    assert {key: count for key, count in sample.xid_errors.items() if count} == {("GPU-0", "5", "1", 94): 1}


async def test_a_log_that_breaks_is_a_collector_that_failed_and_one_that_is_not_there_is_none(host: Host) -> None:
    bench = Bench(host)
    await bench.later(0)
    host.log.unlink()
    host.log.mkdir()
    sample = await bench.later(5.0)
    assert sample.collectors["kernel-log"] == measures.Collector(False, 0.0, 5020.0)
    host.log.rmdir()
    sample = await bench.later(5.0)
    assert bench.sampler._kernel_log is None
