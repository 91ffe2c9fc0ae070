"""Fail when a test was skipped that should have run: reads JUnit files of pytest and the list of allowed reasons.

`python .ci/skips.py RESULT.xml…` prints each skip; exit code 1 when one is not allowed, or when a
file tells of no test at all.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main() -> int:
    """Judge the files named on the command line."""
    allowed = [
        re.compile(line)
        for line in Path(__file__).with_name("allowed-skips").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    wrong = 0
    for name in sys.argv[1:]:
        cases = ET.parse(name).getroot().findall(".//testcase")
        if not cases:
            print(f"{name}: no test ran")
            wrong += 1
        for case in cases:
            skip = case.find("skipped")
            if skip is None:
                continue
            reason = skip.get("message", "")
            fine = any(pattern.search(reason) for pattern in allowed)
            wrong += not fine
            print(f"{'skipped' if fine else 'SKIPPED, MUST RUN'}: {case.get('classname')}.{case.get('name')}: {reason}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
