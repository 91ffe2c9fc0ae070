"""What a process that starts once and then lives long does about its memory.

A start makes some 300,000 objects that all stay: classes, functions, tables. Python's collector goes
through them again and again meanwhile, a tenth of the CPU of the whole start, and finds little. So a daemon
lets it look seldom, and once started has it look once and then leave alone what is there for good. Not to look
at all would leave holes in the heap that stay: a mebibyte more.

The C library gives each thread a heap of its own, for the speed of programs whose threads allocate side
by side, and asks the kernel for more than it needs. Python's do not, so one heap of the right size does.
"""

from __future__ import annotations

import ctypes
import gc

# Names of malloc.h (glibc).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_ANSWER = 512 << 10
"""Bytes that are given back to the kernel only beyond this: setting any of these stops the library from learning it, and
an answer of 300 KiB whose memory came and went with it took twice its time."""
SELDOM = (30_000, 20, 20)
"""Thresholds of the collector during a start (as `gc.set_threshold`)."""
_usual = gc.get_threshold()


def hold() -> None:
    """Let the collector look seldom until `settle`, and keep one heap for all threads, without spare room (glibc)."""
    gc.set_threshold(*SELDOM)
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
    gc.set_threshold(*_usual)
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
