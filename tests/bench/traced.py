"""gpunode with a counter between pynvml and the simulated driver.

`python -m tests.bench.traced COUNTS VERB …` runs `gpunode VERB …`, and writes COUNTS (JSON) at its
end and on each SIGUSR1: samples taken, calls of every NVML function, and the CPU seconds spent inside the
simulator (its library, its files, its import), which a real driver would not cost this process. What the counter itself costs is
measured first and counted with the simulator.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from agent import memory

if "run" in sys.argv[2:3]:
    memory.hold()  # as the verb does before it imports

from agent import daemon as _everything  # noqa: F401  # what a daemon imports without a simulator too
from agent import measures

_began = time.process_time()
from agent.sim import host  # noqa: E402  # the simulator's import is timed
from agent.sim import node as nodes  # noqa: E402

IMPORTED = time.process_time() - _began
"""CPU seconds of importing the simulator, with all else there already."""


class Counter:
    """Stands where the simulated library stands and passes every call on to it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._wrapped: dict[str, Any] = {}
        self._threads: list[dict[str, list[float]]] = []
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        found = self._wrapped.get(name)
        if found is None:
            inner = getattr(self._library, name)
            if not callable(inner):
                return inner
            found = functools.partial(self._call, name, inner)
            self._wrapped[name] = found
        return found

    def _call(self, name: str, inner: Callable[..., Any], *args: Any) -> Any:
        try:
            mine = self._local.mine
        except AttributeError:
            mine = self._local.mine = {}
            self._threads.append(mine)
        cell = mine.get(name)
        if cell is None:
            cell = mine[name] = [0, 0.0]
        started = time.thread_time()
        try:
            return inner(*args)
        finally:
            cell[1] += time.thread_time() - started
            cell[0] += 1

    def totals(self) -> tuple[dict[str, int], float]:
        """Return calls by function and the CPU seconds within them."""
        calls: dict[str, int] = {}
        seconds = 0.0
        for mine in tuple(self._threads):
            for name, (count, spent) in tuple(mine.items()):
                calls[name] = calls.get(name, 0) + int(count)
                seconds += spent
        return calls, seconds


def _own_cost() -> float:
    """Return the CPU seconds that counting adds to one call and that `totals` does not hold."""

    class Nothing:
        @staticmethod
        def nothing() -> int:
            return 0

    counter = Counter(Nothing())
    call = counter.nothing
    started = time.thread_time()
    for _ in range(20000):
        call()
    return (time.thread_time() - started - counter.totals()[1]) / 20000


class Spent:
    """CPU seconds of the simulator outside the library: making the node, showing its host's files."""

    def __init__(self) -> None:
        self.seconds = IMPORTED

    def timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return `inner`, its own thread's CPU added up here."""

        @functools.wraps(inner)
        def outer(*args: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*args, **options)
            finally:
                self.seconds += time.thread_time() - started

        return outer


class _Node:
    """A simulated node whose library is counted; everything else is the node's own."""

    def __init__(self, node: Any, counter: Counter) -> None:
        self._node = node
        self.library = counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def main() -> None:
    """Count, and run the command line."""
    target, argv = Path(sys.argv[1]), sys.argv[2:]
    counters: list[Counter] = []
    began = time.process_time()
    cost = _own_cost()
    measuring = time.process_time() - began  # some 20 ms of this process that are neither's
    spent_beside = Spent()
    original = spent_beside.timed(nodes.open_node)
    host.SimulatedMachine._show = spent_beside.timed(host.SimulatedMachine._show)  # type: ignore[method-assign]

    def open_node(*args: Any, **options: Any) -> Any:
        node = original(*args, **options)
        counter = Counter(node.library)
        counters.append(counter)
        return _Node(node, counter)

    samples = 0

    def count_samples() -> None:
        from agent.serve import board

        publish = board.Board.publish_sample

        def publish_sample(self: board.Board, sample: measures.Sample) -> None:
            nonlocal samples
            samples += 1
            publish(self, sample)

        board.Board.publish_sample = publish_sample  # type: ignore[method-assign]

    def dump(_number: int = 0, _frame: FrameType | None = None) -> None:
        calls: dict[str, int] = {}
        seconds = spent_beside.seconds + measuring
        for counter in counters:
            more, spent = counter.totals()
            seconds += spent + cost * sum(more.values())
            for name, count in more.items():
                calls[name] = calls.get(name, 0) + count
        document = {
            "beside_seconds": spent_beside.seconds - IMPORTED,
            "samples": samples,
            "calls": calls,
            "simulator_seconds": seconds,
            "cpu_seconds": time.process_time(),
        }
        draft = target.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(document), encoding="utf-8")
        draft.replace(target)

    nodes.open_node = open_node
    signal.signal(signal.SIGUSR1, dump)
    atexit.register(dump)
    if "run" in argv:
        count_samples()
    from agent.cli import parser

    sys.exit(parser.run(argv))


if __name__ == "__main__":
    main()
