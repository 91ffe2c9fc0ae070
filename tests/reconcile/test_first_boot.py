"""An A100 whose MIG mode change stays pending: by reset, by one reboot, or to a stated end, never in a loop."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from agent.host import owner
from agent.reconcile import cycle, snapshot

LAYOUT = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 2 }\n'
OTHER = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.40gb" = 1 }\n'
BOTH = '[gpunode]\nmode-change = ["reset", "reboot"]\n'
REBOOT = '[gpunode]\nmode-change = ["reboot"]\n'
PERSISTENCED = "nvidia-persistenced.service"
Make = Callable[..., Any]


def count_reboots(rig: Any) -> int:
    """How many reboots were asked for, by what the guard has kept."""
    try:
        return len(json.loads(rig.sim.machine.path(cycle.REBOOTS).read_text())["requests"])
    except FileNotFoundError:
        return 0


async def test_persistenced_and_our_own_session_make_way_and_come_back(make: Make) -> None:
    rig = make("p4d.24xlarge", LAYOUT)
    assert rig.sim.machine.unit_active(PERSISTENCED)
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.CONVERGED
    assert rig.sim.machine.unit_active(PERSISTENCED)
    assert rig.gpus.initializations == 2
    assert (count_reboots(rig), rig.sim.driver.store.node.resets) == (0, 1)


async def test_persistenced_that_may_not_be_stopped_is_named(make: Make) -> None:
    rig = make("p4d.24xlarge", "[gpunode]\nrelease-before-reset = []\n" + LAYOUT)
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    assert "nvidia-persistenced" in " ".join(r.message for r in result.reasons)
    assert rig.sim.machine.unit_active(PERSISTENCED)
    assert count_reboots(rig) == 0


async def test_a_refused_reset_starts_what_was_stopped_and_is_told(make: Make) -> None:
    rig = make("p4d.24xlarge", LAYOUT)
    pid = rig.sim.hold(2, name="nv-hostengine")
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    assert "nv-hostengine" in " ".join(r.message for r in result.reasons if r.code == "reset-refused")
    assert rig.sim.machine.unit_active(PERSISTENCED)
    assert (await rig.gpus.observe()).gpus  # our session is back
    rig.sim.stop_process(pid)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


async def test_where_resets_are_impossible_the_one_reboot_follows_if_it_may(make: Make) -> None:
    rig = make("p4d.24xlarge", BOTH + LAYOUT)
    rig.sim.allow_reset(False)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.REBOOT_PENDING
    await rig.reboot()
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    assert count_reboots(rig) == 1


@pytest.mark.parametrize("mode_change", [BOTH, REBOOT], ids=["reset or reboot", "reboot"])
async def test_a_reboot_that_does_not_help_is_the_last(make: Make, mode_change: str) -> None:
    rig = make("p4d.24xlarge", mode_change + LAYOUT)
    rig.sim.allow_reset(False)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.REBOOT_PENDING
    for _ in range(4):
        await rig.reboot()
        with rig.sim.driver.store.change() as node:  # somebody turns it off again at each boot
            for gpu in node.gpus:
                gpu.mig = gpu.pending = False
        for _ in range(2):
            result = await rig.cycle(cycle.Intent.DAEMON)
            assert result.phase is snapshot.Phase.FAILED
            assert "did not help" in " ".join(r.message for r in result.reasons)
        rig.now += 3 * 24 * 3600
    assert count_reboots(rig) == 1


async def test_a_reboot_that_does_not_happen_is_asked_for_once(make: Make) -> None:
    rig = make("p4d.24xlarge", REBOOT + LAYOUT)
    for _ in range(3):
        assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.REBOOT_PENDING
        await rig.restart()
        rig.now += 24 * 3600
    assert count_reboots(rig) == 1


FIRST = '[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.20gb" = 2 }\n'


async def test_while_a_peer_on_the_same_switches_is_in_use_no_gpu_is_reset(make: Make) -> None:
    rig = make("p4d.24xlarge", BOTH + FIRST)
    switch = rig.sim.machine.path("/sys/bus/pci/devices/0000:00:06.0")
    switch.mkdir(parents=True)
    (switch / "vendor").write_text("0x10de\n")
    (switch / "class").write_text("0x068000\n")
    pid = rig.sim.start_process(5, name="train.py")
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    assert "train.py" in " ".join(r.message for r in result.reasons if r.code == "mode-pending")
    assert (rig.sim.driver.store.node.resets, count_reboots(rig)) == (0, 0)
    rig.sim.stop_process(pid)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    assert rig.sim.driver.store.node.resets == 1


async def test_without_switches_a_peer_in_use_hinders_a_reset_of_another_gpu_not(make: Make) -> None:
    rig = make("a100.40gb:2", FIRST)
    rig.sim.start_process(1, name="train.py")
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


async def test_no_reboot_while_any_gpu_is_in_use(make: Make) -> None:
    rig = make("a100.40gb:2", REBOOT + FIRST)
    rig.sim.start_process(1, name="train.py")
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.BLOCKED
    assert "train.py" in " ".join(r.message for r in result.reasons)
    assert (rig.sim.reboot_requested, count_reboots(rig)) == (None, 0)


async def test_a_stop_before_the_reset_begins_none(make: Make) -> None:
    rig = make("p4d.24xlarge", LAYOUT)
    result = await rig.cycle(stop=lambda: len(rig.progress) >= 8)
    assert result.outcome.stopped
    assert rig.sim.driver.store.node.resets == 0
    (pending,) = (r.message for r in result.reasons if r.code == "mode-pending")
    assert "waits for a GPU reset (" in pending
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


@pytest.mark.parametrize("unit", ["kubelet.service", "ecs.service"])
async def test_a_serving_node_is_never_rebooted_unless_told(make: Make, unit: str) -> None:
    rig = make("p4d.24xlarge", BOTH + LAYOUT)
    rig.sim.allow_reset(False)
    rig.sim.set_unit(unit, True)
    result = await rig.cycle(cycle.Intent.DAEMON, force=True)
    assert result.phase is snapshot.Phase.BLOCKED
    assert (count_reboots(rig), rig.sim.reboot_requested) == (0, None)
    rig.set('[gpunode]\nmode-change = ["reboot"]\nlive-mode-change = true\n' + LAYOUT)
    assert (await rig.cycle(cycle.Intent.DAEMON, force=True)).phase is snapshot.Phase.REBOOT_PENDING


async def test_two_targets_flapping_reboot_twice_a_day_at_most(make: Make) -> None:
    """Somebody changes the layout at every boot, and turns MIG off each time so that it needs another."""
    rig = make("p4d.24xlarge", REBOOT + LAYOUT)
    asked = []
    for turn in range(10):
        rig.set(REBOOT + (LAYOUT, OTHER)[turn % 2])
        result = await rig.cycle(cycle.Intent.DAEMON)
        asked.append(result.phase is snapshot.Phase.REBOOT_PENDING)
        await rig.reboot()
        with rig.sim.driver.store.change() as node:
            for gpu in node.gpus:
                gpu.mig = gpu.pending = False
        rig.now += 1800
    assert asked == [True, True, *[False] * 8]
    assert count_reboots(rig) == 2


async def test_many_targets_flapping_reboot_twice_a_day_at_most(make: Make) -> None:
    rig = make("p4d.24xlarge", REBOOT + LAYOUT)
    times: list[float] = []
    chance = random.Random(5)
    for turn in range(40):
        counts = {"3g.20gb": 1, "1g.5gb": turn % 4, "2g.10gb": turn // 4 % 2}
        inner = ", ".join(f'"{profile}" = {n}' for profile, n in counts.items() if n)
        rig.set(REBOOT + f"[[gpunode.layout]]\ngpus = [{turn % 8}]\ninstances = {{ {inner} }}\n")
        before = count_reboots(rig)
        await rig.cycle(cycle.Intent.DAEMON)
        if count_reboots(rig) > before:
            times.append(rig.now)
        await rig.reboot()
        with rig.sim.driver.store.change() as node:
            for gpu in node.gpus:
                gpu.mig = gpu.pending = False
        rig.now += chance.uniform(600, 7200)
    assert len(times) > 2
    assert all(later - earlier >= 24 * 3600 for earlier, later in zip(times, times[2:], strict=False))


@pytest.mark.parametrize("harm", ["directory", "nonsense", "not a record", "parent is a file"])
async def test_without_a_record_that_can_be_trusted_no_reboot_is_asked_for(make: Make, harm: str) -> None:
    rig = make("p4d.24xlarge", REBOOT + LAYOUT)
    place = rig.sim.machine.path(cycle.REBOOTS)
    if harm == "parent is a file":
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        place.parent.write_text("")
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        if harm == "directory":
            place.mkdir()
        else:
            place.write_text("{" if harm == "nonsense" else '{"requests": [{"target": 1}]}')
    for _ in range(2):
        result = await rig.cycle(cycle.Intent.DAEMON)
        assert result.phase is snapshot.Phase.FAILED
        assert "no reboot is requested" in " ".join(r.message for r in result.reasons)
        assert rig.sim.reboot_requested is None


@pytest.mark.parametrize("whose", ["auto", "gpunode"])
async def test_the_reboot_loop_of_bottlerocket_cannot_happen(make: Make, whose: str) -> None:
    """Where its MIG manager turns MIG off and reboots at each boot, gpunode never turns it on."""
    rig = make("p4d.24xlarge", f'[gpunode]\nmode-change = ["reset", "reboot"]\nowner = "{whose}"\n' + LAYOUT)

    def decide(settings: Any, node: Any, layout: Any) -> cycle.Ownership:
        rig.sim.machine.path("/etc/os-release").write_text("ID=bottlerocket\nVARIANT_ID=aws-k8s-1.33-nvidia\n")
        signals = owner.gather(rig.sim.machine, settings, node, wants_mig=any(g.mig for g in layout.gpus))
        found = owner.decide(signals)
        return cycle.Ownership(owner=found.owner, may_write=found.may_write, code=found.code, why=found.why)

    rig.around = dataclasses.replace(rig.around, ownership=decide)
    for _ in range(3):
        result = await rig.cycle(cycle.Intent.DAEMON)
        assert result.phase is snapshot.Phase.BLOCKED
        assert (rig.sim.mutations, rig.sim.reboot_requested, count_reboots(rig)) == (0, None, 0)
        assert "reboot" in " ".join(r.message for r in result.reasons)
        await rig.reboot()
