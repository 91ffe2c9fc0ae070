"""Which nodes can be simulated, and what is known and not known of each."""

from __future__ import annotations

from agent.sim import spec, tables


def names() -> tuple[str, ...]:
    """Return every EC2 type, then every model key, in the order they are listed to people."""
    keys = dict.fromkeys(tables.model(identifier).model_key for identifier in tables.model_ids())
    return (*tables.instance_types(), *sorted(keys))


def describe(name: str, /) -> dict[str, object]:
    """Return what is known of a node: `name`, `kind` ("ec2" or "gpu"), `model`, `gpu_name`, `count`,
    `mig` ("yes", "no", or "geometry not published"), `mode_change`, `memory_mib`, `multiprocessors`,
    `profiles` (names), `virtual`, `driver`, `simulated` (whether it can be run), `derived` (figures that
    no source prints), `unknown` (sentences) and `notes`. Raises SimulationError for an unknown name."""
    kind = tables.instance_types().get(name)
    if kind is not None:
        found = _model(kind.model)
        unknown = list(_unknown(kind.model))
        if kind.count is None:
            unknown.append("how many GPUs it has is not published")
        return {
            "name": name,
            "kind": "ec2",
            **found,
            "count": kind.count,
            "fraction": kind.fraction,
            "driver": {
                "kind": kind.driver_kind,
                "min_major": kind.driver_min_major,
                "excluded_majors": list(kind.driver_excluded_majors),
            },
            "simulated": kind.count is not None,
            "unknown": unknown,
            "notes": list(kind.notes),
        }
    identifiers = [name] if name in tables.model_ids() else list(tables.models_of_key(name))
    if not identifiers:
        spec.read(name)  # says what is nearest
        return {"name": name, "kind": "file"}
    return {
        "name": name,
        "kind": "gpu",
        **_model(identifiers[0]),
        "count": 1,
        "also": identifiers[1:],
        "simulated": True,
        "unknown": list(_unknown(identifiers[0])),
        "notes": [],
    }


def _model(identifier: str) -> dict[str, object]:
    model = tables.model(identifier)
    if not model.mig_capable:
        mig = "no"
    else:
        mig = "yes" if model.geometry_known else "geometry not published"
    derived = list(model.derived)
    derived += [f"{profile.name}: {key}" for profile in model.profiles for key in profile.derived]
    return {
        "table": model.id,
        "model": model.model_key,
        "gpu_name": model.name,
        "architecture": model.architecture,
        "memory_mib": model.memory_mib or None,
        "multiprocessors": model.multiprocessors or None,
        "mig": mig,
        "mode_change": None if not model.mig_capable else ("at once" if model.resetless else "by reset"),
        "mode_survives_reboot": model.mode_survives_reboot if model.mig_capable else None,
        "per_instance_activity": model.gpm,
        "virtual": model.virtual,
        "confidence": model.confidence,
        "profiles": [profile.name for profile in model.profiles],
        "derived": derived,
    }


def _unknown(identifier: str) -> tuple[str, ...]:
    model = tables.model(identifier)
    found = []
    if model.mig_capable and not model.geometry_known:
        found.append("its MIG profiles and placements are not published, so no layout can be applied to it here")
    if not model.memory_mib:
        found.append("its memory is not published")
    if model.compute_capability == (0, 0):
        found.append("its compute capability is not published")
    if not model.device_id:
        found.append("its PCI device id is not published")
    return tuple(found)
