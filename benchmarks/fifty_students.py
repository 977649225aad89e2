"""Fifty students on ten slices, in simulated time, with cells and think times of NotebookOS' trace.

``python -m benchmarks.fifty_students sensei_june_60sec.csv`` prints the tables; where the trace is, which is
not part of this project, docs/explanation/recorded-days.md says.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.report import percentile
from gpu_pool.devices import discover
from gpu_pool.simulation.formats import read_sensei
from gpu_pool.simulation.recorded import RecordedCell, RecordedSession
from gpu_pool.simulation.replay import PER_CELL, RESERVATION, Costs, Way, replay
from gpu_pool_client import WHOLE, parse_request

STUDENTS, SLICES = 50, 10
#: For how long, in seconds.
LASTS = 60 * 3600.0
#: What of the slices' time cells fill; None for what they fill by themselves.
LOADS = (0.7, None)
WAYS = (
    RESERVATION,
    Way("yield after 60 s", yield_after=60.0),
    Way("yield after 5 s", yield_after=5.0),
    PER_CELL,
)
#: A little more than what ``python -m benchmarks yielding`` measures of kernels that have not used CUDA.
COSTS = Costs(resume=0.1, park=0.3)
SEEDS = 5

#: Seconds of a cell, and from its end to the next one's submission.
Pair = tuple[float, float]


def pairs(sessions: Sequence[RecordedSession]) -> list[Pair]:
    """Return the cells of the trace with the think time after each."""
    return [
        (cell.seconds, max(0.0, after.at - cell.ended_at))
        for session in sessions
        for cell, after in pairwise(session.cells)
    ]


def student(number: int, of: Sequence[Pair], longer: float, draw: random.Random) -> RecordedSession:
    """Return one student, whose cells take so many times as long as those of the trace."""
    name = f"student-{number}"
    cells = tuple(_cells(of, longer, draw))
    request = parse_request(f"{100 // SLICES}%")
    return RecordedSession(0.0, LASTS, name, "", request, request.milli or 0, cells)


def _cells(of: Sequence[Pair], longer: float, draw: random.Random) -> Iterator[RecordedCell]:
    at = draw.choice(of)[1] * draw.random()
    while at < LASTS:
        seconds, think = draw.choice(of)
        yield RecordedCell(at, min(seconds * longer, LASTS - at))
        at += seconds * longer + think


def students(of: Sequence[Pair], longer: float, seed: int) -> list[RecordedSession]:
    """Return all students."""
    draw = random.Random(seed)
    return [student(number, of, longer, draw) for number in range(STUDENTS)]


def load(sessions: Sequence[RecordedSession]) -> float:
    """Return what of the slices' time cells fill if none of them waits."""
    return sum(cell.seconds for session in sessions for cell in session.cells) / (SLICES * LASTS)


def longer_for(wanted: float, of: Sequence[Pair], seed: int) -> float:
    """Return how much longer cells must be to fill that part of the slices' time: by halving."""
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if load(students(of, middle, seed)) < wanted else (low, middle)
    return high


def main() -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fifty_students", description=__doc__)
    parser.add_argument("file", type=Path, help="the trace")
    with parser.parse_args().file.open(encoding="utf-8") as file:
        of = pairs(read_sensei(file).sessions)
    for wanted in LOADS:
        longer = [1.0 if wanted is None else longer_for(wanted, of, seed) for seed in range(SEEDS)]
        runs = [students(of, each, seed) for seed, each in enumerate(longer)]
        cells = sum(len(session.cells) for run in runs for session in run)
        print(f"load {mean(map(load, runs)):.0%}, cells {mean(longer):.2f} times as long, {cells:,} in all")
        print(
            "| | cells that ran | median | 95th | 99th | slices held | in use |", "|---" * 7 + "|", sep="\n"
        )
        for way in WAYS:
            print(row(way, runs))


def row(way: Way, runs: Sequence[Sequence[RecordedSession]]) -> str:
    """Return the table's row of one way: delays of all cells, and how many slices were held and in use."""
    devices = discover({"GPU_POOL_DEVICES": "A100-SXM4-80GB:1"}).devices
    costs = Costs(resume=0.0) if way is PER_CELL else COSTS
    found = [replay(run, devices, way, costs) for run in runs]
    delays = [delay for each in found for delay in each.delays]
    of_one = WHOLE / SLICES * LASTS
    held, used = (mean(each.held_in_time for each in found), mean(each.used_in_time for each in found))
    times = " | ".join(f"{percentile(delays, share):,.0f} s" for share in (0.5, 0.95, 0.99))
    return f"| {way.name} | {len(delays):,} | {times} | {held / of_one:.1f} | {used / of_one:.1f} |"


if __name__ == "__main__":
    main()
