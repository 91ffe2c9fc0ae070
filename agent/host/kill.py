"""The kill switch: three ways to make gpunode observe only, for the night when it must not act."""

from __future__ import annotations

from collections.abc import Mapping

from agent.host import files
from agent.host import machine as machines

FILE = "/etc/gpunode/disabled"
_FALSE = ("", "0", "false", "no", "off")


def reason(machine: machines.Machine, environ: Mapping[str, str]) -> str | None:
    """Return a sentence that says which switch is thrown, or None when gpunode may act.

    The switches: `gpunode=off` on the kernel command line, the file /etc/gpunode/disabled, and
    GPUNODE_DISABLED=1 in the environment.
    """
    line = files.read_text(machine.path("/proc/cmdline")) or ""
    if "gpunode=off" in line.split():
        return "gpunode=off is on the kernel command line: gpunode observes only"
    if machine.path(FILE).exists():
        return f"{FILE} exists: gpunode observes only"
    value = environ.get("GPUNODE_DISABLED", "")
    if value.strip().lower() not in _FALSE:
        return f"GPUNODE_DISABLED={value} is set: gpunode observes only"
    return None
