"""Days of Alibaba's fractional trace: its list of pods (openb_pod_list_default.csv), one row a pod.

Columns that are read: ``name``, ``num_gpu`` (GPUs), ``gpu_milli`` (thousandths of each), ``qos`` (taken as
the course), ``creation_time``, ``scheduled_time`` and ``deletion_time`` (seconds since the trace began).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool.simulation.recorded import read_number, read_rows
from gpu_pool_client import WHOLE, SliceRequest

_TIMES: Final = ("creation_time", "scheduled_time", "deletion_time")
_COLUMNS: Final = ("num_gpu", "gpu_milli", "qos", *_TIMES)
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
    if not (row["num_gpu"] and row["scheduled_time"]):
        return None
    count, milli = read_number(row, "num_gpu", 1e6), read_number(row, "gpu_milli", WHOLE)
    if not count:
        return None
    if not (count == int(count) and milli == int(milli) > 0):
        raise ValueError(f"num_gpu is {count:g}, gpu_milli is {milli:g}")
    at, began, ended = (read_number(row, name) for name in _TIMES)
    if not at <= began <= ended:
        raise ValueError(f"creation_time is {at:g}, scheduled_time {began:g}, deletion_time {ended:g}")
    if ended == began:
        return None
    return Arrival(at, "", row["qos"], SliceRequest(int(count), int(milli)), min(longest, ended - began))
