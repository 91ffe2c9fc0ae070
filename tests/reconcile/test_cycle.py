"""Cycles on a simulated node: what is done, what is left alone, and which word the node ends with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.reconcile import cycle, snapshot
from tests.reconcile import rig as rigs

HALVES = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2 }\n'
MIXED = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 1, "2g.20gb" = 1, "1g.10gb" = 1 }\n'
A100 = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 2 }\n'
OBSERVE = '[gpunode]\nenforcement = "observe"\n' + HALVES
CONTINUOUS = '[gpunode]\nenforcement = "continuous"\n' + HALVES
REBOOT = '[gpunode]\nmode-change = ["reboot"]\n' + A100
NOTHING = "[gpunode]\nmode-change = []\n" + A100

Make = Callable[..., Any]


async def test_a_layout_is_brought_into_force_and_then_left_alone(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    first = await rig.cycle()
    assert first.phase is snapshot.Phase.CONVERGED
    assert rig.truth() == [(True, [("3g.40gb", 0, 1), ("3g.40gb", 4, 1)])] * 2
    before = rig.sim.mutations
    second = await rig.cycle()
    assert second.phase is snapshot.Phase.CONVERGED
    assert rig.sim.mutations == before
    assert (second.generation, second.cycle) == (first.generation, 2)


async def test_nothing_declared_is_converged_and_touches_nothing(make: Make) -> None:
    rig = make("h100.80gb:1", "")
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.CONVERGED
    assert not result.settings.declared
    assert rig.sim.mutations == 0


async def test_looking_never_acts(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    result = await rig.cycle(cycle.Intent.LOOK)
    assert result.phase is snapshot.Phase.DRIFTED
    assert result.plan.steps == 5
    assert rig.sim.mutations == 0


async def test_observe_tells_drift_and_writes_nothing(make: Make) -> None:
    rig = make("h100.80gb:1", OBSERVE)
    for intent in (cycle.Intent.DAEMON, cycle.Intent.APPLY):
        result = await rig.cycle(intent)
        assert result.phase is snapshot.Phase.DRIFTED
        assert "observe" in rigs.codes(result)
    assert rig.sim.mutations == 0


async def test_boot_writes_until_the_layout_was_once_in_force(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    await rig.gpus.perform(*_first_compute_away(await rig.gpus.observe()))
    before = rig.sim.mutations
    drifted = await rig.cycle(cycle.Intent.DAEMON)
    assert drifted.phase is snapshot.Phase.DRIFTED
    assert "boot-done" in rigs.codes(drifted)
    assert rig.sim.mutations == before
    await rig.reboot()
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


async def test_boot_applies_changed_settings_live(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle(cycle.Intent.DAEMON)
    rig.set(MIXED)
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.CONVERGED
    assert sorted(rigs.names(result)[0]) == ["1g.10gb", "2g.20gb", "3g.40gb"]


async def test_boot_applies_live_what_shall_become_of_gpus_no_layout_names(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    await rig.cycle(cycle.Intent.DAEMON)
    first = HALVES.replace('"all"', "[0]")
    rig.set(first)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    rig.set('[gpunode]\nunlisted-gpus = "disable"\n' + first)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    assert [mig for mig, _ in rig.truth()] == [True, False]
    with rig.sim.driver.store.change() as node:
        node.gpus[1].mig = node.gpus[1].pending = True
    again = await rig.cycle(cycle.Intent.DAEMON)
    assert (again.phase, "boot-done" in rigs.codes(again)) == (snapshot.Phase.DRIFTED, True)


async def test_the_history_of_cycles_is_kept_over_a_reboot(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.around = dataclasses.replace(rig.around, keep_history=True)
    for _ in range(2):
        await rig.cycle(cycle.Intent.DAEMON)
        rig.now += 60
    first = await rig.cycle(cycle.Intent.DAEMON)
    # What is found the same again is told once.
    assert [(past.phase, past.steps, past.times) for past in first.history] == [("converged", 5, 3)]
    boot = first.history[-1].boot_id
    await rig.reboot()
    rig.now += 60
    second = await rig.cycle(cycle.Intent.DAEMON)
    (before, _) = second.history
    assert (before.at, before.boot_id, before.steps) == (first.history[0].at, boot, 5)
    assert second.history[-1].boot_id not in ("", boot)
    assert second.history[-1].steps == 5
    rig.sim.machine.path(cycle.HISTORY).write_text("nonsense")
    await rig.restart()
    assert len((await rig.cycle(cycle.Intent.DAEMON)).history) == 1


async def test_the_history_is_bounded_and_what_cannot_be_kept_stops_nothing(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.around = dataclasses.replace(rig.around, keep_history=True)
    rig.sim.machine.path(cycle.HISTORY).mkdir(parents=True)
    for turn in range(snapshot.HISTORY_LENGTH + 3):
        rig.set((HALVES, MIXED)[turn % 2])
        assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    assert len((await rig.cycle(cycle.Intent.DAEMON)).history) == snapshot.HISTORY_LENGTH


async def test_continuous_repairs_drift(make: Make) -> None:
    rig = make("h100.80gb:1", CONTINUOUS)
    first = await rig.cycle(cycle.Intent.DAEMON)
    await rig.gpus.perform(*_first_compute_away(await rig.gpus.observe()))
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.CONVERGED
    assert [len(steps) for _, steps in result.outcome.done] == [1]
    # The same instance is back under its old ids: it went and it came, which is two changes.
    assert result.generation == first.generation + 2


def _first_compute_away(node: Any) -> tuple[str, Any]:
    from agent.mig import plan

    gpu = node.gpus[0]
    instance = gpu.instances[0]
    step = plan.DestroyComputeInstance(
        gpu_instance_id=instance.id,
        id=instance.compute[0].id,
        profile=instance.compute[0].profile,
        gpu_instance=instance.placement,
    )
    return gpu.uuid, step


@pytest.mark.parametrize(
    ("hindrance", "word"),
    [
        (("kill-switch", "gpunode=off is set"), "gpunode=off"),
        (("not-root", "needs root"), "root"),
        (("lock", "pid 7 has it"), "pid 7"),
    ],
)
async def test_what_forbids_writing_is_said_and_kept_to(make: Make, hindrance: tuple[str, str], word: str) -> None:
    rig = make("h100.80gb:1", HALVES)
    result = await rig.cycle(hindrance=lambda: hindrance)
    assert result.phase is snapshot.Phase.BLOCKED
    assert any(word in reason.message for reason in result.reasons)
    assert not result.writes
    assert rig.sim.mutations == 0


async def test_the_kill_switch_thrown_in_a_cycle_ends_it_after_the_step_at_hand(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    thrown: list[tuple[str, str]] = []

    def progress(what: str) -> None:
        rig.progress.append(what)
        rig.now += cycle.GLANCE  # a step takes its time
        if len(rig.progress) == 2:
            thrown.append(("kill-switch", "/etc/gpunode/disabled exists"))

    result = await rig.cycle(progress=progress, hindrance=lambda: thrown[0] if thrown else None)
    assert len(rig.progress) == 2
    assert rig.sim.mutations == 2
    assert (result.phase, result.writes) == (snapshot.Phase.DRIFTED, False)
    assert "kill-switch" in rigs.codes(result)


async def test_the_kill_switch_is_looked_for_once_for_all_gpus(make: Make) -> None:
    rig = make("h100.80gb:8", HALVES)
    asked: list[None] = []
    assert (await rig.cycle(hindrance=lambda: asked.append(None))).phase is snapshot.Phase.CONVERGED
    assert len(rig.progress) > 8
    assert len(asked) == 2, "before acting and at the first step; the clock stands still"


async def test_another_owner_is_left_to_it(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    theirs = cycle.Ownership(owner="migmanager", may_write=False, code="owner-migmanager", why="migmanager owns it")
    result = await rig.cycle(ownership=lambda _s, _n, _l: theirs)
    assert (result.phase, result.owner) == (snapshot.Phase.BLOCKED, "migmanager")
    assert rig.sim.mutations == 0


async def test_bad_settings_write_nothing_and_keep_the_last_good_ones(make: Make) -> None:
    rig = make("h100.80gb:1", "[gpunode]\nenforcment = 1\n")
    bad = await rig.cycle(cycle.Intent.DAEMON)
    assert (bad.phase, bad.settings.valid) == (snapshot.Phase.FAILED, False)
    assert rig.sim.mutations == 0
    assert bad.node is not None
    rig.set(HALVES)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED
    rig.set("[[gpunode.layout]\n")
    kept = await rig.cycle(cycle.Intent.DAEMON)
    assert (kept.phase, kept.settings.valid) == (snapshot.Phase.CONVERGED, False)
    assert "settings-invalid" in rigs.codes(kept)
    assert kept.layout.gpus


async def test_a_layout_no_such_gpu_can_hold_touches_nothing(make: Make) -> None:
    rig = make("h100.80gb:1", '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.40gb" = 2, "1g.10gb" = 1 }\n')
    result = await rig.cycle()
    assert (result.phase, result.settings.valid) == (snapshot.Phase.FAILED, False)
    assert rig.sim.mutations == 0


async def test_without_a_driver_it_waits(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.sim.fail("nvmlInit_v2", 9, times=0)
    rig.sim.fail("nvmlInitWithFlags", 9, times=0)
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.WAITING
    assert result.driver_problem is not None
    rig.sim.release()
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


async def test_a_fresh_a100_is_reset_with_everybody_out_of_the_way_and_back(make: Make) -> None:
    rig = make("p4d.24xlarge", A100)
    rig.sim.set_unit("nvidia-persistenced.service", True)
    calls: list[str] = []

    async def note(word: str) -> None:
        calls.append(word)

    result = await rig.cycle(pause=lambda: note("pause"), resume=lambda: note("resume"))
    assert result.phase is snapshot.Phase.CONVERGED
    assert calls == ["pause", "resume"]
    assert rig.sim.machine.unit_active("nvidia-persistenced.service")
    assert {tuple(n) for n in rigs.names(result)} == {("3g.20gb", "3g.20gb")}


async def test_an_idle_a100_that_switches_at_once_is_not_reset(make: Make, tmp_path: Any) -> None:
    node = tmp_path / "node.toml"
    node.write_text('[[gpu]]\nmodel = "a100.40gb"\nmode-change = "immediate"\n')
    rig = make(str(node), A100)
    rig.sim.allow_reset(False)
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_a_reset_somebody_else_forbids_is_told_with_who(make: Make) -> None:
    rig = make("p4d.24xlarge", A100)
    rig.sim.hold(3, name="nv-hostengine")
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    text = " ".join(reason.message for reason in result.reasons)
    assert "nv-hostengine" in text
    assert all(not instances for _, instances in rig.truth())


async def test_an_impossible_reset_leaves_the_mode_pending_and_says_so(make: Make) -> None:
    rig = make("p4d.24xlarge", A100)
    rig.sim.allow_reset(False)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert "reset-refused" in rigs.codes(result)
    assert all(gpu.mode.changing for gpu in result.node.gpus)
    rig.sim.allow_reset(True)
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_with_no_mode_change_allowed_the_pending_mode_is_told(make: Make) -> None:
    rig = make("p4d.24xlarge", NOTHING)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert "mode-pending" in rigs.codes(result)
    assert rig.sim.reboot_requested is None


async def test_a_serving_node_is_not_reset(make: Make) -> None:
    rig = make("p4d.24xlarge", A100)
    rig.sim.set_unit("kubelet.service", True)
    result = await rig.cycle(force=True)
    assert result.phase is snapshot.Phase.BLOCKED
    assert all(not instances for _, instances in rig.truth())


async def test_a_driver_that_went_away_and_came_back_is_taken_anew(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED
    rig.sim.reboot()  # every session of the library dies with it, and this process goes on
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_one_reboot_finishes_the_mode_change(make: Make) -> None:
    rig = make("p4d.24xlarge", REBOOT)
    first = await rig.cycle(cycle.Intent.DAEMON)
    assert first.phase is snapshot.Phase.REBOOT_PENDING
    assert rig.sim.reboot_requested is not None
    again = await rig.cycle(cycle.Intent.DAEMON)
    assert again.phase is snapshot.Phase.REBOOT_PENDING
    await rig.reboot()
    assert rig.sim.reboot_requested is None
    last = await rig.cycle(cycle.Intent.DAEMON)
    assert last.phase is snapshot.Phase.CONVERGED


async def test_a_reboot_that_does_not_help_ends_stated(make: Make) -> None:
    rig = make("p4d.24xlarge", REBOOT)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.REBOOT_PENDING
    for _ in range(3):
        await rig.reboot()
        for gpu in rig.sim.driver.gpus:  # somebody turns it off again at each boot, as Bottlerocket's manager would
            with rig.sim.driver.store.change() as node:
                node.gpus[gpu.index].mig = node.gpus[gpu.index].pending = False
        result = await rig.cycle(cycle.Intent.DAEMON)
        assert result.phase is snapshot.Phase.FAILED
        assert "reboot-refused" in rigs.codes(result)
        assert rig.sim.reboot_requested is None


async def test_without_a_durable_record_no_reboot_is_requested(make: Make) -> None:
    rig = make("p4d.24xlarge", REBOOT)
    place = rig.sim.machine.path(cycle.REBOOTS)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir()
    result = await rig.cycle(cycle.Intent.DAEMON)
    assert result.phase is snapshot.Phase.FAILED
    assert rig.sim.reboot_requested is None


async def test_an_instance_in_use_is_never_destroyed(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    await rig.cycle()
    used = next(iter(rig.sim.driver.gpus[0].state.instances))
    rig.sim.start_process(0, gpu_instance=used, name="train.py")
    rig.set('[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n')
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert rig.truth()[0] == (True, [("3g.40gb", 0, 1), ("3g.40gb", 4, 1)])
    assert rig.truth()[1] == (True, [("7g.80gb", 0, 1)])
    assert any("train.py" in reason.message for reason in result.reasons)


async def test_one_in_use_that_the_target_keeps_is_no_hindrance(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    state = rig.sim.driver.gpus[0].state
    used = next(i for i in state.instances.values() if i.start == 0)
    rig.sim.start_process(0, gpu_instance=used.id)
    rig.set(MIXED)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.CONVERGED
    assert used.id in rig.sim.driver.gpus[0].state.instances


async def test_a_process_that_appears_after_planning_stops_that_gpu(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    await rig.cycle()
    before = rig.truth()
    rig.set('[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.80gb" = 1 }\n')
    seen = await cycle.look(rig.around, rig.load())
    rig.sim.start_process(1, gpu_instance=next(iter(rig.sim.driver.gpus[1].state.instances)), name="late.py")
    result = await cycle.run_cycle(rig.around, intent=cycle.Intent.APPLY, trigger="test", seen=seen)
    assert result.phase in (snapshot.Phase.FAILED, snapshot.Phase.BLOCKED)
    assert rig.truth()[1] == before[1]
    assert rig.truth()[0] == (True, [("7g.80gb", 0, 1)])
    assert any("late.py" in reason.message for reason in result.reasons)


async def test_a_step_that_fails_is_rolled_back(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    await rig.cycle()
    before = rig.truth()
    rig.sim.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999, gpu=0)
    rig.set(MIXED)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.FAILED
    assert rig.truth()[0] == before[0]
    assert sorted(p for p, _, _ in rig.truth()[1][1]) == ["1g.10gb", "2g.20gb", "3g.40gb"]
    (failure,) = result.outcome.failures
    assert failure.rolled_back
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_leave_leaves_what_is_there_and_says_it(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    await rig.cycle()
    rig.sim.fail("nvmlGpuInstanceCreateComputeInstance", 999)
    rig.set('[gpunode]\non-failure = "leave"\n' + MIXED)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.FAILED
    (failure,) = result.outcome.failures
    assert not failure.rolled_back
    assert "without compute instance" in failure.remains
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_a_lost_gpu_stops_nobody_else(make: Make) -> None:
    rig = make("h100.80gb:4", HALVES)
    await rig.cycle(cycle.Intent.LOOK)
    rig.sim.lose(2)
    result = await rig.cycle()
    assert result.phase is snapshot.Phase.BLOCKED
    assert [gpu.state.value for gpu in result.node.gpus] == ["ok", "ok", "lost", "ok"]
    assert [len(instances) for _, instances in rig.truth()] == [2, 2, 0, 2]


async def test_a_hung_gpu_stops_nobody_else_and_comes_back(make: Make) -> None:
    rig = make("h100.80gb:3", HALVES, read_deadline=0.3, change_deadline=0.3)
    order = rig.sim.hang("nvmlDeviceSetMigMode", gpu=1)
    result = await rig.cycle()
    assert [gpu.state.value for gpu in result.node.gpus] == ["ok", "hung", "ok"]
    assert [len(instances) for _, instances in rig.truth()] == [2, 0, 2]
    (failure,) = result.outcome.failures
    assert not failure.rolled_back
    rig.sim.release(order)
    await rig.unhung()
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_a_stop_ends_between_steps_and_the_next_cycle_finishes(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    result = await rig.cycle(stop=lambda: len(rig.progress) >= 2)
    assert result.outcome.stopped
    assert result.phase is snapshot.Phase.DRIFTED
    assert rig.truth() == [(True, [("3g.40gb", 4, 0)])] or rig.truth() == [(True, [("3g.40gb", 0, 0)])]
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_a_cycle_begins_no_step_after_its_deadline_and_the_next_goes_on(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    done: list[str] = []

    def slow(what: str) -> None:
        done.append(what)
        rig.now += 70.0  # each step takes more than a minute

    result = await rig.cycle(progress=slow)
    assert len(done) <= 5
    assert result.phase is snapshot.Phase.FAILED
    assert "cycle-deadline" in rigs.codes(result)
    assert result.outcome.late
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_after_a_change_the_operators_commands_are_run(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    ran: list[str] = []

    async def changed(settings: Any) -> tuple[snapshot.Reason, ...]:
        ran.append(settings.enforcement)
        return (snapshot.Reason("after-change", "a command failed"),)

    result = await rig.cycle(changed=changed)
    assert ran == ["boot"]
    assert "after-change" in rigs.codes(result)
    await rig.cycle(changed=changed)
    assert ran == ["boot"]


async def test_what_cannot_be_remembered_does_not_stop_it(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    rig.sim.machine.path(cycle.IN_FORCE).mkdir(parents=True)
    assert (await rig.cycle(cycle.Intent.DAEMON)).phase is snapshot.Phase.CONVERGED


@pytest.mark.parametrize("text", ["[]", '{"indexes": 3}', '{"indexes": {"x": "y"}}', "{}", "nonsense"])
async def test_a_broken_memory_of_indexes_is_no_memory(make: Make, text: str) -> None:
    rig = make("h100.80gb:1", HALVES)
    place = rig.sim.machine.path(cycle.INDEXES)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    assert (await rig.cycle()).phase is snapshot.Phase.CONVERGED


async def test_indexes_are_remembered_by_address(make: Make) -> None:
    rig = make("h100.80gb:2", HALVES)
    result = await rig.cycle(cycle.Intent.DAEMON)
    remembered = json.loads(rig.sim.machine.path(cycle.INDEXES).read_text())
    assert remembered == {"indexes": {str(g.index): g.pci_bus_id for g in result.node.gpus}}


async def test_the_same_layout_has_the_same_digest_whatever_declares_it(make: Make) -> None:
    rig = make("h100.80gb:1", HALVES)
    one = await rig.cycle(cycle.Intent.LOOK)
    rig.set("# a comment\n" + HALVES)
    two = await rig.cycle(cycle.Intent.LOOK)
    assert cycle.digest(one.layout) == cycle.digest(two.layout)
    assert cycle.digest(dataclasses.replace(one.layout, gpus=())) != cycle.digest(one.layout)
