"""The forms of recorded days that can be read, by name: our own history, and traces that others published."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Final, TypeVar

from gpu_pool.simulation.engine import Arrival
from gpu_pool.simulation.history import read_recorded
from gpu_pool.simulation.recorded import RecordedCell, RecordedDays, RecordedSession
from gpu_pool_client import WHOLE, BadRequest, SliceRequest

T = TypeVar("T")


def _read_rows(
    lines: Iterable[str],
    columns: Sequence[str],
    read: Callable[[Mapping[str, str]], T | None],
    *,
    header: Sequence[str] | None = None,
) -> tuple[list[T], int, tuple[tuple[int, str], ...]]:
    """Read the rows of a file of comma-separated values.

    Parameters
    ----------
    lines
        The file's.
    columns
        Those that are needed.
    read
        Reads one row; returns None for one that is left out, raises ``ValueError`` or ``TypeError``
        for one that is not understood.
    header
        The names of all columns, for files that do not begin with them.

    Returns
    -------
    What was read; how many rows were left out; and those that were not understood, by line, and why.

    Raises
    ------
    BadRequest
        A column is missing.
    """
    rows = csv.DictReader(lines, fieldnames=header)
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise BadRequest(f"The trace has no column {', '.join(missing)}.", f"Needed: {', '.join(columns)}.")
    found: list[T] = []
    bad: list[tuple[int, str]] = []
    left_out = 0
    while True:
        try:
            row = next(rows, None)
            if row is None:
                break
            each = read(_whole(row, columns))
        except (ValueError, TypeError, csv.Error) as error:
            bad.append((rows.reader.line_num, f"{error!s:.200}"))
            continue
        if each is None:
            left_out += 1
        else:
            found.append(each)
    return found, left_out, tuple(bad)


def _whole(row: Mapping[str, str], columns: Sequence[str]) -> Mapping[str, str]:
    """Return the row. Raises ``ValueError`` where it ends before one of these columns."""
    lacking = [name for name in columns if row[name] is None]
    if lacking:
        raise ValueError(f"it ends before {lacking[0]}")
    return row


def _read_number(row: Mapping[str, str], column: str, most: float = 1e12) -> float:
    """Return a column's number. Raises ``ValueError`` that names the column."""
    text = row[column] or ""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text[:40]!a}, not a number") from None
    if not 0 <= number <= most:
        raise ValueError(f"{column} is {number:g}")
    return number


def _whole_session(
    at: float, seconds: float, user: str, course: str, request: SliceRequest
) -> RecordedSession:
    """Return a session of which is known only that it had its slice: as if one cell had run all the time."""
    cell = RecordedCell(at, seconds)
    milli = request.count * (request.milli or WHOLE)
    return RecordedSession(at, at + seconds, user, course, request, milli, (cell,), is_job=True)


# June of the trace of Adobe's cluster that NotebookOS (ASPLOS 2026) replays, one row a training.
#
# The file is sensei_june_60sec.csv of ds2-lab/NotebookOS-Dashboard. Columns that are read: ``num_gpu``
# (GPUs), ``submit_time`` and ``duration`` (minutes since the month began). It names no notebook: rows stand
# session after session, and a new session begins where a row's time is earlier than the end of the row before
# it, less a minute. Each training is taken as a cell. A session has the most GPUs that one of its cells has,
# from the first cell's begin to the last one's end.

_SENSEI_COLUMNS: Final = ("num_gpu", "submit_time", "duration")
_MINUTE: Final = 60.0


def read_sensei(lines: Iterable[str]) -> RecordedDays:
    """Read sessions and their cells. Raises ``BadRequest`` where a column is missing."""
    cells, left_out, bad = _read_rows(lines, _SENSEI_COLUMNS, _training)
    sessions = [_session_of(each, number) for number, each in enumerate(_by_session(cells), 1)]
    in_order = tuple(sorted(sessions, key=lambda session: session.at))
    return RecordedDays(in_order, has_cells=True, left_out=left_out, bad=bad)


def _training(row: Mapping[str, str]) -> RecordedCell | None:
    gpus, at, lasted = (_read_number(row, column, 1e9) for column in _SENSEI_COLUMNS)
    if not gpus or not lasted:
        return None
    if gpus != int(gpus):
        raise ValueError(f"num_gpu is {gpus:g}")
    return RecordedCell(at * _MINUTE, lasted * _MINUTE, int(gpus) * WHOLE)


def _by_session(cells: Sequence[RecordedCell]) -> list[list[RecordedCell]]:
    sessions: list[list[RecordedCell]] = []
    for cell in cells:
        if not sessions or cell.at < sessions[-1][-1].ended_at - _MINUTE:
            sessions.append([])
        sessions[-1].append(cell)
    return sessions


def _session_of(cells: Sequence[RecordedCell], number: int) -> RecordedSession:
    milli = max(cell.milli or 0 for cell in cells)
    request = SliceRequest(milli // WHOLE, WHOLE)
    return RecordedSession(
        cells[0].at, cells[-1].ended_at, f"session-{number}", "", request, milli, tuple(cells)
    )


# Jobs of SenseTime's clusters (Helios, SC 2021): a cluster's cluster_log.csv, one row a job.
#
# Columns that are read: ``user``, ``vc`` (virtual cluster, taken as the course), ``gpu_num`` and ``node_num``
# (GPUs in all, and nodes), ``submit_time``, ``start_time`` and ``end_time`` (``2020-06-09 18:41:01``).
# The file is that of S-Lab-System-Group/HeliosData.

_HELIOS_COLUMNS: Final = ("user", "vc", "gpu_num", "node_num", "submit_time", "start_time", "end_time")
_HELIOS_TIME: Final = "%Y-%m-%d %H:%M:%S"


def read_helios(lines: Iterable[str]) -> RecordedDays:
    """Read jobs as leases: asked for when submitted, held from start to end.

    A job on several nodes is one lease a node. Jobs without a GPU, and those that never
    started, are left out. Raises ``BadRequest`` where a column is missing.
    """
    jobs, left_out, bad = _read_rows(lines, _HELIOS_COLUMNS, _job)
    first = min((job[0].at for job in jobs), default=0.0)
    sessions = (session.moved(-first) for job in jobs for session in job)
    return RecordedDays(tuple(sorted(sessions, key=lambda each: each.at)), left_out=left_out, bad=bad)


def _job(row: Mapping[str, str]) -> list[RecordedSession] | None:
    gpus, nodes = _read_number(row, "gpu_num", 1e6), _read_number(row, "node_num", 1e6) or 1.0
    if not gpus or not (row["start_time"] and row["end_time"]):
        return None
    if gpus % nodes:
        raise ValueError(f"gpu_num is {gpus:g}, which is not as many on each of node_num {nodes:g}")
    asked, began, ended = (_time(row, name) for name in ("submit_time", "start_time", "end_time"))
    if not asked <= began <= ended:
        raise ValueError(
            f"submit_time is {row['submit_time']}, start_time {row['start_time']}, end_time {row['end_time']}"
        )
    if began == ended:
        return None
    request = SliceRequest(int(gpus // nodes), WHOLE)
    return [_whole_session(asked, ended - began, row["user"], row["vc"], request)] * int(nodes)


def _time(row: Mapping[str, str], column: str) -> float:
    """Return Unix seconds: the file names no time zone, and only differences matter.

    Raises ``ValueError`` that names the column.
    """
    text = row[column]
    try:
        return datetime.strptime(text, _HELIOS_TIME).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise ValueError(f"{column} is {text[:40]!a}, not a time as 2020-06-09 18:41:01") from None


# Tasks of Alibaba's PAI (NSDI 2022): pai_task_table.csv of alibaba/clusterdata, one row a task.
#
# The file has no header; its columns, of pai_task_table.header, are in :data:`_HEADER`. Those that are
# read: ``task_name`` (the task's role, taken as the course), ``inst_num`` (how many instances it has),
# ``start_time`` and ``end_time`` (seconds), ``plan_gpu`` (hundredths of a GPU that each instance asks for).
# When a task was submitted is in no column: it is taken to be asked for when it started.

_PAI_HEADER: Final = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
_PAI_COLUMNS: Final = ("task_name", "inst_num", "start_time", "end_time", "plan_gpu")


def read_pai(lines: Iterable[str]) -> RecordedDays:
    """Read instances as leases, held from their task's start to its end.

    Tasks without a GPU, and those without an end, are left out. Raises ``BadRequest`` where
    there is a header that lacks a column.
    """
    rest = iter(lines)
    first = next(rest, "")
    header = None if first.startswith("job_name,") else _PAI_HEADER
    tasks, left_out, bad = _read_rows(chain([first], rest), _PAI_COLUMNS, _task, header=header)
    begin = min((task[0].at for task in tasks), default=0.0)
    sessions = (session.moved(-begin) for task in tasks for session in task)
    return RecordedDays(tuple(sorted(sessions, key=lambda each: each.at)), left_out=left_out, bad=bad)


def _task(row: Mapping[str, str]) -> list[RecordedSession] | None:
    if not (row["plan_gpu"] and row["start_time"] and row["end_time"]):
        return None
    percent, instances = _read_number(row, "plan_gpu", 1e5), _read_number(row, "inst_num", 1e5)
    began, ended = _read_number(row, "start_time"), _read_number(row, "end_time")
    if not percent or not instances or began == ended:
        return None
    if ended < began:
        raise ValueError(f"start_time is {began:g}, end_time {ended:g}")
    session = _whole_session(began, ended - began, row["job_name"], row["task_name"], _request(percent))
    return [session] * int(instances)


def _request(percent: float) -> SliceRequest:
    if percent <= 100:
        return SliceRequest(1, max(1, round(percent * WHOLE / 100)))
    if percent % 100:
        raise ValueError(f"plan_gpu is {percent:g}: more than one GPU, and not whole ones")
    return SliceRequest(int(percent // 100), WHOLE)


# Days of Alibaba's fractional trace: its list of pods (openb_pod_list_default.csv), one row a pod.
#
# Columns that are read: ``name``, ``num_gpu`` (GPUs), ``gpu_milli`` (thousandths of each), ``qos`` (taken as
# the course), ``creation_time``, ``scheduled_time`` and ``deletion_time`` (seconds since the trace began).

_OPENB_TIMES: Final = ("creation_time", "scheduled_time", "deletion_time")
_OPENB_COLUMNS: Final = ("num_gpu", "gpu_milli", "qos", *_OPENB_TIMES)
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
    found, left_out, bad = _read_rows(lines, _OPENB_COLUMNS, lambda row: _pod(row, longest))
    return OpenbTrace(tuple(sorted(found, key=lambda each: each.at)), left_out, bad)


def _pod(row: Mapping[str, str], longest: float) -> Arrival | None:
    if not (row["num_gpu"] and row["scheduled_time"]):
        return None
    count, milli = _read_number(row, "num_gpu", 1e6), _read_number(row, "gpu_milli", WHOLE)
    if not count:
        return None
    if not (count == int(count) and milli == int(milli) > 0):
        raise ValueError(f"num_gpu is {count:g}, gpu_milli is {milli:g}")
    at, began, ended = (_read_number(row, name) for name in _OPENB_TIMES)
    if not at <= began <= ended:
        raise ValueError(f"creation_time is {at:g}, scheduled_time {began:g}, deletion_time {ended:g}")
    if ended == began:
        return None
    return Arrival(at, "", row["qos"], SliceRequest(int(count), int(milli)), min(longest, ended - began))


def _openb_days(lines: Iterable[str]) -> RecordedDays:
    trace = read_openb(lines)
    sessions = (
        _whole_session(each.at, each.stay, each.user, each.course, each.request) for each in trace.arrivals
    )
    return RecordedDays(tuple(sessions), left_out=trace.left_out, bad=trace.bad)


#: What reads a file's lines, by the name of its form.
FORMATS: Final[Mapping[str, Callable[[Iterable[str]], RecordedDays]]] = {
    "history": read_recorded,
    "openb": _openb_days,
    "sensei": read_sensei,
    "helios": read_helios,
    "pai": read_pai,
}
