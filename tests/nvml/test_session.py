from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pynvml
import pytest

from agent import errors
from agent.nvml import calls
from agent.nvml import session as sessions
from agent.sim import node as simulated

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.07  Sat Feb 17 22:55:48 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@builder)\n"


def lay(root: Path, directory: str, version: str) -> Path:
    target = root / directory / f"libnvidia-ml.so.{version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"no library")
    link = target.with_name(sessions.NAME)
    link.symlink_to(target.name)
    return link


def module(root: Path, text: str) -> None:
    path = root / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "version"), [(PROPRIETARY, "535.161.07"), (OPEN, "580.65.06"), ("something else", None)]
)
def test_driver_version(tmp_path: Path, text: str, version: str | None) -> None:
    assert sessions.driver_version(tmp_path) is None
    module(tmp_path, text)
    assert sessions.driver_version(tmp_path) == version


@pytest.mark.parametrize(
    "directory",
    [
        "usr/lib64",
        "usr/lib",
        "usr/lib/nvidia/tesla",
        "usr/lib/x86_64-linux-gnu",
        "opt/nvidia/current/lib64",
        "opt/nvidia/lts/lib64",
        "opt/nvidia/pb/lib64",
        ".bottlerocket/rootfs/usr/lib",
        ".bottlerocket/rootfs/usr/lib/nvidia/tesla",
        ".bottlerocket/rootfs/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
        "host/usr/lib64",
    ],
)
def test_every_known_place_is_looked_at(tmp_path: Path, directory: str) -> None:
    link = lay(tmp_path, directory, "580.65.06")
    assert sessions.choose(tmp_path, "x86_64") == link


def test_the_library_of_the_loaded_module_is_preferred(tmp_path: Path) -> None:
    lay(tmp_path, "usr/lib64", "535.161.07")
    match = lay(tmp_path, "opt/nvidia/pb/lib64", "580.65.06")
    module(tmp_path, OPEN)
    assert sessions.choose(tmp_path, "x86_64") == match


def test_without_a_match_the_first_is_taken_and_without_any_none(tmp_path: Path) -> None:
    assert sessions.choose(tmp_path, "x86_64") is None
    first = lay(tmp_path, "usr/lib64", "535.161.07")
    lay(tmp_path, "usr/lib", "550.54.15")
    module(tmp_path, OPEN)
    assert sessions.choose(tmp_path, "x86_64") == first


def test_no_library_is_one_clear_sentence(tmp_path: Path) -> None:
    pynvml.nvmlLib = None
    session = sessions.Session(root=tmp_path)
    with pytest.raises(errors.DriverError) as caught:
        session.open()
    assert str(caught.value) == "there is no NVIDIA driver here: libnvidia-ml.so.1 was not found"
    assert caught.value.exit_code == 5
    assert session.versions is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (9, "kernel module is not loaded"),
        (18, "different versions"),
        (4, "may not open its device files"),
        (999, "cannot be used"),
    ],
)
def test_a_driver_that_refuses_is_one_clear_sentence(code: int, words: str) -> None:
    node = simulated.open_node("h100.80gb:1")
    node.fail("nvmlInitWithFlags", code)
    session = sessions.Session(node.library)
    with pytest.raises(errors.DriverError) as caught:
        session.open()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    session.open()
    assert session.versions is not None
    session.close()
    node.close()


def test_open_and_close_again_and_again() -> None:
    node = simulated.open_node("h100.80gb:1")
    session = sessions.Session(node.library)
    session.close()
    epochs = []
    for _ in range(3):
        session.open()
        session.open()
        epochs.append(session.epoch)
        assert session.versions is not None
        assert session.versions.driver == "590.48.01"
        assert session.versions.cuda == "13.1"
        session.close()
        assert session.versions is None
    assert epochs == [1, 2, 3]
    assert session.initializations == 3
    assert node.library_calls()["nvmlInitWithFlags"] == node.library_calls()["nvmlShutdown"] == 3
    node.close()


def test_two_nodes_in_one_process_after_each_other_do_not_mix() -> None:
    for name in ("h100.80gb:1", "a100.40gb:3"):
        node = simulated.open_node(name)
        session = sessions.Session(node.library)
        session.open()
        assert pynvml.nvmlDeviceGetCount() == len(node.driver.gpus)
        session.close()
        node.close()


def test_a_new_kernel_module_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = simulated.open_node("h100.80gb:1")
    module(tmp_path, PROPRIETARY)
    monkeypatch.setattr(pynvml, "nvmlLib", node.library)  # as if it had been loaded
    pynvml._nvmlGetFunctionPointer_cache.clear()
    session = sessions.Session(root=tmp_path)
    session.open()
    assert not session.driver_changed()
    module(tmp_path, OPEN)
    assert session.driver_changed()
    session.close()
    node.close()


def test_a_library_that_fits_and_came_after_a_mismatch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = simulated.open_node("h100.80gb:1")
    old = lay(tmp_path, "usr/lib64", "535.161.07")
    module(tmp_path, OPEN)
    monkeypatch.setattr(pynvml, "nvmlLib", node.library)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    session = sessions.Session(root=tmp_path)
    session._loaded = old.resolve()  # as if this one had been loaded
    node.fail("nvmlInit*", 18)
    with pytest.raises(errors.DriverError, match="different versions"):
        session.open()
    assert not session.driver_changed()  # to start anew would end the same
    lay(tmp_path, "usr/lib", "580.65.06")
    assert session.driver_changed()
    node.close()


def test_an_opening_that_was_given_up_and_came_late_is_closed_again() -> None:
    """The library counts openings: one too many would be in the way of every GPU reset."""
    node = simulated.open_node("h100.80gb:1")
    session = sessions.Session(node.library)
    order = node.hang("nvmlInitWithFlags")
    record = calls.Record(None)

    def work() -> None:
        calls.attend(record)
        with contextlib.suppress(calls.Abandoned):
            session.open()

    thread = threading.Thread(target=work)
    thread.start()
    while not any(fault.seen for fault in node.faults.listed()):
        time.sleep(0.001)
    record.abandoned = True
    node.release(order)
    thread.join(10)
    session.open()
    assert session.versions is not None
    assert session.versions.driver == "590.48.01"
    session.close()
    assert node.library_calls()["nvmlInitWithFlags"] == node.library_calls()["nvmlShutdown"] == 1
    assert not node.driver.live_sessions()
    node.close()
