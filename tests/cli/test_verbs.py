"""The verbs on simulated nodes: what they print, what they end with, and that they act only when they may."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.sim import node as simulated
from tests import verbs
from tests.cli.conftest import Run

CASES = Path(__file__).resolve().parents[1] / "data" / "cases" / "settings"
NODE = "a100.40gb:2"
UNIFORM = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "2g.10gb" = 3 }\n'
HALVES = '[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 2 }\n'


class Bench:
    """A node kept in a file, and verbs on it."""

    def __init__(self, gpunode: Run, where: Path, name: str = NODE) -> None:
        self._gpunode = gpunode
        self.where = where
        self.node: tuple[str | Path, ...] = ("--simulate", name, "--sim-state", where / "S")

    def settings(self, text: str, name: str = "layout.toml") -> tuple[str | Path, ...]:
        (self.where / name).write_text(text)
        return ("--settings", self.where / name)

    def __call__(self, verb: str, *words: str | Path) -> verbs.Ended:
        return self._gpunode(verb, *self.node, *words)

    @contextlib.contextmanager
    def open(self) -> Iterator[simulated.SimulatedNode]:
        opened = simulated.open_node(str(self.node[1]), state=Path(str(self.node[3])))
        try:
            yield opened
        finally:
            opened.close()

    @property
    def mutations(self) -> int:
        with self.open() as node:
            return node.mutations


@pytest.fixture
def bench(gpunode: Run, tmp_path: Path) -> Bench:
    return Bench(gpunode, tmp_path)


@pytest.fixture
def split(bench: Bench) -> Bench:
    """The same with three 2g.10gb on each GPU."""
    ended = bench("apply", "--yes", *bench.settings(UNIFORM))
    assert ended.code == 0, ended.err
    return bench


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sit at a terminal and type an answer."""
    master, slave = pty.openpty()

    class Loud(io.StringIO):
        def isatty(self) -> bool:
            return True

    with os.fdopen(slave) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)

        def answer(text: str) -> None:
            # capsys stands at sys.stderr; only whether it is a terminal is changed.
            monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
            os.write(master, text.encode())

        yield answer
    os.close(master)


# --- plan and apply ---------------------------------------------------------------------------------


def test_plan_answers_by_exit_code_and_touches_nothing(bench: Bench) -> None:
    ended = bench("plan", *bench.settings(UNIFORM))
    assert ended.code == 3
    assert ended.out.startswith(f"SIMULATED NODE {NODE}")
    assert f"simulated node {NODE}" in ended.err
    assert "GPU 0-1: 2 x NVIDIA A100-SXM4-40GB" in ended.out
    assert bench.mutations == 0


def test_plan_without_a_layout_has_nothing_to_do(bench: Bench) -> None:
    ended = bench("plan", *bench.settings("[gpunode]\n"))
    assert ended.code == 0
    assert "no layout is declared" in ended.err


def test_apply_without_a_terminal_needs_yes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    ended = bench("apply", *bench.settings(UNIFORM))
    assert ended.code == 2
    assert "use --yes" in ended.err
    assert "create GPU instance" in ended.out, "the plan is shown before it is refused"
    assert bench.mutations == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("\x04", 1)])
def test_apply_asks_on_a_terminal(bench: Bench, terminal: Callable[[str], None], answer: str, code: int) -> None:
    terminal(answer)
    ended = bench("apply", *bench.settings(UNIFORM))
    assert ended.code == code, ended.err
    assert "apply these 16 steps? [y/N]" in ended.err
    assert (bench.mutations > 0) is (code == 0)
    assert ("nothing was changed" in ended.err) is (code == 1)


def test_ctrl_c_at_the_question_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    before = signal.getsignal(signal.SIGINT)
    ended = bench("apply", *bench.settings(UNIFORM))
    assert ended.code == 1
    assert "nothing was changed" in ended.err
    assert bench.mutations == 0
    assert signal.getsignal(signal.SIGINT) == before


def test_apply_asks_nothing_when_nothing_is_to_be_done(split: Bench) -> None:
    before = split.mutations
    ended = split("apply", *split.settings(UNIFORM))
    assert ended.code == 0
    assert "nothing to do: the node is as wanted" in ended.out
    assert split.mutations == before


def test_apply_as_json_is_one_document(bench: Bench) -> None:
    ended = bench("apply", "--yes", *bench.settings(UNIFORM), "--output", "json")
    told = ended.json()
    assert told["in_sync"] is False, "the plan is that from before"
    assert told["outcome"]["changed"] is True
    assert told["outcome"]["failed"] == []
    assert told["status"]["phase"] == "converged"
    assert told["warnings"] == []
    assert told["simulated"] == NODE
    assert "create GPU instance 2g.10gb" in ended.err


def test_plan_of_a_second_pass_is_printed_before_it_runs(gpunode: Run, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('profiles-need-mig = true\ndriver-version = "535.129.03"\n[[gpu]]\nmodel = "a100.40gb"\n')
    bench = Bench(gpunode, tmp_path, str(file))
    ended = bench("apply", "--yes", *bench.settings(UNIFORM))
    assert ended.code == 0, ended.err
    first, _, second = ended.out.partition("the rest is planned after that")
    assert "turn MIG on" in first
    assert "create GPU instance" not in first
    assert second.count("+ create GPU instance 2g.10gb") == 3


def test_what_is_in_use_is_never_touched_and_its_holder_named(split: Bench) -> None:
    with split.open() as node:
        gi = min(node.driver.gpus[0].state.instances)
        pid = node.start_process(0, gpu_instance=gi, name="train")
    before = split.mutations
    settings = split.settings('[[gpunode.layout]]\ngpus = [0]\ninstances = { "7g.40gb" = 1 }\n')
    planned = split("plan", *settings)
    assert planned.code == 4
    assert f"process train (pid {pid})" in planned.out
    ended = split("apply", "--yes", *settings)
    assert ended.code == 4
    assert f"train (pid {pid})" in ended.err + ended.out
    assert split.mutations == before
    assert split("status", "--check", *settings).code == 4


def test_gpu_that_is_free_is_changed_beside_one_that_is_not(split: Bench) -> None:
    with split.open() as node:
        gi = min(node.driver.gpus[0].state.instances)
        node.start_process(0, gpu_instance=gi, name="train")
    settings = split.settings('[[gpunode.layout]]\ngpus = "all"\ninstances = { "7g.40gb" = 1 }\n')
    assert split("apply", "--yes", *settings).code == 4
    gpus = split("status", *settings, "--output", "json").json()["gpus"]
    assert [[i["profile"] for i in gpu["gpu_instances"]] for gpu in gpus] == [["2g.10gb"] * 3, ["7g.40gb"]]


def test_failed_step_rolls_its_gpu_back_and_says_so(split: Bench) -> None:
    with split.open() as node:
        node.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999, gpu=1)
    ended = split("apply", "--yes", *split.settings(HALVES), "--output", "json")
    assert ended.code == 1
    told = ended.json()["outcome"]
    assert [failure["index"] for failure in told["failed"]] == [1]
    assert told["failed"][0]["rolled_back"] is True
    assert "GPU 1" in ended.err
    gpus = ended.json()["status"]["gpus"]
    assert [len(gpu["gpu_instances"]) for gpu in gpus] == [2, 3]
    assert {i["profile"] for i in gpus[1]["gpu_instances"]} == {"2g.10gb"}


def test_reset_that_is_refused_leaves_the_mode_pending_and_blocks(bench: Bench) -> None:
    with bench.open() as node:
        node.hold(0, name="dcgm-exporter")
    ended = bench("apply", "--yes", *bench.settings(UNIFORM))
    assert ended.code == 4
    assert "dcgm-exporter" in ended.err + ended.out


def test_reboot_that_finishes_a_mode_change_is_asked_for_once(bench: Bench) -> None:
    settings = bench.settings('[gpunode]\nmode-change = ["reboot"]\n' + UNIFORM)
    ended = bench("apply", "--yes", *settings)
    assert ended.code == 4, ended.err
    assert "`gpunode simulate reboot`" in ended.err
    with bench.open() as node:
        assert node.reboot_requested
    assert bench("simulate", "reboot").code == 0
    after = bench("apply", "--yes", *settings)
    assert after.code == 0, after.err
    assert bench("status", "--check", *settings).code == 0


def test_not_root_is_told_and_ends_with_no_access(gpunode: Run, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('root = false\n[[gpu]]\nmodel = "h100.80gb"\n')
    bench = Bench(gpunode, tmp_path, str(file))
    settings = bench.settings('[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.40gb" = 2 }\n')
    ended = bench("apply", "--yes", *settings)
    assert ended.code == 5
    assert "root" in ended.err
    assert bench.mutations == 0


def test_kill_switch_stops_apply(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_DISABLED", "1")
    ended = bench("apply", "--yes", *bench.settings(UNIFORM))
    assert ended.code == 4
    assert "GPUNODE_DISABLED" in ended.err
    assert bench.mutations == 0


def test_plan_says_when_apply_would_not_do_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = bench("plan", *bench.settings('[gpunode]\nenforcement = "observe"\n' + UNIFORM))
    assert (observe.code, "apply would not do it: enforcement is set to observe" in observe.err) == (3, True)
    may = bench("plan", *bench.settings(UNIFORM))
    assert (may.code, "would not" in may.err) == (3, False)
    monkeypatch.setenv("GPUNODE_DISABLED", "1")
    switched = bench("plan", *bench.settings(UNIFORM))
    assert (switched.code, "would not do it: GPUNODE_DISABLED=1" in switched.err) == (3, True)


def test_observe_never_writes(bench: Bench) -> None:
    ended = bench("apply", "--yes", *bench.settings('[gpunode]\nenforcement = "observe"\n' + UNIFORM))
    assert ended.code == 4
    assert "observe" in ended.err
    assert bench.mutations == 0


def test_other_owner_is_named_with_how_to_take_over(bench: Bench) -> None:
    settings = bench.settings('[gpunode]\nowner = "mig-manager"\n' + UNIFORM)
    for verb in (("plan",), ("apply", "--yes")):
        ended = bench(*verb, *settings)
        assert ended.code == 4
        assert "mig-manager" in ended.err
    assert bench.mutations == 0
    told = bench("apply", "--yes", *settings, "--output", "json").json()
    assert told["owner"]["may_write"] is False


def test_lock_of_another_writer_blocks(split: Bench, tmp_path: Path) -> None:
    from agent.host import files

    with split.open() as node:
        lock = files.Lock.take(node.machine.path("/run/gpunode/lock"))
    try:
        blocked = split("apply", "--yes", *split.settings(HALVES))
        assert blocked.code == 4
        assert "gpunode:" in blocked.err
        assert split("apply", "--yes", *split.settings(UNIFORM)).code == 0, "in sync needs no lock"
    finally:
        lock.release()


def test_ctrl_c_ends_between_steps_and_tells_what_was_done(bench: Bench) -> None:
    with bench.open() as node:
        node.delay("nvmlDeviceCreateGpuInstanceWithPlacement", 0.3)
    with start("apply", "--yes", *bench.node, *bench.settings(UNIFORM)) as child:
        assert child.stderr is not None
        before = ""
        for line in child.stderr:
            before += line
            if "create GPU instance" in line:
                child.send_signal(signal.SIGINT)
                break
        _, said = child.communicate(timeout=60)
        assert child.returncode == 1, before + said
    assert "stopping after the step at hand" in said
    assert "steps done, " in said
    assert "not done (GPU 0-1)" in said
    # What is left is legal, and the next apply goes on from it.
    with bench.open() as node:
        node.release()
    assert bench("apply", "--yes", *bench.settings(UNIFORM)).code == 0


def test_second_ctrl_c_does_not_wait_for_a_call_that_hangs(bench: Bench) -> None:
    with bench.open() as node:
        node.hang("nvmlDeviceSetMigMode", gpu=0)
    with start("apply", "--yes", *bench.node, *bench.settings(UNIFORM)) as child:
        assert child.stderr is not None
        before = ""
        for line in child.stderr:
            before += line
            if "turn MIG on" in line:
                child.send_signal(signal.SIGINT)
                break
        for line in child.stderr:
            before += line
            if "stopping after" in line:
                child.send_signal(signal.SIGINT)
                break
        asked = time.monotonic()
        _, said = child.communicate(timeout=60)
        assert time.monotonic() - asked < 3.0
        assert child.returncode == 1, before + said
    assert "without waiting" in said


@pytest.mark.parametrize("ignored", [False, True], ids=["by ssh", "with nohup"])
def test_a_terminal_that_closes_ends_no_step_half_way(bench: Bench, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with bench.open() as node:
            order = node.hang("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=0)
            with start("apply", "--yes", *bench.node, *bench.settings(UNIFORM)) as child:
                end = time.monotonic() + 60
                while not any(fault.id == order and fault.seen for fault in node.faults.listed()):
                    assert time.monotonic() < end
                    time.sleep(0.01)
                child.send_signal(signal.SIGHUP)
                time.sleep(0.1)  # the signal first, then the step at hand ends
                node.release(order)
                _, said = child.communicate(timeout=60)
            node.driver.store.refresh()
            made = [len(gpu.state.instances) for gpu in node.driver.gpus]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert child.returncode == (0 if ignored else 1), said
    assert made[0] == 1 or ignored
    assert ("stopped;" in said) is not ignored


def test_sigterm_ends_in_time_while_a_call_hangs(bench: Bench) -> None:
    with bench.open() as node:
        node.hang("nvmlDeviceSetMigMode", gpu=0)
    with start("apply", "--yes", *bench.node, *bench.settings(UNIFORM)) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "turn MIG on" in line:
                break
        asked = time.monotonic()
        child.terminate()
        _, said = child.communicate(timeout=60)
        assert time.monotonic() - asked < 4.0
        assert child.returncode == 1, said


@contextlib.contextmanager
def start(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start gpunode as a child, for as long as the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-m", "agent", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith("GPUNODE_")},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


# --- status -----------------------------------------------------------------------------------------


def test_status_shows_what_is_there(split: Bench) -> None:
    ended = split("status", *split.settings(UNIFORM))
    assert ended.code == 0
    assert ended.out.startswith(f"SIMULATED NODE {NODE}")
    assert sum("|2g.10gb|2g.10gb|2g.10gb|free   |" in line for line in ended.out.splitlines()) == 2
    assert ended.out.count("MIG-") == 6
    told = split("status", *split.settings(UNIFORM), "--output", "json").json()
    assert told["phase"] == "converged"
    assert told["health"] == {"live": True, "ready": True, "degraded": False}
    assert told["settings"]["sources"]
    memory = told["gpus"][0]["gpu_instances"][0]["memory"]
    assert 0 < memory["used_bytes"] < memory["total_bytes"]


def test_status_as_nvidia_smi_lists_devices(split: Bench) -> None:
    ended = split("status", "--output", "nvidia-smi")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].startswith("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-")
    assert lines[1].startswith("  MIG 2g.10gb     Device  0: (UUID: MIG-")
    assert len(lines) == 8
    assert f"simulated node {NODE}" in ended.err


def test_check_of_status_answers_by_exit_code(split: Bench) -> None:
    assert split("status", "--check", *split.settings(UNIFORM)).code == 0
    drifted = split("status", "--check", *split.settings(HALVES))
    assert drifted.code == 3
    assert not drifted.out
    assert "drift: GPU 0: " in drifted.err
    broken = split("status", "--check", *split.settings("[gpunod]\n"))
    assert broken.code == 2
    assert "gpunod" in broken.err


def test_check_waits_for_the_node_to_become_as_wanted(split: Bench) -> None:
    settings = split.settings(HALVES)
    with start("apply", "--yes", *split.node, *settings) as child:
        assert split("status", "--check", "--wait", "60", *settings).code == 0
        child.communicate(timeout=60)


def test_who_waits_or_watches_does_not_keep_the_driver_open(bench: Bench) -> None:
    settings = bench.settings(UNIFORM)
    with start("status", *bench.node, *settings, "--check", "--wait", "60") as child:
        until = time.monotonic() + 60
        seen = 0
        while seen < 2:  # opened at least once, and let go of again
            with bench.open() as node:
                held = any(session.pid == child.pid for session in node.driver.live_sessions())
            seen += held if seen == 0 else not held
            assert time.monotonic() < until
        # A reset may meet the one look in half a second that does have it open; then the next does not.
        assert any(bench("apply", "--yes", *settings).code == 0 for _ in range(5))
        said = child.communicate(timeout=60)
        assert child.returncode == 0, said


def test_check_that_waits_in_vain_says_why(bench: Bench) -> None:
    began = time.monotonic()
    assert bench("status", "--check", "--wait", "0.6", *bench.settings(UNIFORM)).code == 3
    assert time.monotonic() - began >= 0.6


def test_status_with_bad_settings_shows_the_node_and_the_mistake(split: Bench) -> None:
    ended = split("status", *split.settings("[gpunode]\nenforcment = 1\n"))
    assert ended.code == 2
    assert "NVIDIA A100-SXM4-40GB" in ended.out
    assert "enforcment" in ended.err


def test_watch_draws_until_ctrl_c(split: Bench) -> None:
    with start("status", *split.node, "--watch", "--interval", "0.1") as child:
        assert child.stdout is not None
        seen = 0
        for line in child.stdout:
            seen += line.startswith("SIMULATED NODE")
            if seen == 2:
                child.send_signal(signal.SIGINT)
                break
        _, said = child.communicate(timeout=60)
        assert seen == 2, said
        assert "Traceback" not in said
        assert child.returncode == 0


@pytest.mark.parametrize(("terminal", "begins"), [("xterm", b"\x1b[H\x1b[2JSIMULATED"), ("dumb", b"SIMULATED")])
def test_watch_on_a_terminal_draws_in_place_where_it_can(split: Bench, terminal: str, begins: bytes) -> None:
    master, slave = pty.openpty()
    drawn = b""
    with subprocess.Popen(
        [sys.executable, "-m", "agent", "status", *map(str, split.node), "--watch", "--interval", "0.1"],
        stdout=slave,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": terminal},
        cwd=Path(__file__).resolve().parents[2],
    ) as child:
        os.close(slave)
        while drawn.count(begins) < 2:
            drawn += os.read(master, 65536)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # what a terminal says when the other end is gone
            while os.read(master, 65536):
                pass
        assert child.wait(60) == 0
    os.close(master)
    assert (b"\x1b" in drawn) is (terminal != "dumb")


# --- check ------------------------------------------------------------------------------------------


def test_check_names_where_every_value_comes_from(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_PERIOD", "30")
    settings = bench.settings('[gpunode]\nenforcement = "continuous"\n' + UNIFORM)
    ended = bench("check", *settings)
    assert ended.code == 0
    row = next(line for line in ended.out.splitlines() if line.startswith("enforcement"))
    assert "continuous" in row
    assert "layout.toml line 2" in row
    assert any(line.startswith("period") and "environment" in line for line in ended.out.splitlines())
    assert any(line.startswith("on-failure") and "default" in line for line in ended.out.splitlines())
    told = bench("check", *settings, "--output", "json").json()
    assert told["ok"] is True
    assert told["problems"] == []
    assert told["values"]["enforcement"]["line"] == 2
    assert told["values"]["layout"]["value"] == "gpunode"


def test_check_tells_which_label_decides(bench: Bench) -> None:
    (bench.where / "parted.yaml").write_text(
        "version: v1\nmig-configs:\n  half:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {3g.20gb: 2}\n"
    )
    told = bench("check", "--mig-config", f"{bench.where / 'parted.yaml'}:half", "--output", "json").json()
    assert told["values"]["layout"]["value"] == "mig-parted:half"
    assert "mig-parted:half" in bench("check", "--mig-config", f"{bench.where / 'parted.yaml'}:half").out


def test_check_tells_a_gpu_that_cannot_do_it(gpunode: Run) -> None:
    ended = gpunode("check", "--simulate", "g6.12xlarge", "--settings", CASES / "fleet.toml", "--output", "json")
    assert ended.code == 4
    told = ended.json()
    assert told["ok"] is False
    assert {problem["code"] for problem in told["problems"]} == {"not-capable"}


def test_check_tells_every_mistake_at_once(bench: Bench) -> None:
    settings = bench.settings('[gpunode]\nenforcment = "boot"\non-failure = "weep"\n')
    ended = bench("check", *settings)
    assert ended.code == 2
    assert "line 2" in ended.out
    assert "line 3" in ended.out
    assert ended.out.splitlines()[-1] == "not ok: 2 errors, 0 warnings"
    told = bench("check", *settings, "--output", "json").json()
    assert told["ok"] is False
    assert {p["where"]["line"] for p in told["problems"]} == {2, 3}
    assert told["problems"][0].keys() == {"severity", "code", "message", "where"}


def test_check_holds_the_layout_against_the_gpus(bench: Bench) -> None:
    settings = bench.settings('[[gpunode.layout]]\ngpus = "all"\ninstances = { "3g.20gb" = 3 }\n')
    ended = bench("check", *settings)
    assert ended.code == 2
    assert "memory slices" in ended.out
    assert bench.mutations == 0


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
def test_check_reads_the_web_configuration_too(bench: Bench) -> None:
    settings = bench.settings('[gpunode]\nweb-config-file = "web.yaml"\n')
    missing = bench("check", *settings)
    assert missing.code == 2
    assert "web.yaml" in missing.out
    web = bench.where / "web.yaml"
    web.write_text("tls_server_config: {cert_file: nope.pem, key_file: nope.pem}\n")
    wrong = bench("check", *settings, "--output", "json")
    assert (wrong.code, wrong.json()["ok"]) == (2, False)
    assert wrong.json()["problems"][0]["where"]["key"] == "tls_server_config.cert_file"
    web.write_text("http_server_config: {headers: {X-Frame-Options: deny}}\n")
    assert bench("check", *settings).code == 0


def test_check_without_gpus_reads_the_settings_alone(gpunode: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(UNIFORM)
    bad.write_text("[gpunode]\nenforcment = 1\n")
    ended = gpunode("check", "--settings", good)
    assert ended.code == 0
    assert "not held against GPUs" in ended.err
    assert gpunode("check", "--settings", bad).code == 2


# --- the others -------------------------------------------------------------------------------------


def test_profiles_agree_with_the_simulated_driver(split: Bench) -> None:
    split(
        "apply",
        "--yes",
        *split.settings('[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.20gb" = 1, "1g.5gb" = 1 }\n'),
    )
    told = split("profiles", "--output", "json").json()
    with split.open() as node:
        for gpu, document in zip(node.driver.gpus, told, strict=True):
            remaining = {p["profile_id"]: p["remaining"] for p in document["profiles"]}
            assert remaining == {p.id: node.driver.capacity(gpu, p) for p in gpu.model.profiles}
    assert "FITS NOW" in split("profiles").out


def test_export_says_what_a_form_cannot(split: Bench) -> None:
    split("apply", "--yes", *split.settings('[[gpunode.layout]]\ngpus = [0]\ninstances = { "3g.20gb" = 1 }\n'))
    ended = split("export", "--format", "bottlerocket")
    assert ended.code == 1
    assert "cannot write this layout as Bottlerocket settings" in ended.err
    assert "start = " in split("export", "--exact").out
    assert "mine" in split("export", "--format", "mig-parted", "--label", "mine").out
    assert split("export", "--output", "json").json()["format"] == "gpunode"


def test_resources_tell_counts(split: Bench) -> None:
    assert split("resources", "--output", "json").json()["device_plugin"]["single"] == {"nvidia.com/gpu": 6}
    assert [line.split() for line in split("resources").out.splitlines() if "single" in line] == [
        ["single", "nvidia.com/gpu", "6"]
    ]


def test_support_bundle_has_what_is_needed_and_no_secret(split: Bench, tmp_path: Path) -> None:
    settings = split.settings('[[gpunode.after-change]]\ncommand = ["/bin/notify", "--token=hunter2"]\n' + UNIFORM)
    ended = split("support", *settings, "--to", tmp_path / "bundle.tar.gz")
    assert ended.code == 0, ended.err
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    assert {"settings.json", "status.json", "plan.json", "profiles.json", "versions.json"} <= names
    everything = "\n".join(texts.values())
    assert "/bin/notify" in everything
    assert "hunter2" not in everything
    assert (tmp_path / "bundle.tar.gz").stat().st_mode & 0o077 == 0
    for name, text in texts.items():
        if name.endswith(".json"):
            json.loads(text)


def test_support_bundle_of_a_broken_node_says_what_is_missing(split: Bench, tmp_path: Path) -> None:
    ended = split("support", *split.settings("[gpunod]\n"), "--to", tmp_path / "b.tar.gz", "--output", "json")
    assert ended.code == 0, ended.err
    told = ended.json()
    assert "plan.json" in told["missing"]
    assert "status.json" in told["parts"]
    unwritable = split("support", "--to", tmp_path / "no" / "such" / "x" / "\0")
    assert unwritable.code == 1


def test_support_replaces_no_device_or_pipe_and_makes_no_directory(split: Bench, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that opening and writing do not wait
    ended = split("support", "--to", pipe)
    assert ended.code == 0, ended.err
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.read(reader, 2) == b"\x1f\x8b"  # gzip
    os.close(reader)
    link = tmp_path / "link.tar.gz"
    link.symlink_to(tmp_path / "behind.tar.gz")
    assert split("support", "--to", link).code == 0
    assert link.is_symlink()
    assert tarfile.is_tarfile(tmp_path / "behind.tar.gz")
    lost = split("support", "--to", tmp_path / "no" / "b.tar.gz")
    assert lost.code == 1
    assert not (tmp_path / "no").exists()


def test_support_bundle_asks_a_daemon_that_listens(gpunode: Run, tmp_path: Path) -> None:
    class Daemon(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"answer of {self.path}".encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Daemon) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "s.toml").write_text(f'[gpunode]\nlisten = ["127.0.0.1:{server.server_port}"]\n')
        ended = gpunode("support", "--settings", tmp_path / "s.toml", "--to", tmp_path / "b.tar.gz")
        server.shutdown()
    assert ended.code == 0, ended.err
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        found = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    assert found["daemon/healthz"] == b"answer of /healthz"
    assert "host/etc/os-release" in found


def test_support_bundle_names_a_daemon_that_does_not_answer(gpunode: Run, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "s.toml").write_text(f'[gpunode]\nlisten = ["127.0.0.1:{probe.getsockname()[1]}"]\n')
        ended = gpunode("support", "--settings", tmp_path / "s.toml", "--to", tmp_path / "b.tar.gz")
    assert ended.code == 0
    assert "daemon/healthz (no daemon answers" in ended.err


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("verb", ["apply", "plan", "status", "profiles", "resources", "export"])
def test_without_a_driver_verbs_say_how_to_simulate(gpunode: Run, tmp_path: Path, verb: str) -> None:
    (tmp_path / "layout.toml").write_text(UNIFORM)
    ended = gpunode(verb, "--settings", tmp_path / "layout.toml")
    assert ended.code == 5
    assert not ended.out
    assert len(ended.err.splitlines()) == 1
    assert "--simulate p4d.24xlarge" in ended.err


def test_run_serves_and_stops(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with start("run", *bench.node, *bench.settings(UNIFORM), "--listen", f"127.0.0.1:{port}") as child:
        assert child.stderr is not None
        said = ""
        for line in child.stderr:
            said += line
            if "msg=started" in line:
                break
        assert bench("status", "--check", *bench.settings(UNIFORM)).code == 0, said
        child.send_signal(signal.SIGINT)
        _, more = child.communicate(timeout=60)
        assert child.returncode == 0, said + more


def documents(text: str) -> list[Any]:
    """Split JSON documents that follow one another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


@pytest.mark.parametrize("verb", ["plan", "status", "check", "profiles", "resources", "export", "version", "simulate"])
def test_json_is_exactly_one_document(split: Bench, verb: str) -> None:
    ended = split(verb, "--output", "json")
    assert ended.code == 0, ended.err
    assert len(documents(ended.out)) == 1
