"""Run the benchmarks by name, or all of them: one table, and on request its rows as JSON and plots."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import Skipped
from benchmarks.sizes import KERNELS_PYTHON, PEERS_PYTHON, QUICK
from benchmarks.table import Row, facts, printed, written

NAMES = (
    "kernels",
    "warm",
    "opening",
    "yielding",
    "checkpoint",
    "hibernation",
    "reclaim",
    "store",
    "stores",
    "peers",
    "growth",
    "long_queue",
    "decisions",
    "days",
    "density",
    "queues",
    "kernel_proxy",
    "pods",
    "supervised",
    "journey",
    "pod_starts",
    "cluster",
    "restart",
    "watchdog",
    "service",
    "rush",
    "tokens",
    "servers",
    "courses",
    "dashboard",
    "pages",
    "load",
    "slurm",
)
#: Each takes as long as all others together: measured only where it is named.
ALONE = ("cluster", "restart", "journey", "pod_starts", "load")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="measure little: to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's facts")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the documentation's plots")
    parser.add_argument(
        "--peers-python", metavar="PYTHON", help="the Python of an environment that has ray and others"
    )
    parser.add_argument(
        "--kernels-python",
        metavar="PYTHON",
        help="the Python of warm kernels, with ipykernel and torch or others",
    )
    found = parser.parse_args(arguments)
    if unknown := sorted(set(found.names) - set(NAMES)):
        parser.error(f"There is no benchmark {', '.join(unknown)}. There are: {', '.join(NAMES)}.")
    return found


def measured(names: Sequence[str]) -> Iterator[Row | str]:
    """Yield the rows of each benchmark, or in words why there is none, and say on the way what is done."""
    for name in names:
        began = time.monotonic()
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        try:
            for line in importlib.import_module(f"benchmarks.{name}").run():
                yield Row(name, line)
        except Skipped as why:
            yield f"{name}, left out: {why}"
        # One that breaks shall not take with it what the others have measured in many minutes.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            yield f"{name} FAILED: {error!r}"
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 0 if everything ran and no promise was broken."""
    asked = options(arguments)
    if asked.quick:
        os.environ[QUICK] = "1"
    if asked.peers_python:
        os.environ[PEERS_PYTHON] = asked.peers_python
    if asked.kernels_python:
        os.environ[KERNELS_PYTHON] = asked.kernels_python
    about = facts(asked.quick)
    found = list(measured(asked.names or [name for name in NAMES if name not in ALONE]))
    rows = [each for each in found if isinstance(each, Row)]
    words = [each for each in found if isinstance(each, str)]
    printed(rows, words, about)
    if asked.json:
        asked.json.write_text(written(rows, words, about))
    if asked.plots:
        from benchmarks.plots import draw

        draw([row.plain() for row in rows], asked.plots)
    broken = any(" FAILED: " in each for each in words)
    return 0 if not broken and all(row.line.verdict != "not kept" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
