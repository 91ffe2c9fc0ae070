"""The state file: shared, durable, never half written, and never of another node."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent.sim import node as nodes
from agent.sim import spec, store
from agent.sim import state as states

# A process that makes and removes instances for ever; it prints a line once it has begun.
CHURN = """
import sys, ctypes, pynvml as N
from pathlib import Path
from agent.sim import node
n = node.open_node("h100.80gb:2", state=Path(sys.argv[1]))
N.nvmlLib = n.library
N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(int(sys.argv[2]))
N.nvmlDeviceSetMigMode(gpu, 1)
print("begun", flush=True)
while True:
    try:
        made = N.nvmlDeviceCreateGpuInstance(gpu, 14)
        compute = N.nvmlGpuInstanceCreateComputeInstance(made, 1)
        N.nvmlComputeInstanceDestroy(compute)
        N.nvmlGpuInstanceDestroy(made)
    except N.NVMLError as error:
        if error.value not in (23,):
            raise
"""


def child(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHURN, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def opened(path: Path, name: str = "h100.80gb:2") -> nodes.SimulatedNode:
    return nodes.open_node(name, state=path)


def test_what_one_process_does_another_sees(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "S"), opened(tmp_path / "S")
    one.driver.set_mig_mode(one.driver.gpus[0], 1)
    two.driver.store.refresh()
    assert two.driver.gpus[0].state.mig
    made = two.driver.create_gpu_instance(two.driver.gpus[0], 19)
    two.driver.create_compute_instance(two.driver.gpus[0], made, 0)
    one.driver.store.refresh()
    assert list(one.driver.gpus[0].state.instances) == [made.id]
    assert one.mutations == two.mutations == 3
    pid = two.start_process(0, gpu_instance=made.id)
    assert [p["pid"] for p in one.processes()] == [pid]
    one.close()
    two.close()


def test_a_decision_is_made_on_the_newest_state(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "S"), opened(tmp_path / "S")
    one.driver.set_mig_mode(one.driver.gpus[0], 1)
    one.driver.create_gpu_instance(one.driver.gpus[0], 19, placement=(0, 1))
    with pytest.raises(Exception, match="23"):  # `two` has not looked since
        two.driver.create_gpu_instance(two.driver.gpus[0], 19, placement=(0, 1))
    one.close()
    two.close()


def test_a_node_outlives_the_process(tmp_path: Path) -> None:
    node = opened(tmp_path / "S")
    node.driver.set_mig_mode(node.driver.gpus[1], 1)
    node.driver.create_gpu_instance(node.driver.gpus[1], 0)
    node.close()
    again = opened(tmp_path / "S")
    assert again.driver.gpus[1].state.instances[0].profile == 0
    assert again.mutations == 2
    again.close()


def test_the_file_is_of_one_node(tmp_path: Path) -> None:
    opened(tmp_path / "S").close()
    with pytest.raises(nodes.SimulationError, match=r"it holds the state of h100\.80gb:2"):
        opened(tmp_path / "S", "h100.80gb:3")
    file = tmp_path / "lab.toml"
    file.write_text('[[gpu]]\nmodel = "h100.80gb"\n')
    opened(tmp_path / "T", str(file)).close()
    file.write_text('root = false\n[[gpu]]\nmodel = "h100.80gb"\n')
    with pytest.raises(nodes.SimulationError, match="its options differ"):
        opened(tmp_path / "T", str(file))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds something else; name another file"),
        ("root:x:0:0", "holds something else"),
        ('{"was": "gpunode-simulated-node"}', "no state of a simulated node"),
        ('{"format": "gpunode-simulated-node", "ver', "is damaged .*; remove it or name another file"),
        ('{"format": "gpunode-simulated-node", "version": 99}', "version is 99"),
        ('{"format": "gpunode-simulated-node", "version": 1}', "gpus"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "S").write_text(content)
    with pytest.raises(nodes.SimulationError, match=says):
        opened(tmp_path / "S")
    assert (tmp_path / "S").read_text() == content


def test_nothing_is_made_beside_what_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, says in (("passwd", "something else"), ("fifo", "not a regular file"), ("folder", "is a directory")):
        with pytest.raises(nodes.SimulationError, match=says):
            opened(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(nodes.SimulationError, match="cannot keep a simulated node"):
        opened(tmp_path / "file" / "S")


def test_what_cannot_be_written_has_not_happened(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    node = opened(folder / "S")
    # A directory where the temporary file goes: no disk is full on request.
    blocker = folder / f".S.{os.getpid()}.tmp"
    blocker.mkdir()
    with pytest.raises(nodes.SimulationError, match="cannot keep the simulated node"):
        node.driver.set_mig_mode(node.driver.gpus[0], 1)
    assert not node.driver.gpus[0].state.mig
    blocker.rmdir()
    node.driver.set_mig_mode(node.driver.gpus[0], 1)
    assert node.driver.gpus[0].state.mig
    node.close()


def test_a_killed_writer_never_leaves_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "S"
    reader = opened(path)
    draw = random.Random(1)
    for round_ in range(6):
        worker = child(path, round_ % 2)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "begun\n"
        time.sleep(draw.uniform(0.01, 0.06))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        states.from_json(json.loads(path.read_bytes()))
        reader.driver.store.refresh()
        written = states.from_json(json.loads(path.read_bytes()))
        assert written == reader.driver.store.node
        assert reader.reset_holders() == ()  # the dead process is no holder
        for gi in list(reader.driver.gpus[round_ % 2].state.instances.values()):  # whatever was left can be removed
            for ci in list(gi.compute.values()):
                reader.driver.destroy_compute_instance(reader.driver.gpus[round_ % 2], gi, ci)
            reader.driver.destroy_gpu_instance(reader.driver.gpus[round_ % 2], gi)
    reader.close()


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "S"
    node = opened(path)
    node.driver.set_mig_mode(node.driver.gpus[1], 1)
    worker = child(path, 0)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "begun\n"
    for _ in range(20):
        made = node.driver.create_gpu_instance(node.driver.gpus[1], 19)
        node.driver.destroy_gpu_instance(node.driver.gpus[1], made)
    seen = [s.pid for s in node.driver.live_sessions()]
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert seen == [worker.pid]
    document = json.loads(path.read_bytes())
    assert document["mutations"] == node.mutations
    assert node.mutations >= 1 + 40 + 1
    node.close()


def test_a_writer_that_died_between_is_noticed_by_the_file_itself(tmp_path: Path) -> None:
    dying, *others = (opened(tmp_path / "S") for _ in range(3))
    kept = dying.driver.store
    assert isinstance(kept, store.FileStore)
    for round_, unit in enumerate(("kubelet.service", "ecs.service")):
        dying.set_unit(unit, active=True)
        kept._counter[0] -= 1  # as if it had been killed after the rename, before telling
        for node in others:
            assert node.driver.store.node.units[unit] is False, round_
            node.driver.store.refresh()
            assert node.driver.store.node.units[unit] is True
    others[0].set_unit("kubelet.service", active=False)  # the next writer puts the counter right
    assert kept._counter[0] % 2 == 0
    others[1].driver.store.refresh()
    assert others[1].driver.store.node.units["kubelet.service"] is False
    for node in (dying, *others):
        node.close()


def test_nested_changes_are_written_once_at_the_end(tmp_path: Path) -> None:
    node = opened(tmp_path / "S")
    kept = node.driver.store
    assert isinstance(kept, store.FileStore)
    before = kept._counter[0]
    with kept.change() as outer:
        outer.serial += 1
        with kept.change() as inner:
            assert inner is outer
            inner.serial += 1
    assert kept._counter[0] == before + 2
    assert json.loads((tmp_path / "S").read_bytes())["serial"] == 2
    node.close()


def test_an_exception_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    node = opened(tmp_path / "S")
    before = (tmp_path / "S").read_bytes()
    with pytest.raises(ZeroDivisionError), node.driver.store.change():
        _ = 1 / 0
    assert (tmp_path / "S").read_bytes() == before
    node.close()


def test_looking_does_not_wait_for_a_change_of_another_thread(tmp_path: Path) -> None:
    node, other = opened(tmp_path / "S"), opened(tmp_path / "S")
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        with node.driver.store.change() as state:
            state.serial = 77
            inside.set()
            go_on.wait(5)

    thread = threading.Thread(target=slow)
    thread.start()
    inside.wait(5)
    began = time.monotonic()
    node.driver.store.refresh()
    other.driver.store.refresh()
    assert time.monotonic() - began < 1
    assert other.driver.store.node.serial == 0
    go_on.set()
    thread.join()
    other.driver.store.refresh()
    assert other.driver.store.node.serial == 77
    node.close()
    other.close()
    other.driver.store.refresh()  # a thread left behind may still look


def test_state_goes_through_json_unchanged() -> None:
    gpu = states.Gpu(mig=True, pending=False, ecc={"corrected/dram/volatile": 2})
    gpu.instances[7] = states.GpuInstance(7, 19, 0, 1, 3, {0: states.ComputeInstance(0, 0, 0, 1, 0, 4)})
    gpu.processes.append(states.Process(9, "x", 7, 0, 10, 0.5, 1.0, owner=(1, 2)))
    gpu.holders.append(states.Holder(9, "y", None, None))
    node = states.Node("n", "d", "b", 1.0, [gpu], units={"u": True})
    node.sessions.append(states.Session(1, 2, "t"))
    node.faults.append(states.Fault(1, "c", "fail"))
    node.emit(0, 8, 79, instance=1, compute=2)
    assert states.from_json(json.loads(json.dumps(states.to_json(node)))) == node


OPEN = """
import resource, sys
from pathlib import Path
from agent import errors
from agent.sim import node
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    node.open_node("h100.80gb:2", state=Path(sys.argv[1])).machine.path("/proc")
except errors.GpunodeError as error:
    print(error)
"""


@pytest.mark.parametrize("room", [0, 100], ids=["for nothing", "for the lock file only"])
def test_no_room_for_the_state_is_said_of_the_state(tmp_path: Path, room: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "S"), str(room)], capture_output=True, text=True, check=True
    )
    assert f"cannot keep a simulated node in {tmp_path / 'S'}: File too large" in ended.stdout, ended.stderr


def test_the_counter_has_its_block(tmp_path: Path) -> None:
    opened(tmp_path / "S").close()
    assert (tmp_path / "S.lock").stat().st_blocks > 0  # a map without one kills its writer on a full disk


def test_a_host_that_cannot_be_written_is_said_each_time(tmp_path: Path) -> None:
    (tmp_path / "S.root").write_text("somebody's")
    node = opened(tmp_path / "S")
    for _ in range(2):
        with pytest.raises(spec.SimulationError, match="cannot write the host of the simulated node"):
            node.machine.path("/proc")
    (tmp_path / "S.root").unlink()
    assert node.machine.path("/proc/driver/nvidia/version").exists()
