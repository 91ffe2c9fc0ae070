"""From the node as it is to the layout as it shall be: steps, what stays, what is in the way.

`compute()` decides everything before anything is touched: placements are settled by exact search,
instances that match stay, and on each GPU destroys come before creates, so that every prefix of
the steps leaves a legal GPU and planning again from there converges.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import ClassVar

from agent import records
from agent.mig import change as changes
from agent.mig import compute as cis
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import placement, search
from agent.mig import profile as profiles


@records.dataclass(frozen=True, slots=True)
class SetMigMode:
    """Ask for MIG on or off."""

    kind: ClassVar[str] = "set-mig-mode"
    enabled: bool
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset the GPU so that a pending mode takes effect; skipped when the mode already has."""

    kind: ClassVar[str] = "reset-gpu"
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class DestroyComputeInstance:
    """Remove a compute instance."""

    kind: ClassVar[str] = "destroy-compute-instance"
    gpu_instance_id: int
    id: int
    profile: profiles.Profile
    gpu_instance: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class DestroyGpuInstance:
    """Remove a GPU instance that has no compute instances left."""

    kind: ClassVar[str] = "destroy-gpu-instance"
    id: int
    profile: profiles.Profile
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class CreateGpuInstance:
    """Make a GPU instance at an exact place (its id is known only afterwards)."""

    kind: ClassVar[str] = "create-gpu-instance"
    profile: profiles.Profile
    profile_id: nodes.ProfileId
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class CreateComputeInstance:
    """Make a compute instance in the GPU instance that lies at `gpu_instance`.

    `profile` equal to the GPU instance's own means the default one, over all its SMs. `start` fixes
    the first compute slice, None leaves it to the driver.
    """

    kind: ClassVar[str] = "create-compute-instance"
    gpu_instance: nodes.Placement
    profile: profiles.Profile
    start: int | None = None
    why: str = dataclasses.field(default="", compare=False)


Step = SetMigMode | ResetGpu | DestroyComputeInstance | DestroyGpuInstance | CreateGpuInstance | CreateComputeInstance


class BlockedKind(enum.Enum):
    """Why a GPU gets no steps; the value is the word shown."""

    IN_USE = "in-use"
    MODE_PENDING = "mode-pending"
    UNPLACEABLE = "unplaceable"
    NOT_CAPABLE = "not-capable"
    NOT_OWNER = "not-owner"
    UNKNOWN_GEOMETRY = "unknown-geometry"
    LOST = "lost"
    HUNG = "hung"
    ERROR = "error"


@records.dataclass(frozen=True, slots=True)
class Blocked:
    """Why nothing may be done on a GPU although something should be."""

    kind: BlockedKind
    message: str
    holders: tuple[nodes.Holder, ...] = ()


@records.dataclass(frozen=True, slots=True)
class Kept:
    """A GPU instance that stays as it is (its compute instances may still change)."""

    id: int
    profile: profiles.Profile
    placement: nodes.Placement
    why: str = dataclasses.field(default="", compare=False)


@records.dataclass(frozen=True, slots=True)
class Drift:
    """One difference between what is wanted and what is: `kind` is mode, missing or extra."""

    kind: str
    message: str


@records.dataclass(frozen=True, slots=True)
class GpuPlan:
    """What happens on one GPU. `steps` is () when in sync or blocked; `drift` tells the differences
    either way. `needs` is "reset" or "reboot" when a mode change will wait for one, else None.
    `partial` is set where the rest can be planned only after these steps (profiles are told by the
    driver only with MIG on)."""

    uuid: str
    index: int
    steps: tuple[Step, ...] = ()
    kept: tuple[Kept, ...] = ()
    drift: tuple[Drift, ...] = ()
    blocked: Blocked | None = None
    needs: str | None = None
    partial: bool = False
    managed: bool = True

    @property
    def in_sync(self) -> bool:
        """Whether the GPU already is as wanted."""
        return not self.drift


@records.dataclass(frozen=True, slots=True)
class Plan:
    """What happens on the node: one entry a GPU of the node, `managed` False where nothing is declared."""

    gpus: tuple[GpuPlan, ...] = ()

    @property
    def in_sync(self) -> bool:
        """Whether every GPU already is as wanted."""
        return all(gpu.in_sync for gpu in self.gpus)

    @property
    def blocked(self) -> tuple[GpuPlan, ...]:
        """The GPUs that should change and may not."""
        return tuple(gpu for gpu in self.gpus if gpu.blocked is not None)

    @property
    def steps(self) -> int:
        """How many steps there are on all GPUs."""
        return sum(len(gpu.steps) for gpu in self.gpus)

    def gpu(self, uuid: str) -> GpuPlan | None:
        """Return the plan of the GPU with this UUID, or None."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        return None


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the plan may do. `reset` and `reboot`: what may follow a mode change that stays pending.
    `force` lifts the allocation check (not the one on processes). `disable_unlisted` turns MIG off
    on GPUs that no layout names, if at least one layout is declared."""

    reset: bool = True
    reboot: bool = False
    force: bool = False
    disable_unlisted: bool = False


_LIFTED_BY_FORCE = ("pod", "task")
# A service of the system (nvidia-persistenced, DCGM) uses no instance: it is the reset that it can
# refuse, and what is stopped around a reset is not for the plan to say.
_NO_USE = ("service",)
_NEEDS_RESET = ("", "unknown", "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada")


def users(holders: Iterable[nodes.Holder], *, force: bool) -> tuple[nodes.Holder, ...]:
    """Return those of `holders` that forbid a destroy; `force` lifts what a scheduler gave away."""
    lifted = _LIFTED_BY_FORCE if force else ()
    return tuple(h for h in holders if h.kind not in _NO_USE and h.kind not in lifted)


def compute(layout: layouts.Layout, node: nodes.NodeState, policy: Policy) -> Plan:
    """Plan the way of every GPU of `node` to `layout`. Pure; see the module's docstring."""
    blind = None
    if node.serving is not None and not node.allocations_known and not policy.force:
        blind = f"{node.serving} is active and what it has allocated cannot be read, so everything counts as in use"
    plans = []
    prepared: dict[int, search.Geometry] = {}
    for gpu in node.gpus:
        wanted = layout.gpu(gpu.uuid)
        usable = gpu.mode is not None and gpu.state is nodes.GpuState.OK
        if wanted is None and policy.disable_unlisted and layout.gpus and usable:
            wanted = layouts.GpuLayout(gpu.uuid, mig=False, origin='unlisted-gpus = "disable"')
        if wanted is None:
            plans.append(GpuPlan(gpu.uuid, gpu.index, managed=False))
        else:
            # Equal GPUs share one tuple of offers; telling so by identity saves hashing all of it.
            geometry = prepared.get(id(gpu.offers))
            if geometry is None:
                geometry = prepared[id(gpu.offers)] = placement.geometry_of(gpu.offers)
            plans.append(_Case(gpu, geometry, wanted, policy, blind, node.instance_type).plan())
    return Plan(tuple(plans))


def is_resetless(gpu: nodes.Gpu) -> bool:
    """Whether a MIG mode change takes effect without a reset: as the driver tells, else by
    architecture (Hopper and later)."""
    if gpu.resetless is not None:
        return gpu.resetless
    return gpu.architecture.lower() not in _NEEDS_RESET


@records.dataclass(frozen=True, slots=True)
class _Case:
    """One GPU, what is wanted of it, and what may be done. `blind` is a sentence when nobody can
    tell what is in use."""

    gpu: nodes.Gpu
    geometry: search.Geometry
    wanted: layouts.GpuLayout
    policy: Policy
    blind: str | None
    instance_type: str | None

    def plan(self) -> GpuPlan:
        gpu = self.gpu
        if gpu.state is not nodes.GpuState.OK:
            kind = {
                nodes.GpuState.LOST: BlockedKind.LOST,
                nodes.GpuState.HUNG: BlockedKind.HUNG,
                nodes.GpuState.ERROR: BlockedKind.ERROR,
            }[gpu.state]
            cause = f": {gpu.problem}" if gpu.problem else ""
            message = f"cannot work on GPU {gpu.index}: it is {gpu.state.value}{cause}"
            return self._blocked(kind, message, [Drift("missing", f"what GPU {gpu.index} is cannot be seen")])
        if gpu.mode is None:
            return self._result() if not self.wanted.mig else self._not_capable()
        if not self.wanted.mig:
            return self._off(gpu.mode)
        if gpu.geometry_unknown is not None:
            message = f"cannot split GPU {gpu.index} ({gpu.name}): {gpu.geometry_unknown}"
            drift = [*self._mode_drift(gpu.mode), *self._all_missing()]
            return self._blocked(BlockedKind.UNKNOWN_GEOMETRY, message, drift)
        return self._on(gpu.mode)

    def _result(
        self,
        steps: Iterable[Step] = (),
        drift: Iterable[Drift] = (),
        *,
        kept: Iterable[Kept] = (),
        needs: str | None = None,
        partial: bool = False,
    ) -> GpuPlan:
        return GpuPlan(
            self.gpu.uuid,
            self.gpu.index,
            steps=tuple(steps),
            kept=tuple(kept),
            drift=tuple(drift),
            needs=needs,
            partial=partial,
        )

    def _blocked(
        self, kind: BlockedKind, message: str, drift: Iterable[Drift], holders: tuple[nodes.Holder, ...] = ()
    ) -> GpuPlan:
        blocked = Blocked(kind, message, holders)
        return GpuPlan(self.gpu.uuid, self.gpu.index, drift=tuple(drift), blocked=blocked)

    def _not_capable(self) -> GpuPlan:
        gpu = self.gpu
        if self.instance_type is None:
            where, whose = f"GPU {gpu.index} ({gpu.name})", "it"
        else:
            family = self.instance_type.partition(".")[0]
            where = f"GPU {gpu.index} ({gpu.name}) of this {self.instance_type}"
            whose = f"a GPU of the {family} family"
        message = f"cannot split {where}: {whose} cannot do MIG; time-slicing shares such a GPU without isolation"
        return self._blocked(
            BlockedKind.NOT_CAPABLE, message, [Drift("mode", "MIG is wanted on, and the GPU has no MIG")]
        )

    # ---- who is in the way

    def _users(self, holders: Iterable[nodes.Holder]) -> tuple[nodes.Holder, ...]:
        return users(holders, force=self.policy.force)

    def _in_use(self, what: str, drift: Sequence[Drift]) -> GpuPlan | None:
        """Return the refusal when the GPU as a whole is in use, else None."""
        users = self._users(self.gpu.in_use)
        if not users and self.blind is None:
            return None
        cause = f"it is in use by {_list(users)}" if users else self.blind
        return self._blocked(BlockedKind.IN_USE, f"cannot {what} on GPU {self.gpu.index}: {cause}", drift, users)

    # ---- MIG off

    def _off(self, mode: nodes.ModeState) -> GpuPlan:
        if not mode.current and not mode.pending:
            return self._result()
        drift = list(self._mode_drift(mode))
        off = SetMigMode(False, why=self._because("MIG off is wanted"))
        if not mode.current:
            return self._result([SetMigMode(False, why=self._because("MIG would come on with the next reset"))], drift)
        drift += [self._extra(instance) for instance in sorted(self.gpu.instances, key=lambda i: i.placement)]
        waits = not mode.pending and not is_resetless(self.gpu)
        if waits and not self.policy.reset and not self.policy.reboot:
            return self._mode_pending(drift)
        refusal = self._in_use("turn MIG off", drift)
        if refusal is not None:
            return refusal
        if waits and not self.policy.reset:
            return self._result((), drift, needs="reboot")
        steps: list[Step] = []
        for instance in sorted(self.gpu.instances, key=lambda i: i.placement):
            steps += self._remove(instance, "MIG is turned off")
        if not waits:
            steps.append(off)
        then, needs, complete = self._after_mode()
        return self._result([*steps, *then], drift, needs=needs, partial=not complete)

    def _after_mode(self) -> tuple[list[Step], str | None, bool]:
        """Return what follows a mode change that was asked for: steps, what it needs, and whether
        the mode is then in effect."""
        why = "the mode asked for takes effect with a reset"
        if is_resetless(self.gpu):
            return [], None, True
        if self.policy.reset:
            return [ResetGpu(why=why)], "reset", True
        return [], "reboot" if self.policy.reboot else None, False

    def _mode_pending(self, drift: Sequence[Drift]) -> GpuPlan:
        word = "on" if self.wanted.mig else "off"
        message = (
            f"cannot turn MIG {word} on GPU {self.gpu.index}: the change waits for a GPU reset or a reboot, "
            "and neither is allowed now"
        )
        return self._blocked(BlockedKind.MODE_PENDING, message, drift)

    # ---- MIG on

    def _on(self, mode: nodes.ModeState) -> GpuPlan:
        gpu = self.gpu
        drift = list(self._mode_drift(mode))
        kinds: tuple[placement.Kind, ...] = ()
        if gpu.offers:
            try:
                kinds = placement.kinds(self.geometry, self.wanted.instances, placement.name_of(gpu))
                refusal = placement.refusal(self.geometry, kinds, placement.name_of(gpu))
            except placement.Refusal as cause:
                refusal = str(cause)
            if refusal is not None:
                return self._blocked(BlockedKind.UNPLACEABLE, refusal, [*drift, *self._all_missing()])
        elif mode.current and self.wanted.instances:
            message = f"cannot split GPU {gpu.index} ({gpu.name}): the driver tells none of its profiles"
            return self._blocked(BlockedKind.UNKNOWN_GEOMETRY, message, [*drift, *self._all_missing()])
        if mode.current:
            head = [] if mode.pending else [SetMigMode(True, why=self._because("MIG would go off with the next reset"))]
            return self._instances(kinds, head, drift)
        drift += self._all_missing()
        waits = mode.pending and not is_resetless(gpu)
        if waits and not self.policy.reset and not self.policy.reboot:
            return self._mode_pending(drift)
        in_use = self._in_use("turn MIG on", drift)
        if in_use is not None:
            return in_use
        steps: list[Step] = [] if waits else [SetMigMode(True, why=self._because("MIG on is wanted"))]
        then, needs, complete = self._after_mode()
        steps += then
        if complete and kinds:
            found = changes.find(self.geometry, kinds, (), True)
            assert found is not None, "fits_empty said that it fits"
            steps += self._makes(found, ())
        partial = not complete or (not gpu.offers and bool(self.wanted.instances))
        return self._result(steps, drift, needs=needs, partial=partial)

    def _instances(self, kinds: tuple[placement.Kind, ...], head: Sequence[Step], drift: list[Drift]) -> GpuPlan:
        """Plan the instances of a GPU whose MIG mode is on."""
        gpu = self.gpu
        geometry = self.geometry
        # Who holds the whole GPU without being seen on an instance may use any of them.
        everything = self.blind is not None or bool(self._users(gpu.holders))
        present = changes.describe(geometry, gpu.instances, lambda holders: everything or bool(self._users(holders)))
        found = changes.find(geometry, kinds, present, True)
        if found is None:
            return self._in_the_way(kinds, present, drift)
        drift += self._differences(kinds, found)
        steps: list[Step] = list(head)
        reason = self._because("not wanted")
        coming = [(new, geometry.offers[new.kind.offer]) for new in found.new]
        for one in found.keep:
            instance = gpu.instances[one.number]
            wanted = ", ".join(str(cis.name_of(geometry.offers[one.kind.offer], kind)) for kind in one.kind.compute)
            for number, compute in enumerate(instance.compute):
                if number not in one.compute.kept:
                    steps.append(_destroy(instance, compute, f"the GPU instance is wanted with {wanted}"))
        for number in sorted(found.gone, key=lambda n: gpu.instances[n].placement):
            instance = gpu.instances[number]
            over = [
                f"{offer.profile} at {new.start}:{offer.size}"
                for new, offer in coming
                if instance.placement.overlaps(nodes.Placement(new.start, offer.size))
            ]
            steps += self._remove(instance, f"its slices are needed for {_list(over)}" if over else reason)
        steps += self._makes(found, gpu.instances)
        kept = []
        for one in found.keep:
            instance = gpu.instances[one.number]
            users = self._users(instance.in_use)
            why = self._because("wanted, and there")
            if one.compute.new or len(one.compute.kept) < len(instance.compute):
                why += "; its compute instances change"
            if users:
                why += f"; in use by {_list(users)}"
            kept.append(Kept(instance.id, instance.profile, instance.placement, why))
        return self._result(steps, drift, kept=kept)

    def _in_the_way(
        self, kinds: tuple[placement.Kind, ...], present: tuple[changes.Present, ...], drift: list[Drift]
    ) -> GpuPlan:
        """Say which instances in use forbid the target."""
        gpu, geometry = self.gpu, self.geometry
        found = changes.find(geometry, kinds, present, False)
        assert found is not None, "fits_empty said that it fits"
        drift += self._differences(kinds, found)
        hurt = [gpu.instances[number] for number in changes.disturbed(found, present)]
        users = self._users(h for instance in hurt for h in instance.in_use) or self._users(gpu.holders)
        by = f"in use by {_list(users)}" if users else f"in use ({self.blind})"
        named = _list([f"GPU instance {i.id} ({i.profile} at {i.placement})" for i in hurt])
        verb = "is" if len(hurt) == 1 else "are"
        if not changes.all_wanted(geometry, kinds, present):
            message = f"cannot bring GPU {gpu.index} to its layout: {named} would have to go and {verb} {by}"
            return self._blocked(BlockedKind.IN_USE, message, drift, users)
        drawn = placement.slice_map(geometry, [(str(i.profile), i.placement.start, i.placement.size) for i in hurt])
        message = (
            f"cannot place {placement.names(geometry, [new.kind for new in found.new])} on GPU {gpu.index}: "
            f"{named} lies in the way and {verb} {by}; {drawn}"
        )
        return self._blocked(BlockedKind.UNPLACEABLE, message, drift, users)

    # ---- steps and words

    def _remove(self, instance: nodes.GpuInstance, why: str) -> list[Step]:
        steps: list[Step] = [_destroy(instance, compute, "its GPU instance goes") for compute in instance.compute]
        return [*steps, DestroyGpuInstance(instance.id, instance.profile, instance.placement, why)]

    def _makes(self, change: changes.Change, instances: Sequence[nodes.GpuInstance]) -> list[Step]:
        """Return the creates, larger GPU instances first, compute instances behind their GPU instance."""
        geometry = self.geometry
        blocks: list[tuple[int, int, list[Step]]] = []
        for new in change.new:
            offer = geometry.offers[new.kind.offer]
            place = nodes.Placement(new.start, offer.size)
            steps: list[Step] = [CreateGpuInstance(offer.profile, offer.id, place, self._because("wanted"))]
            for compute in new.compute:
                why = f"opens {offer.profile} to workloads"
                steps.append(CreateComputeInstance(place, cis.name_of(offer, compute.kind), compute.start, why))
            blocks.append((-place.size, place.start, steps))
        for one in change.keep:
            offer = geometry.offers[one.kind.offer]
            instance = instances[one.number]
            why = self._because("wanted in it")
            if not instance.compute:
                why = f"GPU instance {instance.id} has none, so nothing can use it"
            steps = [
                CreateComputeInstance(instance.placement, cis.name_of(offer, compute.kind), compute.start, why)
                for compute in one.compute.new
            ]
            blocks.append((-instance.placement.size, instance.placement.start, steps))
        return [step for _, _, steps in sorted(blocks, key=lambda block: block[:2]) for step in steps]

    def _because(self, what: str) -> str:
        return f"{what} ({self.wanted.origin})" if self.wanted.origin else what

    def _mode_drift(self, mode: nodes.ModeState) -> Iterable[Drift]:
        is_, wanted = ("on" if mode.current else "off"), ("on" if self.wanted.mig else "off")
        if mode.current is not self.wanted.mig:
            waits = "; the change waits for a reset" if mode.changing else ""
            yield Drift("mode", f"MIG is {is_} and wanted {wanted}{waits}")
        elif mode.changing:
            then = "on" if mode.pending else "off"
            yield Drift("mode", f"MIG is {is_} as wanted, but will be {then} after the next reset")

    def _all_missing(self) -> Iterable[Drift]:
        counts = collections.Counter(str(spec.profile) for spec in self.wanted.instances)
        for name, count in counts.items():
            yield Drift("missing", f"{name}: {count} wanted, none there")

    def _extra(self, instance: nodes.GpuInstance) -> Drift:
        return Drift("extra", f"GPU instance {instance.id} ({instance.profile} at {instance.placement}) is not wanted")

    def _differences(self, kinds: tuple[placement.Kind, ...], change: changes.Change) -> Iterable[Drift]:
        """Tell a change as findings."""
        geometry = self.geometry
        wanted = placement.count_by_offer(kinds)
        short = collections.Counter((new.kind.offer, new.kind.start) for new in change.new)
        for (number, start), missing in sorted(short.items()):
            there = wanted[number] - sum(count for (other, _), count in short.items() if other == number)
            where = "" if start < 0 else f" at {start}"
            profile = geometry.offers[number].profile
            counts = f"{wanted[number]} wanted, {there} there"
            yield Drift("missing", f"{profile}{where}: {missing} missing ({counts})")
        for one in change.keep:
            instance = self.gpu.instances[one.number]
            offer = geometry.offers[one.kind.offer]
            where = f"GPU instance {instance.id} ({instance.profile} at {instance.placement})"
            for compute in one.compute.new:
                yield Drift("missing", f"compute instance {cis.name_of(offer, compute.kind)} of {where} is missing")
            for number, existing in enumerate(instance.compute):
                if number not in one.compute.kept:
                    named = f"compute instance {existing.id} ({existing.profile})"
                    yield Drift("extra", f"{named} of {where} is not wanted")
        elsewhere = {geometry.offers[new.kind.offer].profile for new in change.new}
        for instance in sorted((self.gpu.instances[number] for number in change.gone), key=lambda i: i.placement):
            if instance.profile in elsewhere:
                named = f"GPU instance {instance.id} ({instance.profile} at {instance.placement})"
                yield Drift("extra", f"{named} does not lie where it is wanted")
            else:
                yield self._extra(instance)


def _destroy(instance: nodes.GpuInstance, compute: nodes.ComputeInstance, why: str) -> DestroyComputeInstance:
    return DestroyComputeInstance(instance.id, compute.id, compute.profile, instance.placement, why)


def _list(things: Iterable[object]) -> str:
    """Return things in words: "a, b and c"."""
    words = [str(thing) for thing in things]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
