"""What a pool has recorded, in the form that ``simulate --format history`` reads."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gpu_pool_client import Pool

#: What is told of a lease, beside when it was busy. Nothing that a person wrote.
_KEYS: Final = ("requested_at", "held_at", "ended_at", "held_seconds", "request", "milli", "course", "user")


async def recorded_leases(pool: Pool, since: float) -> list[dict[str, Any]]:
    """Return the leases that were held and have ended since then, with when they were busy.

    ``busy`` is None of a lease of which no server has said when its kernel worked. Sums of old leases
    are left out: they do not say when each was held.
    """
    ended, busy = await pool.history(since), await pool.busy_times(since)
    rows = []
    for each in ended:
        if each.id and each.held_at is not None:
            spans = busy.get(each.id)
            told = None if spans is None else _within(spans, each.held_at, each.ended_at)
            rows.append({**{key: getattr(each, key) for key in _KEYS}, "busy": told})
    return rows


def _within(spans: Iterable[tuple[float, float]], begin: float, end: float) -> list[list[float]]:
    """Return the spans as far as they are between two times, one after the other."""
    found = []
    for at, seconds in spans:
        first, last = max(at, begin), min(at + seconds, end)
        if last > first:
            found.append([round(first, 3), round(last - first, 3)])
            begin = last
    return found


def hashed(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Name users by what tells them apart in this export, and in no other."""
    salt = secrets.token_bytes(16)
    for row in rows:
        digest = hashlib.blake2b(row["user"].encode(errors="replace"), key=salt, digest_size=6)
        yield {**row, "user": f"user-{digest.hexdigest()}"}


def nameless(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave users out."""
    for row in rows:
        yield {**row, "user": ""}
