"""Whose GPU layout it is: the one list of signals, and what follows from them.

    signal (where it is read)                                      owner         gpunode
    settings `owner` names another                                 that one      observes
    EKS Auto Mode (node label compute-type=auto)                   AWS           observes, always
    DRA driver runs with DynamicMIG (its flags)                    dra-dynamic   observes, always
    DynamicMIG in an earlier boot, and its checkpoint still there  dra-dynamic   observes until taken over
    MIG manager process, /etc/nvidia-mig-manager, its unit,
      node label nvidia.com/mig.config                             mig-manager   observes until taken over
    MIG manager process in an earlier boot                         mig-manager   observes until taken over
    Bottlerocket's settings cannot be read                         unknown       observes
    Bottlerocket, strategy "mig" and plugin enabled                migmanager    observes until taken over
    Bottlerocket, else, Ampere GPUs                                nobody        refuses MIG, always: a reboot loop
    Bottlerocket, else, nvidia-migmanager still at work            gpunode       waits
    ECS agent (its unit, /etc/ecs, Bottlerocket's ECS variant)     gpunode       refuses MIG unless allow-mig-on-ecs
    none of these                                                  gpunode       writes

The first line that applies decides. "Taken over" is `owner = "gpunode"` in the settings. Some owners
show themselves only after the kubelet has started, which is after we partition; so what was seen is
remembered in /var/lib/gpunode/owner.json for the next boots of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Protocol

import tomli

from agent import log, records
from agent.host import files, processes, real
from agent.host import machine as machines
from agent.mig import node as nodes

MEMORY = "/var/lib/gpunode/owner.json"
MIGMANAGER_FILE = "/etc/nvidia-migmanager/nvidia-migmanager.toml"
MIGMANAGER_MARKER = "/run/nvidia-migmanager/reboot-required"
DRA_CHECKPOINT = "/var/lib/kubelet/plugins/gpu.nvidia.com"
MIG_MANAGER_FOLDER = "/etc/nvidia-mig-manager"
_UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_DRA_PROCESS = "gpu-kubelet-plu"
_MIG_MANAGERS = ("nvidia-mig-mana", "k8s-mig-manager", "nvidia-mig-part")
_LABELS = ("/etc/eks/kubelet/environment", "/etc/kubernetes/kubelet/environment", "/etc/kubernetes/kubelet/env")
_TAKE_OVER = 'set owner = "gpunode" in the settings'


@records.dataclass(frozen=True, slots=True)
class Signals:
    """Everything that decides, as plain facts. The defaults are a host with no other owner."""

    setting: str = "auto"
    wants_mig: bool = True
    allow_mig_on_ecs: bool = False
    auto_mode: bool = False
    dra_dynamic: bool = False
    dra_remembered: bool = False
    mig_manager: str | None = None
    mig_manager_remembered: bool = False
    bottlerocket: bool = False
    host_strategy: str | None = None
    host_enabled: bool = True
    host_problem: str | None = None
    migmanager_busy: str | None = None
    ampere: bool = False
    ecs: str | None = None


@records.dataclass(frozen=True, slots=True)
class Ownership:
    """Who decides the layout. `may_write` False stops every change; `code` is stable, `why` a sentence,
    `takeover` what to do to let gpunode decide, None where one must not."""

    owner: str
    may_write: bool
    code: str
    why: str
    takeover: str | None = None


def decide(signals: Signals) -> Ownership:
    """Go through the list above. Pure."""
    taken = signals.setting == "gpunode"
    if signals.setting not in ("auto", "gpunode"):
        return Ownership(
            signals.setting,
            False,
            "owner-set",
            f'the settings say owner = "{signals.setting}": gpunode observes',
            _TAKE_OVER,
        )
    if signals.auto_mode:
        return Ownership("aws", False, "owner-auto-mode", "this is an EKS Auto Mode node: AWS decides its GPU layout")
    if signals.dra_dynamic:
        return Ownership(
            "dra-dynamic",
            False,
            "owner-dra-dynamic",
            "the NVIDIA DRA driver runs with DynamicMIG: it makes and destroys instances itself, and destroys those it"
            " did not make",
            "turn its feature gate DynamicMIG off; gpunode then partitions statically",
        )
    if signals.dra_remembered and not taken:
        return Ownership(
            "dra-dynamic",
            False,
            "owner-dra-dynamic",
            f"the NVIDIA DRA driver ran with DynamicMIG on this machine, and {DRA_CHECKPOINT} is still there",
            f"turn DynamicMIG off, then {_TAKE_OVER} or remove {DRA_CHECKPOINT}",
        )
    if signals.mig_manager is not None and not taken:
        return Ownership(
            "mig-manager",
            False,
            "owner-mig-manager",
            f"NVIDIA's MIG manager decides here ({signals.mig_manager})",
            f"remove the MIG manager from this node, or {_TAKE_OVER}",
        )
    if signals.mig_manager_remembered and not taken:
        return Ownership(
            "mig-manager",
            False,
            "owner-mig-manager",
            "NVIDIA's MIG manager ran on this machine in an earlier boot, and starts again once the kubelet has",
            f"remove the MIG manager from this node, then {_TAKE_OVER} or remove {MEMORY}",
        )
    if signals.bottlerocket:
        found = _on_bottlerocket(signals, taken=taken)
        if found is not None:
            return found
    if signals.ecs is not None and signals.wants_mig and not signals.allow_mig_on_ecs:
        return Ownership(
            "gpunode",
            False,
            "ecs-no-mig",
            f"this is an ECS node ({signals.ecs}), and ECS cannot give out MIG instances: it would hand the whole GPU's"
            " name to containers, which then cannot use it",
            "set allow-mig-on-ecs = true if nothing is scheduled by ECS's GPU requirements here",
        )
    why = "the settings say so" if taken else "nobody else was found that partitions GPUs here"
    return Ownership("gpunode", True, "owner-gpunode", why)


def _on_bottlerocket(signals: Signals, *, taken: bool) -> Ownership | None:
    if signals.host_problem is not None:
        return Ownership(
            "unknown",
            False,
            "owner-unknown",
            f"Bottlerocket's own MIG settings cannot be read ({signals.host_problem}), so nobody can tell what its"
            " nvidia-migmanager will do",
        )
    if signals.host_strategy == "mig" and signals.host_enabled:
        if not taken:
            return Ownership(
                "migmanager",
                False,
                "owner-migmanager",
                "Bottlerocket's nvidia-migmanager partitions at boot (device-partitioning-strategy is mig); gpunode"
                " verifies",
                _TAKE_OVER,
            )
    elif signals.ampere and signals.wants_mig:
        off = "its device plugin is disabled" if not signals.host_enabled else "device-partitioning-strategy is not mig"
        return Ownership(
            "nobody",
            False,
            "owner-reboot-loop",
            "MIG on Ampere needs a reboot, and Bottlerocket's nvidia-migmanager turns MIG off and reboots at every boot"
            f" while {off}: enabling it would never end",
            'set settings.kubelet-device-plugins.nvidia.device-partitioning-strategy = "mig" (and enabled = true)',
        )
    if signals.migmanager_busy is not None:
        return Ownership(
            "gpunode", False, "migmanager-busy", f"waiting for nvidia-migmanager: {signals.migmanager_busy}"
        )
    return None


class HostView(Protocol):
    """What the settings learned of the Bottlerocket host (`agent.settings.model.BottlerocketView`)."""

    @property
    def strategy(self) -> str: ...  # noqa: D102
    @property
    def enabled(self) -> bool: ...  # noqa: D102
    @property
    def problem(self) -> str | None: ...  # noqa: D102


class Wishes(Protocol):
    """What of the settings matters here (`agent.settings.model.Settings`)."""

    @property
    def owner(self) -> str: ...  # noqa: D102
    @property
    def allow_mig_on_ecs(self) -> bool: ...  # noqa: D102
    @property
    def bottlerocket(self) -> HostView | None: ...  # noqa: D102


def gather(
    machine: machines.Machine, settings: Wishes, node: nodes.NodeState, *, wants_mig: bool = True, remember: bool = True
) -> Signals:
    """Read every signal from this machine. Blocks for some files and a walk over /proc.

    What was seen is kept for the next boot unless `remember` is False or it cannot be written.
    """
    running = _running(machine)
    release = os_release(machine)
    bottlerocket = release.get("ID") == "bottlerocket"
    strategy, enabled, problem = _host_settings(machine, settings.bottlerocket) if bottlerocket else (None, True, None)
    memory = _Memory(machine)
    dynamic = _dra_dynamic(machine, running)
    manager = _mig_manager(machine, running)
    if remember:
        memory.keep(
            dra_dynamic=memory.dra_dynamic if dynamic is None else dynamic,
            # Files and labels are there at the next boot too; only a process comes late. Who takes over has
            # looked after it, so then it is forgotten.
            mig_manager=settings.owner != "gpunode" and (memory.mig_manager or _runs_mig_manager(running) is not None),
        )
    return Signals(
        setting=settings.owner,
        wants_mig=wants_mig,
        allow_mig_on_ecs=settings.allow_mig_on_ecs,
        auto_mode=_label(machine, running, "eks.amazonaws.com/compute-type=auto"),
        dra_dynamic=dynamic is True,
        dra_remembered=dynamic is None and memory.dra_dynamic and machine.path(DRA_CHECKPOINT).is_dir(),
        mig_manager=manager,
        mig_manager_remembered=manager is None and memory.mig_manager,
        bottlerocket=bottlerocket,
        host_strategy=strategy,
        host_enabled=enabled,
        host_problem=problem,
        migmanager_busy=_migmanager_busy(machine, running) if bottlerocket else None,
        ampere=any(gpu.mig_capable and "ampere" in gpu.architecture.lower() for gpu in node.gpus)
        or any(gpu.mig_capable and gpu.resetless is False for gpu in node.gpus),
        ecs=ecs_node(machine, release),
    )


def _running(machine: machines.Machine) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid in processes.pids(machine):
        name = processes.command(machine, pid)
        if name is not None:
            found.setdefault(name, []).append(pid)
    return found


def os_release(machine: machines.Machine) -> dict[str, str]:
    """Return what /etc/os-release (or its fallback) says, {} where there is none."""
    text = (
        files.read_text(machine.path("/etc/os-release")) or files.read_text(machine.path("/usr/lib/os-release")) or ""
    )
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def _dra_dynamic(machine: machines.Machine, running: Mapping[str, list[int]]) -> bool | None:
    """Whether the DRA driver makes instances itself; None while it does not run."""
    plugins = running.get(_DRA_PROCESS)
    if not plugins:
        return None
    return any(processes.arguments_mention(machine, pid, "DynamicMIG=true") for pid in plugins)


def _runs_mig_manager(running: Mapping[str, list[int]]) -> str | None:
    return next((name for name in _MIG_MANAGERS if name in running), None)


def _mig_manager(machine: machines.Machine, running: Mapping[str, list[int]]) -> str | None:
    name = _runs_mig_manager(running)
    if name is not None:
        return f"process {name}"
    if machine.path(MIG_MANAGER_FOLDER).is_dir():
        return f"{MIG_MANAGER_FOLDER} is there"
    for folder in _UNIT_FOLDERS:
        unit = machine.path(f"{folder}/nvidia-mig-manager.service")
        if unit.is_file():
            return f"{folder}/{unit.name} is there"
    if _label(machine, running, "nvidia.com/mig.config="):
        return "the node has the label nvidia.com/mig.config"
    return None


def _label(machine: machines.Machine, running: Mapping[str, list[int]], text: str) -> bool:
    """Whether the kubelet labels its node so: by its arguments, else by the files that will give them."""
    if any(processes.arguments_mention(machine, pid, text) for pid in running.get("kubelet", ())):
        return True
    places = [machine.path(place) for place in _LABELS]
    places += sorted(machine.path("/etc/systemd/system/kubelet.service.d").glob("*.conf"))
    return any(text in (files.read_text(place) or "") for place in places)


def _host_settings(machine: machines.Machine, view: HostView | None) -> tuple[str | None, bool, str | None]:
    """Return (strategy, plugin enabled, problem) of the Bottlerocket host: from its API where the settings
    asked it, else from the file that nvidia-migmanager itself reads (empty: it turns MIG off)."""
    if view is not None:
        return view.strategy, view.enabled, view.problem
    path = machine.path(MIGMANAGER_FILE)
    try:
        document = tomli.loads(files.read_bounded(path).decode())
    except FileNotFoundError:
        return None, True, None
    except (OSError, ValueError) as error:
        return None, True, f"{MIGMANAGER_FILE}: {error}"
    return str(document.get("device-partitioning-strategy", "none")), True, None


def _migmanager_busy(machine: machines.Machine, running: Mapping[str, list[int]]) -> str | None:
    if machine.path(MIGMANAGER_MARKER).exists():
        return f"{MIGMANAGER_MARKER} is there, the host is about to reboot"
    if "nvidia-migmanag" in running:
        return "it is at work"
    return None


def ecs_node(machine: machines.Machine, release: Mapping[str, str]) -> str | None:
    """Return what makes this an ECS node, in words, None when it is none."""
    variant = release.get("VARIANT_ID", "")
    if re.match(r"aws-ecs-", variant):
        return f"Bottlerocket variant {variant}"
    if machine.path("/etc/ecs/ecs.config").exists():
        return "/etc/ecs/ecs.config is there"
    for folder in _UNIT_FOLDERS:
        if machine.path(f"{folder}/ecs.service").is_file():
            return f"{folder}/ecs.service is there"
    return "ecs.service is active" if machine.unit_active("ecs.service") else None


class _Memory:
    """What was seen in earlier boots of this very machine."""

    def __init__(self, machine: machines.Machine) -> None:
        self._path = machine.path(MEMORY)
        self._machine_id = real.machine_id(machine)
        self.dra_dynamic = False
        self.mig_manager = False
        try:
            document = json.loads(files.read_bounded(self._path))
            ours = document["machine"] == self._machine_id
            self.dra_dynamic = ours and bool(document["dra-dynamic"])
            self.mig_manager = ours and bool(document.get("mig-manager", False))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("what was seen of other owners cannot be read", file=MEMORY, cause=str(error))

    def keep(self, *, dra_dynamic: bool, mig_manager: bool) -> None:
        if (dra_dynamic, mig_manager) == (self.dra_dynamic, self.mig_manager):
            return
        self.dra_dynamic, self.mig_manager = dra_dynamic, mig_manager
        document = {"machine": self._machine_id, "dra-dynamic": dra_dynamic, "mig-manager": mig_manager}
        try:
            files.write_atomic(self._path, (json.dumps(document) + "\n").encode())
        except OSError as error:
            log.debug("what was seen of other owners cannot be kept", file=MEMORY, cause=error.strerror)
