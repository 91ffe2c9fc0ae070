"""The node as it is, written as a document: gpunode TOML, Bottlerocket TOML, or a mig-parted label.

Reading such a document back on an equal node asks for what is there. What a form cannot say is an
error that says why (Bottlerocket knows one profile a model, mig-parted no GPUs beyond an index).
GPUs that are lost, hung or without MIG are left out, with a comment where the form has comments.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence

from agent import errors
from agent.mig import node as nodes
from agent.mig import profile as profiles
from agent.settings import bottlerocket


def to_gpunode(node: nodes.NodeState, *, exact: bool = False) -> str:
    """Return the node as gpunode TOML, equal GPUs together. `exact` fixes where each instance lies."""
    lines = _preface(node)
    for indexes, gpu in _groups(node, exact=exact):
        lines += ["", "[[gpunode.layout]]", f"gpus = [{', '.join(str(index) for index in indexes)}]"]
        if gpu.mode is not None and not gpu.mode.current:
            lines.append("mig = false")
        elif exact or any(_split(instance) for instance in gpu.instances):
            members = [_member(instance, exact=exact) for instance in _ordered(gpu)]
            lines += ["instances = [", *(f"  {member}," for member in members), "]"]
        else:
            counts = collections.Counter(str(instance.profile) for instance in _ordered(gpu))
            lines.append(
                f"instances = {{ {', '.join(f'{_quoted(k)} = {n}' for k, n in counts.items())} }}".replace("{  }", "{}")
            )
    return "\n".join(lines) + "\n"


def to_bottlerocket(node: nodes.NodeState) -> str:
    """Return the node as Bottlerocket user data.

    Raises GpunodeError when that form cannot say what is there.
    """
    profile_of: dict[str, profiles.Profile] = {}
    strategies = set()
    for gpu in _able(node):
        assert gpu.mode is not None
        strategies.add(gpu.mode.current)
        if gpu.mode.current:
            profile = _uniform(gpu)
            if profile_of.setdefault(gpu.model, profile) != profile:
                raise _cannot(f"GPUs of model {gpu.model} are split in different ways, and there is one line a model")
    if len(strategies) > 1:
        raise _cannot("MIG is on for some GPUs and off for others, and it is one switch for all")
    lines = [*_preface(node), f"[settings.{bottlerocket.PREFIX}]"]
    if True not in strategies:
        return "\n".join([*lines, 'device-partitioning-strategy = "none"']) + "\n"
    lines += ['device-partitioning-strategy = "mig"', "", f"[settings.{bottlerocket.PREFIX}.mig.profile]"]
    lines += [f"{_quoted(key)} = {_quoted(str(profile))}" for key, profile in profile_of.items()]
    return "\n".join(lines) + "\n"


def to_mig_parted(node: nodes.NodeState, *, label: str = "current") -> str:
    """Return the node as a mig-parted v1 document with one label.

    Raises GpunodeError when no GPU of the node can do MIG, as a label may not be empty.
    """
    groups = _groups(node, exact=False)
    if not groups:
        raise errors.GpunodeError("cannot write a mig-parted document: no GPU of this node can do MIG")
    lines = [*_preface(node), "version: v1", "mig-configs:", f"  {json.dumps(label)}:"]
    for indexes, gpu in groups:
        everything = len(groups) == 1 and len(indexes) == len(node.gpus)
        lines.append(f"    - devices: {'all' if everything else json.dumps(list(indexes))}")
        if gpu.mode is None or not gpu.mode.current:
            lines.append("      mig-enabled: false")
            continue
        counts = collections.Counter(
            str(part) for instance in _ordered(gpu) for part in (_split(instance) or (instance.profile,))
        )
        lines += ["      mig-enabled: true", "      mig-devices:" + ("" if counts else " {}")]
        lines += [f"        {json.dumps(name)}: {count}" for name, count in counts.items()]
    return "\n".join(lines) + "\n"


def _able(node: nodes.NodeState) -> list[nodes.Gpu]:
    return [gpu for gpu in node.gpus if gpu.mode is not None and gpu.state is nodes.GpuState.OK]


def _preface(node: nodes.NodeState) -> list[str]:
    """Return comments on what the document is, and on what is not in it."""
    where = f" (simulated: {node.simulated})" if node.simulated else ""
    lines = [f"# What was on this node{where}, written by gpunode export."]
    able = {gpu.uuid for gpu in _able(node)}
    for gpu in node.gpus:
        if gpu.state is not nodes.GpuState.OK:
            lines.append(f"# GPU {gpu.index} is {gpu.state.value} and left out.")
        elif gpu.uuid not in able:
            lines.append(f"# GPU {gpu.index} ({gpu.name}) has no MIG and is left out.")
        for instance in gpu.instances:
            if not instance.compute:
                place = instance.placement.start
                lines.append(
                    f"# GPU {gpu.index} has a {instance.profile} at {place} without a compute instance; "
                    "read back, it gets one."
                )
    return lines


def _groups(node: nodes.NodeState, *, exact: bool) -> list[tuple[tuple[int, ...], nodes.Gpu]]:
    """Return the GPUs that can be written, equal ones together, as (indexes, the first of them)."""
    found: dict[object, list[nodes.Gpu]] = {}
    for gpu in _able(node):
        assert gpu.mode is not None
        shape = [
            (str(instance.profile), _split(instance), instance.placement.start if exact else 0)
            for instance in _ordered(gpu)
        ]
        found.setdefault((gpu.mode.current, tuple(sorted(shape))), []).append(gpu)
    return [(tuple(gpu.index for gpu in gpus), gpus[0]) for gpus in found.values()]


def _ordered(gpu: nodes.Gpu) -> list[nodes.GpuInstance]:
    return sorted(gpu.instances, key=lambda instance: instance.placement)


def _split(instance: nodes.GpuInstance) -> tuple[profiles.Profile, ...]:
    """Return the compute instances, () where there is one over all (or none) of the GPU instance."""
    parts = tuple(
        compute.profile for compute in sorted(instance.compute, key=lambda c: (c.placement is None, c.placement, c.id))
    )
    return () if parts == (instance.profile,) else parts


def _member(instance: nodes.GpuInstance, *, exact: bool) -> str:
    words = [f"profile = {_quoted(str(instance.profile))}"]
    if exact:
        words.append(f"start = {instance.placement.start}")
    parts = _split(instance)
    if parts:
        words.append(f"compute = [{', '.join(_quoted(str(part)) for part in parts)}]")
    return f"{{ {', '.join(words)} }}"


def _uniform(gpu: nodes.Gpu) -> profiles.Profile:
    """Return the one profile that fills a GPU, or raise with why it cannot be said so."""
    names: Sequence[str] = tuple(dict.fromkeys(str(instance.profile) for instance in _ordered(gpu)))
    where = f"GPU {gpu.index} ({gpu.model})"
    if not names:
        raise _cannot(f"{where} has MIG on and no instances, and there is always at least one")
    if len(names) > 1:
        raise _cannot(f"{where} has different profiles ({', '.join(names)}), and there is one profile a model")
    profile = gpu.instances[0].profile
    if profile.attributes or profile.without:
        raise _cannot(f"{where} has {profile}, and only profiles without attributes can be written")
    if any(_split(instance) for instance in gpu.instances):
        raise _cannot(f"{where} has split compute instances, which cannot be written")
    offer = gpu.offer(profile)
    if offer is not None and len(gpu.instances) != offer.max_instances:
        raise _cannot(
            f"{where} has {len(gpu.instances)} x {profile}, and as many as fit are always made ({offer.max_instances})"
        )
    return profile


def _cannot(why: str) -> errors.GpunodeError:
    return errors.GpunodeError(f"cannot write this layout as Bottlerocket settings: {why}")


def _quoted(text: str) -> str:
    return json.dumps(text)
