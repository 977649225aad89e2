"""Every decision about leases, each in one transaction of the store.

Those about who gets a slice are in ``requests``, and in ``queue`` for those who wait.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from gpu_pool.policy import admission
from gpu_pool.policy.queue import Waiter
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.store import reclaim
from gpu_pool.store.history import HistorySize
from gpu_pool.store.lease_table import plain, read_failure, write_failure, write_process
from gpu_pool.store.requests import RequestStore
from gpu_pool_client import (
    BadRequest,
    DeviceStatus,
    EndedLease,
    EndReason,
    Failure,
    Lease,
    LeaseState,
    NotAllowed,
    PoolStatus,
    Process,
    Slice,
    SliceRequest,
)
from gpu_pool_client._processes import is_child_of_ours

#: No deadline is set further ahead than this.
_MOST_SECONDS: Final = 86_400.0
#: Characters that are kept of each text about a failure: more than is read of a cluster's messages.
_MOST_OF_FAILURE: Final = 500
#: Starts that are kept of each group of nodes, the latest, and versions of each course.
_MOST_STARTS: Final = 20
MOST_VERSIONS: Final = 100
#: Why a lease that is about to end for this reason is not parked, and what to do.
_NOT_PARKED: Final = {
    EndReason.PROCESS_GONE.value: ("its process has ended.", "Start it again, or release the slice."),
    EndReason.NOT_READY.value: ("its process is not ready yet.", "Wait until it is."),
}


class LeaseStore(RequestStore):
    """The leases of one pool. Used by one thread at a time.

    ``give_up_at`` (``time.monotonic()``, see ``Database.transaction``) bounds
    how long any decision may wait for others to finish theirs.
    """

    # -- Reading -----------------------------------------------------------
    def lease(self, lease_id: str) -> Lease:
        """Return the lease as it is now, ended ones included, and those that are over and not ended yet."""
        with self._db.snapshot():
            row = self._leases.live(lease_id)
            reason = None if row is None else reclaim.why_one_is_over(self._db, row, self._clock.uptime())
            if row is None or reason is None:
                return self._leases.lease(lease_id)
            return self._leases.as_ended(row, reason)

    def find(self, key: str) -> Lease | None:
        """Return the lease of that key, ended ones included; None if there was none."""
        with self._db.snapshot():
            known = self._db.one("ask", key=key)["known"]
            return self._leases.by_key(key) if known else None

    def status(self, url: str) -> PoolStatus:
        """Return everything as one snapshot, without the leases that are over and not ended yet."""
        now = self._clock.uptime()
        findings = reclaim.look(self._db, now)
        with self._db.snapshot():
            status = PoolStatus(
                url,
                tuple(self._devices.statuses(with_gone=True)),
                self._leases.not_waiting(),
                self._leases.waiting(),
                store_bytes=self._db.size(),
            )
            over = reclaim.over(self._db, findings, now) if findings else ()
        return without(status, over) if over else status

    def queue_head(self, most: int) -> list[Waiter]:
        """Return the first who wait, in the order of their turns."""
        with self._db.snapshot():
            return self._queue.queue_head(most)

    def history(self, since: float, user: str | None = None) -> list[EndedLease]:
        """Return the leases, or those of a user, that have ended since then; see ``Pool.history``."""
        with self._db.snapshot():
            return self._history.read(since, user)

    def history_size(self) -> HistorySize:
        """Return how much is kept of what has ended."""
        with self._db.snapshot():
            return self._history.size()

    # -- Changing ----------------------------------------------------------

    def attach(self, lease_id: str, process: Process, ready_within: float | None, grace: float) -> Lease:
        """Tie the lease to a process; see ``Pool.attach``."""
        _check_seconds("grace", grace)
        _check_seconds("ready_within", ready_within)
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            # What is not held yet has its time once it is.
            watched = ready_within is not None and row["state"] == LeaseState.HELD
            # Whether it is this process or its child, which it watches for as long as it lives.
            ends_with_us = row["pulse"] == self._db.liveness.own() and (
                process.pid == os.getpid() or is_child_of_ours(process.pid)
            )
            values = {
                "number": row["number"],
                "process": write_process(process),
                # What lives on without us is not given up when our sign of life has gone.
                "outlives": not ends_with_us,
                "grace": grace,
                "ready_within": None if watched else ready_within,
                "deadline": self._clock.uptime() + (ready_within or 0) if watched else None,
                "reason": EndReason.NOT_READY.value if watched else None,
            }
            self._db.run("attach", values)
            return self._leases.lease(lease_id)

    def renew(self, lease_id: str, ttl: float | None) -> Lease:
        """Lift the deadline, or set it ``ttl`` seconds from now; with nothing attached, only sooner."""
        _check_seconds("ttl", ttl)
        with self._db.transaction(self.give_up_at):
            number = self._leases.row(lease_id)["number"]
            deadline = None if ttl is None else self._clock.uptime() + ttl
            reason = None if ttl is None else EndReason.EXPIRED.value
            self._db.run("set_deadline", {"number": number, "deadline": deadline, "reason": reason})
            return self._leases.lease(lease_id)

    def resize(
        self,
        lease_id: str,
        request: SliceRequest,
        check: Callable[[], None] | None = None,
        *,
        ahead: bool = False,
    ) -> Lease:
        """Change what a lease asks for; see :meth:`request` and ``Pool.resize``."""
        if check is not None:
            check()
        admission.check_rules(request, self._rules)
        with self._db.transaction(self.give_up_at):
            before = self._leases.row(lease_id)
            self._resizing.resize(before, request, ahead=ahead)
            row = self._leases.row(lease_id)
            parts = self._devices.read(row["slices"])
            self._db.audit_buffer.decided("resized", row, parts, {"before": before["request"]})
            self._queue.serve()
            return self._leases.lease(lease_id)

    def check_resize(
        self, lease_id: str, request: SliceRequest, check: Callable[[], None] | None = None
    ) -> None:
        """Refuse a size that a lease could never have; nothing is changed."""
        if check is not None:
            check()
        admission.check_rules(request, self._rules)
        with self._db.snapshot():
            self._resizing.check(self._leases.row(lease_id), request)

    def park(self, lease_id: str, *, queued: bool = False) -> Lease:
        """Give a held lease's slices to the next; one that waits to resume leaves the queue.

        Whatever else ends it still does, but for this: the time in which a kernel has to be
        ready does not run while its pod is ``queued`` in the cluster.
        """
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            if row["state"] == LeaseState.WAITING and not row["home"]:
                raise BadRequest(
                    "A lease that waits in the queue holds nothing to park.", "Release it instead."
                )
            why_not = _NOT_PARKED.get(row["deadline_reason"])
            if row["state"] == LeaseState.HELD and why_not and not queued:
                raise NotAllowed(f"The slice cannot be lent to others: {why_not[0]}", why_not[1])
            if row["state"] != LeaseState.PARKED:
                self._park(row, queued=queued)
            return self._leases.lease(lease_id)

    def _park(self, row: sqlite3.Row, *, queued: bool = False) -> None:
        parts = self._devices.read(row["slices"])
        home = ",".join(part.device.uuid for part in parts) or row["home"]
        self._use.add(row)
        values = {"number": row["number"], "home": home, "now": self._clock.wall(), "queued": queued}
        self._db.run("park", values)
        self._devices.count("give_back", parts)
        why = {"reason": row["asked_back"], "message": row["notice"] or None} if row["asked_back"] else {}
        self._db.audit_buffer.decided("parked", row, parts, why)
        self._queue.serve()

    def ask_back(self, lease_id: str, message: str, reason: EndReason, *, now: bool) -> Lease:
        """Ask a held lease's slices back, for when its kernel is idle; or park it ``now``.

        ``reason`` and ``message`` tell its user, and the history, by whom and why. Those of an
        administrator (REVOKED) stay whatever its user asks for afterwards.
        """
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            if row["state"] != LeaseState.HELD:
                raise BadRequest(f"The lease is {row['state']}: it holds no slice.")
            is_by_admin = row["asked_back"] == EndReason.REVOKED.value
            if not is_by_admin or reason is not EndReason.RELEASED:
                values = {"number": row["number"], "notice": plain(message), "reason": reason.value}
                self._db.run("ask_back", values)
            if now:
                self._park(self._leases.row(lease_id))
            else:
                self._db.audit_buffer.decided(
                    "asked-back", row, (), {"reason": reason.value, "message": message or None}
                )
            return self._leases.lease(lease_id)

    def has_manager(self, lease_id: str) -> bool:
        """Whether the lease's process is a kernel: only their managers are given time for a restart."""
        with self._db.snapshot():
            return bool(self._leases.row(lease_id)["grace"])

    def resume(self, lease_id: str) -> Lease:
        """Put a parked lease in the queue for its devices."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            if row["state"] == LeaseState.PARKED:
                values = {"number": row["number"], "turn": self._next_turn(), "now": self._clock.wall()}
                self._db.run("resume", values)
                self._db.audit_buffer.decided("resumed", row)
                self._queue.serve()
            return self._leases.lease(lease_id)

    def release(self, lease_id: str, reason: EndReason, *, asked: bool = True) -> None:
        """End the lease if it has not ended yet; ``asked`` unless the pool does it by itself."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.live(lease_id)
            if row is not None and row["asked_back"] and reason is EndReason.IDLE:
                reason = EndReason(row["asked_back"])  # it was not for its idleness alone
            self._release(row, reason, asked=asked)

    def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End somebody's lease, and keep for its holder why."""
        with self._db.transaction(self.give_up_at):
            row = self._leases.row(lease_id)
            told = {"number": row["number"], "id": lease_id, "notice": plain(message)}
            self._db.run("set_notice", {**told, "ending": reason.value})
            self._release(self._leases.row(lease_id), reason)

    def release_key(self, key: str, reason: EndReason, mark: str | None = None) -> None:
        """End the lease of that key, if there is one.

        With ``mark``, only the one that was made with it, see :meth:`request`, and nobody uses yet.
        """
        with self._db.transaction(self.give_up_at):
            row = self._db.one("lease_by_key", key=key)
            if row is None or mark is None or (row["id"].endswith(f"-{mark}") and not row["process"]):
                self._release(row, reason)

    def _release(self, row: sqlite3.Row | None, reason: EndReason, *, asked: bool = True) -> None:
        if row is not None:
            self._end(row, reason, asked=asked)
            if row["somebody_waits"]:
                self._queue.serve()

    def _end(self, row: sqlite3.Row, reason: EndReason, *, asked: bool = False) -> None:
        parts = self._devices.read(row["slices"])
        self._use.add(row)
        self._history.add(row, reason)
        self._devices.count("give_back", parts)
        why = {"reason": row["ending"] or reason.value, "message": row["notice"] or None}
        self._db.audit_buffer.decided("ended", row, parts, why, asked=asked)

    def drain(self, device: str, drained: bool) -> DeviceStatus:
        """Grant nothing more on that device, or grant again; see ``Pool.drain``."""
        with self._db.transaction(self.give_up_at):
            statuses = self._devices.statuses(with_gone=True)
            chosen = admission.find_device(device, [status.device for status in statuses])
            self._devices.drain(chosen.uuid, drained, self._clock.wall())
            self._db.audit_buffer.noted("drained" if drained else "undrained", {"device": chosen.uuid})
            self._queue.serve()
            return next(each for each in self._devices.statuses(with_gone=True) if each.device == chosen)

    def set_notice(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        """Set what the lease's user is told; an empty text for nothing any more.

        With ``ending``, whatever ends the lease from now on, this is why: its
        processes are about to be ended by the pool.
        """
        reason = ending.value if ending else None
        number = int(lease_id.partition("-")[0])
        with self._db.transaction(self.give_up_at):
            self._db.run("set_notice", {"number": number, "id": lease_id, "notice": notice, "ending": reason})
            row = self._leases.live(lease_id)
            if notice and row is not None:
                event, why = "ending" if ending else "warned", {"message": notice, "reason": reason}
                self._db.audit_buffer.decided(event, row, (), why, asked=False)

    def record_failure(self, lease_id: str, failure: Failure) -> None:
        """Record how the lease's kernel has failed, also where the lease has ended with it."""
        texts = failure.message, failure.pod, failure.node, failure.image
        kept = Failure(failure.at, *(plain(each, _MOST_OF_FAILURE) for each in texts))
        values = {
            "number": int(lease_id.partition("-")[0]),
            "id": lease_id,
            "failure": write_failure(kept),
        }
        with self._db.transaction(self.give_up_at):
            row = self._leases.live(lease_id)
            known = read_failure(row["failure"]) if row and row["failure"] else None
            if known and known.pod == kept.pod:
                return
            if not self._db.run("fail_lease", values).rowcount:
                self._db.run("fail_history", values)

    # -- What is not about leases --------------------------------------------

    def forget_old(self) -> bool:
        """Keep less of what ended long ago, and of devices long gone; return whether there is more of it.

        Each call is one short transaction, so that others are served in between.
        """
        with self._db.transaction(self.give_up_at):
            return self._history.forget() + self._devices.forget_gone() > 0

    def course_versions(self, course: str, most: int, before: int | None = None) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course file, the last first, numbered below ``before`` if given."""
        values = {"course": course, "before": before, "most": most}
        with self._db.snapshot():
            rows = self._db.run("course_versions", values).fetchall()
        return tuple(CourseVersion(row["user"], row["text"], row["saved_at"], row["number"]) for row in rows)

    def add_course_versions(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Add versions in this order, and forget the oldest; return the number of the last."""
        number = 0
        with self._db.transaction(self.give_up_at):
            for each in versions:
                values = {"course": course, "user": each.user, "text": each.text, "saved_at": each.saved_at}
                number = self._db.run("add_course_version", values).lastrowid or 0
            self._db.run("forget_course_versions", {"course": course, "most": MOST_VERSIONS})
        return number

    def remove_course_version(self, number: int) -> None:
        """Remove a version of a course file that has come to nothing."""
        with self._db.transaction(self.give_up_at):
            self._db.run("remove_course_version", {"number": number})

    def add_node_start(self, group: str, seconds: float) -> None:
        """Add how long a node of a group took to start, and forget the oldest."""
        with self._db.transaction(self.give_up_at):
            values = {"node_group": group, "seconds": seconds, "now": self._clock.wall()}
            self._db.run("add_node_start", values)
            self._db.run("forget_node_starts", {"node_group": group, "most": _MOST_STARTS})

    def node_starts(self, group: str) -> list[float]:
        """Return how many seconds the latest starts of a group's nodes took."""
        with self._db.snapshot():
            rows = self._db.run("node_starts", {"node_group": group}).fetchall()
        return [row["seconds"] for row in rows]

    def try_writing(self) -> None:
        """Write something that says nothing. Raises ``StoreUnusable`` where no decision could be kept."""
        with self._db.transaction(self.give_up_at):
            self._db.run("set_tried_at", {"now": self._clock.wall()})
        # So little is written over what was written before; a grant needs more.
        self._db.check_room()

    # -- What is over ----------------------------------------------------------

    def leads(self, unless_within: float) -> bool:
        """Whether it is for this process to end what is over, and to serve the queue as time passes.

        It is where no other process does, or where the one that does has not for so many seconds: it
        may stand still.
        """
        if self._db.liveness.reconciles():
            return True
        with self._db.snapshot():
            age = self._clock.uptime() - self._db.one("looked_at")[0]
        return not 0 <= age < unless_within

    def findings(self) -> reclaim.Findings:
        """Return which processes are gone, and whether deadlines have passed."""
        return reclaim.look(self._db, self._clock.uptime())

    def somebody_waits(self) -> bool:
        """Whether anybody is in the queue."""
        with self._db.snapshot():
            return bool(self._db.one("count_waiters")[0])

    def end_gone(self, findings: reclaim.Findings) -> bool:
        """End what was kept alive by processes that are gone; return whether there was any."""
        if not findings.dead:
            return False
        with self._db.transaction(self.give_up_at):
            reclaim.end_gone(self._db, findings.dead, self._clock.uptime(), self._end)
        return True

    def end_overdue(self, findings: reclaim.Findings) -> bool:
        """End what is past its deadline, or its longest time; return whether there was any."""
        if not findings.overdue:
            return False
        with self._db.transaction(self.give_up_at):
            reclaim.end_overdue(self._db, self._clock.uptime(), self._end)
        return True

    def serve_queue(self, *, tell: bool = True) -> bool:
        """Grant to those whose turn has come, as time decides too; return whether there was any.

        ``tell`` if other processes are to know by it that this one leads.
        """
        with self._db.transaction(self.give_up_at):
            if tell:
                self._db.run("set_looked_at", {"now": self._clock.uptime()})
            return self._queue.serve() > 0

    def end_over(self) -> None:
        """End what is over, and serve the queue if anything was: before whoever asks has to wait."""
        findings, now = self.findings(), self._clock.uptime()
        if findings:
            with self._db.transaction(self.give_up_at):
                reclaim.end_overdue(self._db, now, self._end)
                reclaim.end_gone(self._db, findings.dead, now, self._end)
                self._queue.serve()


def without(status: PoolStatus, over: Collection[str]) -> PoolStatus:
    """Return a status without the leases that are over, by id, and without what they hold."""
    left = tuple(lease for lease in status.leases if lease.id not in over)
    queue = [lease for lease in status.queue if lease.id not in over]
    freed = [part for lease in status.leases if lease.id in over for part in lease.slices]
    return replace(
        status,
        devices=tuple(
            _freed(each, [part for part in freed if part.device == each.device]) for each in status.devices
        ),
        leases=left,
        queue=tuple(replace(lease, position=place) for place, lease in enumerate(queue, 1)),
    )


def _freed(status: DeviceStatus, parts: Sequence[Slice]) -> DeviceStatus:
    return replace(
        status,
        held_milli=status.held_milli - sum(part.milli for part in parts),
        held_memory_mib=status.held_memory_mib - sum(part.memory_mib for part in parts),
        held_contexts=status.held_contexts - sum(part.contexts for part in parts),
        leases=status.leases - len(parts),
    )


def _check_seconds(name: str, value: float | None) -> None:
    """Refuse a time that is no time: a deadline that never comes would keep a slice for ever."""
    # Written so that NaN, which compares with nothing, is refused.
    if value is not None and not 0 <= value <= _MOST_SECONDS:
        raise BadRequest(f"{name} is {value} seconds.", f"Accepted: 0 to {_MOST_SECONDS:.0f} seconds.")
