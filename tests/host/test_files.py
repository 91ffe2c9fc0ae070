from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent import errors
from agent.host import files


def test_a_write_replaces_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"two", mode=0o644)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["state.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").touch()
    with pytest.raises(OSError, match=r"."):
        files.write_atomic(target, b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_remove_is_at_peace_with_nothing_there(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "x", b"")
    files.remove(tmp_path / "x")
    files.remove(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 11)
    assert files.read_bounded(path, limit=11) == b"x" * 11
    with pytest.raises(OSError, match="larger than 10 bytes"):
        files.read_bounded(path, limit=10)


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_only_regular_files_are_read_and_nobody_waits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/dev/zero")
    with pytest.raises(OSError, match=r"a directory|not a regular file"):
        files.read_bounded(path)
    assert files.read_text(path) is None


def test_text_that_is_not_utf8_is_still_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\xff \n")
    assert files.read_text(tmp_path / "x") == "a\ufffd"


_HOLD = """
import sys, time
from pathlib import Path
from agent.host import files
lock = files.Lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def _holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_by_name_and_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    process = _holder(path)
    try:
        with pytest.raises(errors.BlockedError) as refused:
            files.Lock.take(path)
        assert f"another gpunode holds it (pid {process.pid}, python" in str(refused.value)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
    with files.Lock.take(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    files.Lock.take(path).release()


def test_a_holder_stuck_in_the_kernel_is_not_called_a_rival(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with files.Lock.take(path):
        note = json.loads(path.read_text())
        task = tmp_path / "proc" / str(note["pid"]) / "task" / "77"
        task.mkdir(parents=True)
        fields = "S 1 " + "0 " * 17 + f"{note['started']} 0"
        (task.parent.parent / "stat").write_text(f"{note['pid']} (gpunode) {fields}")
        stuck = "Name:\tgpunode-GPU-0\nState:\tD (disk sleep)\nvoluntary_ctxt_switches:\t12\n"
        (task / "status").write_text(stuck)
        with pytest.raises(errors.BlockedError, match=r"earlier gpunode stuck in a driver call"):
            files.Lock.take(path, proc=tmp_path / "proc")
        (task / "status").write_text(stuck.replace("D (disk sleep)", "S (sleeping)"))
        with pytest.raises(errors.BlockedError, match=rf"another gpunode holds it \(pid {note['pid']}, gpunode\)"):
            files.Lock.take(path, proc=tmp_path / "proc")


def test_a_rival_that_writes_to_a_disk_is_not_called_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    with files.Lock.take(path):
        note = json.loads(path.read_text())
        task = tmp_path / "proc" / str(note["pid"]) / "task" / "77"
        task.mkdir(parents=True)
        fields = "S 1 " + "0 " * 17 + f"{note['started']} 0"
        (task.parent.parent / "stat").write_text(f"{note['pid']} (gpunode) {fields}")
        looks = 0

        def write_again(_: float) -> None:
            nonlocal looks
            looks += 1
            (task / "status").write_text(f"State:\tD (disk sleep)\nvoluntary_ctxt_switches:\t{looks}\n")

        write_again(0)
        monkeypatch.setattr(time, "sleep", write_again)
        with pytest.raises(errors.BlockedError, match=rf"another gpunode holds it \(pid {note['pid']}, gpunode\)"):
            files.Lock.take(path, proc=tmp_path / "proc")
        assert looks > 1


def test_a_recycled_pid_is_not_blamed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with files.Lock.take(path):
        note = json.loads(path.read_text())
        path.write_text(json.dumps({"pid": 1, "started": note["started"]}))
        with pytest.raises(errors.BlockedError, match="another pid namespace"):
            files.Lock.take(path)
        path.write_text("scrap")
        with pytest.raises(errors.BlockedError, match=r"another gpunode holds it$"):
            files.Lock.take(path)


MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - xfs /dev/nvme0n1p1 rw
30 22 0:25 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,size=100k
31 22 0:26 / /var/lib/live rw - overlay overlay rw
32 31 0:27 / /var/lib/live/gpu\\040node rw - tmpfs none rw
33 22 0:28 / /srv rw - tmpfs none rw
34 22 259:2 / /srv rw master:3 - ext4 /dev/nvme1n1 rw
no mount at all
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/run/gpunode/x", "tmpfs"),
        ("/run", "tmpfs"),
        ("/runner/x", None),
        ("/var/lib/gpunode/reboots.json", None),
        ("/var/lib/live/x", None),
        ("/var/lib/live/gpu node/x", "tmpfs"),
        ("/srv/x", None),
    ],
)
def test_what_a_reboot_takes_away(tmp_path: Path, path: str, kind: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert files.volatile(Path(path), mounts=mounts) == kind
    assert files.volatile(Path(path), mounts=tmp_path / "none") is None


def test_what_the_kernel_really_tells_of_mounts() -> None:
    told = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    shared = [fields[fields.index("-") + 1] for fields in told if fields[4] == "/dev/shm"]
    assert files.volatile(Path("/dev/shm/gpunode-none")) == ("tmpfs" if shared[-1:] == ["tmpfs"] else None)
    assert files.volatile(Path("/proc/self/status")) is None


def test_no_lock_file_no_lock(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory belongs")
    with pytest.raises(errors.GpunodeError, match="cannot open the lock file"):
        files.Lock.take(tmp_path / "run" / "lock")


def test_a_link_laid_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(errors.GpunodeError, match="cannot open the lock file"):
        files.Lock.take(tmp_path / "lock")
    assert not (tmp_path / "precious").exists()
