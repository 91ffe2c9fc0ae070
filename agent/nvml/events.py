"""Waits for what GPUs report by themselves: XID errors and changes of the MIG configuration.

One daemon thread a session. It waits in short turns, so that it ends soon when the session is to be
closed; a GPU that refuses to be watched is left out, the others are watched all the same.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agent import errors, log, measures
from agent.nvml import calls

XID = 0x8
MIG_CONFIG_CHANGE = 0x100
_TURN_MS = 200
_AGAIN = 1.0
"""Seconds before watching is begun anew after the driver has refused to wait."""
_NONE = 0xFFFFFFFF
_TIMEOUT = 10
_DEAD = (errors.Unready, errors.InvalidArgument)
_OVERDUE = 30.0


class Watch:
    """Watches `cards` (handle and UUID) and calls `deliver` from its thread for each event.

    `epoch` is the session's, whose handles these are: the watch ends with it.
    """

    def __init__(
        self,
        cards: Sequence[tuple[Any, str]],
        deliver: Callable[[measures.Event], None],
        *,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self._cards = cards
        self._deliver = deliver
        self._clock = clock
        self._uuids = {_address(handle): uuid for handle, uuid in cards}
        self._stop = threading.Event()
        self._record = calls.Record(None)
        self._watched = 0
        self._thread = threading.Thread(target=self._run, name="gpunode-events", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether at least one GPU is being watched and the driver answers."""
        noted = self._record.call
        overdue = noted is not None and self._clock() - noted[1] > _OVERDUE
        return self._watched > 0 and self._thread.is_alive() and not overdue

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, as it does when the session's handles are dead."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def end(self) -> None:
        """Ask the thread to end with its turn; does not wait."""
        self._stop.set()

    def stop(self, timeout: float) -> bool:
        """End watching within `timeout` seconds; blocks. False when the thread is still in the driver."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        calls.attend(self._record)
        told = False
        while not self._stop.is_set():
            try:
                self._watch()
            except _DEAD as cause:
                log.debug("watching GPU events has ended with the session", cause=cause)
                break
            except errors.CallError as cause:
                if not told:
                    told = True
                    log.warning("GPU events cannot be watched; trying again", cause=cause)
                self._stop.wait(_AGAIN)

    def _watch(self) -> None:
        """Watch with one event set until told to stop. Raises CallError."""
        events = calls.call("nvmlEventSetCreate")
        try:
            self._watched = sum(self._register(handle, uuid, events) for handle, uuid in self._cards)
            if not self._watched:
                self._stop.wait()
            while not self._stop.is_set():
                try:
                    event = calls.call("nvmlEventSetWait_v2", events, _TURN_MS)
                except errors.CallError as cause:
                    if cause.code != _TIMEOUT:
                        raise
                    continue
                self._tell(event)
        finally:
            self._watched = 0
            try:
                calls.call("nvmlEventSetFree", events)
            except errors.CallError:
                pass  # it died with the session

    def _register(self, handle: Any, uuid: str, events: Any) -> bool:
        try:
            wanted = (XID | MIG_CONFIG_CHANGE) & int(calls.call("nvmlDeviceGetSupportedEventTypes", handle))
            if wanted:
                calls.call("nvmlDeviceRegisterEvents", handle, wanted, events)
        except errors.CallError as cause:
            log.debug("the events of a GPU cannot be watched", gpu=uuid, cause=cause)
            return False
        return bool(wanted)

    def _tell(self, event: Any) -> None:
        kind = int(event.eventType)
        uuid = self._uuids.get(_address(event.device))
        if uuid is None:
            try:
                uuid = str(calls.call("nvmlDeviceGetUUID", event.device))
            except errors.CallError as cause:
                log.warning("an event of a GPU that is not known", type=hex(kind), cause=cause)
                return
        words = "xid" if kind & XID else "mig-config-change" if kind & MIG_CONFIG_CHANGE else None
        if words is None:
            return
        try:
            self._deliver(
                measures.Event(
                    kind=words,
                    uuid=uuid,
                    gpu_instance_id=_id(event.gpuInstanceId),
                    compute_instance_id=_id(event.computeInstanceId),
                    xid=int(event.eventData) if words == "xid" else None,
                )
            )
        except Exception as cause:  # noqa: BLE001  # a listener's mistake must not end the watch
            log.error("an event could not be handed on", gpu=uuid, cause=repr(cause))


def _id(number: Any) -> int | None:
    return None if int(number) == _NONE else int(number)


def _address(handle: Any) -> int:
    """Return the address in a handle: pynvml's handles are compared by identity, not by what they are."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
