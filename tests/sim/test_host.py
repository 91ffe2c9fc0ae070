"""The simulated host: its files follow the node, and nothing of the real one is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent import errors
from agent.host import machine as machines
from agent.host import pci
from agent.sim import host

N: Any = pynvml
Open = Callable[..., Any]


def test_it_is_a_machine(nvml: Open) -> None:
    machine: machines.Machine = nvml("p4d.24xlarge").node.machine
    assert machine.simulated == "p4d.24xlarge"
    assert machine.is_root()
    assert machine.instance_type() == "p4d.24xlarge"
    assert machine.unit_active("nvidia-persistenced.service")
    assert not machine.unit_active("kubelet.service")
    assert not machine.unit_active("sshd.service")
    assert machine.boot_id() == machine.path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_its_root_is_its_own_and_goes_with_it(nvml: Open) -> None:
    it = nvml()
    root = it.node.machine.root
    assert root != Path("/")
    assert it.node.machine.path("/run/x") == root / "run/x"
    it.node.close()
    assert not root.exists()


def test_the_root_of_a_state_file_stays(nvml: Open, tmp_path: Path) -> None:
    it = nvml(state=tmp_path / "S")
    it.node.machine.path("/run/gpunode").mkdir()
    it.node.machine.path("/var/lib/gpunode").mkdir()
    it.node.close()
    assert (tmp_path / "S.root/run/gpunode").is_dir()
    again = nvml(state=tmp_path / "S")
    assert again.node.machine.path("/run/gpunode").is_dir()
    again.node.reboot()
    assert not again.node.machine.path("/run/gpunode").exists()  # /run does not outlive a boot
    assert again.node.machine.path("/var/lib/gpunode").is_dir()


def test_a_reboot_by_another_process_empties_run_too(nvml: Open, tmp_path: Path) -> None:
    it = nvml(state=tmp_path / "S")
    it.node.machine.path("/run/gpunode").mkdir()
    it.node.close()
    other = nvml(state=tmp_path / "S")
    other.node.driver.reboot()
    other.node.close()
    assert not nvml(state=tmp_path / "S").node.machine.path("/run/gpunode").exists()


def test_gpus_are_on_the_bus(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    found = pci.gpus(it.node.machine)
    assert len(found) == 8
    assert [N.nvmlDeviceGetPciInfo(it.gpu(i)).busId.lower()[4:] for i in range(8)] == list(found)
    assert it.node.machine.path(f"/sys/bus/pci/devices/{found[0]}/device").read_text() == "0x20b0\n"


def test_what_tells_an_ec2_machine(nvml: Open) -> None:
    it = nvml("g7e.2xlarge")
    path = it.node.machine.path
    assert path("/sys/class/dmi/id/sys_vendor").read_text() == "Amazon EC2\n"
    assert path("/sys/class/dmi/id/product_name").read_text() == "g7e.2xlarge\n"
    assert path("/sys/class/dmi/id/board_asset_tag").read_text().startswith("i-")
    assert "590.48.01" in path("/proc/driver/nvidia/version").read_text()
    lab = nvml("h100.80gb")
    assert lab.node.machine.instance_type() is None
    assert lab.node.machine.path("/sys/class/dmi/id/board_asset_tag").read_text() == "\n"
    assert "aarch64" in nvml("g5g.xlarge").node.machine.path("/proc/driver/nvidia/version").read_text()


def test_capability_files_follow_the_instances(nvml: Open) -> None:
    it = nvml('[[gpu]]\nmodel = "h100.80gb"\ncount = 2\ngi-id-map = "A"\n')
    gpu = it.enable(1)
    path = it.node.machine.path
    base = "/proc/driver/nvidia/capabilities/gpu1/mig"
    instance = it.create_at(gpu, 9, 0, 4)
    compute = N.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert "DeviceFileMinor: 147\n" in path(f"{base}/gi1/access").read_text()
    assert "DeviceFileMinor: 148\n" in path(f"{base}/gi1/ci0/access").read_text()
    assert path("/dev/nvidia-caps/nvidia-cap148").exists()
    assert "gpu1/gi1/ci0/access 148\n" in path("/proc/driver/nvidia-caps/mig-minors").read_text()
    N.nvmlComputeInstanceDestroy(compute)
    assert not path(f"{base}/gi1/ci0").exists()
    assert path(f"{base}/gi1/access").exists()
    assert not path("/dev/nvidia-caps/nvidia-cap148").exists()
    N.nvmlGpuInstanceDestroy(instance)
    assert not path(f"{base}/gi1").exists()
    assert path("/dev/nvidia-caps/nvidia-cap1").exists()


@pytest.mark.parametrize(
    ("place", "minor"),
    [((0, 0), 3), ((0, 0, 0), 4), ((0, 1), 12), ((1, 0), 138), ((7, 14, 7), 3 + 7 * 135 + 14 * 9 + 8)],
)
def test_capability_minors_are_numbered_as_the_driver_does(place: tuple[int, ...], minor: int) -> None:
    assert host.capability_minor(*place) == minor


def test_processes_are_seen_in_proc_with_what_they_hold(nvml: Open) -> None:
    it = nvml('[[gpu]]\nmodel = "h100.80gb"\ngi-id-map = "A"\n')
    gpu = it.enable()
    instance = it.create_at(gpu, 9, 0, 4)
    N.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    pid = it.node.start_process(0, gpu_instance=1, name="a-rather-long-name")
    path = it.node.machine.path
    assert path(f"/proc/{pid}/comm").read_text() == "a-rather-long-n\n"
    links = {str(link.readlink()) for link in path(f"/proc/{pid}/fd").iterdir()}
    assert links == {"/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"}
    it.node.stop_process(pid)
    assert not path(f"/proc/{pid}").exists()


def test_xids_are_in_the_kernel_log(nvml: Open) -> None:
    it = nvml()
    it.clock.now += 2
    it.node.lose(0)
    it.node.xid(0, 43, gpu_instance=1)
    lines = it.node.machine.path("/dev/kmsg").read_text().splitlines()
    assert lines[0].endswith("NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', name=<unknown>")
    assert lines[0].split(",")[2] == "2000000"
    assert "GPU-I:01" in lines[1]
    booted = int(it.node.machine.path("/proc/stat").read_text().split()[1])
    assert booted == int(it.clock.now - 2)


def test_units(nvml: Open) -> None:
    it = nvml('scheduler = "kubelet"\n[[gpu]]\nmodel = "h100.80gb"\n')
    machine = it.node.machine
    assert machine.unit_active("kubelet.service")
    with pytest.raises(errors.GpunodeError, match=r"no\.service: the simulated host has no such unit"):
        machine.start_units(["no.service", "ecs.service"])
    assert machine.unit_active("ecs.service")
    assert machine.start_left_units() == ()


def test_persistenced_left_stopped_is_started_again(nvml: Open) -> None:
    it = nvml("p4d.24xlarge")
    it.node.machine.stop_units(["nvidia-persistenced.service"])
    assert it.node.machine.start_left_units() == ("nvidia-persistenced.service",)
    assert it.node.machine.unit_active("nvidia-persistenced.service")


@pytest.mark.parametrize("text", ["00000000:10:1C.0", "0000:10:1c.0", "10:1C.0"])
def test_addresses_are_compared_in_one_form(text: str) -> None:
    assert host.normal_address(text) == "0000:10:1c.0"
