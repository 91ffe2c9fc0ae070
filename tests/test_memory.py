"""The collector is held back while a daemon starts, and works as usual afterwards."""

from __future__ import annotations

import subprocess
import sys

_RUN = """
import gc, weakref
from agent import memory

class Loop:
    def __init__(self):
        self.own = self

def gone(loop):
    seen = weakref.ref(loop)
    del loop
    return seen

usual = gc.get_threshold()
memory.hold()
early = gone(Loop())
for _ in range(2000):
    Loop()
assert early() is not None, "it was looked for as often as ever"
memory.settle()
assert early() is None, "what the start left over was not collected"
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 1000
late = gone(Loop())
for _ in range(20000):
    Loop()
assert late() is None, "nothing is collected any more"
print("done")
"""


def test_the_start_is_not_collected_and_all_else_is() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_c_library_without_these_calls_is_no_failure() -> None:
    code = "from agent import memory\nmemory._libc = lambda: object()\nmemory.hold()\nmemory.settle()\nprint('done')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")
