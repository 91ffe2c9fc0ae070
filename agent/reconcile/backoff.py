"""How long to wait before trying again: doubling, bounded, with jitter handed in.

The same failure on every node of a fleet must not wake them all in the same second.
"""

from __future__ import annotations

FIRST = 5.0
LIMIT = 300.0


def delay(attempt: int, jitter: float) -> float:
    """Return the seconds to wait after `attempt` failures in a row (1 the first).

    `jitter` is a number 0..1 from a random source; it spreads the delay over 75 to 125 percent.
    """
    base = min(LIMIT, FIRST * 2.0 ** min(max(attempt, 1) - 1, 16))
    return base * (0.75 + jitter / 2)
