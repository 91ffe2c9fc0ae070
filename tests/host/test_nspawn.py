"""gpunode as a unit of a real systemd: order against the kubelet, watchdog, reboot, sandbox."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import nspawn

pytestmark = [pytest.mark.full]

UNIFORM = """
[settings.kubelet-device-plugins.nvidia]
device-partitioning-strategy = "mig"

[settings.kubelet-device-plugins.nvidia.mig.profile]
"a100.40gb" = "2g.10gb"
"""
LAYOUT = """
[[gpunode.layout]]
gpus = "all"
instances = {{ "{profile}" = {count} }}

[gpunode]
mode-change = {mode_change}
"""
KUBELET_UNIT = """
[Unit]
Description=Stand-in for the kubelet

[Service]
Environment=GPUNODE_SIMULATE={node} GPUNODE_SIM_STATE={state} GPUNODE_SIM_HOST=real
ExecStart=/usr/local/bin/kubelet
"""
NODEADM_UNIT = """
[Unit]
Description=Stand-in for nodeadm: starts the kubelet, as nodeadm does

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/systemctl start kubelet.service

[Install]
WantedBy=multi-user.target
"""
POWER_ON = """
[Unit]
Description=What a reboot does to the simulated GPUs
Before=gpunode.service
ConditionPathExists={state}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/gpunode simulate reboot --simulate {node} --sim-state {state}
"""

PERSISTENCED = """
[Unit]
Description=Stand-in for nvidia-persistenced: holds the simulated GPUs
After=power-on.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/gpunode simulate unit nvidia-persistenced.service start --simulate {node} --sim-state {state}
ExecStop=/usr/bin/gpunode simulate unit nvidia-persistenced.service stop --simulate {node} --sim-state {state}
"""

Start = Callable[..., nspawn.Machine]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    why = nspawn.why_not()
    if why is not None:
        pytest.skip(f"SKIPPED: no machine can be booted here: {why}")
    with nspawn.installed(tmp_path_factory.mktemp("installed")) as found:
        yield found


_numbers = itertools.count()


@pytest.fixture
def start(layers: tuple[Path, Path], tmp_path: Path) -> Iterator[Start]:
    """Boot a machine with a simulated node in it: `start(layout)`, where `prepare(machine)` lays more."""
    machines: list[nspawn.Machine] = []

    def make(
        settings: str,
        *,
        node: str = "p4d.24xlarge",
        prepare: Callable[[nspawn.Machine], None] = lambda _: None,
        parameters: tuple[str, ...] = (),
    ) -> nspawn.Machine:
        number = next(_numbers)
        machine = nspawn.Machine(layers, tmp_path / f"machine-{number}", f"gpunode-test-{number}")
        machines.append(machine)
        machine.write("/etc/gpunode/config.toml", settings)
        machine.write(
            "/etc/gpunode/environment",
            f"GPUNODE_SIMULATE={node}\nGPUNODE_SIM_STATE={nspawn.STATE}\nGPUNODE_SIM_HOST=real\n",
        )
        machine.write("/usr/local/bin/kubelet", nspawn.KUBELET, mode=0o755)
        machine.write("/etc/systemd/system/kubelet.service", KUBELET_UNIT.format(node=node, state=nspawn.STATE))
        machine.enable("nodeadm-run.service", NODEADM_UNIT)
        machine.enable("power-on.service", POWER_ON.format(node=node, state=nspawn.STATE))
        machine.enable("nvidia-persistenced.service", PERSISTENCED.format(node=node, state=nspawn.STATE))
        prepare(machine)
        machine.boot(*parameters)
        return machine

    yield make
    for machine in machines:
        machine.close()


def layout(profile: str = "2g.10gb", count: int = 3, *, mode_change: str = '["reset"]') -> str:
    return LAYOUT.format(profile=profile, count=count, mode_change=mode_change)


def status(machine: nspawn.Machine, node: str = "p4d.24xlarge") -> dict[str, Any]:
    text = machine.ok(
        *("gpunode", "status", "--output", "json"),
        *("--simulate", node, "--sim-state", nspawn.STATE, "--sim-host", "real"),
    )
    found: dict[str, Any] = json.loads(text)
    return found


def instances(document: dict[str, Any]) -> list[str]:
    return [gi["profile"] for gpu in document["gpus"] for gi in gpu["gpu_instances"]]


def found_by_kubelet(machine: nspawn.Machine) -> dict[str, Any]:
    nspawn.until(
        lambda: (
            (machine.root / "var/lib/kubelet-found.json").exists()
            and machine.run("test", "-S", "/var/lib/kubelet/pod-resources/kubelet.sock").returncode == 0
        ),
        60,
        "the kubelet to look around",
    )
    document: dict[str, Any] = json.loads((machine.root / "var/lib/kubelet-found.json").read_text())
    return document


def started(machine: nspawn.Machine, unit: str) -> int:
    """When a unit became active, in microseconds of this boot."""
    return int(machine.show(unit, "ActiveEnterTimestampMonotonic"))


def test_the_kubelet_starts_after_the_layout_is_in_force(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    assert instances(found_by_kubelet(machine)) == ["2g.10gb"] * 24
    assert (
        0
        < started(machine, "gpunode.service")
        <= int(machine.show("kubelet.service", "ExecMainStartTimestampMonotonic"))
    )


def mutations(machine: nspawn.Machine) -> int:
    """How many calls have changed the simulated GPUs, as the simulator counts them."""
    return int(json.loads((machine.root / nspawn.STATE.lstrip("/")).read_text())["mutations"])


def fail_closed(machine: nspawn.Machine) -> None:
    """Lay the drop-in that the package ships, as the docs say."""
    shipped = "/usr/share/gpunode/drop-ins/nodeadm-run.service.d/50-gpunode-required.conf"
    machine.write(
        "/etc/systemd/system/nodeadm-run.service.d/50-gpunode-required.conf",
        (machine.root / shipped.lstrip("/")).read_text(),
    )


def drop_in(text: str) -> Callable[[nspawn.Machine], None]:
    def prepare(machine: nspawn.Machine) -> None:
        machine.write("/etc/systemd/system/gpunode.service.d/test.conf", text)

    return prepare


BROKEN = '[[gpunode.layout]]\ngpus = [99]\ninstances = { "2g.10gb" = 3 }\n'


def test_fail_open_starts_the_kubelet_when_the_layout_cannot_be(start: Start) -> None:
    machine = start(BROKEN)
    machine.wait_active("kubelet.service")
    assert instances(found_by_kubelet(machine)) == []
    assert machine.show("gpunode.service", "ActiveState") == "active"


def test_fail_closed_does_not(start: Start) -> None:
    def prepare(machine: nspawn.Machine) -> None:
        fail_closed(machine)
        machine.write(  # the minute for a retry, shortened
            "/etc/systemd/system/gpunode-ready.service.d/test.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/gpunode status --check --wait 3\n",
        )

    machine = start(BROKEN, prepare=prepare)
    nspawn.until(
        lambda: machine.show("gpunode-ready.service", "ActiveState") == "failed", 120, "gpunode-ready to give up"
    )
    assert machine.show("nodeadm-run.service", "ActiveState") == "inactive"
    assert machine.show("nodeadm-run.service", "Result") in {"dependency", "success"}
    assert machine.show("kubelet.service", "ActiveState") == "inactive"
    assert machine.show("gpunode.service", "ActiveState") == "active"


def test_fail_closed_starts_it_when_the_layout_is_in_force(start: Start) -> None:
    machine = start(layout(), prepare=fail_closed)
    machine.wait_active("kubelet.service")
    assert started(machine, "gpunode-ready.service") <= started(machine, "nodeadm-run.service")
    assert instances(found_by_kubelet(machine)) == ["2g.10gb"] * 24


def test_a_cycle_longer_than_the_start_timeout_survives(start: Start) -> None:
    node = "/etc/slow.toml"

    def prepare(machine: nspawn.Machine) -> None:
        text = machine.chroot("gpunode", "simulate", "node-file", "p4d.24xlarge")
        machine.write(node, text.replace("# create-gi = 0.02", "create-gi = 4.0"))
        drop_in("[Service]\nTimeoutStartSec=5\n")(machine)

    machine = start(layout(), node=node, prepare=prepare)
    machine.wait_active("kubelet.service", 90)
    assert machine.show("gpunode.service", "NRestarts") == "0"
    begun = int(machine.show("gpunode.service", "ExecMainStartTimestampMonotonic"))
    assert started(machine, "gpunode.service") - begun > 9e6
    assert instances(status(machine, node)) == ["2g.10gb"] * 24


def test_reload_applies_new_settings_to_a_serving_node(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    found_by_kubelet(machine)
    machine.write("/etc/gpunode/config.toml", layout("3g.20gb", 2))
    machine.ok("systemctl", "reload", "gpunode.service")
    nspawn.until(lambda: instances(status(machine)) == ["3g.20gb"] * 16, 30, "the new layout")
    assert machine.show("gpunode.service", "NRestarts") == "0"


def test_a_frozen_daemon_is_restarted_by_the_watchdog(start: Start) -> None:
    machine = start(layout(), prepare=drop_in("[Service]\nWatchdogSec=3\nTimeoutStopSec=1\nTimeoutAbortSec=1\n"))
    machine.wait_active("gpunode.service")
    frozen = machine.show("gpunode.service", "MainPID")
    before = mutations(machine)
    machine.ok("kill", "-STOP", frozen)
    nspawn.until(lambda: machine.show("gpunode.service", "NRestarts") == "1", 40, "the watchdog")
    machine.wait_active("gpunode.service")
    assert machine.show("gpunode.service", "MainPID") not in {"0", frozen}
    assert mutations(machine) == before


def test_kill_9_is_survived_without_a_change(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    before = mutations(machine)
    machine.ok(
        "gpunode",
        *("simulate", "workload", "start", "0/3/0", "--simulate", "p4d.24xlarge", "--sim-state", nspawn.STATE),
    )
    machine.ok("kill", "-9", machine.show("gpunode.service", "MainPID"))
    nspawn.until(lambda: machine.show("gpunode.service", "NRestarts") == "1", 30, "a restart")
    machine.wait_active("gpunode.service")
    nspawn.until(
        lambda: "phase=converged" in machine.text("gpunode.service").split("Scheduled restart")[-1], 30, "a cycle"
    )
    assert mutations(machine) == before
    assert machine.show("kubelet.service", "NRestarts") == "0"


def test_the_mode_change_of_an_a100_reboots_once_and_no_kubelet_starts_before(start: Start) -> None:
    machine = start(layout(mode_change='["reboot"]'))
    machine.boot_again(60)
    assert not (machine.root / "var/lib/kubelet-found.json").exists(), "a kubelet ran before the reboot"
    machine.wait_active("kubelet.service")
    assert instances(found_by_kubelet(machine)) == ["2g.10gb"] * 24
    reasons = machine.ok("journalctl", "--no-pager", "--boot=-1", "--unit=gpunode-reboot.service")
    assert "MIG" in reasons
    assert machine.boots == 2
    assert machine.run("test", "-e", "/run/gpunode/reboot-required").returncode != 0


def test_a_stop_leaves_the_layout_alone(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    before = mutations(machine)
    machine.ok("systemctl", "stop", "gpunode.service")
    assert machine.show("gpunode.service", "Result") == "success"
    assert mutations(machine) == before
    assert instances(status(machine)) == ["2g.10gb"] * 24
    assert machine.show("kubelet.service", "ActiveState") == "active"


def test_the_kernel_command_line_switches_it_off(start: Start) -> None:
    machine = start(layout(), prepare=fail_closed, parameters=("gpunode=off",))
    machine.wait_active("kubelet.service")
    assert machine.show("gpunode.service", "ConditionResult") == "no"
    assert instances(status(machine)) == []


def test_the_file_makes_it_look_only(start: Start) -> None:
    machine = start(layout(), prepare=lambda m: m.write("/etc/gpunode/disabled", ""))
    machine.wait_active("kubelet.service")
    assert machine.show("gpunode.service", "ActiveState") == "active"
    assert instances(found_by_kubelet(machine)) == []


def test_the_journal_has_fields(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    entries = machine.journal("--unit=gpunode.service", "SYSLOG_IDENTIFIER=gpunode")
    assert any(entry.get("PHASE") == "converged" for entry in entries), entries[-3:]
    assert any(str(entry.get("GPU_UUID", "")).startswith("GPU-") for entry in entries)
    machine.write("/etc/gpunode/config.toml", BROKEN)
    machine.ok("systemctl", "reload", "gpunode.service")
    nspawn.until(
        lambda: any("CODE" in e for e in machine.journal("--unit=gpunode.service")), 20, "a reason with its code"
    )


def test_after_change_commands_run_outside_the_sandbox(start: Start) -> None:
    command = """
[[gpunode.after-change]]
command = ["/bin/sh", "-c", "echo told > /etc/after-change"]
"""
    machine = start(layout() + command)
    machine.wait_active("kubelet.service")
    nspawn.until((machine.root / "etc/after-change").exists, 20, "the after-change command")
    assert machine.show("gpunode-after-change.service", "Result") == "success"


def test_metrics_are_served_from_within_the_sandbox(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("gpunode.service")
    text = machine.ok("curl", "--silent", "--fail", "http://127.0.0.1:19400/metrics")
    assert "gpunode_mig_memory_used_bytes" in text
    machine.ok("curl", "--silent", "--fail", "http://127.0.0.1:19400/readyz")


def test_the_socket_unit_hands_over_its_socket(start: Start) -> None:
    def prepare(machine: nspawn.Machine) -> None:
        machine.chroot("systemctl", "enable", "gpunode.socket")

    machine = start(layout(), prepare=prepare)
    machine.wait_active("gpunode.service")
    socket = "/run/gpunode/http.sock"
    assert machine.ok("stat", "--format=%U:%G:%a", socket).strip() == "root:gpunode:660"
    machine.ok("curl", "--silent", "--fail", "--unix-socket", socket, "http://gpunode/livez")


def test_removal_stops_it_and_leaves_settings_and_layout(start: Start) -> None:
    machine = start(layout())
    machine.wait_active("kubelet.service")
    before = mutations(machine)
    machine.ok("dpkg", "--remove", "gpunode")
    assert mutations(machine) == before
    assert (machine.root / "etc/gpunode/config.toml").exists()
    assert not (machine.root / "usr/bin/gpunode").exists()
    assert machine.show("gpunode.service", "ActiveState") == "inactive"
    machine.ok("dpkg", "--purge", "gpunode")
    assert not (machine.root / "etc/gpunode").exists()
    assert not (machine.root / "var/lib/gpunode").exists()
