"""How many mutants the tests have killed, as mutmut left it in the current folder: ``make mutation``.

A mutant is killed if a test fails, or does not end; one that no test reaches lives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: Of each module, so many of a hundred mutants are to be killed.
LEAST = 85
#: Exit codes by which mutmut says that a test failed or took too long, or crashed.
_KILLED = (1, 3, 24, 36, 152, 255, -24, -11, -9)


def main() -> int:
    """Print a table; return 1 where a module has too many survivors."""
    worst = 100.0
    killed = total = 0
    for path in sorted(Path("mutants").rglob("*.meta")):
        codes = [
            code for code in json.loads(path.read_text())["exit_code_by_key"].values() if code is not None
        ]
        if not codes:
            continue
        dead = sum(code in _KILLED for code in codes)
        killed, total = killed + dead, total + len(codes)
        share = 100 * dead / len(codes)
        worst = min(worst, share)
        print(f"{str(path.relative_to('mutants'))[:-5]:45} {dead:5} of {len(codes):5}  {share:5.1f} %")
    if not total:
        print("There is nothing to count: run make mutation.")
        return 1
    print(f"{'all':45} {killed:5} of {total:5}  {100 * killed / total:5.1f} %")
    return int(worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())
