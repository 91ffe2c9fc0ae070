from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent import errors, measures
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import gpus as doors
from agent.nvml import session as sessions

OK, LOST, HUNG = nodes.GpuState.OK, nodes.GpuState.LOST, nodes.GpuState.HUNG
PERSISTENCED = "nvidia-persistenced.service"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:10:1C.0", "0000:10:1c.0"),
        ("0000:10:1c.0", "0000:10:1c.0"),
        ("00010000:01:00.0", "0000:01:00.0"),
        ("x", "x"),
    ],
)
def test_address(text: str, address: str) -> None:
    assert doors.address(text) == address


async def test_no_driver_is_said_in_one_sentence(bench: Callable[..., Any], tmp_path: Path) -> None:
    made = await bench("h100.80gb:1", look=False)
    pynvml.nvmlLib = None
    gpus = doors.NvmlGpus(sessions.Session(root=tmp_path), machine=made.node.machine)
    for _ in range(2):
        with pytest.raises(
            errors.DriverError, match=r"^there is no NVIDIA driver here: libnvidia-ml.so.1 was not found$"
        ):
            await gpus.observe()
    assert gpus.versions() is None
    assert gpus.known() == ()
    assert not gpus.any_hung
    sample = await gpus.measure("GPU-x", slow=False)
    assert not sample.up
    await gpus.close()


async def test_identity_is_known_without_a_call(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge")
    before = made.counted()
    assert made.gpus.known() == made.uuids
    assert made.gpus.versions() == measures.Versions(driver="590.48.01", nvml="13.590.48.01", cuda="13.1")
    assert made.counted() == before


async def test_a_gpu_that_is_not_there(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    with pytest.raises(errors.NotFound, match="cannot find GPU GPU-none"):
        await made.gpus.observe_gpu("GPU-none")
    with pytest.raises(errors.ResetRefused):
        await made.gpus.reset(["GPU-none"])
    assert not (await made.gpus.measure("GPU-none", slow=True)).up


async def test_a_reset_needs_our_session_closed_and_works_then(
    bench: Callable[..., Any], until: Callable[..., Any]
) -> None:
    made = await bench("p4d.24xlarge")
    heard: list[measures.Event] = []
    made.gpus.watch(heard.append)
    await until(lambda: made.gpus.event_watch_up)
    uuids = made.uuids[:2]
    for uuid in uuids:
        await made.gpus.perform(uuid, plans.SetMigMode(True))
        await made.gpus.measure(uuid, slow=True)
    made.node.machine.stop_units([PERSISTENCED])
    with pytest.raises(errors.ResetRefused):
        await made.gpus.reset(uuids)
    await made.gpus.release()
    for refused in (
        made.gpus.observe(),
        made.gpus.observe_gpu(uuids[0]),
        made.gpus.perform(uuids[0], plans.SetMigMode(True)),
    ):
        with pytest.raises(errors.DriverError, match="let go of"):
            await refused
    assert not (await made.gpus.measure(uuids[0], slow=False)).up
    assert made.gpus.versions() is None
    await made.gpus.reset(uuids)
    await made.gpus.retake()
    assert made.gpus.initializations == 2
    state = await made.gpus.observe()
    assert [gpu.mode.current for gpu in state.gpus if gpu.mode] == [True, True] + [False] * 6
    assert (await made.gpus.measure(uuids[0], slow=True)).up
    await until(lambda: made.gpus.event_watch_up)
    made.node.xid(0, 48)
    await until(lambda: bool(heard))


async def test_what_a_reset_changes_is_read_anew(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a GPU's device file may be another one after a reset; its index goes by its place on the bus."""
    made = await bench("a100.40gb:2")
    assert [(gpu.index, gpu.minor) for gpu in (await made.gpus.observe()).gpus] == [(0, 0), (1, 1)]
    numbers = {0: 1, 1: 0}
    asked = pynvml.nvmlDeviceGetMinorNumber
    await made.gpus.release()
    made.node.machine.stop_units([PERSISTENCED])
    await made.gpus.reset(made.uuids)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMinorNumber", lambda handle: numbers[asked(handle)])
    await made.gpus.retake()
    after = (await made.gpus.observe()).gpus
    assert [(gpu.index, gpu.minor) for gpu in after] == [(0, 1), (1, 0)]
    assert tuple(gpu.uuid for gpu in after) == made.uuids


async def test_everything_in_the_driver_is_freed_before_the_session_ends(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    await made.mig_on()
    await made.split(0, ("1g.10gb", 0))
    for uuid in made.uuids:
        await made.gpus.measure(uuid, slow=True)
    assert made.node.library.samples
    await made.gpus.release()
    calls = made.counted()
    assert calls["nvmlGpmSampleAlloc"] == calls["nvmlGpmSampleFree"]
    assert calls["nvmlInitWithFlags"] == calls["nvmlShutdown"]
    await made.gpus.retake()


async def test_the_driver_goes_away_and_comes_back(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    made.node.reboot()  # every handle and the session with them are dead
    order = made.node.fail("nvmlInitWithFlags", 9, times=0)
    with pytest.raises(errors.DriverError, match="kernel module is not loaded"):
        await made.gpus.observe()
    assert made.gpus.versions() is None
    assert not (await made.gpus.measure(made.uuids[0], slow=True)).up
    made.node.release(order)
    state = await made.gpus.observe()
    assert [gpu.state for gpu in state.gpus] == [OK, OK]
    made.node.reboot()
    assert (await made.gpus.measure(made.uuids[0], slow=True)).up, "a visit finds back by itself"
    made.node.reboot()
    await made.gpus.perform(made.uuids[1], plans.SetMigMode(True))
    assert (await made.gpus.observe_gpu(made.uuids[1])).mode == nodes.ModeState(True, True)


async def test_a_stale_handle_is_taken_anew_once(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    uuid = made.uuids[0]
    before = made.counted()
    made.node.fail("nvmlDeviceGetMigMode", 2)
    assert (await made.gpus.observe_gpu(uuid)).state is OK
    assert (made.counted() - before)["nvmlDeviceGetHandleByPciBusId_v2"] == 1
    made.node.fail("nvmlDeviceGetMigMode", 2, times=0)
    gpu = await made.gpus.observe_gpu(uuid)
    assert gpu.state is nodes.GpuState.ERROR
    assert gpu.problem is not None
    made.node.release()
    assert (await made.gpus.observe_gpu(uuid)).state is OK


async def test_a_stale_handle_never_makes_a_change_twice(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:1")
    made.node.fail("nvmlDeviceGetMigMode", 2, skip=0)
    with pytest.raises(errors.InvalidArgument):
        await made.gpus.perform(made.uuids[0], plans.SetMigMode(True))
    assert made.counted()["nvmlDeviceSetMigMode"] == 1


async def test_a_gpu_that_leaves_the_bus_keeps_its_index_and_the_others_theirs(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge")
    gone = doors.address(made.node.driver.gpus[2].spec.pci_bus_id)
    made.node.lose(2)
    shutil.rmtree(made.node.machine.path(f"/sys/bus/pci/devices/{gone}"))
    state = await made.gpus.observe()
    assert [gpu.uuid for gpu in state.gpus] == list(made.uuids)
    assert [gpu.index for gpu in state.gpus] == list(range(8))
    assert (state.gpus[2].state, state.gpus[2].problem) == (LOST, "it has left the bus")
    with pytest.raises(errors.Lost):
        await made.gpus.perform(made.uuids[2], plans.SetMigMode(True))
    assert not (await made.gpus.measure(made.uuids[2], slow=False)).up


async def test_without_a_bus_to_look_at_the_driver_says_which_gpus_there_are(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge", look=False)
    shutil.rmtree(made.node.machine.path("/sys/bus"))
    state = await made.gpus.observe()
    assert [gpu.state for gpu in state.gpus] == [OK] * 8
    assert [gpu.index for gpu in state.gpus] == list(range(8))


async def test_devices_that_are_no_gpus_or_not_the_drivers_are_left_out(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    made = await bench("h100.80gb:2", look=False)
    bus = made.node.machine.path("/sys/bus/pci/devices")
    for name, vendor, kind in (("0000:01:00.0", "0x10de", "0x068000"), ("0000:02:00.0", "0x1d0f", "0x020000")):
        (bus / name).mkdir()
        (bus / name / "vendor").write_text(vendor + "\n")
        (bus / name / "class").write_text(kind + "\n")
    (bus / "0000:03:00.0").mkdir()
    (bus / "0000:03:00.0" / "vendor").write_text("0x10de\n")
    (bus / "0000:03:00.0" / "class").write_text("0x030200\n")
    driver = tmp_path / "drivers" / "vfio-pci"
    driver.mkdir(parents=True)
    (bus / "0000:03:00.0" / "driver").symlink_to(driver)
    assert [gpu.state for gpu in (await made.gpus.observe()).gpus] == [OK, OK]


async def test_a_gpu_on_the_bus_that_the_driver_does_not_show_is_lost(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2", look=False)
    device = made.node.machine.path("/sys/bus/pci/devices/0000:01:00.0")
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    (device / "device").write_text("0x2330\n")
    state = await made.gpus.observe()
    assert [gpu.state for gpu in state.gpus] == [LOST, OK, OK]
    assert [gpu.index for gpu in state.gpus] == [0, 1, 2]
    assert state.gpus[0].uuid == "unknown-0000:01:00.0"
    assert "the driver does not show it" in (state.gpus[0].problem or "")


async def test_steps_on_eight_gpus_run_side_by_side(bench: Callable[..., Any]) -> None:
    made = await bench("p5.48xlarge")
    made.node.delay("nvmlDeviceSetMigMode", 0.3)
    async with asyncio.timeout(1.5):  # one after the other they would take 2.4 s
        await asyncio.gather(*(made.gpus.perform(uuid, plans.SetMigMode(True)) for uuid in made.uuids))


@pytest.mark.parametrize("overdue", [True, False], ids=["told as hung", "not overdue yet"])
async def test_closing_takes_a_moment_whatever_hangs(
    bench: Callable[..., Any], until: Callable[..., Any], overdue: bool
) -> None:
    made = await bench("h100.80gb:2", read_deadline=0.1 if overdue else 30.0)
    made.node.hang("nvmlDeviceGetMigMode", gpu=0)
    task = asyncio.create_task(made.gpus.observe_gpu(made.uuids[0]))
    await until(lambda: made.node.faults.listed()[0].seen == 1)
    if overdue:
        await task
    began = time.monotonic()
    await made.gpus.close()
    assert time.monotonic() - began < 1.5
    assert made.gpus.hung() == (made.uuids[0],), "so that the process is ended without waiting for it"
    assert made.gpus.any_hung
    task.cancel()


async def test_no_thread_is_left_behind(bench: Callable[..., Any], until: Callable[..., Any]) -> None:
    def ours() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("gpunode-")}

    before = ours()
    made = await bench("p5.48xlarge")
    made.gpus.watch(lambda _: None)
    for uuid in made.uuids:
        await made.gpus.measure(uuid, slow=True)
    assert len(ours() - before) == 8 + 1 + 1, "a thread a GPU, one for the node, one for events"
    await made.gpus.close()
    await until(lambda: ours() <= before)


async def test_calls_are_counted_by_name(bench: Callable[..., Any]) -> None:
    made = await bench("h100.80gb:2")
    before = made.gpus.calls().get("nvmlDeviceGetMigMode", 0)
    await made.gpus.observe()
    assert made.gpus.calls()["nvmlDeviceGetMigMode"] - before == 2
