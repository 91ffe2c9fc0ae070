from __future__ import annotations

import pytest

from agent.host import kill
from tests.host import hosts


def test_nothing_thrown(host: hosts.Host) -> None:
    assert kill.reason(host.machine, {}) is None


@pytest.mark.parametrize(
    ("line", "thrown"),
    [
        ("quiet gpunode=off ro\n", True),
        ("gpunode=off\n", True),
        ("quiet xgpunode=off", False),
        ("gpunode=offline", False),
        ("", False),
    ],
)
def test_the_kernel_command_line(host: hosts.Host, line: str, thrown: bool) -> None:
    host.write("/proc/cmdline", line)
    assert (kill.reason(host.machine, {}) is not None) is thrown


def test_the_file(host: hosts.Host) -> None:
    host.write(kill.FILE, "")
    assert kill.reason(host.machine, {}) == "/etc/gpunode/disabled exists: gpunode observes only"


@pytest.mark.parametrize(("value", "thrown"), [("1", True), ("yes", True), ("0", False), ("false", False), ("", False)])
def test_the_environment(host: hosts.Host, value: str, thrown: bool) -> None:
    assert (kill.reason(host.machine, {"GPUNODE_DISABLED": value}) is not None) is thrown
