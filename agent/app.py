"""The wiring that every verb and the daemon share: which GPUs, which machine, which settings.

`async with app.open(options) as node:` gives real GPUs on this host, or a simulated node that
stands below pynvml; everything behind it is the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TextIO

from agent import errors, measures
from agent.host import files, holders, kill, owner, real
from agent.host import machine as machines
from agent.mig import layout as layouts
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.nvml import gpus as nvml_gpus
from agent.nvml import session as sessions
from agent.reconcile import cycle, snapshot
from agent.settings import model, source

NO_DRIVER_HINT = "run it with --simulate p4d.24xlarge to try gpunode on a node that is not there (`gpunode simulate` lists them)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked, whatever the verb."""

    settings: tuple[Path, ...] = ()
    mig_config: str | None = None
    simulate: str | None = None
    sim_state: Path | None = None
    sim_host: str = "private"
    output: str = "table"
    verbose: bool = False
    yes: bool = False
    force: bool = False
    listen: tuple[str, ...] = ()
    wait: float | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    stdout: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    stderr: TextIO = dataclasses.field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.time
