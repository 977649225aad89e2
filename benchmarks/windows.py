"""Windows of a recorded trace, on several numbers of GPUs, under each order of the queue.

``python -m benchmarks.windows openb_pod_list_default.csv`` prints every one, and their means. The trace
is not part of this project; docs/explanation/fairness.md says where it is and on what terms.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpu_pool.devices import discover
from gpu_pool.simulation import ORDERS, Arrival, SimulatedRun, figures, simulate
from gpu_pool.simulation.engine import Lengths
from gpu_pool.simulation.formats import read_openb
from gpu_pool.simulation.report import waits

HOUR = 3600.0
DAYS = 3
FIRST = range(116, 132, DAYS)
DEVICES = (8, 10, 12)
#: A request for so many GPUs is large.
LARGE = 4
#: The order's name, and what it is told of lengths.
ROWS: tuple[tuple[str, str, Lengths], ...] = (
    ("fair, told nothing", "fair", "learned"),
    ("fair, lengths known", "fair", "known"),
    ("backfill", "backfill", "learned"),
    ("strict order", "strict order", "learned"),
)
#: In use, then hours: the mean wait, the mean wait of the large, the longest wait.
Four = tuple[float, float, float, float]


def four(run: SimulatedRun) -> Four:
    """Return the figures of one run."""
    found = figures(run)
    large = waits(each for each in run.outcomes if each.arrival.request.count >= LARGE)
    return found.utilisation, found.waits.mean / HOUR, large.mean / HOUR, found.waits.worst / HOUR


def rows(
    window: Callable[[int], Sequence[Arrival]], first: Sequence[int]
) -> Iterator[tuple[int, int, list[Four]]]:
    """Yield the first day of a window, the number of GPUs, and the figures of each row of ``ROWS``."""
    for day in first:
        for count in DEVICES:
            devices = discover({"GPU_POOL_DEVICES": f"V100-SXM2-32GB:{count}"}).devices
            yield (
                day,
                count,
                [
                    four(simulate(window(day), devices, ORDERS[order], lengths=known))
                    for _, order, known in ROWS
                ],
            )


def line(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def words(found: Four) -> str:
    """Return figures as a cell has them."""
    return f"{found[0]:.0%}, {found[1]:.1f}, {found[2]:.1f}, {found[3]:.0f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=__doc__)
    parser.add_argument("file", type=Path, help="the trace: its list of pods")
    parser.add_argument("--first", type=int, nargs="+", default=list(FIRST), help="first days of the windows")
    given = parser.parse_args()
    with given.file.open(encoding="utf-8") as file:
        trace = read_openb(file)
    for number, why in trace.bad:
        print(f"Line {number} is left out: {why}")
    print(
        line("days", "GPUs", *(name for name, _, _ in ROWS)),
        line("---", "---", *("---" for _ in ROWS)),
        sep="\n",
    )
    found: list[list[Four]] = []
    for day, count, each in rows(lambda day: trace.window(day, DAYS), given.first):
        found.append(each)
        print(line(f"{day} to {day + DAYS}", str(count), *map(words, each)), flush=True)
    means = [
        tuple(statistics.fmean(values) for values in zip(*column, strict=True))
        for column in zip(*found, strict=True)
    ]
    print(
        "", line("order", "in use", "mean wait", "four GPUs or more", "worst"), line(*["---"] * 5), sep="\n"
    )
    for (name, _, _), (used, mean, large, worst) in zip(ROWS, means, strict=True):
        print(line(name, f"{used:.1%}", f"{mean:.2f} h", f"{large:.2f} h", f"{worst:.1f} h"))


if __name__ == "__main__":
    main()
