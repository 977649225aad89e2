"""The forms of recorded days that can be read, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpu_pool.simulation.helios import read_helios
from gpu_pool.simulation.history import read_recorded
from gpu_pool.simulation.openb import read_openb
from gpu_pool.simulation.pai import read_pai
from gpu_pool.simulation.recorded import RecordedDays, whole_session
from gpu_pool.simulation.sensei import read_sensei


def _openb(lines: Iterable[str]) -> RecordedDays:
    trace = read_openb(lines)
    sessions = (
        whole_session(each.at, each.stay, each.user, each.course, each.request) for each in trace.arrivals
    )
    return RecordedDays(tuple(sessions), left_out=trace.left_out, bad=trace.bad)


#: What reads a file's lines, by the name of its form.
FORMATS: Final[Mapping[str, Callable[[Iterable[str]], RecordedDays]]] = {
    "history": read_recorded,
    "openb": _openb,
    "sensei": read_sensei,
    "helios": read_helios,
    "pai": read_pai,
}
