"""Whose layout it is, through `plan` and `apply`: one signal at a time on a simulated host, boot after boot."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host import owner
from agent.sim import node as simulated
from tests import verbs
from tests.e2e import test_cases as cases
from tests.settings import api as apis

PARTS = {"A100": ("a100.40gb:1", "3g.20gb"), "H100": ("h100.80gb:1", "3g.40gb")}
RELEASE = 'ID=bottlerocket\nVARIANT_ID="{}"\nVERSION_ID="1.63.0"\n'
TAKE_OVER = 'set owner = "gpunode" in the settings'


@dataclasses.dataclass(slots=True)
class Host:
    """A simulated host to put the signs of another owner on, and a layout that gpunode is asked for."""

    place: Path
    flags: tuple[object, ...]
    profile: str
    options: str = ""

    def path(self, absolute: str) -> Path:
        return self.place / "state.root" / absolute.lstrip("/")

    def write(self, absolute: str, text: str = "") -> None:
        path = self.path(absolute)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, name: str, *, arguments: str = "", environ: str = "") -> None:
        self.write("/proc/7000/comm", name[:15] + "\n")
        self.write("/proc/7000/cgroup", "0::/kubepods.slice\n")
        self.write("/proc/7000/cmdline", f"{name}\0{arguments}\0")
        self.write("/proc/7000/environ", environ)

    def ended(self) -> None:
        shutil.rmtree(self.path("/proc/7000"))

    def open(self) -> simulated.SimulatedNode:
        return simulated.open_node(str(self.flags[1]), state=Path(str(self.flags[3])))

    @property
    def mutations(self) -> int:
        return cases.mutations(self.flags)

    def verb(self, *words: str) -> verbs.Ended:
        path = self.place / "layout.toml"
        path.write_text(
            f'[gpunode]\n{self.options}\n[[gpunode.layout]]\ngpus = "all"\ninstances = {{ "{self.profile}" = 1 }}\n'
        )
        return verbs.run(*words, *self.flags, "--settings", path)

    def reboot(self) -> None:
        assert verbs.run("simulate", "reboot", *self.flags).code == 0
        with contextlib.closing(self.open()) as node:
            assert not list(node.machine.path("/run").glob("*.sock")), "what lay in /run is gone"

    def refuses(self, code: str, *says: str) -> None:
        """Neither verb does anything, and both say who owns the layout, why, and what to do."""
        before = self.mutations
        ended = verbs.Ended(0, "", "")
        for words in (("plan",), ("apply", "--yes")):
            ended = self.verb(*words)
            assert ended.code == 4, ended.err
            assert f"{code}: " in ended.err
            for word in says:
                assert word in ended.err
        told = self.verb("apply", "--yes", "--output", "json").json()
        assert told["owner"]["may_write"] is False
        assert told["owner"]["why"] in ended.err
        assert told["status"]["owner"] == told["owner"]["owner"]
        assert self.mutations == before

    def applies(self) -> None:
        """`apply` brings the layout about."""
        before = self.mutations
        ended = self.verb("apply", "--yes")
        assert ended.code == 0, ended.err
        assert self.mutations > before

    def taken_over(self) -> None:
        self.options = 'owner = "gpunode"'


@pytest.fixture(params=PARTS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    node, profile = PARTS[request.param]
    host = Host(tmp_path, ("--simulate", node, "--sim-state", tmp_path / "state"), profile)
    assert host.mutations == 0  # the host is there now
    return host


@pytest.fixture
def a100(tmp_path: Path) -> Host:
    node, profile = PARTS["A100"]
    host = Host(tmp_path, ("--simulate", node, "--sim-state", tmp_path / "state"), profile)
    assert host.mutations == 0
    return host


def test_nobody_else(host: Host) -> None:
    host.applies()


@pytest.mark.parametrize("name", ["migmanager", "mig-manager", "dra-dynamic"])
def test_the_settings_name_another(a100: Host, name: str) -> None:
    a100.options = f'owner = "{name}"'
    a100.refuses("owner-set", name, TAKE_OVER)


LABEL = "eks.amazonaws.com/compute-type=auto"


@pytest.mark.parametrize(
    "sign",
    [
        lambda host: host.process("kubelet", arguments=f"--node-labels={LABEL}"),
        lambda host: host.write("/etc/eks/kubelet/environment", f"NODEADM_KUBELET_ARGS=--node-labels={LABEL}\n"),
        lambda host: host.write("/etc/kubernetes/kubelet/environment", f"X=--node-labels={LABEL}\n"),
        lambda host: host.write("/etc/kubernetes/kubelet/env", f"NODE_LABELS={LABEL}\n"),
        lambda host: host.write("/etc/systemd/system/kubelet.service.d/10.conf", f"Environment=X={LABEL}\n"),
    ],
    ids=["a running kubelet", "nodeadm's file", "kubelet's environment", "Bottlerocket's file", "a drop-in"],
)
def test_eks_auto_mode(a100: Host, sign: Callable[[Host], None]) -> None:
    sign(a100)
    a100.refuses("owner-auto-mode", "AWS decides")
    a100.taken_over()
    a100.refuses("owner-auto-mode", "AWS decides")


@pytest.mark.parametrize("how", ["arguments", "environ"])
def test_dra_driver_with_dynamic_mig(a100: Host, how: str) -> None:
    flag = {how: "FEATURE_GATES=DynamicMIG=true"}
    a100.process("gpu-kubelet-plugin", **flag)
    a100.refuses("owner-dra-dynamic", "DynamicMIG off")
    a100.taken_over()
    a100.refuses("owner-dra-dynamic", "DynamicMIG off")
    a100.process("gpu-kubelet-plugin", arguments="--feature-gates=DynamicMIG=false")
    a100.applies()


def test_dra_driver_is_remembered_over_a_boot(a100: Host) -> None:
    a100.write(owner.DRA_CHECKPOINT + "/checkpoint.json", "{}")
    a100.process("gpu-kubelet-plugin", environ="FEATURE_GATES=DynamicMIG=true")
    a100.refuses("owner-dra-dynamic")
    a100.reboot()
    a100.refuses("owner-dra-dynamic", "ran with DynamicMIG on this machine", TAKE_OVER, owner.DRA_CHECKPOINT)
    shutil.rmtree(a100.path(owner.DRA_CHECKPOINT))
    a100.applies()


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        (lambda host: host.process("nvidia-mig-manager"), "process nvidia-mig-mana"),
        (lambda host: host.process("k8s-mig-manager"), "process k8s-mig-manager"),
        (lambda host: host.process("nvidia-mig-parted"), "process nvidia-mig-part"),
        (lambda host: host.write(owner.MIG_MANAGER_FOLDER + "/config.yaml"), owner.MIG_MANAGER_FOLDER),
        (lambda host: host.write("/usr/lib/systemd/system/nvidia-mig-manager.service"), "nvidia-mig-manager.service"),
        (lambda host: host.write("/etc/systemd/system/nvidia-mig-manager.service"), "nvidia-mig-manager.service"),
        (
            lambda host: host.process("kubelet", arguments="--node-labels=nvidia.com/mig.config=all-1g.5gb"),
            "nvidia.com/mig.config",
        ),
        (
            lambda host: host.write("/etc/eks/kubelet/environment", "X=--node-labels=nvidia.com/mig.config=half\n"),
            "nvidia.com/mig.config",
        ),
    ],
    ids=["process", "process in a pod", "mig-parted at work", "folder", "unit", "own unit", "label", "label to come"],
)
def test_mig_manager(a100: Host, sign: Callable[[Host], None], says: str) -> None:
    sign(a100)
    a100.refuses("owner-mig-manager", says, TAKE_OVER)
    a100.taken_over()
    a100.applies()


def test_mig_manager_is_remembered_over_a_boot(a100: Host) -> None:
    a100.process("nvidia-mig-manager")
    a100.refuses("owner-mig-manager")
    a100.reboot()
    a100.refuses("owner-mig-manager", "in an earlier boot", TAKE_OVER, owner.MEMORY)
    a100.path(owner.MEMORY).unlink()
    a100.applies()


MIG = {"device_partitioning_strategy": "mig"}
OFF = {"enabled": False}
BOTTLEROCKET = [
    # what the API says, owner taken, and for each part the code that decides ("" where gpunode writes)
    (MIG, False, {"A100": "owner-migmanager", "H100": "owner-migmanager"}),
    (MIG, True, {"A100": "", "H100": ""}),
    ({**MIG, **OFF}, False, {"A100": "owner-reboot-loop", "H100": ""}),
    ({**MIG, **OFF}, True, {"A100": "owner-reboot-loop", "H100": ""}),
    ({}, False, {"A100": "owner-reboot-loop", "H100": ""}),
    ({}, True, {"A100": "owner-reboot-loop", "H100": ""}),
    (OFF, False, {"A100": "owner-reboot-loop", "H100": ""}),
]
WORDS = {
    "owner-migmanager": ("nvidia-migmanager partitions at boot", TAKE_OVER),
    "owner-reboot-loop": ("reboots at every boot", "device-partitioning-strategy"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("said", "taken", "codes"), BOTTLEROCKET, ids=lambda value: str(value)[:60])
def test_bottlerocket_by_strategy_plugin_and_generation_boot_after_boot(
    tmp_path: Path, part: str, said: dict[str, object], taken: bool, codes: dict[str, str]
) -> None:
    node, profile = PARTS[part]
    host = Host(tmp_path, ("--simulate", node, "--sim-state", tmp_path / "state"), profile)
    assert host.mutations == 0
    host.write("/etc/os-release", RELEASE.format("aws-k8s-1.34-nvidia"))
    if taken:
        host.taken_over()
    for boot in (1, 2, 3):
        with apis.serving(host.path("/run/api.sock")) as api:
            api.answer(apis.table(**said))
            if codes[part]:
                host.refuses(codes[part], *WORDS[codes[part]])
                assert host.mutations == 0, f"boot {boot}"
            else:
                host.applies()
                assert host.verb("plan").code == 0
            with contextlib.closing(host.open()) as opened:
                assert opened.reboot_requested is None, "no loop begins here"
        host.reboot()


def test_turning_mig_off_is_no_loop(a100: Host) -> None:
    a100.applies()
    a100.write("/etc/os-release", RELEASE.format("aws-k8s-1.34-nvidia"))
    path = a100.place / "off.toml"
    path.write_text('[[gpunode.layout]]\ngpus = "all"\nmig = false\n')
    with apis.serving(a100.path("/run/api.sock")) as api:
        api.answer(apis.table())
        assert verbs.run("apply", "--yes", *a100.flags, "--settings", path).code == 0


@pytest.mark.parametrize("taken", [False, True])
def test_bottlerocket_that_cannot_be_read(host: Host, taken: bool) -> None:
    host.write("/etc/os-release", RELEASE.format("aws-k8s-1.34-nvidia"))
    if taken:
        host.taken_over()
    with apis.serving(host.path("/run/api.sock")) as api:
        api.answer("oops", 500)
        host.refuses("owner-unknown", "cannot be read", "answered 500")


def test_bottlerocket_while_its_manager_is_at_work(host: Host) -> None:
    host.taken_over()
    host.write("/etc/os-release", RELEASE.format("aws-k8s-1.34-nvidia"))
    with apis.serving(host.path("/run/api.sock")) as api:
        api.answer(apis.table(**MIG))
        host.process("nvidia-migmanager")
        host.refuses("migmanager-busy", "at work")
        host.ended()
        host.write(owner.MIGMANAGER_MARKER, "Enabling MIG")
        host.refuses("migmanager-busy", owner.MIGMANAGER_MARKER)
        host.path(owner.MIGMANAGER_MARKER).unlink()
        host.applies()


@pytest.mark.parametrize(
    ("file", "codes"),
    [
        ('device-partitioning-strategy = "mig"\n', {"A100": "owner-migmanager", "H100": "owner-migmanager"}),
        ("", {"A100": "owner-reboot-loop", "H100": ""}),
        ("scrap [", {"A100": "owner-unknown", "H100": "owner-unknown"}),
        (None, {"A100": "owner-reboot-loop", "H100": ""}),
    ],
    ids=["mig", "empty, as enabled = false renders it", "broken", "no file"],
)
@pytest.mark.parametrize("part", PARTS)
def test_bottlerocket_by_the_file_of_its_manager(
    tmp_path: Path, part: str, file: str | None, codes: dict[str, str]
) -> None:
    node, profile = PARTS[part]
    host = Host(tmp_path, ("--simulate", node, "--sim-state", tmp_path / "state"), profile)
    assert host.mutations == 0
    host.write("/etc/os-release", RELEASE.format("aws-k8s-1.34-nvidia"))
    if file is not None:
        host.write(owner.MIGMANAGER_FILE, file)
    if codes[part]:
        host.refuses(codes[part])
    else:
        host.applies()


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        (lambda host: host.write("/etc/ecs/ecs.config", "ECS_CLUSTER=c\n"), "/etc/ecs/ecs.config"),
        (lambda host: host.write("/usr/lib/systemd/system/ecs.service"), "ecs.service"),
        (lambda host: host.write("/etc/os-release", RELEASE.format("aws-ecs-2-nvidia")), "aws-ecs-2-nvidia"),
    ],
    ids=["its configuration", "its unit", "Bottlerocket's variant"],
)
def test_ecs(sign: Callable[[Host], None], says: str, tmp_path: Path) -> None:
    node, profile = PARTS["H100"]
    host = Host(tmp_path, ("--simulate", node, "--sim-state", tmp_path / "state"), profile)
    assert host.mutations == 0
    sign(host)
    host.refuses("ecs-no-mig", says, "allow-mig-on-ecs = true")
    host.taken_over()
    host.refuses("ecs-no-mig", says)
    host.options = "allow-mig-on-ecs = true"
    host.applies()


def test_ecs_by_its_active_agent(a100: Host) -> None:
    assert verbs.run("simulate", "unit", "ecs.service", "start", *a100.flags).code == 0
    a100.refuses("ecs-no-mig", "ecs.service is active", "allow-mig-on-ecs = true")


def test_what_is_as_wanted_needs_no_owner(a100: Host) -> None:
    a100.applies()
    a100.process("nvidia-mig-manager")
    assert a100.verb("plan").code == 0
    assert a100.verb("apply", "--yes").code == 0
