"""From what was declared to a layout for exactly these GPUs. Pure.

Model keys, counts, selectors and profile names mean something only together with the GPUs that are
there. Whatever does not fit an empty GPU of that kind is an error here, before a plan is made; what
fits but may not be done now is the planner's. A GPU that cannot do MIG but is asked to stays in the
layout: the planner refuses it, and says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import assert_never

from agent import errors, records
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import placement
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.settings import document, model

_BOTTLEROCKET_KEYS = {0x2321: "h100.80gb", 0x2339: "h100.80gb", 0x2348: "h200.141gb", 0x2941: "b200.180gb"}
"""PCI device ids for which Bottlerocket's MIG manager reads another model's line (94 GB H100, GH200
144 GB, GB200): most profiles of that line do not exist on the part. From its source, 2026-03."""
_FROM_TABLES = ("a100.40gb", "a100.80gb", "h100.80gb", "h200.141gb", "b200.180gb")
"""Models whose 4g profile is missing from the manager's tables, so that it falls back to one 7g."""


@records.dataclass(frozen=True, slots=True)
class Resolution:
    """The layout, warnings about it, and the GPUs on which it may not be brought about.

    `blocked` is keyed by UUID; a GPU that has left the bus is there by its PCI address instead.
    """

    layout: layouts.Layout
    problems: tuple[errors.Problem, ...] = ()
    blocked: Mapping[str, plans.Blocked] = dataclasses.field(default_factory=dict)


def resolve(
    settings: model.Settings,
    node: nodes.NodeState,
    *,
    remembered: Mapping[int, str] | None = None,
    expected: int | None = None,
) -> Resolution:
    """Return what the declaration means on this node.

    `remembered` are the PCI addresses by index of the last good boot, `expected` how many GPUs this
    machine should have: with both unknown, indexes count the GPUs that are there. Raises
    SettingsError when a profile, an index or an amount is impossible.
    """
    job = _Job(settings, node, _Indexes(node, remembered, expected))
    declaration = settings.declaration
    match declaration:
        case None:
            pass
        case model.BottlerocketDeclaration() as declared:
            job.bottlerocket(declared)
        case model.LayoutDeclaration() as declared:
            job.named_layouts(declared)
        case model.MigPartedDeclaration() as declared:
            job.mig_parted(declared)
        case _:
            assert_never(declaration)
    return job.result()


@dataclasses.dataclass(slots=True)
class _Claim:
    """What one GPU shall be, before it is checked that it fits."""

    gpu: nodes.Gpu
    mig: bool
    instances: tuple[layouts.InstanceSpec, ...]
    origin: model.Origin
    selector: model.Origin


class _Indexes:
    """Which card an index means, also when a card has left the bus."""

    def __init__(self, node: nodes.NodeState, remembered: Mapping[int, str] | None, expected: int | None) -> None:
        self._gpus = {address(gpu.pci_bus_id): gpu for gpu in node.gpus}
        self._by_rank = dict(enumerate(sorted(node.gpus, key=lambda gpu: gpu.index)))
        self.missing = expected is not None and expected > len(node.gpus)
        self._cards: dict[int, str] | None = None
        cards = {index: address(text) for index, text in (remembered or {}).items()}
        # Memory of another machine, or of fewer cards than there are, says nothing about this one.
        left_the_bus = set(self._gpus) < set(cards.values())
        if left_the_bus and (expected is None or self.missing):
            self._cards = cards
            self.missing = True
        self.certain = not self.missing or self._cards is not None
        self.count = len(node.gpus) if self._cards is None else len(self._cards)
        if self.missing and expected is not None:
            self.count = max(self.count, expected)

    def gpu(self, index: int) -> nodes.Gpu | None:
        """Return the GPU that the index means, None when it has left the bus or never was."""
        if self._cards is None:
            return self._by_rank.get(index)
        return self._gpus.get(self._cards.get(index, ""))

    def gone(self, index: int) -> str | None:
        """Return the PCI address of a card that has left the bus, "" when only its absence is known."""
        if self._cards is not None and index in self._cards:
            return self._cards[index]
        return "" if self.missing and index < self.count else None


def address(text: str) -> str:
    """Return a PCI address in one spelling: `00000000:10:1C.0` and `10:1c.0` are the same card."""
    match = model.PCI_ADDRESS.fullmatch(text)
    if match is None:
        return text.lower()
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['bus']}:{match['device']}.{match['function']}".lower()


class _Job:
    """One resolution under way: claims by UUID, and what was found wrong."""

    def __init__(self, settings: model.Settings, node: nodes.NodeState, indexes: _Indexes) -> None:
        self._settings = settings
        self._node = node
        self._indexes = indexes
        self._claims: dict[str, _Claim] = {}
        self._problems: list[errors.Problem] = []
        self._blocked: dict[str, plans.Blocked] = {}

    def result(self) -> Resolution:
        """Return the resolution, or raise with everything that is wrong."""
        if not any(problem.is_error for problem in self._problems):
            self._check_room()
        problems = tuple(dict.fromkeys(self._problems))
        if any(problem.is_error for problem in problems):
            raise errors.SettingsError(problems)
        wanted = []
        for claim in sorted(self._claims.values(), key=lambda claim: claim.gpu.index):
            if self._left_out(claim):
                continue
            wanted.append(layouts.GpuLayout(claim.gpu.uuid, claim.mig, claim.instances, origin=str(claim.origin)))
        return Resolution(layouts.Layout(tuple(wanted)), tuple(dict.fromkeys(self._problems)), self._blocked)

    def _say(self, severity: str, code: str, message: str, origin: model.Origin) -> None:
        self._problems.append(
            errors.Problem(severity, code, message, file=origin.file, line=origin.line, key=origin.key)
        )

    def _left_out(self, claim: _Claim) -> bool:
        """Whether a GPU that cannot do MIG is passed over, as `not-capable = "ignore"` asks."""
        gpu = claim.gpu
        if not claim.mig or _can_split(gpu) or self._settings.not_capable != "ignore":
            return False
        message = f'GPU {gpu.index} ({gpu.name}) cannot do MIG and is left as it is, as not-capable = "ignore" asks'
        self._say("warning", "not-capable", message, claim.origin)
        return True

    # --- the three kinds of declaration -------------------------------------------------------------

    def bottlerocket(self, declared: model.BottlerocketDeclaration) -> None:
        """Split every GPU by the line of its model."""
        choices = {choice.key: choice for choice in declared.choices}
        for gpu in self._node.gpus:
            instances: tuple[layouts.InstanceSpec, ...] = ()
            origin = declared.origin
            if gpu.mode is not None and gpu.state is nodes.GpuState.OK:
                choice = choices.get(gpu.model)
                origin = declared.origin if choice is None else choice.origin
                instances = self._largest(gpu, declared) if choice is None else self._uniform(gpu, choice, declared)
                self._differs(gpu, choices, instances, origin)
            self._claims[gpu.uuid] = _Claim(gpu, True, instances, origin, origin)

    def _differs(
        self,
        gpu: nodes.Gpu,
        choices: Mapping[str, model.ProfileChoice],
        instances: tuple[layouts.InstanceSpec, ...],
        origin: model.Origin,
    ) -> None:
        """Say so where Bottlerocket's own manager would read another line for this GPU."""
        theirs = _BOTTLEROCKET_KEYS.get(_device(gpu) >> 16)
        if theirs is None or not instances:
            return
        other = choices.get(theirs)
        words = "gives it one instance of the whole GPU" if other is None else f'reads the line "{theirs}"'
        message = (
            f"{gpu.name} is a {gpu.model}, which Bottlerocket's own MIG manager takes for a {theirs}: it {words}, "
            f"where gpunode makes {len(instances)} x {instances[0].profile}"
        )
        self._say("warning", "bottlerocket-differs", message, origin if other is None else other.origin)

    def _largest(self, gpu: nodes.Gpu, declared: model.BottlerocketDeclaration) -> tuple[layouts.InstanceSpec, ...]:
        """Return the whole GPU as one instance, with the warning that nobody asked for just that."""
        plain = _plain(gpu)
        if not plain:
            return ()
        offer = max(plain, key=_largeness)
        given = ", ".join(choice.key for choice in declared.choices) or "none"
        message = (
            f"no profile is given for GPUs of model {gpu.model} (given: {given}); each gets its largest, "
            f"one {offer.profile}"
        )
        self._say("warning", "no-profile-for-model", message, declared.origin)
        return (layouts.InstanceSpec(offer.profile),)

    def _uniform(
        self, gpu: nodes.Gpu, choice: model.ProfileChoice, declared: model.BottlerocketDeclaration
    ) -> tuple[layouts.InstanceSpec, ...]:
        plain = _plain(gpu)
        if choice.profile is not None:
            if not gpu.offers:
                return (layouts.InstanceSpec(choice.profile),)
            found = self._offer(gpu, choice.profile, choice.origin)
            if found is None:
                return ()
            if declared.from_host and found.slices == 4 and gpu.model in _FROM_TABLES:
                message = (
                    f"Bottlerocket's own MIG manager does not know {found.profile} on {gpu.model} "
                    "and makes one instance of the whole GPU instead"
                )
                self._say("warning", "bottlerocket-differs", message, choice.origin)
            return (layouts.InstanceSpec(found.profile),) * found.max_instances
        if not plain:
            return ()
        matching = [offer for offer in plain if offer.max_instances == choice.count]
        if not matching:
            counts = sorted({offer.max_instances for offer in plain})
            message = (
                f"no profile fits just {choice.count} times on a {gpu.model}; "
                f"possible counts are {', '.join(str(count) for count in counts)}"
            )
            self._say("error", "unknown-count", message, choice.origin)
            return ()
        offer = max(matching, key=_largeness)
        return (layouts.InstanceSpec(offer.profile),) * offer.max_instances

    def named_layouts(self, declared: model.LayoutDeclaration) -> None:
        """Give each layout to the GPUs it names; none may be named twice."""
        absent = []
        for entry in declared.entries:
            named = self._named(entry)
            if entry.model is not None and not named:
                absent.append(entry)
            for gpu, selector in named:
                claim = _Claim(gpu, entry.mig, (), entry.origin, selector)
                earlier = self._claims.get(gpu.uuid)
                if earlier is not None:
                    self._twice(earlier, claim)
                    continue
                claim.instances = self._specs(gpu, entry.instances)
                self._claims[gpu.uuid] = claim
        if absent and len(absent) == len(declared.entries):
            # With another layout in force this is one line of a document for many machines.
            here = ", ".join(sorted({gpu.model for gpu in self._node.gpus})) or "none"
            for entry in absent:
                message = f"there is no GPU of model {entry.model} (models on this node: {here})"
                self._say("error", "no-such-gpu", message, entry.origin)

    def _twice(self, earlier: _Claim, claim: _Claim) -> None:
        gpu = claim.gpu
        if earlier.origin == claim.origin:
            self._say("error", "two-layouts", f"GPU {gpu.index} is named twice in this layout", claim.selector)
            return
        message = f"GPU {gpu.index} is named by two layouts: here, and at {earlier.selector}"
        self._say("error", "two-layouts", message, claim.selector)

    def _named(self, entry: model.LayoutEntry) -> list[tuple[nodes.Gpu, model.Origin]]:
        """Return the GPUs that a layout names, each with the place that names it."""
        if entry.model is not None:
            return [(gpu, entry.origin) for gpu in self._node.gpus if gpu.model == entry.model]
        if entry.gpus == "all":
            able = [gpu for gpu in self._node.gpus if _can_split(gpu)]
            # On a node without any such GPU nothing can be done, which the planner says GPU by GPU.
            return [(gpu, entry.origin) for gpu in (able if able or not entry.mig else self._node.gpus)]
        found = []
        assert entry.gpus is not None
        for selector, origin in zip(entry.gpus, entry.selectors, strict=True):
            gpu = self._by_index(selector, origin) if isinstance(selector, int) else self._by_name(selector, origin)
            if gpu is not None:
                found.append((gpu, origin))
        return found

    def _by_index(self, index: int, origin: model.Origin) -> nodes.Gpu | None:
        gone = self._indexes.gone(index)
        gpu = self._indexes.gpu(index)
        if self._indexes.certain and gpu is not None:
            return gpu
        if gone is None:
            self._say("error", "no-such-gpu", f"there is no GPU {index} ({self._count()})", origin)
        elif gone:
            why = f"GPU {index} (at {gone}) has left the bus, so its layout cannot be brought about"
            self._blocked[gone] = plans.Blocked(plans.BlockedKind.LOST, why)
            self._say("warning", "gpu-gone", why, origin)
        else:
            why = (
                "a GPU has left the bus and it is not known which, so indexes may mean other cards than before; "
                "name GPUs by UUID, or boot once with all of them there"
            )
            self._say("warning", "gpu-gone", why, origin)
            if gpu is not None:
                self._blocked[gpu.uuid] = plans.Blocked(plans.BlockedKind.LOST, why)
        return gpu

    def _count(self) -> str:
        count = self._indexes.count
        if count == 0:
            return "this node has no GPUs"
        return "this node has 1 GPU, 0" if count == 1 else f"this node has {count} GPUs, 0 to {count - 1}"

    def _by_name(self, text: str, origin: model.Origin) -> nodes.Gpu | None:
        wanted = address(text)
        for gpu in self._node.gpus:
            if wanted in (gpu.uuid.lower(), address(gpu.pci_bus_id)):
                return gpu
        self._say("error", "no-such-gpu", f"there is no GPU {text} ({self._count()})", origin)
        return None

    def mig_parted(self, declared: model.MigPartedDeclaration) -> None:
        """Apply the entries in order; the last that matches a GPU decides for it."""
        for entry in declared.entries:
            named: list[nodes.Gpu] = []
            if entry.devices == "all":
                named = [gpu for gpu in self._node.gpus if _can_split(gpu) or (entry.mig and not self._any_can_split())]
            else:
                for index, origin in zip(entry.devices, entry.selectors, strict=True):
                    gpu = self._by_index(index, origin)
                    named += [] if gpu is None else [gpu]
            for gpu in named:
                if entry.filters and not any(self._matches(gpu, wanted, entry) for wanted in entry.filters):
                    continue
                specs = self._specs(gpu, entry.instances)
                self._claims[gpu.uuid] = _Claim(gpu, entry.mig, specs, entry.origin, entry.origin)
        wants_something = any(entry.mig or entry.devices != "all" for entry in declared.entries)
        if not self._claims and not self._blocked and wants_something:
            ids = sorted({f"0x{_device(gpu):08X}" for gpu in self._node.gpus}) or ["none"]
            label = document.quote(declared.label)
            message = f"the label {label} matches no GPU of this node (device ids here: {', '.join(ids)})"
            self._say("error", "no-such-gpu", message, declared.origin)

    def _any_can_split(self) -> bool:
        return any(_can_split(gpu) for gpu in self._node.gpus)

    def _matches(self, gpu: nodes.Gpu, wanted: model.DeviceFilter, entry: model.MigPartedEntry) -> bool:
        if _device(gpu) != wanted.device:
            return False
        if wanted.subsystem is None:
            return True
        if gpu.pci_subsystem_id is None:
            message = f"the subsystem of GPU {gpu.index} is not known, so {wanted} is matched by its first half only"
            self._say("warning", "device-filter", message, entry.origin)
            return True
        return gpu.pci_subsystem_id == wanted.subsystem

    # --- from wanted instances to specs -------------------------------------------------------------

    def _specs(self, gpu: nodes.Gpu, wanted: Sequence[model.WantedInstance]) -> tuple[layouts.InstanceSpec, ...]:
        """Return the instances for one GPU, with names resolved against what it offers."""
        specs: list[layouts.InstanceSpec] = []
        parts: dict[profiles.Profile, list[tuple[profiles.Profile, model.Origin]]] = {}
        for want in wanted:
            offer = self._offer(gpu, want.profile.gpu_instance, want.origin)
            profile = want.profile.gpu_instance if offer is None else offer.profile
            if want.profile.compute_slices is not None:
                part = profile.part(want.profile.compute_slices)
                parts.setdefault(profile, []).extend([(part, want.origin)] * want.count)
                continue
            compute = tuple(
                profile if part.compute_slices is None else profile.part(part.compute_slices) for part in want.compute
            )
            self._check_split(profile, compute, want.origin)
            if compute == (profile,):
                compute = ()
            specs += [layouts.InstanceSpec(profile, compute, want.start)] * want.count
        for profile, members in parts.items():
            specs += [layouts.InstanceSpec(profile, group) for group in _pack(profile, [part for part, _ in members])]
        return tuple(specs)

    def _check_split(
        self, profile: profiles.Profile, compute: tuple[profiles.Profile, ...], origin: model.Origin
    ) -> None:
        taken = sum(_slices(part, profile) for part in compute)
        if taken > profile.gpu_slices:
            names = ", ".join(str(part) for part in compute)
            message = f"{names} take {taken} compute slices together, and a {profile} has {profile.gpu_slices}"
            self._say("error", "too-much", message, origin)

    def _offer(self, gpu: nodes.Gpu, profile: profiles.Profile, origin: model.Origin) -> nodes.ProfileOffer | None:
        """Return the offer that a name means on a GPU; None with an error when it has none such, or
        without one when the GPU does not tell its profiles (now)."""
        if not gpu.offers:
            return None
        offer = gpu.offer(profile)
        if offer is not None:
            return offer
        for offer in gpu.offers:
            if profile in offer.aliases:
                message = f"{profile} is called {offer.profile} on a {gpu.model}; it is understood, but write that"
                self._say("warning", "alias", message, origin)
                return offer
        near = min(gpu.offers, key=lambda offer: _distance(offer.profile, profile))
        names = ", ".join(str(offer.profile) for offer in gpu.offers)
        message = f"{gpu.model} has no profile {profile}; did you mean {near.profile}? It has {names}"
        self._say("error", "unknown-profile", message, origin)
        return None

    def _check_room(self) -> None:
        """Refuse what does not even fit an empty GPU, once for all equal GPUs."""
        groups: dict[tuple[object, ...], list[_Claim]] = {}
        for claim in self._claims.values():
            if claim.mig and claim.instances and claim.gpu.offers:
                key = (claim.gpu.model, claim.gpu.offers, claim.instances, claim.origin)
                groups.setdefault(key, []).append(claim)
        for claims in groups.values():
            gpu = claims[0].gpu
            why = placement.fits_empty(gpu, claims[0].instances)
            if why is not None:
                others = ", ".join(str(claim.gpu.index) for claim in claims[1:])
                same = f"; the same on GPU {others}" if others else ""
                self._say("error", "too-much", f"{why}{same}", claims[0].origin)


def _can_split(gpu: nodes.Gpu) -> bool:
    """Whether a GPU can do MIG; of a lost or hung one it is not known, so it is not ruled out."""
    return gpu.mode is not None or gpu.state is not nodes.GpuState.OK


def _device(gpu: nodes.Gpu) -> int:
    """Return the PCI device id with its vendor, as mig-parted writes it."""
    return gpu.pci_device_id if gpu.pci_device_id > 0xFFFF else gpu.pci_device_id << 16 | 0x10DE


def _plain(gpu: nodes.Gpu) -> list[nodes.ProfileOffer]:
    """Return the offers without attributes, which are those that a uniform split may use."""
    return [offer for offer in gpu.offers if not offer.profile.attributes and not offer.profile.without]


def _largeness(offer: nodes.ProfileOffer) -> tuple[int, int, int]:
    return (offer.memory_bytes, offer.slices, offer.multiprocessors)


def _slices(part: profiles.Profile, whole: profiles.Profile) -> int:
    return whole.gpu_slices if part.compute_slices is None else part.compute_slices


def _pack(profile: profiles.Profile, parts: list[profiles.Profile]) -> list[tuple[profiles.Profile, ...]]:
    """Return compute instances in as few GPU instances as hold them, the largest first."""
    groups: list[list[profiles.Profile]] = []
    for part in sorted(parts, key=lambda part: -_slices(part, profile)):
        for group in groups:
            if sum(_slices(member, profile) for member in group) + _slices(part, profile) <= profile.gpu_slices:
                group.append(part)
                break
        else:
            groups.append([part])
    return [tuple(group) for group in groups]


def _distance(offered: profiles.Profile, wanted: profiles.Profile) -> tuple[int, bool, int, int]:
    """Return how far an offered profile is from a wanted one: slices first, then attributes, memory."""
    other = offered.attributes != wanted.attributes or offered.without != wanted.without
    return (
        abs(offered.gpu_slices - wanted.gpu_slices),
        other,
        abs(offered.memory_gb - wanted.memory_gb),
        len(offered.attributes) + len(offered.without),
    )
