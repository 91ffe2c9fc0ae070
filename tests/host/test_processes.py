from __future__ import annotations

import os

import pytest

from agent.host import processes, real
from tests.host import hosts

ID = "0123456789abcdef" * 4
UID = "12345678-9abc-4def-8012-3456789abcde"
CRI = f"cri-containerd-{ID}.scope"
UID_ = UID.replace("-", "_")
TASK = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "container", "pod", "task"),
    [
        (f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/{CRI}", ID, UID, None),
        (f"0::/kubepods.slice/kubepods-pod{UID_}.slice/{CRI}", ID, UID, None),
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID_}.slice/{CRI}", ID, UID, None),
        (f"0::/kubepods.slice/kubepods-pod{UID_}.slice/crio-{ID}.scope", ID, UID, None),
        (f"0::/kubepods/burstable/pod{UID}/{ID}", ID, UID, None),
        (f"12:devices:/kubepods.slice/kubepods-pod{UID_}.slice:cri-containerd:{ID}\n0::/x", ID, UID, None),
        (f"0::/system.slice/docker-{ID}.scope", ID, None, None),
        (f"0::/ecstasks.slice/ecstasks-{TASK}.slice/docker-{ID}.scope", ID, None, TASK),
        (f"5:devices:/ecs/{TASK}/{ID}\n4:cpu:/ecs/{TASK}/{ID}", ID, None, TASK),
        (f"0::/../../kubepods-pod{UID_}.slice/{CRI}", ID, UID, None),
        ("0::/system.slice/nvidia-persistenced.service", None, None, None),
        ("0::/user.slice/user-1000.slice/session-1.scope", None, None, None),
        ("", None, None, None),
    ],
)  # fmt: skip
def test_control_groups_of_every_kind(text: str, container: str | None, pod: str | None, task: str | None) -> None:
    assert processes.parse_cgroup(text + "\n") == processes.Whereabouts(container, pod, task)


def test_open_gpu_files_are_found_by_name(host: hosts.Host) -> None:
    host.process(10, "app", opens=("/dev/null", "/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "socket:[1]"))
    host.process(11, "mig", opens=("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13", "/dev/nvidia3"))
    host.process(12, "gone", opens=("/dev/nvidia0 (deleted)",))
    host.process(13, "other", opens=("/var/lib/nvidia3.log", "/dev/nvidia-modeset"))
    host.write("/proc/self-made", "no process")
    assert list(processes.open_gpu_files(host.machine)) == [
        processes.OpenFiles(10, frozenset({3}), frozenset()),
        processes.OpenFiles(11, frozenset({3}), frozenset({12, 13})),
        processes.OpenFiles(12, frozenset({0}), frozenset()),
    ]


def test_one_variable_and_one_word_are_all_that_is_looked_at(host: hosts.Host) -> None:
    host.process(
        10, "x", environ="A=1\0NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2\0", cmdline="x\0--feature-gates=DynamicMIG=true\0"
    )
    assert processes.environment_value(host.machine, 10, "NVIDIA_VISIBLE_DEVICES") == "GPU-1,GPU-2"
    assert processes.environment_value(host.machine, 10, "VISIBLE_DEVICES") is None
    assert processes.arguments_mention(host.machine, 10, "DynamicMIG=true")
    assert not processes.arguments_mention(host.machine, 10, "DynamicMIG=false")
    assert processes.environment_value(host.machine, 99, "A") is None


def test_a_process_that_ended_is_nobody(host: hosts.Host) -> None:
    assert processes.command(host.machine, 99) is None
    assert processes.whereabouts(host.machine, 99) == processes.Whereabouts()


def test_no_proc_no_processes(host: hosts.Host) -> None:
    assert processes.pids(real.RealMachine(host.root / "nowhere")) == []


def test_the_real_proc_reads_the_same() -> None:
    machine = real.RealMachine()
    assert os.getpid() in processes.pids(machine)
    assert processes.command(machine, os.getpid())


def test_a_name_cannot_write_to_the_terminal_of_whoever_reads_it(host: hosts.Host) -> None:
    host.process(10, "evil\nGPU 0\x1b[2J\u202e")
    assert processes.command(host.machine, 10) == "evil?GPU 0?[2J?"
