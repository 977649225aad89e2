"""Every decision about leases, each in one transaction of the ledger.

What fits and whose turn it is, pure functions say (``admission``,
``placement``, ``queueing``); this module reads what they need and writes what
they decide.
"""

from __future__ import annotations

import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from gpu_pool import admission, placement, queueing
from gpu_pool.clock import Clock
from gpu_pool.ledger import records
from gpu_pool.ledger.database import Database
from gpu_pool.settings import PoolSettings
from gpu_pool_client import (
    BadRequest,
    Device,
    DeviceStatus,
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    PoolStatus,
    Process,
    Slice,
    SliceRequest,
    TimedOut,
)

_KEY: Final = re.compile(r"[!-~]{1,128}")
_PROCESS_ENDS: Final = EndReason.PROCESS_GONE


class Book:
    """The leases of one pool. Used by one thread at a time.

    ``give_up_at`` (``time.monotonic()``, see ``Database.transaction``) bounds
    how long any decision may wait for others to finish theirs.
    """

    def __init__(self, database: Database, settings: PoolSettings, clock: Clock | None = None) -> None:
        self._db = database
        self._rules = settings.rules
        self._attach_within = settings.attach_within
        self._clock = clock or Clock()
        self._devices: dict[int, tuple[int, Device]] = {}
        self._ids: dict[str, int] = {}
        self._present: set[int] = set()
        self.give_up_at: float | None = None

    # -- Devices -----------------------------------------------------------

    def register(self, devices: Sequence[Device]) -> None:
        """Make these the pool's devices. Leases on others live on; nothing new is granted there."""
        with self._db.transaction(self.give_up_at):
            known = {row["facts"] for row in self._db.run("device_facts") if row["present"]}
            facts = [records.write_device(device) for device in devices]
            if known == set(facts):
                return
            self._db.run("hide_devices")
            for position, (device, text) in enumerate(zip(devices, facts, strict=True)):
                values = {"uuid": device.uuid, "position": position, "facts": text}
                self._db.run("upsert_device", values)
            self._serve_line()

    def _statuses(self) -> list[DeviceStatus]:
        """Return the devices that still hold something or may be granted, in order of placement."""
        rows = self._db.run("devices").fetchall()
        if any(self._devices.get(row["id"], (-1,))[0] != row["revision"] for row in rows):
            self._read_devices()
        milli = self._rules.device_milli
        return [
            DeviceStatus(self._devices[number][1], held, memory, contexts, leases, milli)
            for number, _, held, memory, contexts, leases in rows
        ]

    def _read_devices(self) -> None:
        rows = self._db.run("device_facts").fetchall()
        self._devices = {r["id"]: (r["revision"], records.read_device(r["facts"])) for r in rows}
        self._ids = {device.uuid: number for number, (_, device) in self._devices.items()}
        self._present = {r["id"] for r in rows if r["present"]}

    def _open(self, statuses: Sequence[DeviceStatus]) -> list[DeviceStatus]:
        return [s for s in statuses if self._ids[s.device.uuid] in self._present]

    # -- Asking ------------------------------------------------------------

    def request(self, request: SliceRequest, holder: Holder, key: str) -> Lease:
        """Grant, or put in line; repeated with the same key, return what became of it."""
        if not _KEY.fullmatch(key):
            raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
        with self._db.transaction(self.give_up_at):
            known = self._by_key(key)
            if known is not None:
                return known
            statuses = self._open(self._statuses())
            admission.check(request, [status.device for status in statuses], self._rules)
            parts = None
            if not self._somebody_waits():
                parts = placement.place(request, statuses, self._rules)
            lease = self._insert(request, holder, key, parts)
            if parts is None:
                self._serve_line()
                lease = self._lease(lease.id)
        return lease

    def _insert(
        self, request: SliceRequest, holder: Holder, key: str, parts: tuple[Slice, ...] | None
    ) -> Lease:
        now, keeper = self._clock.wall(), holder.process or Process.current()
        lease = Lease(
            id=uuid.uuid4().hex,
            key=key,
            request=request,
            holder=Holder(holder.user, holder.course, holder.kernel, keeper),
            state=LeaseState.WAITING if parts is None else LeaseState.HELD,
            requested_at=now,
            held_at=None if parts is None else now,
            slices=parts or (),
        )
        cursor = self._db.run("insert_lease", self._row(lease, keeper))
        if parts is not None:
            self._take(cursor.lastrowid or 0, parts)
        return lease

    def _row(self, lease: Lease, keeper: Process) -> dict[str, object]:
        held = lease.state is LeaseState.HELD
        return {
            "id": lease.id,
            "key": lease.key,
            "state": lease.state.value,
            "turn": None if held else self._next_turn(),
            "request": str(lease.request),
            "user": lease.holder.user,
            "course": lease.holder.course,
            "kernel": lease.holder.kernel,
            "requested_at": lease.requested_at,
            "held_at": lease.held_at,
            "keeper": records.write_process(keeper),
            "deadline": self._clock.uptime() + self._attach_within if held else None,
            "deadline_reason": EndReason.NEVER_ATTACHED.value if held else None,
        }

    def _take(self, number: int, parts: Sequence[Slice]) -> None:
        for part in parts:
            device = self._ids[part.device.uuid]
            self._db.run("insert_slice", (number, device, part.milli, part.memory_mib, part.contexts))

    def shortage(self, lease_id: str) -> TimedOut:
        """Return the error that says why this lease still waits."""
        with self._db.snapshot():
            row = self._row_of(lease_id)
            statuses = self._open(self._statuses())
            ahead = (self._place(row) or 1) - 1
        request = records.read_request(row["request"])
        message, remedy, largest = admission.shortage(request, statuses, ahead, self._rules)
        return TimedOut(message, remedy, largest_now=largest)

    # -- The line ----------------------------------------------------------

    def _somebody_waits(self) -> bool:
        return bool(self._db.one("somebody_waits")[0])

    def _next_turn(self) -> int:
        return int(self._db.one("last_turn")[0]) + 1

    def _serve_line(self) -> None:
        """Grant to everybody in line whose turn has come."""
        if not self._somebody_waits():
            return
        statuses = self._open(self._statuses())
        deadline = self._clock.uptime() + self._attach_within
        for waiter, parts in queueing.grants(self._line(), statuses, self._rules):
            values = {
                "number": waiter.number,
                "now": self._clock.wall(),
                "deadline": deadline,
                "reason": EndReason.NEVER_ATTACHED.value,
            }
            self._db.run("grant", values)
            self._take(waiter.number, parts)

    def _line(self) -> Iterator[queueing.Waiter]:
        for row in self._db.run("line").fetchall():
            home = frozenset(row["home"].split(",")) if row["home"] else frozenset()
            yield queueing.Waiter(row["number"], records.read_request(row["request"]), home)

    # -- Reading -----------------------------------------------------------

    def lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now, ended ones included."""
        with self._db.snapshot():
            return self._lease(lease_id)

    def status(self, url: str) -> PoolStatus:
        """Return everything as one snapshot."""
        with self._db.snapshot():
            statuses = tuple(self._statuses())
            held: dict[int, list[Slice]] = {}
            for row in self._db.run("all_slices"):
                held.setdefault(row["lease"], []).append(self._slice(row))
            leases = tuple(
                records.live_lease(row, tuple(held.get(row["number"], ())), None)
                for row in self._db.run("leases")
            )
            line = tuple(
                records.live_lease(row, (), place) for place, row in enumerate(self._db.run("line"), 1)
            )
        return PoolStatus(url, statuses, leases, line)

    def _lease(self, lease_id: str) -> Lease:
        row = self._db.one("lease_by_id", id=lease_id)
        if row is not None:
            return self._value(row)
        ended = self._db.one("ended_by_id", id=lease_id)
        if ended is None:
            raise LeaseGone(f"There is no lease {lease_id[:64]!r} in this pool.", "Ask for a new slice.")
        return records.ended_lease(ended)

    def _by_key(self, key: str) -> Lease | None:
        row = self._db.one("lease_by_key", key=key)
        if row is not None:
            return self._value(row)
        ended = self._db.one("ended_by_key", key=key)
        return None if ended is None else records.ended_lease(ended)

    def _value(self, row: sqlite3.Row) -> Lease:
        return records.live_lease(row, self._slices(row["number"]), self._place(row))

    def _slices(self, number: int) -> tuple[Slice, ...]:
        return tuple(self._slice(row) for row in self._db.run("slices_of", {"number": number}).fetchall())

    def _slice(self, row: sqlite3.Row) -> Slice:
        if row["device"] not in self._devices:
            self._read_devices()
        device = self._devices[row["device"]][1]
        return Slice(device, row["milli"], row["memory_mib"], row["contexts"])

    def _place(self, row: sqlite3.Row) -> int | None:
        turn = row["turn"]
        return None if turn is None else int(self._db.one("place_in_line", turn=turn)[0])

    def _row_of(self, lease_id: str) -> sqlite3.Row:
        """Return the row of a lease that has not ended."""
        row: sqlite3.Row | None = self._db.one("lease_by_id", id=lease_id)
        if row is None:
            raise gone(self._lease(lease_id))
        return row

    # -- Changing ----------------------------------------------------------

    def attach(self, lease_id: str, process: Process, ready_within: float | None, grace: float) -> Lease:
        """Tie the lease to a process; see ``Pool.attach``."""
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            watched = ready_within is not None and row["state"] == LeaseState.HELD
            values = {
                "number": row["number"],
                "process": records.write_process(process),
                "grace": grace,
                "deadline": self._clock.uptime() + (ready_within or 0) if watched else None,
                "reason": EndReason.NOT_READY.value if watched else None,
            }
            self._db.run("attach", values)
            return self._lease(lease_id)

    def renew(self, lease_id: str, ttl: float | None) -> Lease:
        """Lift the deadline, or set it ``ttl`` seconds from now."""
        with self._db.transaction(self.give_up_at):
            number = self._row_of(lease_id)["number"]
            deadline = None if ttl is None else self._clock.uptime() + ttl
            reason = None if ttl is None else EndReason.EXPIRED.value
            self._db.run("set_deadline", {"number": number, "deadline": deadline, "reason": reason})
            return self._lease(lease_id)

    def park(self, lease_id: str) -> Lease:
        """Give a held lease's slices to the next in line."""
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            if row["state"] == LeaseState.WAITING:
                raise BadRequest("A lease that waits in line holds nothing to park.", "Release it instead.")
            if row["state"] == LeaseState.HELD:
                home = ",".join(part.device.uuid for part in self._slices(row["number"]))
                values = {"number": row["number"], "home": home, "now": self._clock.wall()}
                self._db.run("park", values)
                self._db.run("drop_slices", {"number": row["number"]})
                self._serve_line()
            return self._lease(lease_id)

    def resume(self, lease_id: str) -> Lease:
        """Put a parked lease in line for its devices."""
        with self._db.transaction(self.give_up_at):
            row = self._row_of(lease_id)
            if row["state"] == LeaseState.PARKED:
                self._db.run("resume", {"number": row["number"], "turn": self._next_turn()})
                self._serve_line()
            return self._lease(lease_id)

    def release(self, lease_id: str, reason: EndReason) -> None:
        """End the lease if it has not ended yet."""
        with self._db.transaction(self.give_up_at):
            row = self._db.one("lease_by_id", id=lease_id)
            if row is not None:
                self._end(row["number"], reason)
                self._serve_line()

    def release_key(self, key: str, reason: EndReason) -> None:
        """End the lease of that key, if there is one."""
        with self._db.transaction(self.give_up_at):
            row = self._db.one("lease_by_key", key=key)
            if row is not None:
                self._end(row["number"], reason)
                self._serve_line()

    def _end(self, number: int, reason: EndReason) -> None:
        slices = records.write_slices(self._slices(number))
        values = {"number": number, "now": self._clock.wall(), "reason": reason.value, "slices": slices}
        self._db.run("remember", values)
        self._db.run("delete_lease", {"number": number})

    # -- Reclaim -----------------------------------------------------------

    def look(self, at_most_every: float = 0.0) -> None:
        """End every lease whose process is gone or whose deadline has passed.

        Processes are looked at outside the transaction; the lease is judged by
        the exact process that was seen dead, so nothing is ended by mistake if
        another was attached meanwhile. With ``at_most_every`` (seconds) nothing
        is done when any process looked that recently.
        """
        now = self._clock.uptime()
        with self._db.snapshot():
            age = now - self._db.one("looked_at")[0]
            if 0 <= age < at_most_every:
                return
            named = [row[0] for row in self._db.run("processes")]
            overdue = self._db.one("overdue", now=now) is not None
        dead = [text for text in named if records.read_process(text).is_alive() is False]
        if dead or overdue or at_most_every:
            self._bury(dead, now)

    def _bury(self, dead: Sequence[str], now: float) -> None:
        with self._db.transaction(self.give_up_at):
            self._db.run("set_looked_at", {"now": now})
            for row in self._db.run("overdue", {"now": now}).fetchall():
                self._end(row["number"], EndReason(row["deadline_reason"]))
            for text in dead:
                for row in self._db.run("leases_of_process", {"process": text}).fetchall():
                    self._mourn(row, now)
            self._serve_line()

    def _mourn(self, row: sqlite3.Row, now: float) -> None:
        """End a lease whose process is dead, or give its holder the promised grace."""
        forgiven = row["process"] and row["grace"] > 0
        if forgiven and records.read_process(row["keeper"]).is_alive():
            deadline = {"deadline": now + row["grace"], "reason": _PROCESS_ENDS.value}
            self._db.run("detach", {"number": row["number"], **deadline})
        else:
            self._end(row["number"], _PROCESS_ENDS)


def gone(lease: Lease) -> LeaseGone:
    """Return the error for a lease that has ended."""
    reason = lease.end_reason.value if lease.end_reason else "unknown"
    ended = time.strftime("%H:%M:%S", time.localtime(lease.ended_at))
    return LeaseGone(
        f"The lease on {lease.request} ended at {ended}: {reason}.", "Ask for a new slice.", reason=reason
    )
