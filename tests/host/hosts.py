"""A host in a temporary directory: the real `RealMachine`, with its files and tools elsewhere; and a
node of two GPUs to put holders on."""

from __future__ import annotations

import stat
from pathlib import Path

from agent.host import real
from agent.mig import node as nodes
from agent.mig import profile as profiles


class Host:
    """A root directory to put files, processes and tools into. `machine` looks at nothing else."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.bin = base / "bin"
        self.calls = base / "calls"
        for folder in (self.root, self.bin):
            folder.mkdir()
        self.calls.touch()
        self.write("/proc/sys/kernel/random/boot_id", "5d0c5a4e-0000-4000-8000-000000000001\n")
        self.write("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p1 quiet\n")
        self.machine = real.RealMachine(self.root, search=[self.bin], unit_deadline=5.0, reset_deadline=5.0)

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def write(self, absolute: str, text: str | bytes) -> Path:
        path = self.path(absolute)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def tool(self, name: str, script: str) -> None:
        """Put an executable on the host's search path. `$CALLS` is a file to note calls in."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\nCALLS={self.calls}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def process(
        self,
        pid: int,
        comm: str,
        *,
        cgroup: str = "0::/system.slice/x.service\n",
        opens: tuple[str, ...] = (),
        cmdline: str = "",
        environ: str = "",
    ) -> None:
        self.write(f"/proc/{pid}/comm", comm[:15] + "\n")
        self.write(f"/proc/{pid}/cgroup", cgroup)
        self.write(f"/proc/{pid}/cmdline", cmdline)
        self.write(f"/proc/{pid}/environ", environ)
        folder = self.path(f"/proc/{pid}/fd")
        folder.mkdir(parents=True, exist_ok=True)
        for number, target in enumerate(opens):
            (folder / str(number)).symlink_to(target)

    def systemd(self, *active: str) -> None:
        """Give the host a systemctl that knows units and remembers what it was asked."""
        self.path("/run/systemd/system").mkdir(parents=True, exist_ok=True)
        units = self.bin / "units"
        units.mkdir(exist_ok=True)
        for unit in active:
            (units / unit).touch()
        self.tool(
            "systemctl",
            f"""
            verb=$1; shift
            while [ $# -gt 1 ]; do shift; done
            unit={units}/$1
            case $verb in
              is-active) [ -e $unit ] ;;
              stop) echo "stop $1" >> $CALLS
                [ -e {self.bin}/stuck ] && sleep 60
                [ -e {self.bin}/refuse-$1 ] && {{ echo "Job for $1 failed."; exit 1; }}
                rm $unit ;;
              start) echo "start $1" >> $CALLS
                [ -e {self.bin}/refuse-start-$1 ] && {{ echo "Unit $1 is masked."; exit 1; }}
                touch $unit ;;
            esac""",
        )


A100 = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
SPARE = "GPU-aaaaaaaa-0000-4000-8000-000000000002"
MIG_3G = "MIG-bbbbbbbb-0000-5000-8000-000000000001"
MIG_1C = "MIG-bbbbbbbb-0000-5000-8000-000000000002"


def _instance(
    identity: int, name: str, profile_id: int, start: int, size: int, uuids: tuple[str, ...]
) -> nodes.GpuInstance:
    profile = profiles.parse(name)
    return nodes.GpuInstance(
        id=identity,
        profile=profile,
        profile_id=nodes.ProfileId(profile_id),
        placement=nodes.Placement(start, size),
        memory_bytes=1 << 30,
        compute=tuple(
            nodes.ComputeInstance(
                id=number, profile=profile, profile_id=nodes.ProfileId(0), uuid=uuid, multiprocessors=14, slices=1
            )
            for number, uuid in enumerate(uuids)
        ),
    )


def node() -> nodes.NodeState:
    """GPU 0 (minor 3, to tell minors from indexes) is split into 3g.20gb at 4 and 1g.5gb at 0; GPU 1 (minor 5) is whole."""
    split = nodes.Gpu(
        index=0,
        uuid=A100,
        pci_bus_id="00000000:10:1C.0",
        name="NVIDIA A100-SXM4-40GB",
        model="a100.40gb",
        architecture="Ampere",
        minor=3,
        mode=nodes.ModeState(True, True),
        resetless=False,
        instances=(_instance(2, "3g.20gb", 9, 4, 4, (MIG_3G,)), _instance(7, "1g.5gb", 19, 0, 1, (MIG_1C,))),
    )
    whole = nodes.Gpu(
        index=1,
        uuid=SPARE,
        pci_bus_id="00000000:20:1C.0",
        name="NVIDIA A100-SXM4-40GB",
        model="a100.40gb",
        architecture="Ampere",
        minor=5,
        mode=nodes.ModeState(False, False),
        resetless=False,
    )
    return nodes.NodeState(gpus=(split, whole))
