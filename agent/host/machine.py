"""The machine around the GPUs as everybody is handed it: files, units, reset, reboot.

`RealMachine` is this host; `agent.sim.host.SimulatedMachine` is one that is not there, with a root
directory of its own, so that a simulated run reads and writes nothing of the real host.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Machine(Protocol):
    """What gpunode asks of its host. All paths below are absolute on the host and are to be joined
    to `root` by `path()`."""

    simulated: str | None

    @property
    def root(self) -> Path:
        """The directory under which the host's files lie ("/" for the real one)."""

    def path(self, absolute: str) -> Path:
        """Return where the host's file `absolute` ("/run/gpunode") is to be opened."""

    def is_root(self) -> bool:
        """Whether this process may change GPUs."""

    def boot_id(self) -> str:
        """The kernel's id of this boot."""

    def instance_type(self) -> str | None:
        """The EC2 instance type when it is known without waiting, else None."""

    def unit_active(self, unit: str) -> bool:
        """Whether a systemd unit (or its process) is active."""

    def stop_units(self, units: Sequence[str]) -> tuple[str, ...]:
        """Stop those of `units` that are active; return them, to be started again."""

    def start_units(self, units: Sequence[str]) -> None:
        """Start units again."""

    def reset_gpus(self, pci_bus_ids: Sequence[str]) -> None:
        """Reset exactly these GPUs; raises `agent.errors.ResetRefused`. Blocks; call it in a thread."""

    def request_reboot(self, reason: str) -> None:
        """Ask the host to reboot."""
