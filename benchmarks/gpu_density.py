"""More and more processes at 2% learn on one GPU at once, in turns and by MPS.

In every step all of them learn for the same seconds. A GPU without MPS gives
its processes turns of the whole of it: that is the yardstick, and one process
alone is the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.gpu import NOT_GIVEN, Full, Occupant, SharedDevice, memory_of, used_mib
from tests.support.gpu_child import Failed

from benchmarks.gpu_plan import TURNS, Plan

COUNTS = (1, 2, 4, 8, 16, 24, 32, 40, 48)
SIZE = "2%"
#: Seconds from telling processes to begin until they do, all at once.
LEAD = 1.0

#: Says how long importing PyTorch took, and when the first operation on the GPU was done.
START = """
import time
began = time.time()
import torch
imported = time.time() - began
torch.ones(1, device={where!r}).sum().item()
reserved = torch.cuda.memory_reserved() >> 20 if torch.cuda.is_available() else 0
answer = {{"imported": imported, "done_at": time.time(), "reserved": reserved}}
"""

Row = dict[str, Any]


def measure(plan: Plan) -> Iterator[Row]:
    """Yield one row for each number of processes and each way of sharing."""
    for number, sharing in enumerate(plan.sharings):
        part = plan.within(1 / (len(plan.sharings) - number))
        with part.shared(sharing) as shared:
            for row in _grow(part, shared):
                yield {"sharing": sharing, **row}


def _grow(plan: Plan, shared: SharedDevice) -> Iterator[Row]:
    occupants: list[Occupant] = []
    for count in [each for each in COUNTS if each <= plan.most]:
        if plan.is_over:
            return
        begun = len(occupants)
        try:
            row = _start(plan, shared, occupants, count)
            if len(occupants) == begun:
                return  # no more of them fit
            yield {"processes": len(occupants), **row, **_together(plan, occupants)}
        except (Failed, *NOT_GIVEN) as failure:
            yield {"processes": len(occupants), "failed": str(failure)[:500]}
            return


def _start(plan: Plan, shared: SharedDevice, occupants: list[Occupant], count: int) -> Row:
    """Start processes, all at once, until there are ``count`` of them or no more fit."""
    before = 0 if plan.device.simulated else used_mib(plan.device)
    new: list[Occupant] = []
    try:
        while len(occupants) < count:
            new.append(shared.take(SIZE))
            occupants.append(new[-1])
            new[-1].child.tell(START.format(where=plan.where))
    except Full:
        pass  # those that fit are measured
    heard = [each.child.hear() for each in new]
    if not new:
        return {}
    starts = [told["done_at"] - each.child.started_at for each, told in zip(new, heard, strict=True)]
    row: Row = {
        "started_at_once": len(new),
        "start_seconds": statistics.median(starts),
        "import_seconds": statistics.median(told["imported"] for told in heard),
        "context_mib": None if plan.device.simulated else _context(plan, new, heard, before),
    }
    for each in new:
        each.child.tell(plan.prepare)
    for each in new:
        each.child.hear()
    return row


def _context(plan: Plan, new: Sequence[Occupant], heard: Sequence[Row], before: int) -> float:
    """Return the MiB that each of the new processes uses beyond what PyTorch has reserved."""
    told = [memory_of(plan.device, each.child.pid) for each in new]
    if None in told:  # in a container, where only the sum is told
        told = [(used_mib(plan.device) - before) // len(new)] * len(new)
    beyond = [float((mib or 0) - each["reserved"]) for mib, each in zip(told, heard, strict=True)]
    return statistics.median(beyond)


def _together(plan: Plan, occupants: Sequence[Occupant]) -> Row:
    begin = time.time() + LEAD
    for each in occupants:
        each.child.tell(f"answer = lesson.learn_between({begin}, {begin + plan.together})")
    speeds = [each.child.hear() for each in occupants]
    return {"total": sum(speeds), "each": statistics.median(speeds), "least": min(speeds)}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratios: of the total and of each to one alone, and to time-slicing."""
    totals = {(row["sharing"], row["processes"]): row["total"] for row in rows if "total" in row}
    found = []
    for row in rows:
        alone = totals.get((TURNS, 1))
        turns = totals.get((TURNS, row["processes"]))
        more = {
            "total_to_alone": row["total"] / alone if "total" in row and alone else None,
            "each_to_alone": row["each"] / alone if "total" in row and alone else None,
            "to_turns": row["total"] / turns if "total" in row and turns else None,
        }
        found.append({**row, **more})
    return found
