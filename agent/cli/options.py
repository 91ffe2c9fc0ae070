"""From parsed flags to what the wiring takes: apart from the parser, as it needs the heavy parts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from agent import app


def build(found: argparse.Namespace) -> app.Options:
    """Return the options of a verb; flags that the verb does not have keep their defaults."""
    return app.Options(
        settings=tuple(Path(word) for word in found.settings),
        mig_config=found.mig_config,
        simulate=found.simulate,
        sim_state=None if found.sim_state is None else Path(found.sim_state),
        sim_host=found.sim_host,
        output=found.output,
        verbose=found.verbose,
        yes=getattr(found, "yes", False),
        force=getattr(found, "force", False),
        listen=tuple(getattr(found, "listen", None) or ()),
        wait=getattr(found, "wait", None),
        environ=dict(os.environ),
        stdout=sys.stdout,
        stderr=sys.stderr,
    )
