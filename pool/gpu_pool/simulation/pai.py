"""Tasks of Alibaba's PAI (NSDI 2022): pai_task_table.csv of alibaba/clusterdata, one row a task.

The file has no header; its columns, of pai_task_table.header, are in :data:`_HEADER`. Those that are
read: ``task_name`` (the task's role, taken as the course), ``inst_num`` (how many instances it has),
``start_time`` and ``end_time`` (seconds), ``plan_gpu`` (hundredths of a GPU that each instance asks for).
When a task was submitted is in no column: it is taken to be asked for when it started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from gpu_pool.simulation.recorded import RecordedDays, RecordedSession, read_number, read_rows, whole_session
from gpu_pool_client import WHOLE, SliceRequest

_HEADER: Final = (
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
_READ: Final = ("task_name", "inst_num", "start_time", "end_time", "plan_gpu")


def read_pai(lines: Iterable[str]) -> RecordedDays:
    """Read instances as leases, held from their task's start to its end.

    Tasks without a GPU, and those without an end, are left out. Raises ``BadRequest`` where
    there is a header that lacks a column.
    """
    rest = iter(lines)
    first = next(rest, "")
    header = None if first.startswith("job_name,") else _HEADER
    tasks, left_out, bad = read_rows(chain([first], rest), _READ, _task, header=header)
    begin = min((task[0].at for task in tasks), default=0.0)
    sessions = (session.moved(-begin) for task in tasks for session in task)
    return RecordedDays(tuple(sorted(sessions, key=lambda each: each.at)), left_out=left_out, bad=bad)


def _task(row: Mapping[str, str]) -> list[RecordedSession] | None:
    if not (row["plan_gpu"] and row["start_time"] and row["end_time"]):
        return None
    percent, instances = read_number(row, "plan_gpu", 1e5), read_number(row, "inst_num", 1e5)
    began, ended = read_number(row, "start_time"), read_number(row, "end_time")
    if not percent or not instances or began == ended:
        return None
    if ended < began:
        raise ValueError(f"start_time is {began:g}, end_time {ended:g}")
    session = whole_session(began, ended - began, row["job_name"], row["task_name"], _request(percent))
    return [session] * int(instances)


def _request(percent: float) -> SliceRequest:
    if percent <= 100:
        return SliceRequest(1, max(1, round(percent * WHOLE / 100)))
    if percent % 100:
        raise ValueError(f"plan_gpu is {percent:g}: more than one GPU, and not whole ones")
    return SliceRequest(int(percent // 100), WHOLE)
