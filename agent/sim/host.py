"""The simulated machine around the GPUs: files, units, reset and reboot of a host that is not there.

Its root is a directory of its own, beside the state file or in a temporary place. What the kernel and
the driver would show there (proc, sys, dev) follows the state: it is written when somebody asks for a
path after something changed. Nothing of the real host is read or written.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from agent import errors
from agent.sim import machine, spec, state

_CAPS_PER_GPU = 135  # capability minors of one GPU: 15 GPU instances with 8 compute instances each
_CAPS_PER_INSTANCE = 9
_FIRST_CAP = 3  # 1 is mig/config, 2 is mig/monitor
_PARAMS = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
_CGROUP = "0::/system.slice/simulated.service\n"
_OS_RELEASE = 'NAME="Amazon Linux"\nID="amzn"\nVERSION_ID="2023"\nPRETTY_NAME="Amazon Linux 2023 (simulated)"\n'


class SimulatedMachine:
    """A host as `agent.host.machine.Machine` describes it. `directory` is its root; None makes one that
    `close` removes."""

    def __init__(self, node: machine.Machine, directory: Path | None) -> None:
        self.simulated: str | None = node.spec.name
        self._machine = node
        self._directory = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._shown: tuple[object, ...] | None = None
        self._devices: dict[str, int] = {}
        self._mutex = threading.RLock()

    # --- what agent.host.machine.Machine asks for

    @property
    def root(self) -> Path:
        """The directory under which the host's files lie, brought up to date. Raises SimulationError."""
        try:
            self._show()
        except OSError as error:
            self._shown = None  # what was begun is not all there: the next look begins anew
            raise spec.SimulationError(
                f"cannot write the host of the simulated node in {self._directory}: {error.strerror}"
            ) from error
        assert self._directory is not None
        return self._directory

    def path(self, absolute: str) -> Path:
        """Return where the host's file `absolute` is to be opened."""
        return self.root / absolute.lstrip("/")

    def is_root(self) -> bool:
        """Whether this process may change GPUs, as the node says."""
        return self._machine.spec.root

    def boot_id(self) -> str:
        """The id of this boot."""
        self._machine.store.refresh()
        return self._machine.store.node.boot_id

    def instance_type(self) -> str | None:
        """The EC2 type this node stands for, else None."""
        return self._machine.spec.instance_type

    def unit_active(self, unit: str) -> bool:
        """Whether a unit of the simulated host is active."""
        self._machine.store.refresh()
        return self._machine.store.node.units.get(unit, False)

    def stop_units(self, units: Sequence[str]) -> tuple[str, ...]:
        """Stop those that are active; return them."""
        with self._machine.store.change() as node:
            stopped = tuple(unit for unit in units if node.units.get(unit))
            for unit in stopped:
                node.units[unit] = False
        return stopped

    def start_units(self, units: Sequence[str]) -> None:
        """Start units. Raises GpunodeError for one that this host does not have."""
        unknown = [unit for unit in units if unit not in self._machine.store.node.units]
        with self._machine.store.change() as node:
            for unit in units:
                if unit not in unknown:
                    node.units[unit] = True
        if unknown:
            raise errors.GpunodeError(f"cannot start {', '.join(unknown)}: the simulated host has no such unit")

    def start_left_units(self) -> tuple[str, ...]:
        """Start what a run before this one stopped and left so: persistenced, where the node has it."""
        node = self._machine.store.node
        if self._machine.spec.persistenced and not node.units.get(machine.PERSISTENCED):
            self.start_units((machine.PERSISTENCED,))
            return (machine.PERSISTENCED,)
        return ()

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        """Reset exactly these GPUs. Raises errors.ResetRefused."""
        by_address = {normal_address(gpu.spec.pci_bus_id): gpu for gpu in self._machine.gpus}
        gpus = []
        for text in pci_bus_ids:
            gpu = by_address.get(normal_address(text))
            if gpu is None:
                raise errors.ResetRefused(f"cannot reset GPU {text}: there is no GPU at this address")
            gpus.append(gpu)
        self._machine.reset(gpus)

    def request_reboot(self, reason: str) -> None:
        """Note that a reboot was asked for; `gpunode simulate reboot` (or `SimulatedNode.reboot`) does it,
        as nothing here ends the process that asked."""
        with self._machine.store.change() as node:
            node.reboot_requested = reason

    # --- the files

    def close(self) -> None:
        """Remove the root if it was a temporary one."""
        with self._mutex:
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _show(self) -> None:
        with self._mutex:
            if self._directory is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="gpunode-simulated-", ignore_cleanup_errors=True)
                self._directory = Path(self._temporary.name)
            self._machine.store.refresh()
            node = self._machine.store.node
            key = (
                node.boots,
                node.mutations,
                node.resets,
                _users(node),
                len(node.kernel_log),
                node.units.get("ecs.service"),
                *((g.lost, g.gone) for g in node.gpus),
            )
            if key == self._shown:
                return
            last = self._shown
            first = last is None
            rebooted = last is not None and last[0] != node.boots
            self._shown = key
            marker = self._directory / ".simulated"
            if first:
                self._directory.mkdir(parents=True, exist_ok=True)
                rebooted = _read(marker) not in (None, str(node.boots))
            if rebooted:
                shutil.rmtree(self._directory / "run", ignore_errors=True)
                for folder in (self._directory / "proc").glob("[0-9]*"):
                    shutil.rmtree(folder, ignore_errors=True)
            if first or rebooted:
                self._write_static(node)
                _write(marker, str(node.boots))
            before = None if first or rebooted else last  # what of the files is as it was
            if before is None or before[6:] != key[6:]:
                self._show_bus(node)
            self._write_devices(node, anew=before is None)
            if before is None or before[3] != key[3]:
                self._write_processes(node)
            self._write_ecs(node)
            _write(self._directory / "dev/kmsg", "".join(line + "\n" for line in node.kernel_log))

    def _write_static(self, node: state.Node) -> None:
        assert self._directory is not None
        root = self._directory
        about = self._machine.spec
        for folder in (
            "run",
            "var/lib",
            "var/log",
            "etc/gpunode",
            "tmp",
            "run/systemd/system",
            "proc",
            "sys/bus/pci/devices",
        ):
            (root / folder).mkdir(parents=True, exist_ok=True)
        kind = "Open Kernel Module for" if about.driver_kind.startswith("open") else "Kernel Module for"
        machine_word = "aarch64" if about.architecture == "arm64" else "x86_64"
        _write(
            root / "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX {kind} {machine_word}  {about.driver_version}  Release Build  (simulated)\n",
        )
        _write(root / "sys/module/nvidia/version", about.driver_version + "\n")
        _write(root / "proc/sys/kernel/random/boot_id", node.boot_id + "\n")
        _write(root / "proc/stat", f"btime {int(node.booted)}\n")
        _write_once(root / "proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p1\n")
        _write(
            root / "proc/driver/nvidia/params",
            "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n",
        )
        _write(root / "etc/machine-id", uuid.uuid5(spec.NAMESPACE, f"{about.name}/machine").hex + "\n")
        _write_once(root / "etc/os-release", _OS_RELEASE)
        ec2 = about.instance_type is not None
        _write(root / "sys/class/dmi/id/sys_vendor", "Amazon EC2\n" if ec2 else "Simulated\n")
        _write(root / "sys/class/dmi/id/product_name", (about.instance_type or about.name) + "\n")
        tag = f"i-{uuid.uuid5(spec.NAMESPACE, about.name).hex[:17]}" if ec2 else ""
        _write(root / "sys/class/dmi/id/board_asset_tag", tag + "\n")
        for gpu in self._machine.gpus:
            address = gpu.spec.pci_bus_id[4:].lower()
            device = root / "sys/bus/pci/devices" / address
            _write(device / "vendor", "0x10de\n")
            _write(device / "device", f"{gpu.model.device_id:#06x}\n")
            _write(device / "class", "0x030200\n")
            _write(device / "numa_node", "0\n")
            _write(
                root / "proc/driver/nvidia/gpus" / address / "information",
                f"Model: \t\t {gpu.model.name}\nGPU UUID: \t {gpu.spec.uuid}\n"
                f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {gpu.index}\n",
            )
            _write(root / f"dev/nvidia{gpu.index}", "")
        _write(root / "dev/nvidiactl", "")
        _write(root / "dev/nvidia-caps/nvidia-cap1", "")
        _write(root / "dev/nvidia-caps/nvidia-cap2", "")
        _write(root / "proc/driver/nvidia/capabilities/mig/config", _capability(1))
        _write(root / "proc/driver/nvidia/capabilities/mig/monitor", _capability(2))
        minors = ["config 1", "monitor 2"]
        for gpu in self._machine.gpus:
            for gi in range(15):
                minors.append(f"gpu{gpu.index}/gi{gi}/access {capability_minor(gpu.index, gi)}")
                minors += [
                    f"gpu{gpu.index}/gi{gi}/ci{ci}/access {capability_minor(gpu.index, gi, ci)}" for ci in range(8)
                ]
        _write(root / "proc/driver/nvidia-caps/mig-minors", "\n".join(minors) + "\n")

    def _show_bus(self, node: state.Node) -> None:
        """Show on the PCI bus exactly the GPUs that are on it."""
        assert self._directory is not None
        for gpu in self._machine.gpus:
            address = gpu.spec.pci_bus_id[4:].lower()
            device = self._directory / "sys/bus/pci/devices" / address
            if node.gpus[gpu.index].gone:
                for folder in (device, self._directory / "proc/driver/nvidia/gpus" / address):
                    shutil.rmtree(folder, ignore_errors=True)
            elif not device.exists():
                self._write_static(node)

    def _write_devices(self, node: state.Node, *, anew: bool) -> None:
        """Show the capabilities and device nodes of exactly the instances there are.

        `anew`: by what lies there. Else by what this process has shown last, as a node is shown again
        between any two steps, and going through all files each time would take longer than the steps.
        """
        assert self._directory is not None
        capabilities, devices = (
            self._directory / name for name in ("proc/driver/nvidia/capabilities", "dev/nvidia-caps")
        )
        wanted: dict[str, int] = {}
        for index, gpu in enumerate(node.gpus):
            for gi in gpu.instances.values():
                base = f"gpu{index}/mig/gi{gi.id}"
                wanted[base] = capability_minor(index, gi.id)
                for ci in gi.compute.values():
                    wanted[f"{base}/ci{ci.id}"] = capability_minor(index, gi.id, ci.id)
        before = self._devices
        if anew:
            before = {}
            for folder in (*capabilities.glob("gpu*/mig/gi*/ci*"), *capabilities.glob("gpu*/mig/gi*")):
                if folder.relative_to(capabilities).as_posix() not in wanted:
                    shutil.rmtree(folder, ignore_errors=True)
            nodes = {f"nvidia-cap{minor}" for minor in (1, 2, *wanted.values())}
            for device in devices.iterdir():
                if device.name not in nodes:
                    device.unlink(missing_ok=True)
        for path, minor in before.items():
            if path not in wanted:
                shutil.rmtree(capabilities / path, ignore_errors=True)
                (devices / f"nvidia-cap{minor}").unlink(missing_ok=True)
        for path, minor in wanted.items():
            if path not in before:
                _write_once(capabilities / path / "access", _capability(minor))
                _write_once(devices / f"nvidia-cap{minor}", "")
        self._devices = wanted

    def _write_ecs(self, node: state.Node) -> None:
        """Show what the start of the ECS agent leaves: the GPUs it will register. It goes with a reboot."""
        assert self._directory is not None
        path = self._directory / "var/lib/ecs/gpu/nvidia-gpu-info.json"
        if not node.units.get("ecs.service"):
            path.unlink(missing_ok=True)
        elif not path.exists():
            told = {
                "DriverVersion": self._machine.spec.driver_version,
                "GPUIDs": [gpu.spec.uuid for gpu in self._machine.gpus if not node.gpus[gpu.index].lost],
            }
            _write(path, json.dumps(told) + "\n")

    def _write_processes(self, node: state.Node) -> None:
        """Show the processes and holders of the node in proc: name, cgroup and open device files."""
        assert self._directory is not None
        proc = self._directory / "proc"
        there: set[str] = set()
        for index, gpu in enumerate(node.gpus):
            for user in state.users(gpu):
                there.add(str(user.pid))
                folder = proc / str(user.pid)
                _write(folder / "comm", user.name[:15] + "\n")
                _write(folder / "cgroup", _CGROUP)
                _write(folder / "status", f"Name:\t{user.name[:15]}\nState:\tS (sleeping)\nPid:\t{user.pid}\n")
                _write(folder / "stat", f"{user.pid} ({user.name[:15]}) S 1 " + " ".join(["0"] * 48) + "\n")
                targets = ["/dev/nvidiactl", f"/dev/nvidia{index}"]
                if user.gpu_instance is not None:
                    targets.append(f"/dev/nvidia-caps/nvidia-cap{capability_minor(index, user.gpu_instance)}")
                    if user.compute_instance is not None:
                        minor = capability_minor(index, user.gpu_instance, user.compute_instance)
                        targets.append(f"/dev/nvidia-caps/nvidia-cap{minor}")
                (folder / "fd").mkdir(exist_ok=True)
                for number, target in enumerate(targets, 3):
                    link = folder / "fd" / str(number + 10 * index)
                    link.unlink(missing_ok=True)
                    link.symlink_to(target)
        for folder in proc.glob("[0-9]*"):
            # Others were put there by whoever plays another program of this host.
            if folder.name not in there and _read(folder / "cgroup") == _CGROUP:
                shutil.rmtree(folder, ignore_errors=True)


def capability_minor(gpu: int, instance: int, compute: int | None = None) -> int:
    """Return N of /dev/nvidia-caps/nvidia-capN for an instance, as the driver numbers them."""
    base = _FIRST_CAP + gpu * _CAPS_PER_GPU + instance * _CAPS_PER_INSTANCE
    return base if compute is None else base + 1 + compute


def _capability(minor: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


def normal_address(text: str) -> str:
    """Return a PCI address as sysfs writes it (0000:10:1c.0), from NVML's long form or any case."""
    parts = text.lower().split(":")
    return ":".join([parts[0][-4:], *parts[1:]]) if len(parts) == 3 else "0000:" + ":".join(parts)


def _users(node: state.Node) -> str:
    return json.dumps([[(u.pid, u.gpu_instance, u.compute_instance) for u in state.users(g)] for g in node.gpus])


def _write_once(path: Path, text: str) -> None:
    """Write a file that whoever makes this host another one may have written already."""
    if not path.exists():
        _write(path, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None
