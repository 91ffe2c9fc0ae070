from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from agent.host import child


def test_says_how_it_ended_and_what_it_said() -> None:
    ended = child.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], deadline=10)
    assert (ended.code, ended.output, ended.ok) == (3, "out\nerr\n", False)
    assert ended.words() == "exit status 3: out; err"


def test_success_is_success() -> None:
    assert child.run(["/bin/true"], deadline=10).ok


def test_a_program_that_is_not_there_is_named() -> None:
    ended = child.run(["/no/such/tool"], deadline=10)
    assert ended.words() == "cannot start /no/such/tool: No such file or directory"


def test_a_child_past_its_deadline_is_killed_with_its_own_children(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    began = time.monotonic()
    ended = child.run(["/bin/sh", "-c", f"sleep 300 & echo $! > {noted}; wait"], deadline=0.3)
    assert time.monotonic() - began < 5
    assert ended.words() == "no end after 0.3 s"
    grandchild = int(noted.read_text())
    end = time.monotonic() + 5
    while Path(f"/proc/{grandchild}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{grandchild}").exists()


def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for() -> None:
    began = time.monotonic()
    ended = child.run(["/bin/sh", "-c", "sleep 5 & echo done"], deadline=10)
    assert ended.ok
    assert ended.output == "done\n"
    assert time.monotonic() - began < 3


def test_output_is_bounded_to_its_end() -> None:
    ended = child.run([sys.executable, "-c", "print('x' * 100000); print('last')"], deadline=30)
    assert len(ended.output) == child.OUTPUT_LIMIT
    assert ended.output.endswith("x\nlast\n")
    all_of_it = child.run([sys.executable, "-c", "print('x' * 100000)"], deadline=30, keep=1_000_000)
    assert len(all_of_it.output) == 100_001


def test_a_signal_is_told_as_such() -> None:
    assert child.run(["/bin/sh", "-c", "kill -9 $$"], deadline=10).words() == "ended by signal 9"


def test_only_the_given_environment_is_passed() -> None:
    os.environ["GPUNODE_TEST_SECRET"] = "x"
    try:
        ended = child.run(["/usr/bin/env"], deadline=10, environ={"ONLY": "this"})
    finally:
        del os.environ["GPUNODE_TEST_SECRET"]
    assert ended.output == "ONLY=this\n"
