"""What a process that starts once and then lives long does about its memory.

A start makes some 300,000 objects that all stay: classes, functions, tables. Python's collector goes
through them again and again meanwhile, a fifth of the CPU of the whole start, and finds nothing. So a daemon
holds it back, and once started has it look once and then leave alone what is there for good.
"""

from __future__ import annotations

import ctypes
import gc


def hold() -> None:
    """Let nothing be collected until `settle`."""
    gc.disable()


def settle() -> None:
    """Collect once, set what is left apart for good, and collect as usual from here on.

    What the start used for itself goes back to the kernel, where the C library can do that (glibc).
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
