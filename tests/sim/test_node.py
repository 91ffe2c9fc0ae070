"""What happens to a node: resets and their holders, reboots, processes, errors on order."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent import errors
from agent.sim import node as nodes

N: Any = pynvml
Open = Callable[..., Any]


def test_a_reset_is_refused_for_everybody_who_holds_the_gpu(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    with pytest.raises(errors.ResetRefused) as caught:
        it.node.reset()
    assert "nvidia-persistenced" in caught.value.holders
    assert any(f"(pid {os.getpid()})" in holder for holder in caught.value.holders)  # our own session
    N.nvmlShutdown()
    assert it.node.machine.stop_units(["nvidia-persistenced.service", "no.service"]) == ("nvidia-persistenced.service",)
    it.node.hold(2, name="dcgm")
    bus_ids = [gpu.spec.pci_bus_id for gpu in it.node.driver.gpus]
    it.node.machine.reset_gpus(bus_ids[:2])  # exactly these: the third is held
    with pytest.raises(errors.ResetRefused, match="dcgm"):
        it.node.machine.reset_gpus(bus_ids[2:3])
    it.node.stop_process(gpu=2)
    it.node.reset()
    it.node.machine.start_units(["nvidia-persistenced.service"])
    assert it.node.machine.unit_active("nvidia-persistenced.service")


def test_resets_can_be_impossible(nvml: Open) -> None:
    it = nvml('reset = "impossible"\n[[gpu]]\nmodel = "a100.40gb"\n', init=False)
    with pytest.raises(errors.ResetRefused, match="not supported"):
        it.node.reset()
    it.node.allow_reset(possible=True)
    it.node.reset()
    with pytest.raises(errors.ResetRefused, match="no GPU at this address"):
        it.node.machine.reset_gpus(["0000:ff:00.0"])


def test_a_reset_takes_instances_and_brings_a_pending_mode(nvml: Open) -> None:
    it = nvml('[[gpu]]\nmodel = "a100.40gb"\ncount = 2\n')
    for index in range(2):
        N.nvmlDeviceSetMigMode(it.gpu(index), 1)
    N.nvmlShutdown()
    it.node.reset([it.node.driver.gpus[0].spec.pci_bus_id])
    N.nvmlInit()
    assert [N.nvmlDeviceGetMigMode(it.gpu(i)) for i in range(2)] == [[1, 1], [0, 1]]
    N.nvmlDeviceCreateGpuInstance(it.gpu(), 19)
    N.nvmlShutdown()
    it.node.reset()
    N.nvmlInit()
    assert it.instances(it.gpu(), 19) == []
    assert N.nvmlDeviceGetMigMode(it.gpu(1)) == [1, 1]


def test_without_root_there_is_no_reset(nvml: Open) -> None:
    it = nvml('root = false\n[[gpu]]\nmodel = "a100.40gb"\n', init=False)
    with pytest.raises(errors.ResetRefused, match="not permitted"):
        it.node.reset()


@pytest.mark.parametrize(("key", "mode"), [("a100.40gb", [1, 1]), ("h100.80gb", [0, 0])])
def test_a_reboot(nvml: Open, key: str, mode: list[int]) -> None:
    it = nvml(f'[[gpu]]\nmodel = "{key}"\nmode-change = "immediate"\n')
    N.nvmlDeviceSetMigMode(it.gpu(), 1)
    instance = N.nvmlDeviceCreateGpuInstance(it.gpu(), 19)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    it.node.start_process(0, gpu_instance=N.nvmlGpuInstanceGetInfo(instance).id)
    it.node.damage(0, ecc={"corrected/dram": 2}, remapped_correctable=1)
    boot = it.node.machine.boot_id()
    gpu = it.gpu()
    it.node.machine.request_reboot("mode change")
    assert it.node.reboot_requested == "mode change"
    it.clock.now += 100
    it.node.reboot()
    assert it.node.reboot_requested is None
    assert it.node.machine.boot_id() != boot
    assert it.code(N.nvmlDeviceGetName, gpu) == 1  # the session has died with the old boot
    N.nvmlInit()
    gpu = it.gpu()
    assert N.nvmlDeviceGetMigMode(gpu) == mode
    assert it.node.processes() == ()
    assert it.code(it.instances, gpu, 19) == (0 if mode[0] else 3)
    assert N.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 0
    assert N.nvmlDeviceGetTotalEccErrors(gpu, 0, 1) == 2
    assert N.nvmlDeviceGetRemappedRows(gpu)[0] == 1
    assert N.nvmlDeviceGetTotalEnergyConsumption(gpu) == 0


def test_a_pending_mode_comes_with_the_reboot(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    N.nvmlDeviceSetMigMode(it.gpu(), 1)
    it.node.reboot()
    N.nvmlInit()
    assert N.nvmlDeviceGetMigMode(it.gpu()) == [1, 1]


def test_a_lost_gpu_is_lost_to_every_call_until_a_reboot(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    gpu, other = it.gpu(0), it.gpu(1)
    events = N.nvmlEventSetCreate()
    N.nvmlDeviceRegisterEvents(gpu, 8, events)
    it.node.lose(0)
    assert N.nvmlEventSetWait_v2(events, 1000).eventData == 79
    assert N.nvmlDeviceGetCount() == 2
    assert it.code(N.nvmlDeviceGetName, gpu) == 15
    assert it.code(it.gpu, 0) == 15
    assert it.code(N.nvmlDeviceGetHandleByUUID, it.node.driver.gpus[0].spec.uuid) == 15
    assert N.nvmlDeviceGetName(other)
    with pytest.raises(nodes.SimulationError, match="fallen off the bus"):
        it.node.start_process(0)
    N.nvmlShutdown()
    with pytest.raises(errors.ResetRefused, match="only a reboot"):
        it.node.reset()
    it.node.reboot()
    N.nvmlInit()
    assert N.nvmlDeviceGetName(it.gpu(0))


def test_a_lost_gpu_keeps_its_mig_devices_from_being_found(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    N.nvmlGpuInstanceCreateComputeInstance(N.nvmlDeviceCreateGpuInstance(gpu, 19), 0)
    uuid = N.nvmlDeviceGetUUID(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))
    it.node.lose(0)
    assert it.code(N.nvmlDeviceGetHandleByUUID, uuid) == 15


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpu": 9}, "there is no GPU 9"),
        ({"gpu": 0}, "say which GPU instance"),
        ({"gpu": 0, "gpu_instance": 1}, "no compute instance in a GPU instance 1"),
        ({"gpu": 0, "gpu_instance": 13, "compute_instance": 5}, "no compute instance 5"),
        ({"gpu": 1, "gpu_instance": 1}, "MIG off"),
        ({"gpu": 1, "kind": "game"}, "compute, graphics or mps"),
        ({"gpu": 1, "activity": 2}, "from 0 to 1"),
    ],
)
def test_a_process_that_could_not_be_is_refused(nvml: Open, arguments: dict[str, Any], says: str) -> None:
    it = nvml('[[gpu]]\nmodel = "h100.80gb"\ncount = 2\ngi-id-map = "A"\n')
    N.nvmlGpuInstanceCreateComputeInstance(N.nvmlDeviceCreateGpuInstance(it.enable(), 19), 0)
    with pytest.raises(nodes.SimulationError, match=says):
        it.node.start_process(**arguments)


def test_a_holder_needs_something_to_hold(nvml: Open) -> None:
    it = nvml()
    with pytest.raises(nodes.SimulationError, match="no such instance"):
        it.node.hold(0, gpu_instance=3)
    pid = it.node.hold(0, name="nvsm")
    assert it.node.processes()[0]["kind"] == "open-file"
    assert it.node.stop_process(pid) == 1
    assert it.node.stop_process() == 0


def test_a_process_tied_to_one_that_has_ended_is_gone(nvml: Open, tmp_path: Path) -> None:
    it = nvml(state=tmp_path / "S")
    gpu = it.enable()
    instance = N.nvmlDeviceCreateGpuInstance(gpu, 19)
    compute = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    number = N.nvmlGpuInstanceGetInfo(instance).id
    script = (
        "import sys; from pathlib import Path; from agent.sim import node\n"
        "n = node.open_node('h100.80gb', state=Path(sys.argv[1]))\n"
        "n.start_process(0, gpu_instance=int(sys.argv[2]), tied=True)\n"
        "n.hold(0, tied=True)\n"
        "print('on', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "S"), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "on\n"
    assert it.code(N.nvmlComputeInstanceDestroy, compute) == 19
    holder.communicate()
    assert N.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    assert it.node.processes() == ()
    N.nvmlComputeInstanceDestroy(compute)


def test_damage_of_an_unknown_kind_is_refused(nvml: Open) -> None:
    with pytest.raises(nodes.SimulationError, match="ECC errors are"):
        nvml().node.damage(0, ecc={"wrong": 1})


# --- faults


def test_the_nth_call_fails_and_no_other(nvml: Open) -> None:
    it = nvml()
    gpu = it.gpu()
    it.node.fail("nvmlDeviceGetName", 999, skip=2, times=2)
    assert [it.code(N.nvmlDeviceGetName, gpu) for _ in range(6)] == [0, 0, 999, 999, 0, 0]


def test_a_fault_of_one_gpu_spares_the_others(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    first, second = it.gpu(0), it.gpu(1)
    it.node.fail("nvmlDeviceGet*", 15, gpu=1, times=0)
    assert [it.code(N.nvmlDeviceGetName, gpu) for gpu in (first, second)] == [0, 15]
    assert it.code(it.gpu, 1) == 15
    assert it.code(it.gpu, 0) == 0
    assert it.code(N.nvmlDeviceGetHandleByUUID, it.node.driver.gpus[1].spec.uuid) == 15
    assert it.node.faults.listed()[0].seen == 3
    it.node.release()
    assert it.code(it.gpu, 1) == 0


def test_a_failed_change_has_not_happened(nvml: Open) -> None:
    it = nvml()
    gpu = it.enable()
    it.node.fail("nvmlDeviceCreateGpuInstance", 999)
    assert it.code(N.nvmlDeviceCreateGpuInstance, gpu, 19) == 999
    assert it.instances(gpu, 19) == []
    assert it.node.mutations == 1


def test_init_can_fail_as_without_a_driver(nvml: Open) -> None:
    it = nvml(init=False)
    it.node.fail("nvmlInitWithFlags", 9)
    assert it.code(N.nvmlInit) == 9
    assert it.code(N.nvmlInit) == 0


def test_a_delay_holds_no_lock(nvml: Open) -> None:
    it = nvml("h100.80gb:2")
    first, second = it.gpu(0), it.gpu(1)
    it.node.delay("nvmlDeviceGetName", 0.4, gpu=0)
    slow = threading.Thread(target=N.nvmlDeviceGetName, args=(first,))
    began = time.monotonic()
    slow.start()
    assert N.nvmlDeviceGetName(second)
    assert N.nvmlDeviceGetUUID(first)
    assert time.monotonic() - began < 0.3
    slow.join()
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("code", [0, 999])
def test_a_hang_blocks_until_released_and_then_completes_or_fails(nvml: Open, code: int) -> None:
    it = nvml()
    gpu = it.enable()
    order = it.node.hang("nvmlDeviceCreateGpuInstance", code=code)
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(it.code(N.nvmlDeviceCreateGpuInstance, gpu, 19)), daemon=True
    )
    thread.start()
    thread.join(0.15)
    assert thread.is_alive()
    assert N.nvmlDeviceGetName(gpu)  # the lock is free
    assert it.instances(gpu, 19) == []
    it.node.release(order)
    thread.join(5)
    assert answers == [code]
    assert len(it.instances(gpu, 19)) == (1 if code == 0 else 0)


def test_a_hang_ends_when_the_node_is_closed(nvml: Open) -> None:
    it = nvml()
    it.node.hang("nvmlDeviceGetName", gpu=0)
    gpu = it.gpu()
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(it.code(N.nvmlDeviceGetName, gpu)), daemon=True)
    thread.start()
    thread.join(0.1)
    it.node.close()
    thread.join(5)
    assert not thread.is_alive()


def test_another_process_places_and_withdraws_orders(nvml: Open, tmp_path: Path) -> None:
    it = nvml(state=tmp_path / "S")
    gpu = it.gpu()
    other = nodes.open_node("h100.80gb", state=tmp_path / "S")
    other.hang("nvmlDeviceGetName")
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(it.code(N.nvmlDeviceGetName, gpu)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    other.release()
    thread.join(5)
    assert answers == [0]
    other.xid(0, 43)
    other.close()


def test_events_of_another_process_arrive(nvml: Open, tmp_path: Path) -> None:
    it = nvml(state=tmp_path / "S")
    events = N.nvmlEventSetCreate()
    N.nvmlDeviceRegisterEvents(it.gpu(), 8, events)
    other = nodes.open_node("h100.80gb", state=tmp_path / "S")
    threading.Timer(0.05, lambda: other.xid(0, 48)).start()
    assert N.nvmlEventSetWait_v2(events, 5000).eventData == 48
    other.close()


def test_bad_orders_are_refused(nvml: Open) -> None:
    it = nvml()
    with pytest.raises(nodes.SimulationError, match="fail, delay, hang"):
        it.node.faults.order("nvmlDeviceGetName", "explode")
    with pytest.raises(nodes.SimulationError, match="no GPU 4"):
        it.node.fail("nvmlDeviceGetName", gpu=4)


def test_faults_of_a_node_file(nvml: Open) -> None:
    it = nvml(
        '[[gpu]]\nmodel = "h100.80gb"\n[[fault]]\ncall = "nvmlDeviceGetName"\naction = "fail"\ncode = 4\nskip = 1\n'
    )
    assert [it.code(N.nvmlDeviceGetName, it.gpu()) for _ in range(3)] == [0, 4, 0]


def test_latency_is_outside_the_locks(nvml: Open) -> None:
    it = nvml('[latency]\ncreate-gi = 0.3\nread = 0.001\n[[gpu]]\nmodel = "h100.80gb"\n')
    gpu = it.enable()
    began = time.monotonic()
    thread = threading.Thread(target=N.nvmlDeviceCreateGpuInstance, args=(gpu, 19))
    thread.start()
    for _ in range(5):
        N.nvmlDeviceGetName(gpu)
    assert time.monotonic() - began < 0.25
    thread.join()
    assert time.monotonic() - began >= 0.3
    assert it.node.library.latency_of("destroy-gi") == 0
    assert it.node.library.latency_of("pcie-throughput") == 0.02
