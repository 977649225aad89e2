"""Days of Alibaba's fractional trace: its list of pods (openb_pod_list_default.csv), one row a pod.

Columns that are read: ``name``, ``num_gpu`` (GPUs), ``gpu_milli`` (thousandths of each), ``qos`` (taken as
the course), ``creation_time``, ``scheduled_time`` and ``deletion_time`` (seconds since the trace began).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool.simulation.recorded import read_rows
from gpu_pool_client import WHOLE, SliceRequest

_COLUMNS: Final = (
    "num_gpu",
    "gpu_milli",
    "qos",
    "creation_time",
    "scheduled_time",
    "deletion_time",
)  # fmt: skip
_DAY: Final = 86_400.0
#: Nobody is taken to hold a slice for longer, in seconds: some pods of the trace are services.
LONGEST: Final = 12 * 3600.0


@dataclass(frozen=True, slots=True)
class OpenbTrace:
    """What was read of a file."""

    #: In order of time, in seconds since the trace began.
    arrivals: tuple[Arrival, ...]
    #: Pods without a GPU, and those that were never scheduled: how long they would have held is not known.
    left_out: int
    #: Rows that are not understood: the line of the file, and why.
    bad: tuple[tuple[int, str], ...]

    def window(self, first_day: float, days: float) -> list[Arrival]:
        """Return who came in these days, with time counted from the first of them."""
        begin = first_day * _DAY
        return [
            Arrival(each.at - begin, each.user, each.course, each.request, each.stay)
            for each in self.arrivals
            if begin <= each.at < begin + days * _DAY
        ]


def read_openb(lines: Iterable[str], longest: float = LONGEST) -> OpenbTrace:
    """Read pods as leases: asked for when they were created, held from being scheduled to being deleted.

    Parameters
    ----------
    lines
        The file's, its header first.
    longest
        The longest that one is taken to be held, in seconds.

    Raises
    ------
    BadRequest
        A column is missing.
    """
    found, left_out, bad = read_rows(lines, _COLUMNS, lambda row: _arrival(row, longest))
    return OpenbTrace(tuple(sorted(found, key=lambda each: each.at)), left_out, bad)


def _arrival(row: Mapping[str, str], longest: float) -> Arrival | None:
    count, milli = int(row["num_gpu"] or 0), int(row["gpu_milli"] or 0)
    if not count or not row["scheduled_time"]:
        return None
    if not (count > 0 and 0 < milli <= WHOLE):
        raise ValueError(f"{count} GPUs of {milli} thousandths each")
    at, began, ended = (float(row[name]) for name in ("creation_time", "scheduled_time", "deletion_time"))
    if not 0 <= at <= began <= ended < 1e12:
        raise ValueError(f"created at {at:g}, scheduled at {began:g}, deleted at {ended:g}")
    if ended == began:
        return None
    return Arrival(at, "", row["qos"], SliceRequest(count, milli), min(longest, ended - began))
