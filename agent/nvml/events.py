"""Wait for NVML events in a thread of their own: XIDs, and MIG being reconfigured by somebody.

Events are registered on whole GPUs; the event says which instance it concerns. The thread waits in
short turns so that it ends soon after it is told to; NVML's wait drops the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from agent import errors, log, measures
from agent.nvml import calls

_XID = 0x8
_MIG_CONFIG = 0x100
_WHOLE = 0xFFFFFFFF
_TURN_MS = 500


class Watch:
    """Events of `cards` ((handle, UUID) each) until `stop()`. `epoch` is the session's it belongs to."""

    def __init__(
        self, cards: Sequence[tuple[Any, str]], deliver: Callable[[measures.Event], None], *, epoch: int
    ) -> None:
        self.epoch = epoch
        self.up = False
        self._cards = tuple(cards)
        self._deliver = deliver
        self._end = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin waiting."""
        threading.Thread(target=self._run, name="gpunode-events", daemon=True).start()

    def stop(self, patience: float) -> None:
        """Tell the thread to end and give it `patience` seconds to do so. Blocks."""
        self._end.set()
        self._ended.wait(patience)

    def _run(self) -> None:
        try:
            self._watch()
        except errors.CallError as cause:
            log.warning("events of the driver are not watched", cause=cause)
        finally:
            self.up = False
            self._ended.set()

    def _watch(self) -> None:
        events = calls.call("nvmlEventSetCreate")
        try:
            registered = 0
            for handle, uuid in self._cards:
                try:
                    mask = int(calls.call("nvmlDeviceGetSupportedEventTypes", handle)) & (_XID | _MIG_CONFIG)
                    if mask:
                        calls.call("nvmlDeviceRegisterEvents", handle, mask, events)
                        registered += 1
                except errors.CallError as cause:
                    log.debug("events of a GPU are not watched", gpu=uuid, cause=cause)
            if not registered:
                return
            self.up = True
            while not self._end.is_set():
                try:
                    data = calls.call("nvmlEventSetWait_v2", events, _TURN_MS)
                except errors.Unready:
                    return
                except errors.CallError as cause:
                    if cause.code == 10:
                        continue
                    # A lost GPU makes the wait fail at once; do not spin on it.
                    log.debug("waiting for events failed", cause=cause)
                    self._end.wait(1.0)
                    continue
                event = self._translate(data)
                if event is not None:
                    self._deliver(event)
        finally:
            try:
                calls.call("nvmlEventSetFree", events)
            except errors.CallError as cause:
                log.debug("an event set was not freed", cause=cause)

    def _translate(self, data: Any) -> measures.Event | None:
        uuid = self._uuid(data.device)
        if uuid is None:
            return None
        kind = int(data.eventType)
        if kind == _MIG_CONFIG:
            return measures.Event(kind="mig-config-change", uuid=uuid)
        if kind != _XID:
            return None
        return measures.Event(
            kind="xid",
            uuid=uuid,
            gpu_instance_id=_id(data.gpuInstanceId),
            compute_instance_id=_id(data.computeInstanceId),
            xid=int(data.eventData),
        )

    @staticmethod
    def _uuid(handle: Any) -> str | None:
        # Handles are pointers that compare by identity, so the GPU is asked.
        try:
            return str(calls.call("nvmlDeviceGetUUID", handle))
        except errors.CallError as cause:
            return cause.gpu


def _id(number: Any) -> int | None:
    return None if int(number) == _WHOLE else int(number)
