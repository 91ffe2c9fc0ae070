from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agent.host import holders, pods
from agent.mig import node as nodes
from tests.host import hosts, kubelet

OWN = 1
UID = "12345678-9abc-4def-8012-3456789abcde"
IN_POD = f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'ab' * 32}.scope\n"
MINORS = """config 1
monitor 2
gpu3/gi2/access 30
gpu3/gi2/ci0/access 31
gpu3/gi7/access 66
gpu3/gi7/ci0/access 67
gpu5/gi0/access 90
"""


def merged(host: hosts.Host, node: nodes.NodeState | None = None) -> nodes.NodeState:
    host.write("/proc/driver/nvidia-caps/mig-minors", MINORS)
    return holders.merge(node or hosts.node(), host.machine, own_pid=OWN, deadline=2.0)


def held(node: nodes.NodeState) -> dict[str, list[str]]:
    """Return who is where, in words."""
    found = {}
    for gpu in node.gpus:
        found[f"gpu{gpu.index}"] = [str(h) for h in gpu.holders]
        for gi in gpu.instances:
            found[f"gpu{gpu.index}/gi{gi.id}"] = [str(h) for h in gi.holders]
            for ci in gi.compute:
                found[f"gpu{gpu.index}/gi{gi.id}/ci{ci.id}"] = [str(h) for h in ci.holders]
    return {place: who for place, who in found.items() if who}


def with_process(node: nodes.NodeState, pid: int) -> nodes.NodeState:
    """Return the node with a process as NVML lists it on the 3g instance: a number and nothing more."""
    split, whole = node.gpus
    big, small = split.instances
    (ci,) = big.compute
    ci = dataclasses.replace(ci, holders=(nodes.Holder("process", str(pid), pid=pid),))
    split = dataclasses.replace(split, instances=(dataclasses.replace(big, compute=(ci,)), small))
    return dataclasses.replace(node, gpus=(split, whole))


def test_nobody_holds_anything(host: hosts.Host) -> None:
    node = merged(host)
    assert held(node) == {}
    assert (node.serving, node.allocations_known) == (None, True)


def test_nvml_processes_get_name_container_and_pod(host: hosts.Host) -> None:
    host.process(4242, "python3", cgroup=IN_POD, cmdline="python3\0--token=secret\0")
    host.path(f"/var/log/pods/ml_train-0_{UID}").mkdir(parents=True)
    node = merged(host, with_process(hosts.node(), 4242))
    assert held(node) == {"gpu0/gi2/ci0": ["process python3 (pid 4242) in pod ml/train-0"]}
    assert node.gpus[0].instances[0].in_use[0].container == "ab" * 6
    assert "secret" not in repr(node)


def test_a_pod_without_log_folder_is_told_by_its_uid(host: hosts.Host) -> None:
    host.process(4242, "python3", cgroup=IN_POD)
    node = merged(host, with_process(hosts.node(), 4242))
    assert held(node) == {"gpu0/gi2/ci0": [f"process python3 (pid 4242) in pod {UID}"]}


def test_a_process_of_another_pid_namespace_stays_as_nvml_told_it(host: hosts.Host) -> None:
    assert held(merged(host, with_process(hosts.node(), 777))) == {"gpu0/gi2/ci0": ["process 777 (pid 777)"]}


def test_our_own_process_holds_nothing(host: hosts.Host) -> None:
    host.process(OWN, "gpunode", opens=("/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap31"))
    node = merged(host, with_process(hosts.node(), OWN))
    assert held(node) == {}
    assert node.gpus[0].openers == ()


@pytest.mark.parametrize(
    ("opens", "where"),
    [
        (("nvidia-cap30", "nvidia-cap31"), "gpu0/gi2/ci0"),
        (("nvidia-cap30",), "gpu0/gi2"),
        (("nvidia-cap67",), "gpu0/gi7/ci0"),
    ],
)
def test_an_open_capability_file_holds_its_instance(host: hosts.Host, opens: tuple[str, ...], where: str) -> None:
    host.process(50, "leaky", opens=("/dev/nvidia3", *(f"/dev/nvidia-caps/{name}" for name in opens)))
    node = merged(host)
    assert held(node) == {where: ["open-file leaky (pid 50)"]}
    assert node.gpus[0].openers == ()


def test_one_process_is_named_once_per_place(host: hosts.Host) -> None:
    host.process(
        4242, "python3", opens=("/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31")
    )
    assert held(merged(host, with_process(hosts.node(), 4242))) == {"gpu0/gi2/ci0": ["process python3 (pid 4242)"]}


def test_files_for_configuring_and_of_unknown_gpus_hold_no_instance(host: hosts.Host) -> None:
    host.process(50, "nv-hostengine", opens=("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"))
    host.process(51, "x", opens=("/dev/nvidia9", "/dev/nvidia-caps/nvidia-cap999"))
    assert held(merged(host)) == {}


def test_who_only_has_the_gpu_open_is_told_apart_with_what_to_do(host: hosts.Host) -> None:
    host.process(60, "nvidia-persistenced", opens=("/dev/nvidia3", "/dev/nvidia5"))
    host.process(61, "nv-hostengine", opens=("/dev/nvidia5",))
    node = merged(host)
    assert held(node) == {}
    assert [str(h) for h in node.gpus[0].openers] == ["service nvidia-persistenced (pid 60)"]
    assert [(h.name, h.hint) for h in node.gpus[1].openers] == [
        ("nvidia-persistenced", "add nvidia-persistenced.service to release-before-reset"),
        ("nv-hostengine (DCGM)", "add nvidia-dcgm.service to release-before-reset, or stop the DCGM pod"),
    ]


@pytest.mark.parametrize(
    ("identity", "device"),
    [
        (hosts.MIG_3G, holders.Device(mig=hosts.MIG_3G)),
        (f"{hosts.MIG_3G}::2", holders.Device(mig=hosts.MIG_3G)),
        (hosts.A100, holders.Device(gpu=hosts.A100)),
        (f"{hosts.A100}::11", holders.Device(gpu=hosts.A100)),
        (f"MIG-{hosts.A100}/2/0", holders.Device(gpu=hosts.A100, gi=2, ci=0)),
        ("nvidia0/gi1", holders.Device(minor=0, gi=1)),
        ("nvidia0/gi1/vgpu0", holders.Device(minor=0, gi=1)),
        ("nvidia12", holders.Device(minor=12)),
        ("nvidia12/vgpu3", holders.Device(minor=12)),
        ("gpu-1-mig-1g6gb-14-0", holders.Device(minor=1, profile_id=14, start=0)),
        ("gpu-0-mig-1g24gb-me-20-5", holders.Device(minor=0, profile_id=20, start=5)),
        ("gpu-7", holders.Device(minor=7)),
        ("0", None),
        ("MIG-nonsense", None),
        ("gpu-x", None),
        ("", None),
    ],
)
def test_device_names_of_every_scheduler(identity: str, device: holders.Device | None) -> None:
    assert holders.parse_device(identity) == device


class TestPods:
    @pytest.fixture(autouse=True)
    def _kubelet_is_active(self, host: hosts.Host) -> None:
        host.systemd("kubelet.service")

    def socket(self, host: hosts.Host) -> Path:
        return host.path(pods.SOCKET)

    @pytest.mark.parametrize(
        ("identity", "where"),
        [
            (hosts.MIG_3G, "gpu0/gi2/ci0"),
            (f"{hosts.MIG_1C}::1", "gpu0/gi7/ci0"),
            (f"MIG-{hosts.A100}/2/0", "gpu0/gi2/ci0"),
            ("nvidia3/gi7", "gpu0/gi7"),
            (hosts.SPARE, "gpu1"),
            ("nvidia5", "gpu1"),
        ],
    )
    def test_an_allocation_without_a_process_holds(self, host: hosts.Host, identity: str, where: str) -> None:
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [kubelet.pod("train-0", namespace="ml", devices={"nvidia.com/mig-3g.20gb": [identity]})]
            node = merged(host)
        assert held(node) == {where: ["pod ml/train-0 in container main"]}
        assert node.gpus[0].in_use + node.gpus[1].in_use == (
            nodes.Holder("pod", "ml/train-0", container="main", pod="train-0", namespace="ml"),
        )
        assert (node.serving, node.allocations_known) == ("kubelet", True)

    @pytest.mark.parametrize(
        ("device", "where"),
        [("gpu-3-mig-3g20gb-9-4", "gpu0/gi2"), ("gpu-5", "gpu1"), ("gpu-3-mig-1g5gb-19-0", "gpu0/gi7")],
    )
    def test_a_claim_holds_by_minor_profile_and_place(self, host: hosts.Host, device: str, where: str) -> None:
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [
                kubelet.pod("p", claimed=[("gpu.nvidia.com", device), ("compute-domain.nvidia.com", "channel-0")])
            ]
            node = merged(host)
        assert held(node) == {where: ["pod default/p in container main"]}
        assert node.allocations_known

    def test_devices_that_are_gone_or_not_ours_hold_nothing(self, host: hosts.Host) -> None:
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [
                kubelet.pod("old", devices={"nvidia.com/gpu": ["MIG-00000000-0000-5000-8000-000000000000"]}),
                kubelet.pod("efa", devices={"vpc.amazonaws.com/efa": ["0"]}),
                kubelet.pod("old-claim", claimed=[("gpu.nvidia.com", "gpu-3-mig-2g10gb-14-2")]),
            ]
            node = merged(host)
        assert held(node) == {}
        assert node.allocations_known

    @pytest.mark.parametrize(
        ("identity", "where"),
        [
            (hosts.MIG_3G, {"gpu0/gi2/ci0"}),
            (f"{hosts.SPARE}::0", {"gpu1"}),
            ("nvidia5", set()),
            ("slot-1", set()),
        ],
    )
    def test_under_a_resource_of_another_name_a_uuid_is_a_device_and_nothing_else_is(
        self, host: hosts.Host, identity: str, where: set[str]
    ) -> None:
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [kubelet.pod("p", devices={"example.com/small-gpu": [identity]})]
            node = merged(host)
        assert held(node).keys() == where
        assert node.allocations_known

    def test_a_name_nobody_understands_makes_everything_count_as_used(self, host: hosts.Host) -> None:
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [kubelet.pod("p", devices={"nvidia.com/gpu": ["slot-1"]})]
            assert not merged(host).allocations_known

    def test_an_active_kubelet_that_does_not_tell(self, host: hosts.Host) -> None:
        node = merged(host)
        assert (node.serving, node.allocations_known) == ("kubelet", False)

    def test_pod_and_its_process_are_both_told(self, host: hosts.Host) -> None:
        host.process(4242, "python3", cgroup=IN_POD)
        with kubelet.serving(self.socket(host)) as served:
            served.pods = [kubelet.pod("train-0", namespace="ml", devices={"nvidia.com/gpu": [hosts.MIG_3G]})]
            node = merged(host, with_process(hosts.node(), 4242))
        assert held(node) == {
            "gpu0/gi2/ci0": [f"process python3 (pid 4242) in pod {UID}", "pod ml/train-0 in container main"]
        }


def test_a_container_with_all_gpus_holds_every_one(host: hosts.Host) -> None:
    host.systemd("ecs.service")
    task, container = "0" * 32, "cd" * 32
    host.process(70, "tf", environ="NVIDIA_VISIBLE_DEVICES=all\0")
    host.write(f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{task}.slice/docker-{container}.scope/cgroup.procs", "70\n")
    host.write("/proc/driver/nvidia-caps/mig-minors", MINORS)
    node = holders.merge(hosts.node(), host.machine, own_pid=OWN, introspection=None)
    assert held(node) == {
        "gpu0": [f"task {task} in container {container[:12]}"],
        "gpu1": [f"task {task} in container {container[:12]}"],
    }
    assert (node.serving, node.allocations_known) == ("ecs", True)


def test_an_ecs_agent_that_does_not_tell(host: hosts.Host) -> None:
    host.systemd("ecs.service")
    node = holders.merge(hosts.node(), host.machine, own_pid=OWN, introspection="http://127.0.0.1:1")
    assert (node.serving, node.allocations_known) == ("ecs", False)


class TestObstacles:
    def test_only_those_on_the_gpu_in_question(self, host: hosts.Host) -> None:
        host.write("/proc/driver/nvidia/gpus/0000:10:1c.0/information", "Device Minor: \t 3\n")
        host.process(60, "nvidia-persistenced", opens=("/dev/nvidia3",))
        host.process(61, "python3", opens=("/dev/nvidia5",))
        host.process(OWN, "gpunode", opens=("/dev/nvidia3",))
        found = holders.obstacles(host.machine, ["00000000:10:1C.0"], own_pid=OWN)
        assert [h.pid for h in found] == [60]

    def test_everybody_where_the_address_is_not_known(self, host: hosts.Host) -> None:
        host.process(61, "python3", opens=("/dev/nvidia5",))
        assert [h.pid for h in holders.obstacles(host.machine, ["00000000:10:1C.0"], own_pid=OWN)] == [61]

    @pytest.mark.parametrize(("modeset", "named"), [("Y\n", True), ("N\n", False), (None, False)])
    def test_the_kernel_itself(self, host: hosts.Host, modeset: str | None, named: bool) -> None:
        if modeset is not None:
            host.write("/sys/module/nvidia_drm/parameters/modeset", modeset)
        found = holders.obstacles(host.machine, ["00000000:10:1C.0"], own_pid=OWN)
        assert [h.name for h in found] == (["nvidia_drm (kernel module)"] if named else [])
