"""Rows of the store as values, and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
from typing import Any, Final, TypeAlias

from gpu_pool_client import (
    Device,
    EndedLease,
    EndReason,
    Failure,
    Holder,
    Lease,
    LeaseState,
    Process,
    Slice,
    SliceRequest,
    Terms,
    parse_request,
)

#: A row as it was read, or as it is about to be written.
Row: TypeAlias = sqlite3.Row | dict[str, Any]
#: What a row says, to compare it by.
Values: TypeAlias = tuple[object, ...]

#: Characters that are kept of a text that came from outside.
MOST_TEXT: Final = 200
#: The same few requests are read over and over.
read_request = functools.lru_cache(maxsize=1024)(parse_request)


def write_device(device: Device) -> str:
    """Write a device's facts as JSON."""
    return json.dumps(dataclasses.asdict(device), sort_keys=True)


def read_device(facts: str) -> Device:
    """Read what :func:`write_device` wrote."""
    values: dict[str, Any] = json.loads(facts)
    values["nvlink"] = tuple(values["nvlink"])
    return Device(**values)


def write_process(process: Process) -> str:
    """Write a process in one word; equal processes give equal words."""
    return f"{process.pid}/{process.start}/{process.boot}/{process.namespace}"


@functools.lru_cache(maxsize=4096)
def read_process(text: str) -> Process:
    """Read what :func:`write_process` wrote."""
    pid, start, boot, namespace = text.split("/", 3)
    return Process(int(pid), int(start), boot, namespace)


def write_failure(failure: Failure) -> str:
    """Write a failure as JSON."""
    return json.dumps(dataclasses.asdict(failure), sort_keys=True)


def read_failure(text: str) -> Failure | None:
    """Read what :func:`write_failure` wrote; None for an empty text."""
    return Failure(**json.loads(text)) if text else None


def history_row(row: sqlite3.Row) -> EndedLease:
    """Return what the queries of the history say of one lease."""
    touched = None if row["touched"] is None else bool(row["touched"])
    return EndedLease(**{**row, "failure": read_failure(row["failure"]), "touched": touched})


def live_lease(row: Row, parts: tuple[Slice, ...], place: int | None, terms: Terms) -> Lease:
    """Return the lease of a row of ``lease``."""
    return Lease(
        id=row["id"],
        key=row["key"],
        request=_request(row),
        holder=_holder(row, read_process(row["keeper"])),
        state=LeaseState(row["state"]),
        requested_at=row["requested_at"],
        held_at=row["held_at"],
        slices=parts,
        notice=row["notice"],
        process=read_process(row["process"]) if row["process"] else None,
        position=place,
        terms=terms,
        asked_back=EndReason(row["asked_back"]) if row["asked_back"] else None,
        failure=read_failure(row["failure"]),
    )


def ended_lease(row: sqlite3.Row) -> Lease:
    """Return the lease of a row of ``history``."""
    return Lease(
        id=row["id"],
        key=row["key"],
        request=_request(row),
        holder=_holder(row, None),
        state=LeaseState.ENDED,
        requested_at=row["requested_at"],
        held_at=row["held_at"],
        ended_at=row["ended_at"],
        end_reason=EndReason(row["reason"]),
        notice=row["note"],
        failure=read_failure(row["failure"]),
    )


def _request(row: Row) -> SliceRequest:
    return read_request(row["request"])


def _holder(row: Row, process: Process | None) -> Holder:
    return Holder(row["user"], row["course"] or None, row["kernel"], process)


def plain(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text that came from outside, and leave out what a file or a terminal could choke on."""
    if len(text) <= most and text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text[:most])
