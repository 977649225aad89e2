"""What is read of leases, and decided about one: each a transaction of the store.

Those about who gets a slice are in ``requests``, those about what is over in ``reclaim``.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from gpu_pool.policy import admission
from gpu_pool.policy.queue import Waiter
from gpu_pool.store import reclaim, yielding
from gpu_pool.store.context import StoreContext
from gpu_pool.store.lease_table import plain, read_failure, write_failure, write_process
from gpu_pool.store.resizing import with_length
from gpu_pool_client import (
    BadRequest,
    DeviceStatus,
    EndReason,
    Failure,
    Holder,
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
#: Why a lease that is about to end for this reason is not parked, and what to do.
_NOT_PARKED: Final = {
    EndReason.PROCESS_GONE.value: ("its process has ended.", "Start it again, or release the slice."),
    EndReason.NOT_READY.value: ("its process is not ready yet.", "Wait until it is."),
}


def read(store: StoreContext, lease_id: str) -> Lease:
    """Return the lease as it is now, ended ones included, and those that are over and not ended yet."""
    with store.db.snapshot():
        row = store.leases.live(lease_id)
        reason = None if row is None else reclaim.why_one_is_over(store.db, row, store.clock.uptime())
        if row is None or reason is None:
            return store.leases.lease(lease_id)
        return store.leases.as_ended(row, reason)


def read_by_key(store: StoreContext, key: str) -> Lease | None:
    """Return the lease of that key, ended ones included; None if there was none."""
    with store.db.snapshot():
        known = store.db.one("ask", key=key)["known"]
        return store.leases.by_key(key) if known else None


def status(store: StoreContext, url: str) -> PoolStatus:
    """Return everything as one snapshot, without the leases that are over and not ended yet."""
    now = store.clock.uptime()
    findings = reclaim.find_over(store)
    with store.db.snapshot():
        devices = tuple(store.devices.statuses(with_gone=True))
        status = PoolStatus(
            url,
            devices,
            *store.leases.read_all(),
            store_bytes=store.db.size(),
        )
        over = reclaim.over(store.db, findings, now) if findings else ()
    return without(status, over) if over else status


def queue_head(store: StoreContext, most: int) -> list[Waiter]:
    """Return the first who wait, in the order of their turns."""
    with store.db.snapshot():
        return store.queue.queue_head(most)


def bind_process(
    store: StoreContext, lease_id: str, process: Process, ready_within: float | None, grace: float
) -> Lease:
    """Tie the lease to a process; see ``Pool.attach``."""
    _check_seconds("grace", grace)
    _check_seconds("ready_within", ready_within)
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        # What is not held yet has its time once it is.
        watched = ready_within is not None and row["state"] == LeaseState.HELD
        # Whether it is this process or its child, which it watches for as long as it lives.
        ends_with_us = row["pulse"] == store.db.liveness.own() and (
            process.pid == os.getpid() or is_child_of_ours(process.pid)
        )
        values = {
            "number": row["number"],
            "process": write_process(process),
            # What lives on without us is not given up when our sign of life has gone.
            "outlives": not ends_with_us,
            "grace": grace,
            "ready_within": None if watched else ready_within,
            "deadline": store.clock.uptime() + (ready_within or 0) if watched else None,
            "reason": EndReason.NOT_READY.value if watched else None,
        }
        store.db.run("attach", values)
        return store.leases.lease(lease_id)


def set_deadline(store: StoreContext, lease_id: str, ttl: float | None) -> Lease:
    """Lift the deadline, or set it ``ttl`` seconds from now; with nothing attached, only sooner."""
    _check_seconds("ttl", ttl)
    with store.db.transaction(store.give_up_at):
        number = store.leases.row(lease_id)["number"]
        deadline = None if ttl is None else store.clock.uptime() + ttl
        reason = None if ttl is None else EndReason.EXPIRED.value
        store.db.run("set_deadline", {"number": number, "deadline": deadline, "reason": reason})
        return store.leases.lease(lease_id)


def change_size(
    store: StoreContext,
    lease_id: str,
    request: SliceRequest,
    *,
    ahead: bool = False,
    stays: bool = False,
) -> Lease:
    """Change what a lease asks for; see ``Pool.resize``. One that ``stays`` keeps its devices."""
    with store.db.transaction(store.give_up_at):
        before, request = _checked_size(store, lease_id, request)
        store.resizing.change(before, request, ahead=ahead, stays=stays)
        row = store.leases.row(lease_id)
        parts = store.devices.read(row["slices"])
        store.db.audit_buffer.decided("resized", row, parts, {"before": before["request"]})
        store.queue.serve()
        return store.leases.lease(lease_id)


def check_size(store: StoreContext, lease_id: str, request: SliceRequest) -> None:
    """Refuse a size that a lease could never have; nothing is changed."""
    with store.db.snapshot():
        store.resizing.check(*_checked_size(store, lease_id, request))


def _checked_size(
    store: StoreContext, lease_id: str, request: SliceRequest
) -> tuple[sqlite3.Row, SliceRequest]:
    """Return a lease's row, and what it is to ask for, which the rules of the pool and its course allow."""
    row = store.leases.row(lease_id)
    request = with_length(row, request)
    store.check_course(request, Holder(row["user"], row["course"] or None))
    admission.check_rules(request, store.rules)
    return row, request


def lend(store: StoreContext, lease_id: str, *, queued: bool = False, yields: bool = False) -> Lease:
    """Give a held lease's slices to the next; one that waits to resume leaves the queue.

    One that ``yields`` keeps them where they are not asked back any more.

    Whatever else ends it still does, but for this: the time in which a kernel has to be
    ready does not run while its pod is ``queued`` in the cluster.
    """
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        if row["state"] == LeaseState.WAITING and not row["home"]:
            raise BadRequest("A lease that waits in the queue holds nothing to park.", "Release it instead.")
        if yields and row["state"] == LeaseState.HELD and row["asked_back"] is None:
            yielding.note_in_vain(store, row)
            return store.leases.lease(lease_id)
        why_not = _NOT_PARKED.get(row["deadline_reason"])
        if row["state"] == LeaseState.HELD and why_not and not queued:
            raise NotAllowed(f"The slice cannot be lent to others: {why_not[0]}", why_not[1])
        if row["state"] != LeaseState.PARKED:
            _park(store, row, queued=queued)
        return store.leases.lease(lease_id)


def _park(store: StoreContext, row: sqlite3.Row, *, queued: bool = False) -> None:
    parts = store.devices.read(row["slices"])
    home = ",".join(part.device.uuid for part in parts) or row["home"]
    unused = queued and _is_unused(store, row)
    if not unused:
        store.use.add(row)
    parkings = yielding.parkings(store, row)
    values = {"number": row["number"], "home": home, "now": store.clock.wall()}
    values |= {"uptime": store.clock.uptime(), "queued": queued, "unused": unused}
    store.db.run("park", {**values, "parkings": parkings})
    store.db.run("needs_nobody", {"number": row["number"]})
    store.devices.count("give_back", parts)
    why = {"reason": row["asked_back"], "message": row["notice"] or None} if row["asked_back"] else {}
    store.db.audit_buffer.decided("parked", row, parts, why)
    store.queue.serve()


def _is_unused(store: StoreContext, row: sqlite3.Row) -> bool:
    """Whether no kernel has been ready on what is held, nor busy before: one that restarts has been."""
    if row["deadline_reason"] not in (EndReason.NEVER_ATTACHED.value, EndReason.NOT_READY.value):
        return False
    return not store.db.one("has_been_busy", number=row["number"])["found"]


def ask_back(store: StoreContext, lease_id: str, message: str, reason: EndReason, *, now: bool) -> Lease:
    """Ask a held lease's slices back, for when its kernel is idle; or park it ``now``.

    ``reason`` and ``message`` tell its user, and the history, by whom and why. Those of an
    administrator (REVOKED) stay whatever its user asks for afterwards.
    """
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        if row["state"] != LeaseState.HELD:
            raise BadRequest(f"The lease is {row['state']}: it holds no slice.")
        is_by_admin = row["asked_back"] == EndReason.REVOKED.value
        if not is_by_admin or reason is not EndReason.RELEASED:
            values = {"number": row["number"], "notice": plain(message), "reason": reason.value}
            store.db.run("ask_back", values)
        if now:
            _park(store, store.leases.row(lease_id))
        else:
            store.db.audit_buffer.decided(
                "asked-back", row, (), {"reason": reason.value, "message": message or None}
            )
        return store.leases.lease(lease_id)


def has_manager(store: StoreContext, lease_id: str) -> bool:
    """Whether the lease's process is a kernel: only their managers are given time for a restart."""
    with store.db.snapshot():
        return bool(store.leases.row(lease_id)["grace"])


def queue_again(store: StoreContext, lease_id: str) -> Lease:
    """Put a parked lease in the queue for its devices."""
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        if row["state"] == LeaseState.PARKED:
            now = {"now": store.clock.wall(), "uptime": store.clock.uptime()}
            values = {"number": row["number"], "turn": store.next_turn(), **now}
            store.db.run("resume", {**values, **yielding.place(store, row)})
            store.db.audit_buffer.decided("resumed", row)
            store.queue.serve()
        return store.leases.lease(lease_id)


def forget_homes(store: StoreContext, lease_ids: Collection[str]) -> None:
    """Let leases that were parked return to any device: nothing of their kernels is on those of before."""
    with store.db.snapshot():
        rows = [store.leases.live(lease_id) for lease_id in lease_ids]
    numbers = [row["number"] for row in rows if row is not None and row["home"]]
    if not numbers:
        return
    with store.db.transaction(store.give_up_at):
        for number in numbers:
            store.db.run("forget_home", {"number": number})
        store.queue.serve()


def end_lease(store: StoreContext, lease_id: str, reason: EndReason, *, asked: bool = True) -> None:
    """End the lease if it has not ended yet; ``asked`` unless the pool does it by itself."""
    with store.db.transaction(store.give_up_at):
        row = store.leases.live(lease_id)
        is_asked = row is not None and row["asked_back"] not in (None, EndReason.YIELDED)
        if row is not None and is_asked and reason is EndReason.IDLE:
            reason = EndReason(row["asked_back"])  # it was not for its idleness alone
        _release(store, row, reason, asked=asked)


def revoke(store: StoreContext, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
    """End somebody's lease, and keep for its holder why."""
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        told = {"number": row["number"], "id": lease_id, "notice": plain(message)}
        store.db.run("set_notice", {**told, "ending": reason.value})
        _release(store, store.leases.row(lease_id), reason)


def end_request(store: StoreContext, key: str, reason: EndReason, mark: str | None = None) -> None:
    """End the lease of that key, if there is one.

    With ``mark``, only the one that was made with it, see :meth:`request`, and nobody uses yet.
    """
    with store.db.transaction(store.give_up_at):
        row = store.db.one("lease_by_key", key=key)
        if row is None or mark is None or (row["id"].endswith(f"-{mark}") and not row["process"]):
            _release(store, row, reason)


def _release(store: StoreContext, row: sqlite3.Row | None, reason: EndReason, *, asked: bool = True) -> None:
    if row is not None:
        reclaim.end(store, row, reason, asked=asked)
        if row["somebody_waits"]:
            store.queue.serve()


def set_notice(store: StoreContext, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
    """Set what the lease's user is told; an empty text for nothing any more.

    With ``ending``, whatever ends the lease from now on, this is why: its
    processes are about to be ended by the pool.
    """
    reason = ending.value if ending else None
    number = int(lease_id.partition("-")[0])
    with store.db.transaction(store.give_up_at):
        store.db.run("set_notice", {"number": number, "id": lease_id, "notice": notice, "ending": reason})
        row = store.leases.live(lease_id)
        if notice and row is not None:
            event, why = "ending" if ending else "warned", {"message": notice, "reason": reason}
            store.db.audit_buffer.decided(event, row, (), why, asked=False)


def record_failure(store: StoreContext, lease_id: str, failure: Failure) -> None:
    """Record how the lease's kernel has failed, also where the lease has ended with it."""
    texts = failure.message, failure.pod, failure.node, failure.image
    kept = Failure(failure.at, *(plain(each, _MOST_OF_FAILURE) for each in texts))
    values = {
        "number": int(lease_id.partition("-")[0]),
        "id": lease_id,
        "failure": write_failure(kept),
    }
    with store.db.transaction(store.give_up_at):
        row = store.leases.live(lease_id)
        known = read_failure(row["failure"]) if row and row["failure"] else None
        if known and known.pod == kept.pod:
            return
        if not store.db.run("fail_lease", values).rowcount:
            store.db.run("fail_history", values)


def add_job(store: StoreContext, lease_id: str, job: str) -> None:
    """Keep in which job of a batch system a lease's kernel is, besides those before; for the history."""
    with store.db.transaction(store.give_up_at):
        row = store.leases.row(lease_id)
        store.db.run("add_job", {"number": row["number"], "id": lease_id, "job": job})


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
