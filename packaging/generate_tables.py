"""Make the simulator's tables from two facts files: what is known of GPUs, and of EC2 types.

    python packaging/generate_tables.py [--check] [--geometry FILE] [--instances FILE] [--into DIR]

Writes `agent/sim/gpus/*.toml`, `agent/sim/instances.toml` and `agent/sim/driver.toml`; with `--check` writes nothing and exits
1 when a table differs from what the facts say. Figures that no source prints are worked out here, and
their keys are listed in `derived` of the record, so that nobody takes them for observed ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Fact = dict[str, Any]

# What a part without MIG is called in settings: the style of the parts with MIG.
_KEYS = {
    "v100-16gb": "v100.16gb",
    "v100-32gb": "v100.32gb",
    "t4": "t4.16gb",
    "t4g": "t4g.16gb",
    "a10g": "a10g.24gb",
    "l4": "l4.24gb",
    "l4-3q": "l4-3q.3gb",
    "l4-6q": "l4-6q.6gb",
    "l4-12q": "l4-12q.12gb",
    "l40s": "l40s.48gb",
}
# MiB that NVML shows where the facts have it only in a note; multiprocessors from the compute data sheet of the part.
_MEMORY_SEEN = {"a10g": 23034, "l4": 23034}
_MULTIPROCESSORS = {
    "v100-16gb": 80,
    "v100-32gb": 80,
    "t4": 40,
    "t4g": 40,
    "a10g": 80,
    "l4": 58,
    "l4-3q": 58,
    "l4-6q": 58,
    "l4-12q": 58,
    "l40s": 142,
}
_ENGINES = ("copy_engines", "decoders", "encoders", "jpeg", "ofa")
_GRANULE_MIB = 128


def name_gb(instance_mib: int, total_mib: int, /) -> int:
    """Return the gigabytes that the naming rule of go-nvlib puts into a profile's name."""
    eighths = -(-8 * instance_mib // total_mib)
    gib = -(-total_mib // 1024)
    return (2 * eighths * gib + 8) // 16


def printed_gb(name: str, /) -> int:
    """Return the gigabytes written in a profile name."""
    return int(name.split(".")[1].split("gb")[0])


def device_ids(fact: Fact, /) -> list[str]:
    """Return the PCI device ids of a model as four hex digits, lower case, the commonest first."""
    return [str(device["device_id"]).lower() for device in fact["pci_devices"]]


def mig_model(fact: Fact, siblings: list[Fact], /) -> Fact:
    """Return the table of a part that can do MIG."""
    profiles = fact["gi_profiles"]
    derived: list[str] = []
    placed = bool(profiles) and all(p["placements"] and p["profile_id"] is not None for p in profiles)
    total = fact["memory_total_mib"]["nvml"]
    if total is None and profiles:
        # The largest profile is the whole GPU and its name carries ceil(T) GiB.
        total = max(printed_gb(p["name"]) for p in profiles) * 1024 or None
        derived.append("memory_mib")
    whole = fact["sm_count"]["full_gpu"]
    table: Fact = {
        "id": fact["id"],
        "model_key": fact["model_key"],
        "title": fact["title"],
        "names": [n["name"] for n in fact["nvml_names"]],
        "pci_device_ids": device_ids(fact),
        "form_factors": [d["form_factor"] or "" for d in fact["pci_devices"]],
        "architecture": fact["architecture"],
        "compute_capability": _capability(fact["compute_capability"]),
        "memory_mib": total,
        "multiprocessors": whole,
        "memory_slices": fact["memory_slices"],
        "compute_slices": fact["compute_slices"],
        "mig_capable": True,
        "geometry_known": placed,
        "resetless": not fact["mig_enable_needs_gpu_reset"]["value"],
        "mode_survives_reboot": fact["mig_mode_persists_reboot"]["value"],
        "gpm": fact["gpm_per_instance_utilisation"]["value"],
        "virtual": False,
        "confidence": fact["confidence"],
        "sources": fact["source"],
    }
    if placed:
        sms, one = _multiprocessors(fact, siblings)
        if whole is None:
            table["multiprocessors"] = max(sms.values())
            derived.append("multiprocessors")
        table["profiles"] = [_profile(p, fact, total, sms[p["nvml_profile_index"]], one) for p in profiles]
    table["derived"] = derived
    return table


def _capability(fact: Fact) -> str | None:
    return None if fact["major"] is None else f"{fact['major']}.{fact['minor']}"


def _multiprocessors(fact: Fact, siblings: list[Fact]) -> tuple[dict[int, int], int]:
    """Return the SMs of each profile by selector, and of one compute slice: as printed, else slices
    times those of a 1g, else as a sibling of the same generation and slicing has them."""
    profiles = fact["gi_profiles"]
    known = {p["nvml_profile_index"]: p["sm_count"] for p in profiles}
    one = known.get(0) or next(
        (c["sm_count"] for p in profiles for c in p["ci_profiles"] if c["compute_slices"] == 1 and c["sm_count"]), None
    )
    generation = fact["architecture"].split()[0]
    donor = next(
        (
            s
            for s in siblings
            if s["architecture"].split()[0] == generation
            and s["memory_slices"] == fact["memory_slices"]
            and all(p["sm_count"] for p in s["gi_profiles"] if p["nvml_profile_index"] in (0, 4))
            and s["gi_profiles"]
            and fact["sm_count"]["full_gpu"] in (None, s["sm_count"]["full_gpu"])
        ),
        None,
    )
    spare = {p["nvml_profile_index"]: p["sm_count"] for p in donor["gi_profiles"]} if donor else {}
    if one is None:
        one = spare[0]
    whole = fact["sm_count"]["full_gpu"]
    found = {}
    for profile in profiles:
        index = profile["nvml_profile_index"]
        value = known[index]
        if value is None:
            default = next((c["sm_count"] for c in profile["ci_profiles"] if c["is_default"]), None)
            largest = profile["compute_slices"] == fact["compute_slices"]
            if default is not None:
                value = default
            elif largest:
                value = whole or spare.get(index) or one * profile["compute_slices"]
            elif index == 9 and one == spare.get(0):  # double memory: more SMs than its one slice has
                value = spare.get(9) or one
            else:
                value = one * profile["compute_slices"]
        found[index] = value
    return found, one


def _profile(fact: Fact, model: Fact, total: int, sms: int, one: int) -> Fact:
    derived = []
    memory = fact["memory_mib"]
    if memory is None:
        share = fact["placements"]["size"] * total * 98 // (100 * model["memory_slices"])
        memory = share // _GRANULE_MIB * _GRANULE_MIB
        derived.append("memory_mib")
        if name_gb(memory, total) != printed_gb(fact["name"]):
            raise SystemExit(
                f"{model['id']} {fact['name']}: {memory} of {total} MiB would be named {name_gb(memory, total)}gb"
            )
    if fact["sm_count"] is None:
        derived.append("multiprocessors")
    derived += [key for key, how in fact["field_confidence"].items() if how == "derived" and key not in derived]
    table: Fact = {
        "name": fact["name"],
        "aliases": fact["other_names_seen"],
        "index": fact["nvml_profile_index"],
        "id": fact["profile_id"],
        "slices": fact["compute_slices"],
        "starts": fact["placements"]["starts"],
        "size": fact["placements"]["size"],
        "memory_mib": memory,
        "multiprocessors": sms,
        "max_instances": fact["max_instances"],
        "p2p": fact["p2p_supported"],
        "graphics": "gfx" in fact["attributes"],
        **{key: fact[key] for key in _ENGINES},
        "confidence": fact["confidence"],
        "derived": derived,
        "sources": fact["source"],
    }
    table["compute"] = [_compute(c, fact, sms, one) for c in fact["ci_profiles"]]
    return table


def _compute(fact: Fact, gi: Fact, sms: int, one: int) -> Fact:
    derived = []
    value = fact["sm_count"]
    if value is None:
        value = sms if fact["is_default"] else one * fact["compute_slices"]
        derived.append("multiprocessors")
    size = fact["compute_slices"]
    return {
        "name": fact["name"],
        "index": fact["nvml_profile_index"],
        "id": fact["profile_id"],
        "slices": size,
        "starts": _compute_starts(size, gi["compute_slices"], fact["max_instances"]),
        "multiprocessors": value,
        "max_instances": fact["max_instances"],
        "default": fact["is_default"],
        "derived": derived,
    }


def _compute_starts(size: int, slices: int, most: int) -> list[int]:
    """Return where a compute instance of `size` slices may begin: at multiples of the next power of
    two, so a 2c of a 3g only at 0 and a 3c of a 7g at 0 and 4."""
    step = 1
    while step < size:
        step *= 2
    return [start for start in range(0, slices, step) if start + size <= slices][:most]


def plain_model(key: str, fact: Fact, types: list[Fact], /) -> Fact:
    """Return the table of a part that cannot do MIG; memory as the EC2 types that have it say."""
    api = [t["ec2_api"]["gpu_memory_mib"] for t in types if t["gpu_model"] == key and t["ec2_api"]["gpu_memory_mib"]]
    seen = _MEMORY_SEEN.get(key)
    memory = seen or (api[0] if api else 1024 * int(_KEYS[key].split(".")[1].removesuffix("gb")))
    derived = ["multiprocessors"] + ([] if seen else ["memory_mib"])
    name = fact["nvml_name"]
    if name is None:
        name = f"NVIDIA {fact['display_name']}"
        derived.append("names")
    elif fact["nvml_name_confidence"] == "low":
        derived.append("names")
    ids = [i.removeprefix("0x").lower() for i in fact["pci_device_ids"] or []]
    return {
        "id": key,
        "model_key": _KEYS[key],
        "title": fact["display_name"],
        "names": [name],
        "pci_device_ids": ids,
        "form_factors": ["SXM2"] if key.startswith("v100") else ["PCIe"],
        "architecture": fact["architecture"],
        "compute_capability": fact["compute_capability"],
        "memory_mib": memory,
        "multiprocessors": _MULTIPROCESSORS[key],
        "memory_slices": None,
        "compute_slices": None,
        "mig_capable": False,
        "geometry_known": False,
        "resetless": False,
        "mode_survives_reboot": False,
        "gpm": False,
        "virtual": any(t["fractional"] for t in types if t["gpu_model"] == key),
        "confidence": fact["nvml_name_confidence"] or "unknown",
        "sources": sorted({*fact["nvml_name_sources"], *fact["pci_sources"]}),
        "derived": derived,
    }


def instance_type(fact: Fact, models: dict[str, str], /) -> Fact:
    """Return the record of an EC2 type; `model` is the id of a GPU table."""
    driver = fact["driver"]
    return {
        "name": fact["instance_type"],
        "family": fact["family"],
        "architecture": fact["architecture"],
        "model": models[fact["gpu_model"]],
        "count": fact["gpu_count"],
        "fraction": fact["gpu_fraction"],
        "mig_capable": fact["mig_capable"],
        "api_count": fact["ec2_api"]["gpu_count"],
        "api_memory_mib": fact["ec2_api"]["gpu_memory_mib"],
        "ecs_values": fact["ecs_gpu_values"],
        "vcpus": fact["vcpus"],
        "memory_mib": fact["memory_mib"],
        "driver_kind": driver["kind"] if driver else None,
        "driver_min_major": driver["min_major"] if driver else None,
        "driver_excluded_majors": (driver["excluded_majors"] if driver else None) or [],
        "notes": fact["notes"],
        "sources": fact["sources"],
    }


_ORDER_NAMES = {
    "size1": [[1, 1]],
    "2g": [[2, 2]],
    "1g_double": [[1, 2]],
    "3g": [[3, 4]],
    "4g": [[4, 4]],
    "7g": [[7, 8]],
}


def driver(geometry: Fact, /) -> Fact:
    """Return the maps of GPU-instance ids, and the order of starts a driver tries by itself.

    A row of `orders` holds for profiles of `slices` compute slices over `size` memory slices; where a
    part has no row, starts are tried in ascending order.
    """
    maps = []
    for fact in geometry["gi_id_maps"]:
        spans = [[*map(int, span.split(":")), number] for span, number in fact["map"].items()]
        maps.append({"name": fact["id"], "spans": spans, "confidence": fact["confidence"], "sources": fact["source"]})
    orders = []
    for fact in geometry["automatic_placement_order"]:
        if isinstance(fact["order"], dict):
            last = 509 if fact["applies_to"].endswith("R450") else None
            for name, starts in fact["order"].items():
                for slices, size in _ORDER_NAMES[name]:
                    orders.append({"slices": slices, "size": size, "starts": starts, "last_driver_major": last})
    orders.sort(key=lambda row: row["last_driver_major"] or 10_000)
    return {"gi_id_maps": maps, "orders": orders}


def models_by_ec2_key(ec2: Fact, geometry: list[Fact], /) -> dict[str, str]:
    """Return the GPU table id for each GPU key of the EC2 facts: the MIG part with its device id."""
    found = {}
    for key, fact in ec2["gpu_models"].items():
        found[key] = key
        if fact["mig_capable"]:
            ids = {i.removeprefix("0x").lower() for i in fact["pci_device_ids"] or []}
            found[key] = next(m["id"] for m in geometry if ids & set(device_ids(m)))
    return found


def render(table: Fact, about: str, /) -> str:
    """Return `table` as TOML. A key whose value is None is left out: unknown."""
    lines = [
        f"# {about}",
        "# Made by packaging/generate_tables.py: change the facts, not this file. A missing key is unknown.",
    ]
    lines += _body(table, "")
    return "\n".join(lines) + "\n"


def _body(table: Fact, prefix: str) -> list[str]:
    lines = []
    for key, value in table.items():
        if value is not None and not _is_tables(value):
            lines.append(f"{key} = {_value(value)}")
    for key, value in table.items():
        if _is_tables(value):
            for row in value:
                lines += ["", f"[[{prefix}{key}]]", *_body(row, f"{prefix}{key}.")]
    return lines


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def tables(geometry: Fact, ec2: Fact, /) -> dict[str, str]:
    """Return the text of every table by its path below agent/sim."""
    about = "What is known of a GPU, from {} (facts of {}); `derived` lists what no source prints."
    made = {}
    siblings = geometry["models"]
    source = about.format("packaging/facts/mig-geometry.json", geometry["retrieved"])
    for fact in siblings:
        made[f"gpus/{fact['id']}.toml"] = render(mig_model(fact, siblings), source)
    source = about.format("packaging/facts/ec2-gpu-instances.json", ec2["compiled"])
    for key, fact in ec2["gpu_models"].items():
        if not fact["mig_capable"]:
            made[f"gpus/{key}.toml"] = render(plain_model(key, fact, ec2["instance_types"]), source)
    models = models_by_ec2_key(ec2, siblings)
    types = {"instance_types": [instance_type(t, models) for t in ec2["instance_types"]]}
    made["driver.toml"] = render(
        driver(geometry), f"How drivers number and place instances (facts of {geometry['retrieved']})."
    )
    made["instances.toml"] = render(types, f"EC2 types with NVIDIA GPUs (facts of {ec2['compiled']}).")
    return made


def main(arguments: list[str]) -> int:
    """Write the tables, or with --check compare them."""
    parser = argparse.ArgumentParser(description="Make agent/sim's tables from the facts.")
    parser.add_argument("--geometry", type=Path, default=HERE / "facts" / "mig-geometry.json")
    parser.add_argument("--instances", type=Path, default=HERE / "facts" / "ec2-gpu-instances.json")
    parser.add_argument("--into", type=Path, default=HERE.parent / "agent" / "sim")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a table differs")
    options = parser.parse_args(arguments)
    made = tables(json.loads(options.geometry.read_text()), json.loads(options.instances.read_text()))
    there = {f"gpus/{p.name}" for p in (options.into / "gpus").glob("*.toml")}
    differing = sorted(
        {
            name
            for name, text in made.items()
            if not (options.into / name).is_file() or (options.into / name).read_text() != text
        }
        | (there - set(made))
    )
    if options.check:
        for name in differing:
            print(f"{options.into / name}: differs from the facts; run packaging/generate_tables.py", file=sys.stderr)
        return 1 if differing else 0
    for name in differing:
        path = options.into / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name])
        else:
            path.unlink()
    print(f"{len(made)} tables, {len(differing)} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
