"""Recorded days: one JSON object a line for every lease that was held."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from gpu_pool.simulation.engine import Arrival
from gpu_pool_client import BadRequest, parse_request

ACCEPTED: Final = (
    'Accepted: one JSON object per line, such as {"requested_at": 1760000000.0, "held_seconds": 3600, '
    '"user": "ada", "course": "ml", "request": "2%"}. Times are in seconds; user and course may be '
    "left out; further keys are ignored."
)


def read_history(lines: Iterable[str]) -> list[Arrival]:
    """Read leases that were held: when they were asked for, by whom, and for how long they were held.

    Leases that were never held are left out: how long they would have been
    held is not known. Raises :class:`~gpu_pool_client.BadRequest` that names
    the queue which is not understood.
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


def _read(line: str, number: int) -> Arrival | None:
    """Read one lease; None for a sum of old ones, which does not say when each was asked for."""
    try:
        plain: dict[str, Any] = json.loads(line)
        if plain.get("id") == "":
            return None
        at, stay = float(plain["requested_at"]), float(plain.get("held_seconds") or 0.0)
        request = parse_request(str(plain["request"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"Line {number} of the history is not valid: {error!s:.200}.", ACCEPTED) from error
    if not (math.isfinite(at) and math.isfinite(stay)):
        raise BadRequest(
            f"Line {number} of the history has a time that is not a number of seconds.", ACCEPTED
        )
    return Arrival(at, str(plain.get("user") or ""), str(plain.get("course") or ""), request, stay)


def _moved(arrival: Arrival, first: float) -> Arrival:
    """Count time from the first request."""
    return Arrival(arrival.at - first, arrival.user, arrival.course, arrival.request, arrival.stay)
