"""Recorded days: one JSON object a line for every lease that was held."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool.simulation.recorded import RecordedCell, RecordedDays, RecordedSession
from gpu_pool_client import WHOLE, BadRequest, GpuPoolError, parse_request

ACCEPTED: Final = (
    'Accepted: one JSON object per line, such as {"requested_at": 1760000000.0, "held_seconds": 3600, '
    '"user": "ada", "course": "ml", "request": "2%"}. Times are in seconds; user and course may be '
    "left out; further keys are ignored."
)
#: Seconds that times of a record may be apart by their rounding.
_ROUNDED: Final = 0.01


def read_history(lines: Iterable[str]) -> list[Arrival]:
    """Read leases that were held: when they were asked for, by whom, and for how long they were held.

    Leases that were never held are left out: how long they would have been
    held is not known. Raises :class:`~gpu_pool_client.BadRequest` that names
    the line which is not understood.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            arrival = _read(line, number)
            if arrival is not None and arrival.stay > 0:
                found.append(arrival)
    if not found:
        raise BadRequest("The history has no lease that was held.", ACCEPTED)
    first = min(arrival.at for arrival in found)
    return sorted((_moved(arrival, first) for arrival in found), key=lambda arrival: arrival.at)


def read_recorded(lines: Iterable[str]) -> RecordedDays:
    """Read leases that were held, and when their cells ran, as ``gpu-pool history --cells`` writes them.

    ``busy`` is a list of [start, seconds] in order of time, in seconds of the clock of ``requested_at``; a
    lease without it is taken to have been busy all the time. Time is counted from the first
    request, and each lease's as if its slice had been there at once. Lines that are not
    understood are told in the result, but for a file of which none is.
    """
    sessions: list[RecordedSession] = []
    bad: list[tuple[int, str]] = []
    left_out, has_cells = 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            plain = _plain(line)
            session = _session(plain)
        except _NOT_UNDERSTOOD as error:
            bad.append((number, f"{error!s:.200}"))
            continue
        if session is None:
            left_out += 1
        else:
            sessions.append(session)
            has_cells |= plain.get("busy") is not None
    if not sessions:
        why = f" Line {bad[0][0]}: {bad[0][1]}." if bad else ""
        raise BadRequest(f"The history has no lease that was held.{why}", ACCEPTED)
    first = min(session.at for session in sessions)
    moved = sorted((session.moved(-first) for session in sessions), key=lambda session: session.at)
    return RecordedDays(tuple(moved), has_cells, left_out, tuple(bad))


#: What a line raises that is not a lease.
_NOT_UNDERSTOOD: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError, GpuPoolError)


def _plain(line: str) -> Mapping[str, Any]:
    plain = json.loads(line)
    if not isinstance(plain, dict):
        raise TypeError("it is not a JSON object")
    return plain


def _arrival(plain: Mapping[str, Any]) -> Arrival | None:
    """Read one lease; None for a sum of old ones, which does not say when each was asked for."""
    if plain.get("id") == "":
        return None
    at, stay = _seconds(plain["requested_at"]), _seconds(plain.get("held_seconds") or 0.0)
    request = parse_request(str(plain["request"]))
    return Arrival(at, str(plain.get("user") or ""), str(plain.get("course") or ""), request, stay)


def _session(plain: Mapping[str, Any]) -> RecordedSession | None:
    arrival = _arrival(plain)
    if arrival is None or arrival.stay <= 0:
        return None
    request = arrival.request
    milli = request.count * request.milli if request.milli else int(plain.get("milli") or WHOLE)
    busy: tuple[RecordedCell, ...]
    is_job = plain.get("busy") is None
    if is_job:
        busy, ends_at = (RecordedCell(arrival.at, arrival.stay),), arrival.at + arrival.stay
    else:
        held_at = _seconds(plain.get("held_at") or arrival.at)
        wait = held_at - arrival.at
        ends_at = _seconds(plain.get("ended_at") or held_at + arrival.stay) - wait
        busy = tuple(RecordedCell(_seconds(at) - wait, _seconds(lasted)) for at, lasted in plain["busy"])
        _check(busy, arrival.at, ends_at)
    return RecordedSession(
        arrival.at, ends_at, arrival.user, arrival.course, request, milli, busy, is_job=is_job
    )


def _check(busy: Sequence[RecordedCell], at: float, ends_at: float) -> None:
    """Raise ``ValueError`` where cells are not one after the other, within a lease."""
    for cell in busy:
        if cell.seconds < 0 or cell.at < at - _ROUNDED or cell.ended_at > ends_at + _ROUNDED:
            raise ValueError(f"what was busy at {cell.at:g} for {cell.seconds:g} s is not within its lease")
        at = cell.ended_at


def _seconds(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError("it has a time that is not a number of seconds")
    return number


def _read(line: str, number: int) -> Arrival | None:
    try:
        return _arrival(_plain(line))
    except _NOT_UNDERSTOOD as error:
        raise BadRequest(f"Line {number} of the history is not valid: {error!s:.200}.", ACCEPTED) from error


def _moved(arrival: Arrival, first: float) -> Arrival:
    """Count time from the first request."""
    return Arrival(arrival.at - first, arrival.user, arrival.course, arrival.request, arrival.stay)
