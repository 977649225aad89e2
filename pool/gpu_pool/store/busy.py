"""When kernels worked, as their servers report it: kept for as long as the history keeps their leases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeAlias

from gpu_pool.store.database import Database
from gpu_pool_client import BadRequest

#: Unix seconds of a begin, and seconds.
Span: TypeAlias = tuple[float, float]

#: Spans that are kept of one lease, and those that are read at once.
MOST_OF_LEASE: Final = 10_000
_MOST_READ: Final = 1_000_000


def add(database: Database, number: int, spans: Iterable[Span]) -> None:
    """Keep more of a lease's spans; one with a begin that is known replaces that. Too many are left out."""
    kept = int(database.one("busy_of_lease", number=number)[0])
    for began, seconds in spans:
        if not (math.isfinite(began) and math.isfinite(seconds) and seconds >= 0):
            raise BadRequest(
                f"A kernel cannot have been busy at {began} for {seconds} s.",
                "Accepted: Unix seconds, and seconds.",
            )
        if kept < MOST_OF_LEASE:
            database.run("add_busy", {"number": number, "began": began, "seconds": seconds})
            kept += 1


def read(database: Database, since: float) -> dict[str, tuple[Span, ...]]:
    """Return the spans of the leases that have ended since then, by their ids, in order of time."""
    found: dict[str, list[Span]] = defaultdict(list)
    for row in database.run("busy_times", {"since": since, "most": _MOST_READ}).fetchall():
        found[row["id"]].append((row["began"], row["seconds"]))
    return {lease: tuple(spans) for lease, spans in found.items()}
