"""What a pool has recorded, with users that are named by nothing that is known elsewhere."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from gpu_pool_client import Pool


async def recorded_rows(pool: Pool, since: float) -> list[dict[str, Any]]:
    """Return the leases that were held and have ended since then, with when they were busy."""
    from gpu_pool.pool.own_days import recorded_leases

    return recorded_leases(await pool.history(since), await pool.busy_times(since))


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
