"""Jobs of SenseTime's clusters (Helios, SC 2021): a cluster's cluster_log.csv, one row a job.

Columns that are read: ``user``, ``vc`` (virtual cluster, taken as the course), ``gpu_num`` and ``node_num``
(GPUs in all, and nodes), ``submit_time``, ``start_time`` and ``end_time`` (``2020-06-09 18:41:01``).
The file is that of S-Lab-System-Group/HeliosData.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Final

from gpu_pool.simulation.recorded import RecordedDays, RecordedSession, read_number, read_rows, whole_session
from gpu_pool_client import WHOLE, SliceRequest

_COLUMNS: Final = ("user", "vc", "gpu_num", "node_num", "submit_time", "start_time", "end_time")
_FORMAT: Final = "%Y-%m-%d %H:%M:%S"


def read_helios(lines: Iterable[str]) -> RecordedDays:
    """Read jobs as leases: asked for when submitted, held from start to end.

    A job on several nodes is one lease a node. Jobs without a GPU, and those that never
    started, are left out. Raises ``BadRequest`` where a column is missing.
    """
    jobs, left_out, bad = read_rows(lines, _COLUMNS, _job)
    first = min((job[0].at for job in jobs), default=0.0)
    sessions = (session.moved(-first) for job in jobs for session in job)
    return RecordedDays(tuple(sorted(sessions, key=lambda each: each.at)), left_out=left_out, bad=bad)


def _job(row: Mapping[str, str]) -> list[RecordedSession] | None:
    gpus, nodes = read_number(row, "gpu_num", 1e6), read_number(row, "node_num", 1e6) or 1.0
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
    return [whole_session(asked, ended - began, row["user"], row["vc"], request)] * int(nodes)


def _time(row: Mapping[str, str], column: str) -> float:
    """Return Unix seconds: the file names no time zone, and only differences matter.

    Raises ``ValueError`` that names the column.
    """
    text = row[column]
    try:
        return datetime.strptime(text, _FORMAT).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise ValueError(f"{column} is {text[:40]!a}, not a time as 2020-06-09 18:41:01") from None
