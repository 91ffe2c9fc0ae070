from __future__ import annotations

import os
import tty
from pathlib import Path

import pytest

from agent.host import kmsg

LINES = (
    "6,100,5000000,-;nvidia: loading out-of-tree module taints kernel.\n"
    " SUBSYSTEM=module\n"
    "4,101,6500000,-;NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    " DEVICE=+pci:0000:10:1c.0\n"
    "4,103,7000000,c;NVRM: Xid (PCI:0000:20:1d GPU-I:05 GPU-CI:00): 31, pid=4242, name=python3, Ch 00000008\n"
    "4,104,7000001,-;NVRM: Xid (PCI:00000000:A0:1D.0): 63, Row remapping event\n"
)


def test_xids_with_and_without_instances(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(LINES)
    reader = kmsg.Reader(path)
    assert reader.read() == (
        kmsg.Xid(101, 6.5, "0000:10:1c.0", 79),
        kmsg.Xid(103, 7.0, "0000:20:1d.0", 31, gi=5, ci=0),
        kmsg.Xid(104, 7.000001, "0000:a0:1d.0", 63),
    )
    assert reader.sequence == 104


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(LINES)
    reader = kmsg.Reader(path, after=101)
    assert [x.sequence for x in reader.read()] == [103, 104]
    assert reader.read() == ()
    with path.open("a") as log:
        log.write("4,105,8000000,-;NVRM: Xid (PCI:0000:10:1c): 45, pid=1, name=x\n")
    assert [(x.sequence, x.xid) for x in reader.read()] == [(105, 45)]


def test_scrap_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"\n;\nno header\nx,y,z;NVRM: Xid (PCI:0000:10:1c): 1\n4,5;NVRM: Xid\n\xff\xfe\n4,9,1,-;")
    assert kmsg.Reader(path).read() == ()


def test_a_long_log_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    lines = [f"6,{n},{n},-;{'x' * 900}\n" for n in range(100)]
    path.write_text("".join(lines) + "4,100,1,-;NVRM: Xid (PCI:0000:10:1c): 13, pid=1\n")
    assert [x.xid for x in kmsg.Reader(path).read()] == [13]


def test_no_log_is_the_callers_to_handle(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        kmsg.Reader(tmp_path / "none").read()


def test_the_real_kernel_log_ends(tmp_path: Path) -> None:
    try:
        reader = kmsg.Reader(Path(kmsg.PATH))
        reader.read()
    except OSError:
        pytest.skip("/dev/kmsg is not readable here")
    assert reader.sequence >= -1


def test_a_device_stays_open_and_brings_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal stands where the kernel's log stands: a device that says "nothing yet" when it is empty."""
    writer, kept = os.openpty()
    tty.setraw(kept)
    opened = []
    really = os.open

    def counted(path: Path, flags: int) -> int:
        opened.append(path)
        return really(path, flags)

    monkeypatch.setattr(os, "open", counted)
    reader = kmsg.Reader(Path(os.ttyname(kept)))
    try:
        assert reader.read() == ()
        os.write(writer, b"4,7,1000000,-;NVRM: Xid (PCI:0000:10:1c): 79, pid=1\n")
        assert [(x.sequence, x.xid) for x in reader.read()] == [(7, 79)]
        os.write(writer, b"4,8,2000000,-;NVRM: Xid (PCI:0000:10:1c): 94, pid=1\n")
        assert [(x.sequence, x.xid) for x in reader.read()] == [(8, 94)]
        assert len(opened) == 1
        reader.close()
        assert reader.read() == ()
        assert len(opened) == 2
    finally:
        reader.close()
        os.close(writer)
        os.close(kept)
