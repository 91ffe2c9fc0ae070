"""Does it fit: workloads packed onto what this node advertises, one after another.

Each strategy is a way of seeing the node, and each is judged by itself. A workload that does not
fit takes nothing, so that the one named is the one in the way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agent.workload import dra, read

PLUGIN = ("none", "single", "mixed")
FRACTIONS = {"0.125": ("g6f.large", "g6f.xlarge"), "0.25": ("g6f.2xlarge",), "0.5": ("g6f.4xlarge",)}
"""ECS's fractional values and the instance types each belongs to."""
_WORDS = {0.125: "an eighth", 0.25: "a quarter", 0.5: "half"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What schedulers see of this node. `plugin[strategy]` is None where the device plugin would
    refuse, with `refused[strategy]` saying why. `fraction` is the part of a GPU that a fractional
    instance has, else None. `mig_on`: any GPU has MIG enabled. `gpu_memory_mib` is the memory of the
    smallest GPU, None where not known."""

    plugin: Mapping[str, Mapping[str, int] | None]
    refused: Mapping[str, str]
    devices: tuple[dra.Device, ...]
    gpus: int
    mig_on: bool
    fraction: float | None = None
    gpu_memory_mib: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One workload under one strategy. `line` is the line that decides, where known; `change` what to
    change so that it fits, "" where the reason says it."""

    file: str
    kind: str
    name: str
    fits: bool
    strategy: str
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    line: int | None = None
    unreadable: bool = False
    change: str = ""


def judge(
    workloads: Sequence[read.Workload], offer: Offer, *, strategy: str | None = None, plugin: str | None = None
) -> tuple[Verdict, ...]:
    """Judge the workloads together on one node. With `strategy` None each is answered under every
    strategy that can apply to it; `plugin` is the one the device plugin is known to have, where it is
    known: others of its strategies then do not apply. Pure."""
    claims = {(w.kind == "ResourceClaimTemplate", w.name): w for w in workloads if isinstance(w, read.Claim)}
    referenced = {(ref.template, ref.target) for w in workloads if isinstance(w, read.Pod) for ref in w.claims}
    packers: dict[str, Callable[[read.Workload], Verdict | None]] = {}
    for name in PLUGIN:
        if strategy == name or (strategy is None and plugin in (None, name)):
            packers[name] = _Plugin(offer, name).judge
    if strategy in (None, "dra"):
        packers["dra"] = _Dra(offer, claims, referenced, only=strategy == "dra").judge
    if strategy in (None, "ecs"):
        packers["ecs"] = _Ecs(offer).judge
    verdicts = []
    for workload in workloads:
        answers = [answer for pack in packers.values() if (answer := pack(workload)) is not None]
        referred = (
            isinstance(workload, read.Claim) and (workload.kind == "ResourceClaimTemplate", workload.name) in referenced
        )
        if not answers and not referred:
            answers = [_out_of_place(workload, strategy)]
        verdicts += answers
    return tuple(verdicts)


def _out_of_place(workload: read.Workload, strategy: str | None) -> Verdict:
    belongs = {"Pod": "Kubernetes", "Claim": "the DRA driver", "Task": "ECS"}[type(workload).__name__]
    return Verdict(
        file=workload.file,
        kind=workload.kind,
        name=workload.name,
        fits=False,
        strategy=strategy or "none",
        reasons=(f"a {workload.kind} is for {belongs}, and was asked about under --strategy {strategy}",),
        line=workload.line,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


class _Plugin:
    """Counts of extended resources, as the device plugin advertises them under one strategy."""

    def __init__(self, offer: Offer, strategy: str) -> None:
        self._strategy = strategy
        self._advertised = offer.plugin.get(strategy)
        self._why = offer.refused.get(strategy, "the device plugin refuses this strategy here")
        self._left = collections.Counter(self._advertised or {})
        self._taken: list[str] = []
        self._mig_on = offer.mig_on

    def judge(self, workload: read.Workload) -> Verdict | None:
        if not isinstance(workload, read.Pod) or (workload.claims and not workload.asks and not workload.init_asks):
            return None
        wants: collections.Counter[str] = collections.Counter()
        lines: dict[str, int | None] = {}
        for ask in workload.asks:
            wants[ask.resource] += ask.count
            lines.setdefault(ask.resource, ask.line)
        for ask in workload.init_asks:
            wants[ask.resource] = max(wants[ask.resource], ask.count)
            lines.setdefault(ask.resource, ask.line)
        wants = +wants
        if not wants:
            return self._verdict(workload, fits=True, warnings=("it asks for no GPU at all",))
        if self._advertised is None:
            first = next(iter(wants))
            return self._verdict(
                workload,
                reasons=(f"the device plugin refuses strategy {self._strategy} on this node: {self._why}",),
                line=lines[first],
                change="set the plugin to another strategy, or the layout to one that this strategy takes",
            )
        for resource, count in wants.items():
            if not self._advertised.get(resource):
                return self._verdict(
                    workload,
                    reasons=(self._not_there(resource), "the pod stays Pending"),
                    line=lines[resource],
                    change=self._instead(resource),
                )
            if self._left[resource] < count:
                have, total = self._left[resource], self._advertised[resource]
                others = (
                    f", {total - have} of {total} are taken by {', '.join(dict.fromkeys(self._taken))}"
                    if have < total
                    else ""
                )
                return self._verdict(
                    workload,
                    reasons=(
                        f"it asks for {count} {resource} and this node has {have}{others}",
                        "the pod stays Pending",
                    ),
                    line=lines[resource],
                    change=f"ask for at most {have} {resource}" if have else "use another node, or free this one",
                )
        fitting = workload.replicas
        for resource, count in wants.items():
            fitting = min(fitting, self._left[resource] // count)
        warnings = self._warnings(wants)
        if workload.replicas == 0:
            return self._verdict(workload, fits=True, warnings=("it has no replicas",))
        if fitting < workload.replicas:
            warnings += (
                f"{fitting} of its {workload.replicas} replicas fit on this node; the others need other nodes",
            )
        for resource, count in wants.items():
            self._left[resource] -= count * fitting
        self._taken.append(f"{workload.kind} {workload.name}")
        return self._verdict(workload, fits=True, warnings=warnings)

    def _not_there(self, resource: str) -> str:
        assert self._advertised is not None
        there = ", ".join(f"{name}: {n}" for name, n in sorted(self._advertised.items()) if n) or "nothing"
        sentence = f"the node advertises no {resource} under {self._strategy}; it advertises {there}"
        if resource == "nvidia.com/gpu" and self._strategy == "mixed":
            names = ", ".join(n for n, c in sorted(self._advertised.items()) if c) or "nothing"
            sentence = f"under mixed the node advertises {names}, no nvidia.com/gpu"
        elif resource.startswith("nvidia.com/mig-") and self._strategy == "single":
            sentence += " (under single every MIG device is nvidia.com/gpu)"
        elif resource.endswith(".shared"):
            sentence += " (shared resources come from time-slicing, which gpunode does not configure)"
        return sentence

    def _instead(self, resource: str) -> str:
        """Say what to ask for instead of a resource that is not there."""
        there = [name for name, count in sorted((self._advertised or {}).items()) if count]
        if resource.startswith("nvidia.com/mig-") and self._strategy == "none":
            return "set the device plugin to mixed; under none no MIG device is advertised"
        if there:
            return f"ask for {' or '.join(there)}, or change the layout"
        return "split the GPUs of this node first"

    def _warnings(self, wants: Mapping[str, int]) -> tuple[str, ...]:
        warnings = []
        for resource, count in wants.items():
            is_mig = resource.startswith("nvidia.com/mig-") or (self._strategy == "single" and self._mig_on)
            if is_mig and count > 1:
                warnings.append(
                    f"it gets {count} MIG devices, and one CUDA process uses one MIG device: it must start one for each"
                )
            if resource == "nvidia.com/gpu" and self._strategy == "none" and self._mig_on:
                warnings.append("under none a GPU with MIG on is advertised as whole, and CUDA cannot use it so")
        return tuple(warnings)

    def _verdict(
        self,
        workload: read.Pod,
        *,
        fits: bool = False,
        reasons: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
        line: int | None = None,
        change: str = "",
    ) -> Verdict:
        return Verdict(
            workload.file,
            workload.kind,
            workload.name,
            fits,
            self._strategy,
            reasons,
            warnings,
            line,
            change=change,
        )


class _Dra:
    """Devices of the DRA driver, taken one by one."""

    def __init__(
        self,
        offer: Offer,
        claims: Mapping[tuple[bool, str], read.Claim],
        referenced: set[tuple[bool, str]],
        *,
        only: bool,
    ) -> None:
        self._free = list(offer.devices)
        self._claims = claims
        self._referenced = referenced
        self._only = only
        self._allocated: dict[str, bool] = {}

    def judge(self, workload: read.Workload) -> Verdict | None:
        if isinstance(workload, read.Task):
            return None
        if isinstance(workload, read.Claim):
            if (workload.kind == "ResourceClaimTemplate", workload.name) in self._referenced:
                return None  # judged with the pod that uses it
            decision = self._take(workload)
            return self._verdict(workload, decision)
        if not workload.claims:
            if not self._only:
                return None
            resource = next((a for a in (*workload.asks, *workload.init_asks)), None)
            reason = "the DRA driver advertises no extended resources; the pod needs resourceClaims"
            return Verdict(
                workload.file,
                workload.kind,
                workload.name,
                resource is None,
                "dra",
                (reason,) if resource else (),
                () if resource else ("it asks for no GPU at all",),
                resource.line if resource else None,
                change="ask by a ResourceClaim of class mig.nvidia.com or gpu.nvidia.com" if resource else "",
            )
        before, allocated = list(self._free), dict(self._allocated)
        for ref in workload.claims:
            claim = self._claims.get((ref.template, ref.target))
            if claim is None:
                what = "ResourceClaimTemplate" if ref.template else "ResourceClaim"
                decision = dra.Decision(
                    fits=False,
                    line=ref.line,
                    reason=f'it uses {what} "{ref.target}", which is in none of the files given',
                )
            elif not ref.template and self._allocated.get(claim.name):
                continue  # a claim by name is shared by all pods that name it
            else:
                decision = self._take(claim)
                if not ref.template:
                    self._allocated[claim.name] = decision.fits
            if not decision.fits:
                self._free, self._allocated = before, allocated
                return self._verdict(workload, decision)
        return self._verdict(workload, dra.Decision(fits=True))

    def _take(self, claim: read.Claim) -> dra.Decision:
        decision = dra.decide(claim, self._free)
        if decision.fits:
            gone = set(decision.devices)
            self._free = [d for d in self._free if d.name not in gone]
        return decision

    @staticmethod
    def _verdict(workload: read.Workload, decision: dra.Decision) -> Verdict:
        return Verdict(
            workload.file,
            workload.kind,
            workload.name,
            decision.fits,
            "dra",
            (decision.reason,) if decision.reason else (),
            (),
            decision.line,
            decision.unreadable,
            decision.change,
        )


class _Ecs:
    """Whole GPUs, pinned by the ECS agent; a fractional instance has one slice."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._left = offer.gpus
        self._shared: list[int] = []  # MiB left on each GPU that is shared by MPS
        self._taken: list[str] = []

    def judge(self, workload: read.Workload) -> Verdict | None:
        if not isinstance(workload, read.Task):
            return None
        warnings: tuple[str, ...] = ()
        if workload.managed_instances:
            warnings = ("it also asks for managed instances, which this node cannot tell of itself",)
        wishes: tuple[read.GpuValue | read.Share, ...] = (*workload.values, *workload.shares)
        if not wishes:
            return self._verdict(workload, fits=True, warnings=(*warnings, "it asks for no GPU at all"))
        line = wishes[0].line
        if workload.fargate:
            return self._verdict(
                workload, reason="Fargate has no GPUs; remove FARGATE from requiresCompatibilities", line=line
            )
        if self._offer.mig_on:
            return self._verdict(
                workload,
                reason="ECS does not support MIG; this node has MIG enabled, so turn MIG off to run ECS tasks on it",
                line=line,
            )
        total = 0
        for value in workload.values:
            problem, count = self._value(value, workload)
            if problem:
                return self._verdict(workload, reason=problem, line=value.line)
            total += count
        if total > self._left:
            taken = f", {self._offer.gpus - self._left} taken by {', '.join(self._taken)}" if self._taken else ""
            reason = f"asks for {_plural(total, 'GPU')}, the instance has {self._offer.gpus}{taken}"
            change = (
                f"ask for at most {self._left}, or use a type with more GPUs" if self._left else "use another instance"
            )
            return self._verdict(workload, reason=reason, line=line, change=change)
        shared = self._place(workload.shares, self._left - total)
        if isinstance(shared, str):
            return self._verdict(workload, reason=shared, line=workload.shares[0].line)
        self._left -= total + len(shared) - len(self._shared)
        self._shared = shared
        self._taken.append(workload.name)
        return self._verdict(workload, fits=True, warnings=warnings)

    def _place(self, shares: Sequence[read.Share], free: int) -> list[int] | str:
        """Return what is left on shared GPUs after these, first fit, `free` more GPUs at hand; or why not."""
        left = list(self._shared)
        if shares and self._offer.fraction is not None:
            return "MPS cannot be used on a fractional (G6f) instance"
        size = self._offer.gpu_memory_mib
        for share in shares:
            if size is None:
                return "the memory of these GPUs is not known, so what fits on one by MPS cannot be told"
            if share.memory_mib > size:
                return f"{share.container} asks for {share.memory_mib} MiB by MPS, and a GPU here has {size} MiB"
            spot = next((i for i, room in enumerate(left) if room >= share.memory_mib), None)
            if spot is None:
                if len(left) - len(self._shared) >= free:
                    return f"{share.container} asks for {share.memory_mib} MiB by MPS, and no GPU has so much left"
                left.append(size)
                spot = len(left) - 1
            left[spot] -= share.memory_mib
        return left

    def _value(self, value: read.GpuValue, task: read.Task) -> tuple[str | None, int]:
        """Return (what is wrong, how many GPUs it takes)."""
        fraction = self._offer.fraction
        if value.value == "ALL":
            if len(task.values) > 1:
                return ('with "ALL" in one container no other container of the task may hold a GPU', 0)
            if self._offer.gpus == 0:
                return ("asks for all GPUs, the instance has none", 0)
            return (None, self._offer.gpus)
        if "." in value.value:
            wanted = float(value.value)
            types = next((t for text, t in FRACTIONS.items() if float(text) == wanted), None)
            if types is None:
                return (f"{value.value} is no fraction that ECS offers; there are {', '.join(FRACTIONS)}", 0)
            if fraction is None:
                belongs = f"{value.value} belongs to {' or '.join(types)}"
                return (f"a decimal needs a fractional (G6f) instance; it does not slice a whole GPU ({belongs})", 0)
            if wanted != fraction:
                return (f"{value.value} belongs to {' or '.join(types)}; this is a {fraction:g} instance", 0)
            return (None, 1)
        count = int(value.value)
        if fraction is not None:
            words = _WORDS.get(fraction, f"{fraction:g}")
            return (f"asks for {_plural(count, 'GPU')}, the instance has {words} of one; write {fraction:g} for it", 0)
        return (None, count)

    @staticmethod
    def _verdict(
        workload: read.Task,
        *,
        fits: bool = False,
        reason: str = "",
        warnings: tuple[str, ...] = (),
        line: int | None = None,
        change: str = "",
    ) -> Verdict:
        reasons = (reason,) if reason else ()
        return Verdict(workload.file, workload.kind, workload.name, fits, "ecs", reasons, warnings, line, change=change)
