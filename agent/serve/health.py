"""The verdict on a node, from one snapshot and one sample: live, ready, degraded, and why. Pure.

Ready implies live. A driver that is missing, hung or broken makes the node not ready and never
not live: restarting the agent would not help. What touches a GPU that no layout needs, or a
subsystem, only degrades: `/readyz` stays 200 and the reasons say so.
"""

from __future__ import annotations

from agent import findings, measures, records
from agent.mig import node as nodes
from agent.reconcile import snapshot as snapshots
from agent.sample import xid as xids

Reason = snapshots.Reason

LIVE_WITHIN = 10.0
"""Seconds within which the loop must have turned."""
SAMPLE_STALE_AFTER = 30.0
"""Seconds after which a sample is called old (six cycles of the default interval)."""
XID_REMEMBERED = 600.0
"""Seconds for which a fatal XID keeps a node degraded, unless the driver itself asks for recovery."""
STOPPED_BY = frozenset(("gpu-reset", "node-reboot", "drain-and-reset", "bus-reset", "system-reboot"))
"""Recovery actions that end what runs on the instances of a GPU; the others are about its links."""

CODES = {
    "loop-stuck": "the event loop of gpunode has not turned for 10 s",
    "starting": "no enforcement cycle has ended yet",
    "driver": "there is no NVIDIA driver, or it does not answer",
    "settings-invalid": "the newest settings cannot be used",
    "drift": "a GPU is not as its layout wants it",
    "in-use": "what would have to change is in use",
    "mode-pending": "a change of the MIG mode waits for a reset or a reboot",
    "unplaceable": "the layout does not fit beside what is kept",
    "not-capable": "a GPU that should be split cannot do MIG",
    "not-owner": "somebody else owns the layout",
    "unknown-geometry": "nothing tells the profiles of this GPU",
    "lost": "a GPU has fallen off the bus",
    "hung": "a call to a GPU has not come back",
    "error": "a GPU cannot be read",
    "step-failed": "a step of the plan failed",
    "reset-refused": "a GPU reset did not happen",
    "reboot-pending": "a reboot was requested",
    "reboot-refused": "the reboot guard allows no further reboot",
    "reboot-failed": "the reboot could not be requested",
    "cycle-deadline": "a cycle was not done within its time; the next one goes on",
    "cycle-failed": "an enforcement cycle broke; the next one tries again",
    "driver-changed": "the driver was replaced under the running daemon, which only observes since",
    "lock": "another gpunode writes here, or the lock cannot be taken",
    "kill-switch": "the kill switch is thrown",
    "observe": "enforcement is set to observe",
    "boot-done": "the layout was in force once in this boot, and nothing is repaired after that",
    "after-change-failed": "a command that runs after a change failed",
    "gpu-missing": "fewer GPUs answer than this machine should have",
    "fabric": "a whole GPU on an NVSwitch host has no completed fabric",
    "samples-stale": "the newest measurement is old",
    "not-measured": "a GPU does not answer the sampler",
    "nvml-down": "the sampler has no driver to ask",
    "events-down": "GPU events (XIDs) are not watched",
    "collector-failed": "a collector's last visit failed",
    "xid": "a GPU reported a fatal XID within 10 minutes",
    "recovery-action": "the driver asks for a reset, a drain or a reboot",
    "remap-failed": "a row of GPU memory could not be remapped",
    "remap-pending": "a row of GPU memory waits for a reset to be remapped",
}
"""Codes that this module gives or knows, with what they mean. Codes of a cycle are passed on as they are."""


@records.dataclass(frozen=True, slots=True)
class Health:
    """The verdict. `reasons` lists everything that keeps the node from being healthy. `findings` are what
    around the GPUs will hurt somebody; those that are critical are reasons too."""

    live: bool
    ready: bool
    degraded: bool
    reasons: tuple[Reason, ...] = ()
    findings: tuple[findings.Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        """The one answer for a fleet: live, ready and not degraded."""
        return self.live and self.ready and not self.degraded

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons, each once, in order of appearance."""
        return tuple(dict.fromkeys(reason.code for reason in self.reasons))


class _Findings:
    """Collects reasons, each (code, GPU) once, and whether one of them stops the node from being ready."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, str | None, str], Reason] = {}
        self.ready = True
        self.degraded = False

    def add(self, reason: Reason, *, stops: bool) -> None:
        self.reasons.setdefault((reason.code, reason.gpu, reason.message), reason)
        if stops:
            self.ready = False
        else:
            self.degraded = True

    def explains(self, uuid: str) -> bool:
        return any(gpu == uuid for _, gpu, _ in self.reasons)


def judge(
    snapshot: snapshots.Snapshot | None,
    sample: measures.Sample | None,
    *,
    now: float,
    loop_turned: float,
    noticed: tuple[findings.Finding, ...] = (),
) -> Health:
    """Return the health of a node. `now` and `loop_turned` are Unix seconds; `noticed` are the findings
    of snapshot and sample (`Board.findings`)."""
    found = _Findings()
    live = now - loop_turned <= LIVE_WITHIN
    if not live:
        found.add(
            Reason("loop-stuck", f"the event loop of gpunode has not turned for {now - loop_turned:.0f} s"), stops=True
        )
    if snapshot is None or snapshot.phase is snapshots.Phase.STARTING:
        found.add(Reason("starting", "the first enforcement cycle has not ended"), stops=True)
    if snapshot is not None:
        _settings_and_driver(snapshot, found)
        _layout(snapshot, found)
        _inventory(snapshot, found)
        _passed_on(snapshot, found)
    if sample is not None:
        _measured(snapshot, sample, found, now=now)
    elif snapshot is not None and snapshot.node is not None and now - snapshot.started > SAMPLE_STALE_AFTER:
        found.add(Reason("samples-stale", "nothing has been measured yet"), stops=False)
    for finding in noticed:
        # The fabric has a reason of its own above, which also keeps the node from being ready.
        if finding.severity == findings.CRITICAL and finding.code != "fabric-incomplete":
            found.add(Reason(finding.code, f"{finding.message} ({finding.advice})", finding.gpu), stops=False)
    return Health(
        live=live,
        ready=live and found.ready,
        degraded=found.degraded,
        reasons=tuple(found.reasons.values()),
        findings=noticed,
    )


def _settings_and_driver(snapshot: snapshots.Snapshot, found: _Findings) -> None:
    for reason in snapshot.reasons:
        # Told of no GPU, "lost" is a card that a layout names and that has left the bus.
        if reason.code in ("settings-invalid", "driver") or (reason.code == "lost" and reason.gpu is None):
            found.add(reason, stops=True)
    codes = {reason.code for reason in found.reasons.values()}
    if not snapshot.settings.valid and "settings-invalid" not in codes:
        for problem in snapshot.settings.problems:
            if problem.is_error:
                found.add(Reason("settings-invalid", str(problem)), stops=True)
        found.ready = False
    if snapshot.node is None and snapshot.phase is not snapshots.Phase.STARTING and "driver" not in codes:
        # Also when invalid settings were met first: a node without a driver runs nothing either way.
        why = snapshot.driver_problem or "the GPUs of this node could not be read"
        found.add(Reason("driver", why), stops=True)


def _layout(snapshot: snapshots.Snapshot, found: _Findings) -> None:
    """Every GPU that a layout needs must be there, answer, and be as wanted."""
    if snapshot.node is None:
        return
    needed = {gpu.uuid for gpu in snapshot.layout.gpus}
    for plan in snapshot.plan.gpus:
        if plan.blocked is not None:
            # Blocked without a difference to show: a layout that could not be tied to a card.
            stops = plan.uuid in needed or not plan.drift
            found.add(Reason(plan.blocked.kind.value, plan.blocked.message, plan.uuid), stops=stops)
        elif plan.drift:
            words = "; ".join(drift.message for drift in plan.drift)
            found.add(Reason("drift", f"GPU {plan.index}: {words}", plan.uuid), stops=plan.uuid in needed)
    for wanted in snapshot.layout.gpus:
        gpu = snapshot.node.gpu(wanted.uuid)
        if gpu is None:
            found.add(
                Reason("lost", f"{wanted.uuid} has a layout and is not on this node any more", wanted.uuid), stops=True
            )


def _inventory(snapshot: snapshots.Snapshot, found: _Findings) -> None:
    """GPUs that do not answer, needed or not, and fewer of them than there should be."""
    if snapshot.node is None:
        return
    needed = {gpu.uuid for gpu in snapshot.layout.gpus}
    for gpu in snapshot.node.gpus:
        if gpu.state is nodes.GpuState.OK:
            continue
        stops = gpu.uuid in needed
        code = gpu.state.value
        if (code, gpu.uuid) in {(c, g) for c, g, _ in found.reasons}:
            found.ready = found.ready and not stops
            continue
        found.add(
            Reason(code, f"GPU {gpu.index} is {code}" + (f": {gpu.problem}" if gpu.problem else ""), gpu.uuid),
            stops=stops,
        )
    expected = snapshot.gpus_expected
    if expected is not None and len(snapshot.node.gpus) < expected:
        missing = expected - len(snapshot.node.gpus)
        are = "is" if missing == 1 else "are"
        found.add(
            Reason("gpu-missing", f"{missing} of the {expected} GPUs of this machine {are} not there"), stops=False
        )


def _passed_on(snapshot: snapshots.Snapshot, found: _Findings) -> None:
    """What the cycle itself had to say, unless the same was found above in the same words' place."""
    known = {(code, gpu) for code, gpu, _ in found.reasons}
    not_ready = not found.ready
    for reason in snapshot.reasons:
        if (reason.code, reason.gpu) in known and reason.code != "settings-invalid":
            continue
        # A cycle's reason explains a node that is not ready; alone, it degrades.
        found.add(reason, stops=not_ready)
    if snapshot.phase in (snapshots.Phase.FAILED, snapshots.Phase.REBOOT_PENDING) and snapshot.layout.gpus:
        found.ready = False


def _measured(snapshot: snapshots.Snapshot | None, sample: measures.Sample, found: _Findings, *, now: float) -> None:
    age = now - sample.taken
    if age > SAMPLE_STALE_AFTER:
        # The figures below are then not about now; say only that.
        found.add(Reason("samples-stale", f"the newest measurement is {age:.0f} s old"), stops=False)
        return
    if not sample.nvml_up:
        if snapshot is not None and snapshot.node is not None:
            found.add(Reason("nvml-down", "the sampler has no driver to ask"), stops=False)
        return
    if sample.event_watch_up is False:
        found.add(Reason("events-down", "GPU events are not watched, so XIDs may go unseen"), stops=False)
    silent = any(not gpu.up for gpu in sample.gpus)
    for name, collector in sorted(sample.collectors.items()):
        # A GPU that says nothing fails the visits to all GPUs; it is told by its own number.
        if not collector.success and not (silent and name in ("gpu", "gpu-slow")):
            found.add(Reason("collector-failed", f"the collector {name} failed at its last visit"), stops=False)
    for gpu in sample.gpus:
        _gpu_measured(gpu, found)
    indexes = {gpu.uuid: gpu.index for gpu in sample.gpus}
    for (uuid, instance, _, xid), when in sorted(sample.xid_last.items()):
        if xid in xids.FATAL and now - when <= XID_REMEMBERED:
            who = f"GPU {indexes[uuid]}" if uuid in indexes else uuid
            who = f"instance {instance} of {who}" if instance else who
            found.add(Reason("xid", f"{who} reported XID {xid} {now - when:.0f} s ago", uuid), stops=False)


def sound(sample: measures.Sample, gpu: measures.GpuSample, instance: measures.InstanceSample, *, now: float) -> bool:
    """Return whether a GPU instance is to be trusted: neither it nor its whole GPU has had a fatal XID
    lately, and the driver asks for nothing that would end what runs on it. What happened under the same
    id before the instance was made is not its own. `now` is in Unix seconds."""
    if gpu.recovery_action in STOPPED_BY:
        return False
    for (uuid, number, _, xid), when in sample.xid_last.items():
        hit = uuid == gpu.uuid and (number == "" or (number == str(instance.id) and when >= instance.first_seen))
        if hit and xid in xids.FATAL and now - when <= XID_REMEMBERED:
            return False
    return True


def _gpu_measured(gpu: measures.GpuSample, found: _Findings) -> None:
    who = f"GPU {gpu.index}"
    if not gpu.up:
        if not found.explains(gpu.uuid):
            found.add(
                Reason(
                    "not-measured",
                    f"{who} does not answer the sampler" + (f": {gpu.problem}" if gpu.problem else ""),
                    gpu.uuid,
                ),
                stops=False,
            )
        return
    state = None if gpu.fabric_state is None else gpu.fabric_state.replace("_", "-")
    if gpu.mig_enabled is not True and state not in (None, "completed", "not-supported"):
        text = f"the fabric of {who} is {state}: until it is completed CUDA does not start on the whole GPU"
        found.add(Reason("fabric", text, gpu.uuid), stops=True)
    if gpu.recovery_action not in (None, "none"):
        found.add(
            Reason("recovery-action", f"the driver asks for {gpu.recovery_action} on {who}", gpu.uuid), stops=False
        )
    if gpu.remap_failed:
        found.add(Reason("remap-failed", f"a row of the memory of {who} could not be remapped", gpu.uuid), stops=False)
    if gpu.remap_pending:
        found.add(
            Reason("remap-pending", f"a row of the memory of {who} is remapped with the next reset", gpu.uuid),
            stops=False,
        )
