"""The door to the hardware as reconcile is handed it; `agent.nvml.gpus` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent.mig import node as nodes
from agent.mig import plan as plans


class Gpus(Protocol):
    """GPUs of this machine. Every method may take long (a GPU's lane works in its own thread) and
    raises `agent.errors.CallError` kinds, or DriverError when there is no driver to talk to."""

    async def observe(self) -> nodes.NodeState:
        """Read all GPUs side by side. A GPU that is lost or hung is in the answer, marked so."""

    async def observe_gpu(self, uuid: str) -> nodes.Gpu:
        """Read one GPU afresh."""

    async def perform(self, uuid: str, step: plans.Step) -> None:
        """Do one step and verify it by reading back. ResetGpu is not one of these: see `reset`."""

    async def release(self) -> None:
        """Close the library session, so that a reset is not refused for our own sake."""

    async def retake(self) -> None:
        """Open the session again and take every handle anew."""

    async def reset(self, uuids: Sequence[str]) -> None:
        """Reset exactly these GPUs (between `release` and `retake`). Raises ResetRefused."""
