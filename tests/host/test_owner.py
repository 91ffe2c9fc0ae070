from __future__ import annotations

import dataclasses
import json

import pytest

from agent.host import owner
from agent.mig import node as nodes
from tests.host import hosts


@dataclasses.dataclass(frozen=True)
class View:
    strategy: str = "none"
    enabled: bool = True
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Wishes:
    owner: str = "auto"
    allow_mig_on_ecs: bool = False
    bottlerocket: View | None = None


AUTO = Wishes()
TAKEN = Wishes(owner="gpunode")


def hopper() -> nodes.NodeState:
    node = hosts.node()
    return dataclasses.replace(
        node, gpus=tuple(dataclasses.replace(gpu, architecture="Hopper", resetless=True) for gpu in node.gpus)
    )


def decide(
    host: hosts.Host, wishes: Wishes = AUTO, node: nodes.NodeState | None = None, *, wants_mig: bool = True
) -> tuple[str, bool, str]:
    found = owner.decide(owner.gather(host.machine, wishes, node or hopper(), wants_mig=wants_mig))
    assert found.why
    return found.owner, found.may_write, found.code


def test_a_plain_host_is_ours(host: hosts.Host) -> None:
    assert decide(host) == ("gpunode", True, "owner-gpunode")
    assert decide(host, TAKEN) == ("gpunode", True, "owner-gpunode")


@pytest.mark.parametrize("name", ["migmanager", "mig-manager", "dra-dynamic"])
def test_the_settings_name_another(host: hosts.Host, name: str) -> None:
    found = owner.decide(owner.gather(host.machine, Wishes(owner=name), hopper()))
    assert (found.owner, found.may_write, found.code) == (name, False, "owner-set")
    assert found.takeover == 'set owner = "gpunode" in the settings'


class TestBottlerocket:
    @pytest.fixture(autouse=True)
    def _release(self, host: hosts.Host) -> None:
        host.write("/etc/os-release", 'NAME=Bottlerocket\nID=bottlerocket\nVARIANT_ID="aws-k8s-1.34-nvidia"\n')

    @pytest.mark.parametrize(
        ("view", "gpus", "setting", "expected"),
        [
            (View("mig"), "hopper", "auto", ("migmanager", False, "owner-migmanager")),
            (View("mig"), "ampere", "auto", ("migmanager", False, "owner-migmanager")),
            (View("mig"), "ampere", "gpunode", ("gpunode", True, "owner-gpunode")),
            (View("mig", enabled=False), "ampere", "auto", ("nobody", False, "owner-reboot-loop")),
            (View("mig", enabled=False), "ampere", "gpunode", ("nobody", False, "owner-reboot-loop")),
            (View("mig", enabled=False), "hopper", "auto", ("gpunode", True, "owner-gpunode")),
            (View("none"), "ampere", "auto", ("nobody", False, "owner-reboot-loop")),
            (View("none"), "ampere", "gpunode", ("nobody", False, "owner-reboot-loop")),
            (View("none"), "hopper", "auto", ("gpunode", True, "owner-gpunode")),
            (View("none", enabled=False), "hopper", "auto", ("gpunode", True, "owner-gpunode")),
            (View(problem="500"), "hopper", "auto", ("unknown", False, "owner-unknown")),
            (View(problem="500"), "hopper", "gpunode", ("unknown", False, "owner-unknown")),
        ],
        ids=str,
    )
    def test_by_strategy_plugin_and_generation(
        self, host: hosts.Host, view: View, gpus: str, setting: str, expected: tuple[str, bool, str]
    ) -> None:
        node = hopper() if gpus == "hopper" else hosts.node()
        assert decide(host, Wishes(owner=setting, bottlerocket=view), node) == expected

    def test_turning_mig_off_on_ampere_is_no_loop(self, host: hosts.Host) -> None:
        assert decide(host, Wishes(bottlerocket=View()), hosts.node(), wants_mig=False) == (
            "gpunode",
            True,
            "owner-gpunode",
        )

    @pytest.mark.parametrize(
        ("file", "expected"),
        [
            ('device-partitioning-strategy = "mig"\nprofile = { "a100.40gb" = "1g.5gb" }\n', "owner-migmanager"),
            ("", "owner-reboot-loop"),
            ("not toml [", "owner-unknown"),
            (None, "owner-reboot-loop"),
        ],
    )
    def test_without_the_api_its_managers_own_file_is_read(
        self, host: hosts.Host, file: str | None, expected: str
    ) -> None:
        if file is not None:
            host.write(owner.MIGMANAGER_FILE, file)
        assert decide(host, AUTO, hosts.node())[2] == expected

    def test_its_manager_must_have_ended(self, host: hosts.Host) -> None:
        wishes = Wishes(bottlerocket=View())
        host.process(300, "nvidia-migmanager")
        assert decide(host, wishes) == ("gpunode", False, "migmanager-busy")
        host.process(300, "something-else")
        host.write(owner.MIGMANAGER_MARKER, "Enabling MIG")
        assert decide(host, wishes) == ("gpunode", False, "migmanager-busy")
        host.path(owner.MIGMANAGER_MARKER).unlink()
        assert decide(host, wishes) == ("gpunode", True, "owner-gpunode")

    def test_first_and_later_boot_of_an_a100_with_the_plugin_off(self, host: hosts.Host) -> None:
        """The loop: their manager disables, we enable, their manager disables and reboots."""
        wishes = Wishes(bottlerocket=View("mig", enabled=False))
        for boot in (1, 2):
            host.write("/proc/sys/kernel/random/boot_id", f"5d0c5a4e-0000-4000-8000-00000000000{boot}\n")
            assert decide(host, wishes, hosts.node()) == ("nobody", False, "owner-reboot-loop")

    def test_its_ecs_variant(self, host: hosts.Host) -> None:
        host.write("/etc/os-release", "ID=bottlerocket\nVARIANT_ID=aws-ecs-2-nvidia\n")
        assert decide(host, Wishes(bottlerocket=View())) == ("gpunode", False, "ecs-no-mig")


class TestDraDriver:
    def test_dynamic_by_argument_or_environment(self, host: hosts.Host) -> None:
        host.process(400, "gpu-kubelet-plugin", cmdline="gpu-kubelet-plugin\0--feature-gates=DynamicMIG=true\0")
        for wishes in (AUTO, TAKEN):
            assert decide(host, wishes) == ("dra-dynamic", False, "owner-dra-dynamic")
        host.process(400, "gpu-kubelet-plugin", environ="FEATURE_GATES=X=true,DynamicMIG=true\0")
        assert decide(host) == ("dra-dynamic", False, "owner-dra-dynamic")

    def test_static_is_ours(self, host: hosts.Host) -> None:
        host.process(400, "gpu-kubelet-plugin", cmdline="gpu-kubelet-plugin\0--feature-gates=DynamicMIG=false\0")
        assert decide(host)[1]

    def test_it_is_remembered_over_a_boot_until_it_is_gone(self, host: hosts.Host) -> None:
        host.write("/etc/machine-id", "m1\n")
        host.write(f"{owner.DRA_CHECKPOINT}/checkpoint.json", "{}")
        assert decide(host)[1], "a checkpoint alone is a static driver's too"
        host.process(400, "gpu-kubelet-plugin", environ="FEATURE_GATES=DynamicMIG=true\0")
        assert decide(host) == ("dra-dynamic", False, "owner-dra-dynamic")
        host.process(400, "x")  # rebooted: the kubelet has not started it yet
        assert decide(host) == ("dra-dynamic", False, "owner-dra-dynamic")
        assert decide(host, TAKEN)[1]
        host.process(400, "gpu-kubelet-plugin", environ="FEATURE_GATES=\0")  # it came back, static
        assert decide(host)[1]
        host.process(400, "x")
        assert decide(host)[1], "what was seen last counts"

    def test_a_removed_driver_is_forgotten(self, host: hosts.Host) -> None:
        host.process(400, "gpu-kubelet-plugin", environ="FEATURE_GATES=DynamicMIG=true\0")
        assert not decide(host)[1]
        host.process(400, "x")
        assert decide(host)[1], "no checkpoint, no driver"

    def test_another_machines_memory_does_not_count(self, host: hosts.Host) -> None:
        host.path(owner.DRA_CHECKPOINT).mkdir(parents=True)
        host.write("/etc/machine-id", "m2\n")
        host.write(owner.MEMORY, json.dumps({"machine": "m1", "dra-dynamic": True}))
        assert decide(host)[1]
        host.write(owner.MEMORY, json.dumps({"machine": "m2", "dra-dynamic": True}))
        assert not decide(host)[1]

    @pytest.mark.parametrize("text", ["", "[]", "{}", "scrap"])
    def test_a_broken_memory_is_said_and_passed_over(
        self, host: hosts.Host, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        host.write(owner.MEMORY, text)
        assert decide(host)[1]
        assert "cannot be read" in capsys.readouterr().err

    def test_a_look_without_remembering_writes_nothing(self, host: hosts.Host) -> None:
        host.process(400, "gpu-kubelet-plugin", environ="FEATURE_GATES=DynamicMIG=true\0")
        owner.gather(host.machine, AUTO, hopper(), remember=False)
        assert not host.path(owner.MEMORY).exists()
        host.write("/var/lib/gpunode", "a file: nothing can be kept")
        assert not decide(host)[1]


class TestMigManager:
    @pytest.mark.parametrize("kind", ["process", "folder", "unit", "label", "label of a running kubelet"])
    def test_each_signal(self, host: hosts.Host, kind: str) -> None:
        match kind:
            case "process":
                host.process(500, "nvidia-mig-manager")
            case "folder":
                host.write(f"{owner.MIG_MANAGER_FOLDER}/config.yaml", "version: v1\n")
            case "unit":
                host.write("/usr/lib/systemd/system/nvidia-mig-manager.service", "[Service]\n")
            case "label":
                host.write(
                    "/etc/eks/kubelet/environment",
                    "ARGS=--node-labels=nvidia.com/mig.config=all-1g.5gb\n",
                )
            case _:
                host.process(501, "kubelet", cmdline="kubelet\0--node-labels=a=b,nvidia.com/mig.config=x\0")
        assert decide(host) == ("mig-manager", False, "owner-mig-manager")
        assert decide(host, TAKEN) == ("gpunode", True, "owner-gpunode")

    def test_another_label_is_no_signal(self, host: hosts.Host) -> None:
        host.write(
            "/etc/systemd/system/kubelet.service.d/10.conf", "Environment=--node-labels=nvidia.com/gpu.present=true\n"
        )
        assert decide(host)[1]

    def test_one_that_comes_after_the_kubelet_is_remembered_over_a_boot(self, host: hosts.Host) -> None:
        host.write("/etc/machine-id", "m1\n")
        host.process(500, "nvidia-mig-manager")
        assert not decide(host)[1]
        host.process(500, "x")  # rebooted: the kubelet has not started its pod yet
        found = owner.decide(owner.gather(host.machine, AUTO, hopper()))
        assert (found.owner, found.may_write, found.code) == ("mig-manager", False, "owner-mig-manager")
        assert owner.MEMORY in str(found.takeover)
        assert decide(host, TAKEN)[1]
        assert decide(host)[1], "who took over once need not say so for ever"

    def test_another_machines_memory_of_it_does_not_count(self, host: hosts.Host) -> None:
        host.write("/etc/machine-id", "m2\n")
        host.write(owner.MEMORY, json.dumps({"machine": "m1", "dra-dynamic": False, "mig-manager": True}))
        assert decide(host)[1]


class TestEcs:
    @pytest.mark.parametrize("kind", ["config", "unit", "active"])
    def test_each_signal(self, host: hosts.Host, kind: str) -> None:
        match kind:
            case "config":
                host.write("/etc/ecs/ecs.config", "ECS_CLUSTER=c\n")
            case "unit":
                host.write("/usr/lib/systemd/system/ecs.service", "[Unit]\n")
            case _:
                host.systemd("ecs.service")
        for wishes in (AUTO, TAKEN):
            assert decide(host, wishes) == ("gpunode", False, "ecs-no-mig")
        assert decide(host, Wishes(allow_mig_on_ecs=True)) == ("gpunode", True, "owner-gpunode")
        assert decide(host, wants_mig=False) == ("gpunode", True, "owner-gpunode")


@pytest.mark.parametrize("place", ["environment", "running"])
def test_eks_auto_mode_is_awss(host: hosts.Host, place: str) -> None:
    if place == "environment":
        host.write("/etc/eks/kubelet/environment", "X=--node-labels=eks.amazonaws.com/compute-type=auto\n")
    else:
        host.process(501, "kubelet", cmdline="kubelet\0--node-labels=eks.amazonaws.com/compute-type=auto\0")
    for wishes in (AUTO, TAKEN):
        found = owner.decide(owner.gather(host.machine, wishes, hopper()))
        assert (found.owner, found.may_write, found.takeover) == ("aws", False, None)


def test_every_refusal_of_the_list_says_how_to_take_over_if_one_may() -> None:
    signals = owner.Signals()
    cases = {
        "owner-dra-dynamic": dataclasses.replace(signals, dra_dynamic=True),
        "owner-mig-manager": dataclasses.replace(signals, mig_manager="process x"),
        "owner-migmanager": dataclasses.replace(signals, bottlerocket=True, host_strategy="mig"),
        "owner-reboot-loop": dataclasses.replace(signals, bottlerocket=True, ampere=True),
        "ecs-no-mig": dataclasses.replace(signals, ecs="x"),
    }
    for code, case in cases.items():
        found = owner.decide(case)
        assert found.code == code
        assert not found.may_write
        assert found.takeover
