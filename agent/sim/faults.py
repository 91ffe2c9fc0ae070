"""Failures on order: a call fails, is slow, or hangs until somebody lets it go.

Orders stand in the node's state, so that another process (`gpunode simulate fault`) can place them and
every process meets them; how many calls an order has seen is counted there too.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable

from agent.sim import machine, prototypes, spec, state

ACTIONS = ("fail", "delay", "hang", "stall")
_POLL = 0.05


class Faults:
    """The orders of one node. `sleep` is how a delay passes."""

    def __init__(self, node: machine.Machine, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._machine = node
        self._sleep = sleep

    def order(
        self,
        call: str,
        action: str,
        *,
        code: int = 999,
        seconds: float = 0.0,
        gpu: int | None = None,
        skip: int = 0,
        times: int = 1,
    ) -> int:
        """Place an order; return its number. `call` is a C name, `*` matches any text in it. `skip`
        matching calls pass first, then `times` are hit (0: all). A hang with code 0 completes its
        effect when it is released, with another code it fails then. A stall has its effect at once, and
        hangs on its way back. Raises SimulationError."""
        if action not in ACTIONS:
            raise spec.SimulationError(f"a fault is one of {', '.join(ACTIONS)}, not {action}")
        if not any(call == name or fnmatch.fnmatchcase(name, call) for name in prototypes.PROTOTYPES):
            import difflib

            near = difflib.get_close_matches(call, prototypes.PROTOTYPES, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise spec.SimulationError(f"the simulated driver has no call {call}{guess}")
        if gpu is not None and not 0 <= gpu < len(self._machine.gpus):
            raise spec.SimulationError(f"there is no GPU {gpu} on this node")
        with self._machine.store.change() as node:
            number = max((fault.id for fault in node.faults), default=0) + 1
            node.faults.append(
                state.Fault(
                    id=number,
                    call=call,
                    action=action,
                    code=code,
                    seconds=seconds,
                    gpu=gpu,
                    skip=skip,
                    times=times,
                )
            )
        return number

    def release(self, number: int | None = None) -> None:
        """Let go of what hangs on this order (or on any), and withdraw it."""
        with self._machine.store.change() as node:
            node.faults = [fault for fault in node.faults if number is not None and fault.id != number]
        with self._machine.happened:
            self._machine.happened.notify_all()

    def listed(self) -> tuple[state.Fault, ...]:
        """Return the orders as they stand."""
        self._machine.store.refresh()
        return tuple(self._machine.store.node.faults)

    def meet(self, name: str, gpu: int | None, *, only_of_gpu: bool = False) -> int:
        """Let a call of `name` on GPU `gpu` meet its orders: sleep, hang, or return the code it shall
        fail with (0: go on). Called without any lock. `only_of_gpu`: the orders for every GPU have been
        met already."""
        wanted = [f for f in self._machine.store.node.faults if f.action != "stall" and _matches(f, name, gpu)]
        if only_of_gpu:
            wanted = [f for f in wanted if f.gpu is not None]
        for fault in wanted:
            hit = self._count(fault.id)
            if hit is None:
                continue
            if hit.action == "fail":
                return hit.code
            if hit.action == "delay":
                self._sleep(hit.seconds)
            else:
                self._hang(hit.id)
                if hit.code:
                    return hit.code
        return 0

    def stall(self, name: str, gpu: int) -> None:
        """Let a call that has had its effect meet the orders to stall. Called without any lock."""
        for fault in [f for f in self._machine.store.node.faults if f.action == "stall" and _matches(f, name, gpu)]:
            if self._count(fault.id) is not None:
                self._hang(fault.id)

    def _count(self, number: int) -> state.Fault | None:
        """Count one matching call of an order; return the order when this call is to be hit."""
        with self._machine.store.change(durable=False) as node:
            for fault in node.faults:
                if fault.id == number:
                    fault.seen += 1
                    due = fault.seen > fault.skip and (fault.times == 0 or fault.seen <= fault.skip + fault.times)
                    return fault if due else None
        return None

    def _hang(self, number: int) -> None:
        while not self._machine.closed:
            self._machine.store.refresh()
            if not any(f.id == number and not f.released for f in self._machine.store.node.faults):
                return
            with self._machine.happened:
                self._machine.happened.wait(_POLL)


def _matches(fault: state.Fault, name: str, gpu: int | None) -> bool:
    if fault.gpu is not None and fault.gpu != gpu:
        return False
    if fault.times and fault.seen >= fault.skip + fault.times:
        return False  # all its hits are done; it stays listed
    return fault.call == name or ("*" in fault.call and fnmatch.fnmatchcase(name, fault.call))
