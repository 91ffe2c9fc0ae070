"""What a process that starts once and then lives long does about its memory.

A start makes some 300,000 objects that all stay: classes, functions, tables. Python's collector goes
through them again and again meanwhile, a fifth of the CPU of the whole start, and finds nothing. So a daemon
holds it back, and once started has it look once and then leave alone what is there for good.

The C library gives each thread a heap of its own and asks the kernel for more than it needs, for the
speed of programs whose threads allocate side by side. Python's do not, so one heap of the right size does.
"""

from __future__ import annotations

import ctypes
import gc

# Names of malloc.h (glibc).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_ANSWER = 1 << 20
"""Bytes that are given back to the kernel only beyond this: setting any of these stops the library from learning it, and
an answer of 300 KiB whose memory came and went with it took twice its time."""


def hold() -> None:
    """Let nothing be collected until `settle`, and keep one heap for all threads, without spare room (glibc)."""
    gc.disable()
    tell = getattr(_libc(), "mallopt", None)
    if tell is not None:
        tell(_M_ARENA_MAX, 1)
        tell(_M_TOP_PAD, 0)
        tell(_M_MMAP_THRESHOLD, _ANSWER)
        tell(_M_TRIM_THRESHOLD, _ANSWER)


def settle() -> None:
    """Collect once, set what is left apart for good, and collect as usual from here on.

    What the start used for itself goes back to the kernel, where the C library can do that (glibc).
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
