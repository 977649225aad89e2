"""A small network learns from clothing-sized images on slices of several sizes, alone on the GPU.

Sizes follow one another and are repeated, so that a ratio compares what was
measured within minutes on the same card.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.gpu import NOT_GIVEN, SharedDevice, memory_of
from tests.support.gpu_child import Failed

from benchmarks.gpu_plan import Plan

SIZES = ("100%", "10%", "5%", "2%")
MEASURED = ("images_per_second", "accuracy", "reserved_mib", "memory_mib", "granted_mib")

Row = dict[str, Any]


def measure(plan: Plan) -> Iterator[Row]:
    """Yield one row for each training: how the GPU was shared, the slice, and what was measured."""
    for _ in range(plan.rounds):
        for sharing in plan.sharings:
            with plan.shared(sharing) as shared:
                for size in SIZES:
                    if plan.is_over:
                        return
                    yield {"sharing": sharing, "size": size, **_train(plan, shared, size)}


def _train(plan: Plan, shared: SharedDevice, size: str) -> Row:
    """Train once. What fails is a row, too: the rest is measured all the same."""
    try:
        occupant = shared.take(size)
    except NOT_GIVEN as failure:
        return {"failed": str(failure)[:500]}
    try:
        occupant.child.ask(plan.prepare)
        found: Row = occupant.child.ask(f"answer = lesson.learn({plan.epochs})")
        found["memory_mib"] = None if plan.device.simulated else memory_of(plan.device, occupant.child.pid)
    except Failed as failure:
        return {"failed": str(failure)[:500]}
    else:
        return {**found, "granted_mib": occupant.lease.memory_mib}
    finally:
        shared.leave(occupant)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each way of sharing and size: medians, and the speed as a ratio to 100%."""
    found = []
    for sharing in dict.fromkeys(row["sharing"] for row in rows):
        mine = [row for row in rows if row["sharing"] == sharing]
        whole = _median(mine, SIZES[0], "images_per_second")
        for size in SIZES:
            there = [row for row in mine if row["size"] == size]
            if there:
                found.append({"sharing": sharing, "size": size, **_of_size(there, size, whole)})
    return found


def _of_size(rows: Sequence[Row], size: str, whole: float | None) -> Row:
    row: Row = {name: _median(rows, size, name) for name in MEASURED}
    speed = row["images_per_second"]
    row["ratio"] = speed / whole if speed and whole else None
    row["runs"] = sum("failed" not in each for each in rows)
    row["failed"] = next((each["failed"] for each in rows if "failed" in each), "")
    return row


def _median(rows: Sequence[Row], size: str, name: str) -> float | None:
    values = [row[name] for row in rows if row["size"] == size and row.get(name) is not None]
    return statistics.median(values) if values else None
