"""`make bench`: run the measurements, print them, write them down, and compare with the baseline.

Exit code 1 when a measurement fails or a figure is worse than the baseline by more than its slack;
a figure out of its reach is shown as MISSED. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import claims, enforcing, faulty, growing, planning, report, resident, scraping, starting

BASELINE = Path(__file__).with_name("baseline.json")
PARTS: dict[str, Callable[[Path], Iterator[report.Row]]] = {
    "start": starting.rows,
    "scrape": scraping.rows,
    "resident": resident.rows,
    "enforce": enforcing.rows,
    "faulty": faulty.rows,
    "plan": planning.rows,
    "claims": claims.rows,
    "growth": growing.rows,
}


def main() -> int:
    """Measure what the command line names (all, unless told)."""
    parser = argparse.ArgumentParser(prog="make bench", description="Measure gpunode on simulated nodes.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure: {', '.join(PARTS)} (all)")
    parser.add_argument("--write-baseline", action="store_true", help="keep the result as the new baseline")
    parser.add_argument("--to", type=Path, default=Path("bench-results.json"), help="where the JSON goes")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part}; there are {', '.join(PARTS)}")
    rows: list[report.Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpunode-bench-") as where:
        for part in options.parts or PARTS:
            started = time.monotonic()
            (Path(where) / part).mkdir()
            try:
                rows += PARTS[part](Path(where) / part)
            except RuntimeError as cause:
                failed.append(f"{part}: {cause}")
            print(f"{part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    baseline = report.read_baseline(BASELINE)
    print(report.table(rows, baseline))
    report.write(options.to, rows)
    if options.write_baseline and not failed:
        report.write(BASELINE, rows)
    problems = failed + report.worse(rows, baseline)
    for problem in problems:
        print(f"worse: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
