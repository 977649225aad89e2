"""The busiest hours of NotebookOS' trace, on several numbers of GPUs, in each way of giving slices.

``python -m benchmarks.ways sensei_june_60sec.csv`` prints the tables of docs/explanation/recorded-days.md,
which says where the trace is. It is not part of this project.
"""

from __future__ import annotations

import argparse
import concurrent.futures
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu_pool.devices import discover
from gpu_pool.simulation.formats import read_sensei
from gpu_pool.simulation.recorded import RecordedSession
from gpu_pool.simulation.replay import PER_CELL, RESERVATION, Costs, Way, replay
from gpu_pool.simulation.report import ReplayFigures, replay_figures
from gpu_pool_client import Device

HOUR = 3600.0
#: The busiest window: its begin and its length.
WINDOW = (561.5 * HOUR, 17.5 * HOUR)
GPUS = (240, 320, 400, 480, 640, 800, 1024)
#: Of one machine.
PER_NODE = 8
YIELD = Way("yield after 60 s", yield_after=60.0)
IDLE = Way("idle limit 5 min", idle_limit=300.0)
WAYS = (RESERVATION, Way("idle limit 15 min", idle_limit=900.0), IDLE, YIELD, PER_CELL)
#: At how many GPUs it is asked what a kernel costs that has used CUDA; and those costs.
OF_COSTS = 400
COSTS = (
    (f"{YIELD.name}, 5 s to take a slice again", YIELD, Costs()),
    (
        f"{YIELD.name}, 2 s to give back and 0.3 s to take again (no CUDA)",
        YIELD,
        Costs(resume=0.3, park=2.0),
    ),
    (
        "the same, and 20 GiB on each GPU moved (`--state 20GiB`)",
        YIELD,
        Costs(resume=0.3, park=2.0, state_mib=20 * 1024),
    ),
    (f"{YIELD.name}, pinned", YIELD, Costs(same_devices=True)),
    (f"{IDLE.name}, 5 s to take a slice again", IDLE, Costs()),
    (f"{IDLE.name}, pinned", IDLE, Costs(same_devices=True)),
)


def machines(count: int) -> tuple[Device, ...]:
    """Return so many GPUs, eight in each machine."""
    found = discover({"GPU_POOL_DEVICES": f"V100-SXM2-32GB:{count}"}).devices
    return tuple(replace(each, node=f"node-{place // PER_NODE}") for place, each in enumerate(found))


def figures(sessions: Sequence[RecordedSession], count: int, way: Way, costs: Costs) -> ReplayFigures:
    """Return what one way is like on so many GPUs."""
    return replay_figures(sessions, replay(sessions, machines(count), way, costs))


def line(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> str:
    """Return the first two rows of a table."""
    return f"{line(*cells)}\n|{'---|' * len(cells)}"


def words(seconds: float) -> str:
    """Return a delay as a cell has it."""
    if seconds < 2 * HOUR:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR:.0f} h"


def delays(found: ReplayFigures) -> tuple[str, ...]:
    """Return how many cells begin at once, and the longest delays but few."""
    cells = found.cells
    return f"{cells.at_once:.1%}", words(cells.delay.p95), words(cells.delay.p99)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ways", description=__doc__)
    parser.add_argument("file", type=Path, help="the trace")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--jobs", type=int, default=1, help="how many are simulated at a time")
    given = parser.parse_args()
    with given.file.open(encoding="utf-8") as file:
        sessions = read_sensei(file).window(*WINDOW).sessions
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        by_gpus = {
            count: [pool.submit(figures, sessions, count, way, Costs()) for way in WAYS]
            for count in given.gpus
        }
        by_cost = [pool.submit(figures, sessions, OF_COSTS, way, costs) for _, way, costs in COSTS]
        print(head("GPUs", *(way.name for way in WAYS)))
        for count, found in by_gpus.items():
            print(line(f"{count:,}", *(", ".join(delays(each.result())) for each in found)), flush=True)
        print("", head("GPUs", *(way.name for way in WAYS), "asked"), sep="\n")
        for count, found in by_gpus.items():
            held = [f"{each.result().gpu_hours.held:,.0f}" for each in found]
            print(line(f"{count:,}", *held, str(found[WAYS.index(YIELD)].result().asked_back)))
        print("", head("", "at once", "95th", "99th"), sep="\n")
        for (name, _, _), cost in zip(COSTS, by_cost, strict=True):
            print(line(name, *delays(cost.result())))


if __name__ == "__main__":
    main()
