"""Leases read from the store, living and ended ones."""

from __future__ import annotations

import re
import sqlite3
import time
from dataclasses import replace
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.policy.sharing import Sharing
from gpu_pool.store import records
from gpu_pool.store.database import Database
from gpu_pool.store.device_table import DeviceTable
from gpu_pool_client import Lease, LeaseGone, Slice, Terms

_ID: Final = re.compile(r"([0-9]{1,18})-[0-9a-f]{8}", re.ASCII)


class LeaseTable:
    """Reads leases, inside the transactions and snapshots of its caller."""

    def __init__(self, database: Database, devices: DeviceTable, sharing: Sharing, clock: Clock) -> None:
        self._db = database
        self._devices = devices
        self._sharing = sharing
        self._clock = clock
        #: What was last told of all, by row: of thousands few change from one look to the next.
        self._not_waiting: dict[records.Values, Lease] = {}
        self._waiting: dict[records.Values, Lease] = {}

    def follow(self, sharing: Sharing) -> None:
        """State these terms from now on."""
        self._sharing = sharing
        self._not_waiting, self._waiting = {}, {}

    def lease(self, lease_id: str) -> Lease:
        """Return a lease, ended ones included. Raises ``LeaseGone`` for one that never was."""
        row = self.live(lease_id)
        if row is not None:
            return self._read(row)
        number = lease_number(lease_id)
        ended = None if number is None else self._db.one("ended_by_number", number=number)
        if ended is None or ended["id"] != lease_id:
            raise LeaseGone(f"There is no lease {lease_id[:64]!a} in this pool.", "Ask for a new slice.")
        return records.ended_lease(ended)

    def by_key(self, key: str) -> Lease:
        """Return the lease of a key that is known."""
        row = self._db.one("lease_by_key", key=key)
        if row is not None:
            return self._read(row)
        return records.ended_lease(self._db.one("ended_by_key", key=key))

    def not_waiting(self) -> tuple[Lease, ...]:
        """Return held and parked leases, oldest first."""
        known, self._not_waiting = self._not_waiting, {}
        for row in self._db.run("leases").fetchall():
            values, parts = tuple(row), self._devices.read(row["slices"])
            lease = known.get(values)
            if lease is None or lease.slices != parts:  # what is known of a device may have changed
                lease = self.value(row, parts)
            if row["ends_by"] is not None:  # the clock of the wall may have been set
                lease = replace(lease, terms=self._terms(row))
            self._not_waiting[values] = lease
        return tuple(self._not_waiting.values())

    def waiting(self) -> tuple[Lease, ...]:
        """Return waiting leases in the order of the queue."""
        known, self._waiting = self._waiting, {}
        for place, row in enumerate(self._db.run("waiting").fetchall(), 1):
            values = tuple(row)
            lease = known.get(values) or self.value(row, (), place)
            self._waiting[values] = lease if lease.position == place else replace(lease, position=place)
        return tuple(self._waiting.values())

    def live(self, lease_id: str) -> sqlite3.Row | None:
        """Return the row of a lease that has not ended, or None."""
        number = lease_number(lease_id)
        row: sqlite3.Row | None = None if number is None else self._db.one("lease_by_number", number=number)
        return row if row is not None and row["id"] == lease_id else None

    def row(self, lease_id: str) -> sqlite3.Row:
        """Return the row of a lease, or say how it ended."""
        row = self.live(lease_id)
        if row is None:
            raise gone(self.lease(lease_id))
        return row

    def position(self, row: sqlite3.Row) -> int | None:
        """Return a lease's position in the queue, or None if it does not wait."""
        turn = row["turn"]
        return None if turn is None else int(self._db.one("position", turn=turn)[0])

    def value(self, row: records.Row, parts: tuple[Slice, ...], place: int | None = None) -> Lease:
        """Return the lease of a row, as read or as about to be written."""
        return records.live_lease(row, parts, place, self._terms(row))

    def _terms(self, row: records.Row) -> Terms:
        ends_by = row["ends_by"]
        ends_at = None if ends_by is None else ends_by + self._clock.wall() - self._clock.uptime()
        return self._sharing.terms(row["course"], ends_at)

    def _read(self, row: sqlite3.Row) -> Lease:
        return self.value(row, self._devices.read(row["slices"]), self.position(row))


def gone(lease: Lease) -> LeaseGone:
    """Return the error for a lease that has ended."""
    reason = lease.end_reason.value if lease.end_reason else "unknown"
    ended = time.strftime("%H:%M:%S", time.localtime(lease.ended_at))
    words = f"{reason}. {lease.notice}".rstrip() if lease.notice else f"{reason}."
    return LeaseGone(
        f"The lease on {lease.request.named} ended at {ended}: {words}", "Ask for a new slice.", reason=reason
    )


def lease_number(lease_id: str) -> int | None:
    """Return the number in a lease's id, None if it is no id of a lease."""
    match = _ID.fullmatch(lease_id)
    return int(match[1]) if match else None
