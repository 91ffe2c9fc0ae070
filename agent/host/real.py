"""This host as `Machine`: the only place that really stops units, resets GPUs or asks for a reboot.

Every child process has a deadline, and nothing here waits for the network. In a container the
host's files lie under another root (`host_root`); units are then out of reach and said to be so.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent import errors, log
from agent.host import child, files, holders
from agent.host import machine as machines

REBOOT_FILE = "/run/gpunode/reboot-required"
STOPPED_FILE = "/run/gpunode/stopped-units"
BOTTLEROCKET_ROOT = "/.bottlerocket/rootfs"
_API_SOCKET = "/run/api.sock"
_REBOOT_UNIT = "gpunode-reboot.path"
_SMI = (
    "/usr/bin/nvidia-smi",
    "/opt/nvidia/current/bin/nvidia-smi",
    "/usr/libexec/nvidia/tesla/bin/nvidia-smi",
    "/usr/local/bin/nvidia-smi",
)
# Units whose work is done by a process that may run without them: in a container, or under another init.
_PROCESSES = {"kubelet.service": ("kubelet",), "ecs.service": ("amazon-ecs-init", "amazon-ecs-agen")}


def host_root(environ: Mapping[str, str], *, base: Path = Path("/")) -> Path:
    """Return where the host's files lie: GPUNODE_HOST_ROOT, a Bottlerocket container's view, or `base`.

    Raises `errors.UsageError` when GPUNODE_HOST_ROOT names no directory: looking elsewhere would be
    looking at the wrong host.
    """
    named = environ.get("GPUNODE_HOST_ROOT")
    if named:
        if not Path(named).is_dir():
            raise errors.UsageError(f"GPUNODE_HOST_ROOT={named}: there is no such directory")
        return Path(named)
    view = base / BOTTLEROCKET_ROOT.lstrip("/")
    return view if view.is_dir() else base


def settings_root(machine: machines.Machine) -> Path:
    """Return under which directory settings are looked for: the machine's root, but this container's own
    where that is Bottlerocket's view of its host: our user data lies beside the view."""
    return Path("/") if machine.root == Path(BOTTLEROCKET_ROOT) else machine.root


class RealMachine:
    """The host this process runs on.

    `root` is where its files lie. `search` are directories for systemctl and nvidia-smi in front of
    the usual ones. `unit_deadline` and `reset_deadline` bound one child process, in seconds.
    """

    simulated: str | None = None

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        search: Sequence[Path] = (),
        unit_deadline: float = 30.0,
        reset_deadline: float = 120.0,
        api_socket: Path | None = None,
    ) -> None:
        self._root = root
        self._search = os.pathsep.join([*map(str, search), "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
        self._own_search = bool(search)
        self._unit_deadline = unit_deadline
        self._reset_deadline = reset_deadline
        self._api_socket = api_socket

    @property
    def root(self) -> Path:
        """The directory under which the host's files lie."""
        return self._root

    def path(self, absolute: str) -> Path:
        """Return where the host's file `absolute` is to be opened."""
        return self._root / absolute.lstrip("/")

    def is_root(self) -> bool:
        """Whether this process may change GPUs (the driver asks for CAP_SYS_ADMIN, root has it)."""
        return os.geteuid() == 0

    def boot_id(self) -> str:
        """The kernel's id of this boot. Raises `errors.GpunodeError` where /proc does not tell it:
        what must happen once a boot cannot be promised then."""
        text = files.read_text(self.path("/proc/sys/kernel/random/boot_id"))
        if not text:
            raise errors.GpunodeError("cannot read the boot id: /proc/sys/kernel/random/boot_id does not answer")
        return text

    def instance_type(self) -> str | None:
        """The EC2 instance type as DMI has it on Nitro, else None; never waits."""
        vendor = files.read_text(self.path("/sys/class/dmi/id/sys_vendor"))
        if vendor != "Amazon EC2":
            return None
        product = files.read_text(self.path("/sys/class/dmi/id/product_name"))
        # Xen instances have a product that is not a type ("HVM domU").
        return product if product and "." in product and " " not in product else None

    def unit_active(self, unit: str) -> bool:
        """Whether `unit` has processes (by its cgroup), or systemd calls it active, or its known
        process runs. False when nobody can tell."""
        if self._has_processes(unit):
            return True
        systemctl = self._systemctl()
        if systemctl is not None:
            return child.run([systemctl, "is-active", "--quiet", "--", unit], deadline=5.0).ok
        return self._process_runs(_PROCESSES.get(unit, ()))

    def _has_processes(self, unit: str) -> bool:
        groups = self.path("/sys/fs/cgroup")
        for pattern in (unit, f"*.slice/{unit}", f"*.slice/*.slice/{unit}", f"systemd/*.slice/{unit}"):
            for group in groups.glob(pattern):
                events = files.read_text(group / "cgroup.events")
                if events is not None:
                    if "populated 1" in events.splitlines():
                        return True
                elif files.read_text(group / "cgroup.procs"):
                    return True
        return False

    def _process_runs(self, names: Sequence[str]) -> bool:
        if not names:
            return False
        return any(files.read_text(comm) in names for comm in self.path("/proc").glob("[0-9]*/comm"))

    def _systemctl(self) -> str | None:
        """Where systemctl is, if this process can reach the host's systemd with it."""
        if self._root != Path("/") and not self._own_search:
            return None
        if not self.path("/run/systemd/system").is_dir():
            return None
        return shutil.which("systemctl", path=self._search)

    def stop_units(self, units: Sequence[str]) -> tuple[str, ...]:
        """Stop those of `units` that are active; return them, to be started again.

        They are noted under /run first, so that `start_left_units` finds them after a crash. When one
        cannot be stopped those already stopped are started again and `errors.BlockedError` is raised.
        """
        active = tuple(unit for unit in units if self.unit_active(unit))
        if not active:
            return ()
        systemctl = self._systemctl()
        if systemctl is None:
            raise errors.BlockedError(f"cannot stop {', '.join(active)}: the host's systemd is out of reach from here")
        noted = self.path(STOPPED_FILE)
        files.write_atomic(noted, "".join(f"{unit}\n" for unit in active).encode())
        for unit in active:
            ended = child.run([systemctl, "stop", "--", unit], deadline=self._unit_deadline)
            if not ended.ok:
                with contextlib.suppress(errors.GpunodeError):  # the first failure is the one to tell
                    self.start_units(active)
                raise errors.BlockedError(f"cannot stop {unit}: {ended.words()}")
            log.info("unit stopped for a GPU reset", unit=unit)
        return active

    def start_units(self, units: Sequence[str]) -> None:
        """Start units again. All are tried; raises `errors.GpunodeError` naming those that did not start."""
        if not units:
            return
        systemctl = self._systemctl()
        failed = []
        for unit in units:
            if systemctl is None:
                failed.append(f"{unit}: the host's systemd is out of reach from here")
                continue
            # --no-block: at boot the unit may be ordered after us, and waiting for it would never end.
            ended = child.run([systemctl, "start", "--no-block", "--", unit], deadline=self._unit_deadline)
            if ended.ok:
                log.info("unit started again", unit=unit)
            else:
                failed.append(f"{unit}: {ended.words()}")
        if failed:
            raise errors.GpunodeError("cannot start again " + "; ".join(failed))
        files.remove(self.path(STOPPED_FILE))

    def start_left_units(self) -> tuple[str, ...]:
        """Start what an earlier run stopped and, having died, did not start again; return it."""
        text = files.read_text(self.path(STOPPED_FILE))
        units = tuple(line for line in (text or "").splitlines() if line)
        self.start_units(units)
        return units

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        """Reset exactly these GPUs with nvidia-smi. Blocks for up to the reset deadline.

        Raises `errors.ResetRefused` with nvidia-smi's own words, and who has the GPUs open, when it does
        not succeed.
        """
        which = ", ".join(pci_bus_ids)
        tool = self._smi()
        if tool is None:
            raise errors.ResetRefused(f"cannot reset GPU {which}: there is no nvidia-smi on this host")
        ended = child.run([*tool, "--gpu-reset", "-i", ",".join(pci_bus_ids)], deadline=self._reset_deadline)
        if not ended.ok:
            who = tuple(
                f"{holder}: {holder.hint}" if holder.hint else str(holder)
                for holder in holders.obstacles(self, pci_bus_ids, own_pid=os.getpid())
            )
            raise errors.ResetRefused(f"cannot reset GPU {which}: nvidia-smi says {ended.words()}", who)
        log.info("GPUs reset", pci=which)

    def _smi(self) -> list[str] | None:
        if self._own_search or self._root == Path("/"):
            found = shutil.which("nvidia-smi", path=self._search)
            if found is not None:
                return [found]
        for absolute in _SMI:
            if os.access(self.path(absolute), os.X_OK):
                # Under another root the tool needs the libraries of that root.
                return [absolute] if self._root == Path("/") else ["chroot", str(self._root), absolute]
        return None

    def request_reboot(self, reason: str) -> None:
        """Ask the host to reboot: through Bottlerocket's API, else through gpunode-reboot.path, which
        watches /run/gpunode/reboot-required. Returns when it was asked, not when it happens.

        Raises `errors.GpunodeError` when nobody would act on it.
        """
        api = self._api()
        if api is not None:
            _post_reboot(api)
        elif self.unit_active(_REBOOT_UNIT):
            try:
                files.write_atomic(self.path(REBOOT_FILE), (reason + "\n").encode(), mode=0o644)
            except OSError as error:
                raise errors.GpunodeError(f"cannot ask for a reboot: {REBOOT_FILE}: {error.strerror}") from error
        else:
            raise errors.GpunodeError(
                f"cannot ask for a reboot: {_REBOOT_UNIT} is not active, so nobody acts on {REBOOT_FILE}"
            )
        log.warning("reboot requested", reason=reason)

    def _api(self) -> Path | None:
        if self._api_socket is not None:
            return self._api_socket
        release = files.read_text(self.path("/etc/os-release")) or ""
        if "ID=bottlerocket" not in release.splitlines():
            return None
        for candidate in (Path(_API_SOCKET), self.path(_API_SOCKET)):
            if candidate.is_socket():
                return candidate
        return None


def machine_id(machine: machines.Machine) -> str:
    """Return what tells this machine from a copy of its disk: the EC2 instance id as DMI has it, else
    /etc/machine-id, else "unknown"."""
    tag = files.read_text(machine.path("/sys/class/dmi/id/board_asset_tag"))
    if tag and tag.startswith("i-"):
        return tag
    return files.read_text(machine.path("/etc/machine-id")) or "unknown"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _post_reboot(path: Path, *, timeout: float = 10.0) -> None:
    """POST /actions/reboot; 204 means that the host runs `systemctl reboot`."""
    connection = _UnixConnection(path, timeout)
    try:
        connection.request("POST", "/actions/reboot", headers={"Content-Length": "0"})
        answer = connection.getresponse()
        said = answer.read(1024).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise errors.GpunodeError(f"cannot ask Bottlerocket's API for a reboot: {error}") from error
    finally:
        connection.close()
    if answer.status // 100 != 2:
        raise errors.GpunodeError(f"cannot ask Bottlerocket's API for a reboot: it answers {answer.status} {said}")
