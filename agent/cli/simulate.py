"""`gpunode simulate`: which nodes that are not there can be had, and what happens to one of them.

    gpunode simulate                                  list all
    gpunode simulate describe p4d.24xlarge            what is known, and what is not
    gpunode simulate node-file p4d.24xlarge           a node file to edit, on stdout

With `--simulate NODE --sim-state FILE`, on the node kept in that file:

    gpunode simulate reboot
    gpunode simulate reset [GPU...]                   all GPUs unless given
    gpunode simulate unit NAME start|stop             kubelet.service, nvidia-fabricmanager.service and others
    gpunode simulate workload                         list processes and holders
    gpunode simulate workload start TARGET            a process; --name --memory-mib --activity --kind
    gpunode simulate workload hold TARGET             somebody with the device file open; --name
    gpunode simulate workload stop PID|all
    gpunode simulate fault                            list orders
    gpunode simulate fault fail|delay|hang CALL       --gpu --code --seconds --skip --times
    gpunode simulate fault release [ORDER]            all unless given
    gpunode simulate fault lose GPU                   it falls off the bus
    gpunode simulate fault xid TARGET CODE
    gpunode simulate fault reset impossible|possible

TARGET is GPU, GPU/GI or GPU/GI/CI by number, or the UUID of a MIG device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from agent import errors
from agent.cli import out
from agent.serve import render
from agent.sim import catalogue, spec
from agent.sim import node as simulated


def main(found: argparse.Namespace) -> int:
    """Do one action; 0 when done, 2 when it cannot be understood, 4 when a reset is refused."""
    words: list[str] = found.words
    _refuse_flags_of_others(found, words)
    match found.action:
        case "list":
            _list(words, found)
        case "describe":
            _describe(_only(words, "describe NODE"), found)
        case "node-file":
            print(node_file(_only(words, "node-file NODE")), end="")
        case _:
            _act(found, words)
    return errors.EXIT_OK


# Which flags each action reads; a flag elsewhere would be taken for obeyed.
_FLAGS = {
    ("workload", "start"): ("name", "memory_mib", "activity", "kind"),
    ("workload", "hold"): ("name",),
    ("fault", "fail"): ("gpu", "code", "skip", "times"),
    ("fault", "delay"): ("gpu", "code", "seconds", "skip", "times"),
    ("fault", "hang"): ("gpu", "code", "skip", "times"),
}


def _refuse_flags_of_others(found: argparse.Namespace, words: Sequence[str]) -> None:
    action = " ".join((found.action, *words[:1]))
    taken = _FLAGS.get((found.action, words[0] if words else ""), ())
    for flag in sorted({flag for flags in _FLAGS.values() for flag in flags}):
        if getattr(found, flag) is not None and flag not in taken:
            whose = ", ".join(" ".join(key) for key, flags in _FLAGS.items() if flag in flags)
            raise errors.UsageError(f"--{flag.replace('_', '-')} does not belong to {action}, but to {whose}")


def _only(words: Sequence[str], usage: str) -> str:
    if len(words) != 1:
        raise errors.UsageError(f"use: gpunode simulate {usage}")
    return words[0]


# --- what there is ----------------------------------------------------------------------------------


def _list(words: Sequence[str], found: argparse.Namespace) -> None:
    names = [name for name in catalogue.names() if not words or any(word in name for word in words)]
    if not names:
        raise errors.UsageError(f"no simulated node has {' or '.join(words)} in its name; `gpunode simulate` lists all")
    told = [catalogue.describe(name) for name in names]
    if found.output == "json":
        out.document(told, sys.stdout)
        return
    rows = [("NODE", "GPUS", "GPU", "MODEL", "MIG", "MODE CHANGE", "KNOWN")]
    rows += [
        (
            str(node["name"]),
            _count(node),
            str(node.get("gpu_name") or "-"),
            str(node.get("model") or "-"),
            str(node.get("mig") or "-"),
            str(node.get("mode_change") or "-"),
            _known(node),
        )
        for node in told
    ]
    print("\n".join(render.columns(rows)))
    print(
        "--simulate takes these names, MODEL:COUNT, or a node file (gpunode simulate node-file NODE writes one)",
        file=sys.stderr,
    )


def _count(node: dict[str, object]) -> str:
    fraction = node.get("fraction")
    if isinstance(fraction, float) and fraction < 1:
        return f"{fraction:g}"
    return "?" if node.get("count") is None else str(node["count"])


def _known(node: dict[str, object]) -> str:
    unknown, derived = node.get("unknown"), node.get("derived")
    if unknown:
        return f"{len(unknown)} unknown" if isinstance(unknown, list) else "partly"
    return f"{len(derived)} derived" if isinstance(derived, list) and derived else "all"


def _describe(name: str, found: argparse.Namespace) -> None:
    told = catalogue.describe(name)
    if told.get("kind") == "file":
        about = spec.read(name)
        told |= {
            "gpus": [gpu.model for gpu in about.gpus],
            "driver_version": about.driver_version,
            "instance_type": about.instance_type,
        }
    if found.output == "json":
        out.document(told, sys.stdout)
        return
    plain = [
        (key.replace("_", " "), _words(value))
        for key, value in told.items()
        if key not in ("unknown", "notes", "derived")
    ]
    print("\n".join(render.columns(plain)))
    for key, title in (("unknown", "unknown"), ("derived", "derived, not observed"), ("notes", "note")):
        value = told.get(key)
        for line in value if isinstance(value, list) else ():
            print(f"{title}: {line}")


def _words(value: object) -> str:
    match value:
        case None:
            return "unknown"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(str(v) for v in value) or "none"
        case dict():
            return ", ".join(f"{k.replace('_', ' ')} {_words(v)}" for k, v in value.items())
        case _:
            return str(value)


def node_file(name: str) -> str:
    """Return a node file of a known node with every key in it, to be edited. Raises SimulationError."""
    about = spec.read(name)
    lines = [
        f"# A simulated node, written from {name} to be edited: gpunode status --simulate THIS-FILE",
        f"name = {_quoted(about.name)}",
    ]
    if about.instance_type is not None:
        lines.append(f"instance-type = {_quoted(about.instance_type)}")
    missing = ", ".join(map(_quoted, about.missing_functions))
    rows = [
        ("root", _flag(about.root), "false: this process may not change GPUs"),
        ("driver-version", _quoted(about.driver_version), "also decides which functions the library exports"),
        ("missing-functions", f"[{missing}]", "NVML names that this library lacks"),
        ("persistenced", _flag(about.persistenced), "nvidia-persistenced runs and holds the GPUs against a reset"),
        ("scheduler", _quoted(about.scheduler), "none, kubelet or ecs: whose agent is active"),
        ("profiles-need-mig", _flag(about.profiles_need_mig), "true: profiles are told only while MIG is on"),
        ("reset", _quoted("possible" if about.reset_possible else "impossible"), "or impossible"),
        ("load", _quoted(about.load), "idle, or busy: a process on every instance"),
        ("seed", str(about.seed), "of everything that moves"),
    ]
    lines += [f"{f'{key} = {value}':<34}# {what}" for key, value, what in rows]
    lines += ["", "[latency]  # seconds a call takes"]
    lines += [f"{key} = {value:g}" for key, value in about.latency]
    lines += [f"# {key} = 0.02" for key in spec.LATENCIES if key not in dict(about.latency)]
    for gpus in _runs(about.gpus):
        gpu = gpus[0]
        lines += [
            "",
            "[[gpu]]",
            f"model = {_quoted(gpu.model)}",
            f"count = {len(gpus)}",
            f"mode-change = {_quoted(gpu.mode_change)}  # pending, in-use or immediate (parts that need a reset)",
            '# gi-id-map = "A"  # A or B, else drawn from the UUID',
            '# uuid = "GPU-..."  # with count = 1',
        ]
    lines += [
        "",
        "# [[fault]]  # as `gpunode simulate fault` orders them",
        '# call = "nvmlDeviceCreateGpuInstanceWithPlacement"',
        '# action = "fail"  # fail, delay or hang',
        "# code = 999",
    ]
    return "\n".join(lines) + "\n"


def _runs(gpus: Sequence[spec.Gpu]) -> list[list[spec.Gpu]]:
    runs: list[list[spec.Gpu]] = []
    for gpu in gpus:
        if runs and (runs[-1][0].model, runs[-1][0].mode_change) == (gpu.model, gpu.mode_change):
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _flag(value: bool) -> str:
    return "true" if value else "false"


# --- what happens to one ----------------------------------------------------------------------------


def _act(found: argparse.Namespace, words: list[str]) -> None:
    if found.simulate is None or found.sim_state is None:
        raise errors.UsageError(
            f"{found.action} acts on a node that is kept in a file: say which with --simulate NODE --sim-state FILE"
        )
    node = simulated.open_node(found.simulate, state=Path(found.sim_state))
    try:
        match found.action:
            case "reboot":
                if words:
                    raise errors.UsageError("use: gpunode simulate reboot")
                node.reboot()
                _say(found, {"rebooted": node.name}, f"{node.name} rebooted")
            case "reset":
                _reset(node, words, found)
            case "unit":
                _unit(node, words, found)
            case "workload":
                _workload(node, words, found)
            case _:
                _fault(node, words, found)
    finally:
        node.close()


def _say(found: argparse.Namespace, document: dict[str, object], text: str) -> None:
    if found.output == "json":
        out.document({"simulated": found.simulate, **document}, sys.stdout)
    else:
        print(text)


def _number(word: str, what: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise errors.UsageError(f'"{word}" is no {what}: write its number')
    return int(word)


def _gpu(node: simulated.SimulatedNode, word: str) -> int:
    index = _number(word, "GPU")
    if index >= len(node.driver.gpus):
        raise errors.UsageError(f"there is no GPU {index} on {node.name}: it has {len(node.driver.gpus)}")
    return index


def _reset(node: simulated.SimulatedNode, words: list[str], found: argparse.Namespace) -> None:
    indexes = [_gpu(node, word) for word in words] or [gpu.index for gpu in node.driver.gpus]
    node.reset([node.driver.gpus[index].spec.pci_bus_id for index in indexes])
    _say(found, {"reset": indexes}, f"GPU {render.indexes(indexes)} of {node.name} reset")


def _unit(node: simulated.SimulatedNode, words: list[str], found: argparse.Namespace) -> None:
    if len(words) != 2 or words[1] not in ("start", "stop"):
        raise errors.UsageError("use: gpunode simulate unit NAME start|stop (as kubelet.service, ecs.service)")
    name = words[0] if "." in words[0] else f"{words[0]}.service"  # as systemctl takes it
    active = words[1] == "start"
    node.set_unit(name, active)
    _say(found, {"unit": name, "active": active}, f"{name} of {node.name} {'started' if active else 'stopped'}")


def _workload(node: simulated.SimulatedNode, words: list[str], found: argparse.Namespace) -> None:
    match words:
        case [] | ["list"]:
            users = [dict(user) for user in node.processes()]
            rows: list[tuple[str, ...]] = [("PID", "NAME", "KIND", "GPU", "GI", "CI")]
            rows += [
                tuple(
                    "-" if user[key] is None else str(user[key])
                    for key in ("pid", "name", "kind", "gpu", "gpu_instance", "compute_instance")
                )
                for user in users
            ]
            _say(
                found, {"workload": users}, "\n".join(render.columns(rows)) if users else f"nothing runs on {node.name}"
            )
        case ["start", target]:
            gpu, instance, compute = _target(node, target)
            pid = node.start_process(
                gpu,
                gpu_instance=instance,
                compute_instance=compute,
                name=found.name or "python3",
                memory_mib=1024 if found.memory_mib is None else found.memory_mib,
                activity=0.6 if found.activity is None else found.activity,
                kind=found.kind or "compute",
            )
            _say(found, {"pid": pid}, f"started pid {pid} on {target} of {node.name}")
        case ["hold", target]:
            gpu, instance, compute = _target(node, target)
            pid = node.hold(gpu, gpu_instance=instance, compute_instance=compute, name=found.name or "dcgm-exporter")
            _say(found, {"pid": pid}, f"pid {pid} holds {target} of {node.name} open")
        case ["stop", "all"]:
            ended = node.stop_process()
            _say(found, {"ended": ended}, f"ended {ended} on {node.name}")
        case ["stop", word]:
            pid = _number(word, "pid")
            if not node.stop_process(pid):
                raise errors.UsageError(f"there is no pid {pid} on {node.name}; `gpunode simulate workload` lists them")
            _say(found, {"ended": 1}, f"ended pid {pid} on {node.name}")
        case _:
            raise errors.UsageError("use: gpunode simulate workload [list | start TARGET | hold TARGET | stop PID|all]")


def _target(node: simulated.SimulatedNode, word: str) -> tuple[int, int | None, int | None]:
    """Return GPU, GPU instance and compute instance of "0", "0/3", "0/3/0" or the UUID of a MIG device."""
    if word.startswith("MIG-"):
        for gpu in node.driver.gpus:
            for instance in gpu.state.instances.values():
                for compute in instance.compute.values():
                    if gpu.mig_uuid(instance.id, compute.id) == word:
                        return gpu.index, instance.id, compute.id
        raise errors.UsageError(f"there is no MIG device {word} on {node.name}")
    head, *rest = word.split("/")
    if len(rest) > 2:
        raise errors.UsageError(f'"{word}" is no target: write GPU, GPU/GI, GPU/GI/CI or the UUID of a MIG device')
    ids = [_number(part, "instance") for part in rest]
    return _gpu(node, head), ids[0] if ids else None, ids[1] if len(ids) > 1 else None


def _fault(node: simulated.SimulatedNode, words: list[str], found: argparse.Namespace) -> None:
    gpu = None if found.gpu is None else _gpu(node, found.gpu)
    match words:
        case [] | ["list"]:
            orders = [dataclasses.asdict(order) for order in node.faults.listed()]
            rows: list[tuple[str, ...]] = [
                ("ORDER", "ACTION", "CALL", "GPU", "CODE", "SECONDS", "SKIP", "TIMES", "SEEN")
            ]
            rows += [
                tuple(
                    "-" if order[key] is None else str(order[key])
                    for key in ("id", "action", "call", "gpu", "code", "seconds", "skip", "times", "seen")
                )
                for order in orders
            ]
            _say(
                found,
                {"faults": orders},
                "\n".join(render.columns(rows)) if orders else f"no faults are ordered on {node.name}",
            )
        case [("fail" | "delay" | "hang") as action, call]:
            # A failure and a hang hit once, slowness stays, unless it was said otherwise.
            times = found.times if found.times is not None else (0 if action == "delay" else 1)
            code = found.code if found.code is not None else (999 if action == "fail" else 0)
            if action == "delay" and found.seconds is None:
                raise errors.UsageError("a delay needs --seconds")
            order = node.faults.order(
                call, action, code=code, seconds=found.seconds or 0.0, gpu=gpu, skip=found.skip or 0, times=times
            )
            _say(found, {"order": order}, f"ordered ({order}): {call} of {node.name} will {action}")
        case ["release"]:
            node.release()
            _say(found, {"released": "all"}, f"all orders on {node.name} withdrawn")
        case ["release", word]:
            order = _number(word, "order")
            if all(known.id != order for known in node.faults.listed()):
                raise errors.UsageError(
                    f"there is no order {order} on {node.name}; `gpunode simulate fault` lists them"
                )
            node.release(order)
            _say(found, {"released": order}, f"order {order} on {node.name} withdrawn")
        case ["lose", word]:
            index = _gpu(node, word)
            node.lose(index)
            _say(found, {"lost": index}, f"GPU {index} of {node.name} fell off the bus")
        case ["xid", word, code]:
            index, instance, compute = _target(node, word)
            number = _number(code, "XID")
            if instance is not None and instance not in node.driver.gpus[index].state.instances:
                raise errors.UsageError(f"GPU {index} of {node.name} has no GPU instance {instance}")
            node.xid(index, number, gpu_instance=instance, compute_instance=compute)
            where = "" if instance is None else f" in GPU instance {instance}"
            _say(
                found,
                {"xid": number, "gpu": index, "gpu_instance": instance, "compute_instance": compute},
                f"GPU {index} of {node.name} reported XID {number}{where}",
            )
        case ["reset", ("possible" | "impossible") as how]:
            node.allow_reset(how == "possible")
            _say(found, {"reset": how}, f"resets of {node.name} are {how} from now on")
        case _:
            raise errors.UsageError(
                "use: gpunode simulate fault [list | fail|delay|hang CALL | release [ORDER] | lose GPU | xid TARGET CODE | "
                "reset possible|impossible]"
            )
