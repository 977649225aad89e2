"""Run the benchmarks by name, or all of them."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "kernels",
    "opening",
    "reclaim",
    "ledger",
    "growth",
    "room",
    "pods",
    "guard",
    "service",
    "rush",
    "courses",
    "dashboard",
)


def main(names: list[str]) -> int:
    """Print the report; return 0 if every promise was kept."""
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"There is no benchmark {', '.join(sorted(unknown))}. There are: {', '.join(NAMES)}.")
        return 2
    kept = True
    for name in names or NAMES:
        for line in importlib.import_module(f"benchmarks.{name}").run():
            print(line, flush=True)
            kept &= line.kept
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
