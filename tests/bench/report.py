"""What a measurement says, how it is printed, and how two runs are compared.

Only ratios, counts and sizes are compared with the baseline: seconds belong to the machine they
were measured on, so a row in seconds is told, not judged against an older run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FLAT = 0.05
"""Share of a figure below which its changes with size are told as none."""
COMPARED = ("x", "calls", "MiB", "exponent")
"""Units that mean the same on another machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reach` is the bound it is held to (None: told only); `least` turns it into a lower
    bound. `slack` is how much worse than the baseline passes, as a factor, above `noise` in its unit."""

    name: str
    value: float
    unit: str
    reach: float | None = None
    least: bool = False
    note: str = ""
    slack: float = 1.3
    noise: float = 0.0

    @property
    def reached(self) -> bool:
        """Whether the figure is within its bound."""
        if self.reach is None:
            return True
        return self.value >= self.reach if self.least else self.value <= self.reach


def table(rows: Sequence[Row], baseline: Mapping[str, float]) -> str:
    """Return the rows as aligned text, with what the baseline had beside each."""
    lines = [("what", "figure", "reach", "baseline", "", "")]
    for row in rows:
        bound = "" if row.reach is None else f"{'>=' if row.least else '<='} {_number(row.reach)}"
        old = _number(baseline[row.name]) if row.name in baseline else ""
        verdict = "" if row.reach is None else "ok" if row.reached else "MISSED"
        lines.append((row.name, f"{_number(row.value)} {row.unit}", bound, old, verdict, row.note))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    text = []
    for *cells, note in lines:
        sized = [c.rjust(w) if 0 < i < 4 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        text.append("  ".join([*sized, note]).rstrip())
    return "\n".join(text)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def worse(rows: Iterable[Row], baseline: Mapping[str, float]) -> list[str]:
    """Return a sentence for each row that is worse than the baseline by more than its slack."""
    found = []
    for row in rows:
        old = baseline.get(row.name)
        if old is None or row.unit not in COMPARED:
            continue
        bad = row.value < old / row.slack - row.noise if row.least else row.value > old * row.slack + row.noise
        if bad:
            found.append(f"{row.name}: {_number(row.value)} {row.unit}, the baseline had {_number(old)}")
    return found


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as JSON, with what machine they were measured on."""
    document = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [dataclasses.asdict(row) | {"reached": row.reached} for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_baseline(path: Path) -> dict[str, float]:
    """Return name to figure of an earlier run; {} where there is none."""
    if not path.exists():
        return {}
    return {row["name"]: row["value"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return k of the best fit y = a + b·x^k over (x, y) with x rising: 1 is linear growth above a fixed cost.

    The fixed cost `a` is what makes a plain log-log slope flatter than the growth is, so it is fitted
    too: k is searched, a and b follow by least squares, with residuals weighed by 1/y. Where y changes by
    less than `FLAT` of itself over all x there is no growth to fit, and k is 0.
    """
    smallest, largest = min(y for _, y in points), max(y for _, y in points)
    if largest - smallest < FLAT * smallest:
        return 0.0
    best = (math.inf, math.nan)
    for step in range(5, 301):
        k = step / 100
        weights = [1 / max(y, 1e-12) ** 2 for _, y in points]
        powers = [x**k for x, _ in points]
        values = [y for _, y in points]
        total = sum(weights)
        mean_p = sum(w * p for w, p in zip(weights, powers, strict=True)) / total
        mean_y = sum(w * y for w, y in zip(weights, values, strict=True)) / total
        spread = sum(w * (p - mean_p) ** 2 for w, p in zip(weights, powers, strict=True))
        slope = sum(w * (p - mean_p) * (y - mean_y) for w, p, y in zip(weights, powers, values, strict=True)) / spread
        fixed = mean_y - slope * mean_p
        error = sum(w * (fixed + slope * p - y) ** 2 for w, p, y in zip(weights, powers, values, strict=True))
        if slope > 0 and fixed >= 0 and error < best[0]:
            best = (error, k)
    return best[1]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
