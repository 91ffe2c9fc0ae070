"""The functions of the simulated library by subject; importing a module enters its functions in the table."""

from __future__ import annotations

import importlib

_SUBJECTS = ("system", "device", "mig", "memory", "monitor", "health", "links", "gpm", "events")


def load() -> None:
    """Enter every function; costs nothing the second time."""
    for subject in _SUBJECTS:
        importlib.import_module(f"agent.sim.calls.{subject}")
