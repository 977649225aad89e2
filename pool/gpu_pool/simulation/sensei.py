"""June of the trace of Adobe's cluster that NotebookOS (ASPLOS 2026) replays, one row a training.

The file is sensei_june_60sec.csv of ds2-lab/NotebookOS-Dashboard. Columns that are read: ``num_gpu``
(GPUs), ``submit_time`` and ``duration`` (minutes since the month began). It names no notebook: rows stand
session after session, and a new session begins where a row's time is earlier than the end of the row before
it, less a minute. Each training is taken as a cell. A session has the most GPUs that one of its cells has,
from the first cell's begin to the last one's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpu_pool.simulation.recorded import RecordedCell, RecordedDays, RecordedSession, read_number, read_rows
from gpu_pool_client import WHOLE, SliceRequest

_COLUMNS: Final = ("num_gpu", "submit_time", "duration")
_MINUTE: Final = 60.0


def read_sensei(lines: Iterable[str]) -> RecordedDays:
    """Read sessions and their cells. Raises ``BadRequest`` where a column is missing."""
    cells, left_out, bad = read_rows(lines, _COLUMNS, _cell)
    sessions = [_session(each, number) for number, each in enumerate(_sessions(cells), 1)]
    in_order = tuple(sorted(sessions, key=lambda session: session.at))
    return RecordedDays(in_order, has_cells=True, left_out=left_out, bad=bad)


def _cell(row: Mapping[str, str]) -> RecordedCell | None:
    gpus, at, lasted = (read_number(row, column, 1e9) for column in _COLUMNS)
    if not gpus or not lasted:
        return None
    if gpus != int(gpus):
        raise ValueError(f"num_gpu is {gpus:g}")
    return RecordedCell(at * _MINUTE, lasted * _MINUTE, int(gpus) * WHOLE)


def _sessions(cells: Sequence[RecordedCell]) -> list[list[RecordedCell]]:
    sessions: list[list[RecordedCell]] = []
    for cell in cells:
        if not sessions or cell.at < sessions[-1][-1].ended_at - _MINUTE:
            sessions.append([])
        sessions[-1].append(cell)
    return sessions


def _session(cells: Sequence[RecordedCell], number: int) -> RecordedSession:
    milli = max(cell.milli or 0 for cell in cells)
    request = SliceRequest(milli // WHOLE, WHOLE)
    return RecordedSession(
        cells[0].at, cells[-1].ended_at, f"session-{number}", "", request, milli, tuple(cells)
    )
