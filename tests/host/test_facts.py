"""What is read of a host: each file there, absent, and as it should not be."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from agent.host import ec2, facts, pods
from tests.host import hosts, kubelet

CAPS = "gpu3/gi2/access 30\ngpu3/gi2/ci0/access 31\ngpu3/gi7/access 40\ngpu5/gi1/access 50\nconfig 1\nmonitor 2\n"
ID = "a" * 64


def look(host: hosts.Host) -> facts.HostFacts:
    return facts.gather(host.machine, hosts.node())


def test_a_host_with_nothing_on_it_tells_nothing(host: hosts.Host) -> None:
    assert look(host) == facts.HostFacts()


def test_processes_sockets_and_settings(host: hosts.Host) -> None:
    host.process(11, "nvidia-device-plugin")
    host.process(12, "nvidia-device-plugin")
    host.process(13, "gpu-kubelet-plugin")
    host.process(14, "nvidia-cuda-mps-server")
    host.write("/proc/sys/vm/overcommit_memory", "0\n")
    gpu_socket = host.write("/var/lib/kubelet/device-plugins/nvidia-gpu.sock", "")
    host.write("/var/lib/kubelet/device-plugins/kubelet.sock", "")
    os.utime(gpu_socket, (100, 100))
    os.utime(host.write(facts.DRA_SOCKET, ""), (200, 200))
    host.write("/etc/os-release", 'ID=bottlerocket\nVERSION_ID="1.62.0"\n')
    host.write(
        facts.BOTTLEROCKET_PLUGIN, 'version: v1\nflags:\n  migStrategy: "single"\nsharing:\n  timeSlicing:\n    x: 1\n'
    )
    seen = look(host)
    assert (seen.plugins, seen.dra, seen.mps, seen.overcommit) == (2, True, True, 0)
    assert (seen.plugin_sockets, seen.plugin_since, seen.dra_since) == (("nvidia-gpu.sock",), 100, 200)
    assert (seen.bottlerocket, seen.strategy, seen.strategy_source) == ("1.62.0", "single", facts.BOTTLEROCKET_PLUGIN)
    assert seen.time_slicing == facts.BOTTLEROCKET_PLUGIN


def test_a_socket_whose_process_is_gone_is_nobody(host: hosts.Host) -> None:
    host.write("/var/lib/kubelet/device-plugins/nvidia-gpu.sock", "")
    host.write(facts.DRA_SOCKET, "")
    assert look(host).plugin_sockets
    assert look(host).dra, "without a view of processes the sockets are believed"
    host.process(9, "kubelet")
    seen = look(host)
    assert (seen.plugin_sockets, seen.plugin_since, seen.dra, seen.dra_since) == ((), None, False, None)


def test_a_host_that_cannot_be_looked_at_is_no_failure(host: hosts.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(facts, "plugin_settings", broken)
    node = dataclasses.replace(hosts.node(), instance_type="p4d.24xlarge")
    assert facts.gather(host.machine, node) == facts.HostFacts(instance_type=ec2.instance_type("p4d.24xlarge"))


def test_the_strategy_comes_from_labels_where_the_plugin_has_no_file(host: hosts.Host) -> None:
    host.write(
        facts.GFD_LABELS, "nvidia.com/mig.strategy=mixed\nnvidia.com/gpu.sharing-strategy=time-slicing\nno label\n"
    )
    assert facts.plugin_settings(host.machine) == ("mixed", facts.GFD_LABELS, facts.GFD_LABELS)
    host.write(facts.GFD_LABELS, "nvidia.com/mig.strategy=other\n")
    assert facts.plugin_settings(host.machine) == (None, None, None)


def test_when_the_newest_instance_of_this_node_was_made(host: hosts.Host) -> None:
    host.write("/proc/driver/nvidia-caps/mig-minors", CAPS)
    for minor, time in ((30, 1000), (31, 1000), (40, 2000), (50, 9000)):
        os.utime(host.write(f"/dev/nvidia-caps/nvidia-cap{minor}", ""), (time, time))
    assert look(host).instances_since == 2000, "GPU 5 has no instances here, so its file is not about any"
    whole = dataclasses.replace(hosts.node(), gpus=hosts.node().gpus[1:])
    assert facts.gather(host.machine, whole).instances_since is None


def test_device_files_that_are_not_there_for_an_instance(host: hosts.Host) -> None:
    host.write("/proc/driver/nvidia-caps/mig-minors", CAPS)
    assert look(host).files_missing == (), "where no device is shown nothing is missed"
    host.write("/dev/nvidiactl", "")
    host.write("/dev/nvidia-caps/nvidia-cap40", "")
    missing = [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (30, 31)]
    assert look(host).files_missing == tuple((hosts.A100, path) for path in missing), "GPU 5 has no instances here"
    for path in missing:
        host.write(path, "")
    assert look(host).files_missing == ()


@pytest.mark.parametrize(
    "text",
    [
        (
            'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0:0"\n  containerEdits:\n    hooks:\n'
            "    - hookName: createContainer\n- name: all\n"
        ),
        json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "0:0"}, {"name": "all"}]}),
    ],
    ids=["yaml", "json"],
)
def test_cdi_specifications(host: hosts.Host, text: str) -> None:
    suffix = "json" if text.startswith("{") else "yaml"
    os.utime(host.write(f"/etc/cdi/nvidia.{suffix}", text), (77, 77))
    host.write("/etc/cdi/claim.yaml", "kind: k8s.gpu.nvidia.com/claim\ndevices:\n- name: x\n")
    host.write("/etc/cdi/notes.txt", "kind: nvidia.com/gpu\n")
    (spec,) = look(host).cdi
    assert spec == facts.CdiSpec(f"/etc/cdi/nvidia.{suffix}", 77, frozenset({"0:0", "all"}))


def test_a_folder_that_is_reached_twice_is_read_once(host: hosts.Host) -> None:
    host.write("/run/cdi/nvidia.yaml", "kind: nvidia.com/gpu\ndevices:\n- name: gpu0\n")
    host.path("/var").mkdir()
    host.path("/var/run").symlink_to(Path("../run"))
    assert [spec.path for spec in look(host).cdi] == ["/var/run/cdi/nvidia.yaml"]


def test_what_the_ecs_agent_was_told(host: hosts.Host) -> None:
    assert look(host).ecs_gpu_info is None, "this is no ECS node"
    host.write("/etc/ecs/ecs.config", "ECS_ENABLE_GPU_SUPPORT=true\n")
    assert look(host).ecs_gpu_info == facts.EcsGpuInfo(problem="it is not there")
    host.write(facts.ECS_GPU_INFO, json.dumps({"DriverVersion": "580.1", "GPUIDs": [hosts.A100]}))
    assert look(host).ecs_gpu_info == facts.EcsGpuInfo((hosts.A100,), "580.1")
    for text, says in (("{", "cannot be read"), ("[]", "cannot be read"), ("{}", "GPUIDs")):
        host.write(facts.ECS_GPU_INFO, text)
        info = look(host).ecs_gpu_info
        assert info is not None
        assert info.problem is not None
        assert says in info.problem


def test_what_containers_of_ecs_see(host: hosts.Host) -> None:
    host.write("/etc/ecs/ecs.config", "")
    host.write(f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{'b' * 32}.slice/docker-{ID}.scope/cgroup.procs", "20\n")
    host.process(20, "python", environ=f"NVIDIA_VISIBLE_DEVICES={hosts.SPARE}\0")
    (container,) = look(host).containers
    assert container.gpus == (hosts.SPARE,)
    assert container.name.startswith("a" * 12)


def test_a_slice_of_a_gpu_needs_its_licence_daemon(host: hosts.Host) -> None:
    node = dataclasses.replace(hosts.node(), instance_type="g6f.large")
    assert facts.gather(host.machine, node).gridd is False
    host.process(30, "nvidia-gridd")
    assert facts.gather(host.machine, node).gridd is True
    assert look(host).gridd is None, "nobody asks elsewhere"


def test_what_the_kubelet_has_to_give(host: hosts.Host) -> None:
    with kubelet.serving(host.path(pods.SOCKET)) as served:
        served.allocatable = {"nvidia.com/gpu": ["GPU-1", "GPU-2"], "vpc.amazonaws.com/efa": ["0"]}
        assert look(host).allocatable == {"nvidia.com/gpu": 2}
    host.write(pods.SOCKET, "")
    seen = look(host)
    assert seen.allocatable is None
    assert seen.allocatable_problem is not None
    assert "kubelet" in seen.allocatable_problem


def test_instance_types_are_told_one_at_a_time() -> None:
    kind = ec2.instance_type("g7.2xlarge")
    assert kind is not None
    assert (kind.family, kind.gpus, kind.driver_min_major, kind.mig_capable) == ("g7", 1, 595, True)
    slice_ = ec2.instance_type("g6f.2xlarge")
    assert slice_ is not None
    assert (slice_.fraction, slice_.driver_excluded_majors) == (0.25, (595,))
    assert ec2.instance_type("m5.large") is None
    assert ec2.instance_type("p4d") is None, "a family is no type"
    assert ec2.instance_type(None) is None
