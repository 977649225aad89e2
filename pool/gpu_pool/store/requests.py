"""Asking for a slice: granted at once, queued or refused; and what whoever asks can be told.

What fits and whose turn it is, pure functions say (``admission``,
``placement``, ``queue``); this module reads what they need and writes what
they decide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from gpu_pool.names import checked_name
from gpu_pool.policy import admission, placement, quotas
from gpu_pool.policy.queue_state import Situation
from gpu_pool.store import reclaim
from gpu_pool.store.context import StoreContext
from gpu_pool.store.lease_table import gone, plain, read_request, write_process
from gpu_pool.store.queue import QueueForecast, allowed_devices
from gpu_pool_client import (
    BadRequest,
    Device,
    Holder,
    Lease,
    NeverFits,
    NotAllowed,
    Outlook,
    Process,
    Slice,
    SliceRequest,
    TimedOut,
)

_KEY: Final = re.compile(r"[!-~]{1,128}")


def decide(
    store: StoreContext,
    request: SliceRequest,
    holder: Holder,
    key: str,
    within: Collection[str] = (),
    mark: str | None = None,
    asked: SliceRequest | None = None,
) -> Lease:
    """Grant, or queued; repeated with the same key, return what became of it.

    ``within`` are the uuids of the devices that it may have; none mean all. ``mark``, 8 hexadecimal
    digits, is in the id of a lease that is made now: who asked knows it from one that was there. The
    course is asked about ``asked``, by default the request.
    """
    if not _KEY.fullmatch(key):
        raise BadRequest("The key of a request is 1 to 128 printable ASCII characters without spaces.")
    row = _draft(store, request, holder, key)
    limits = list(quotas.scopes(store.sharing, row["user"], row["course"])) if store.has_quotas else []
    with store.db.transaction(store.give_up_at):
        known, somebody_waits, number = store.db.one("ask", key=key)
        if known:  # whatever would be said of a new one by now
            return store.leases.by_key(key)
        admission.check_rules(request, store.rules)
        if store.course_files is not None:
            store.check_course(asked or request, holder)
        row["number"], row["id"] = number, f"{number}-{mark or os.urandom(4).hex()}"
        row["within"] = ",".join(sorted(within))
        statuses = [
            s for s in store.devices.statuses() if not s.drained and (not within or s.device.uuid in within)
        ]
        parts = None if somebody_waits else placement.place(request, statuses, store.rules)
        if parts is None or limits:
            _check(store, request, row, limits)
        if parts is None:
            _check_waiting(store, request, row["user"])
            _insert_waiting(store, row)
            return store.leases.lease(str(row["id"]))
        _insert_held(store, row, parts)
    return store.leases.value(row, parts)


def _draft(store: StoreContext, request: SliceRequest, holder: Holder, key: str) -> dict[str, Any]:
    """Return what is known of a lease's row before any decision."""
    me, course = Process.current(), store.sharing.course(holder.course)
    keeper = holder.process or me
    return {
        "key": key,
        "request": str(request),
        "user": checked_name(holder.user),
        # A name that nobody has configured has no weight and no quota of its own.
        "course": course.name,
        "batch": int(holder.batch or course.batch),
        "yields": holder.yields,
        "kernel": holder.kernel and plain(holder.kernel),
        "requested_at": store.clock.wall(),
        "queued_at": store.clock.uptime(),
        "keeper": write_process(keeper),
        "pulse": store.db.liveness.own() if keeper == me else None,
        "process": None,
        "notice": "",
        "asked_back": None,
        "failure": "",
        "held_before": 0.0,
        "outside": False,
        "used_before": 0.0,
        "parked_at": None,
        "lent": 0.0,
        "burst_since": None,
        "burst_before": 0.0,
        "burst_peak_mib": 0,
        "hibernates": False,
        "hibernation": "",
    }


def _check(
    store: StoreContext, request: SliceRequest, row: dict[str, Any], limits: Sequence[quotas.Scope]
) -> None:
    """Refuse what can never be granted, and what is over a quota; note how much it is."""
    within = set(filter(None, row["within"].split(",")))
    devices = [s.device for s in store.devices.statuses() if not within or s.device.uuid in within]
    admission.check(request, devices, store.rules)
    part = next(placement.candidates(request, devices, store.rules))
    row["milli"], row["memory_mib"] = request.count * part.milli, request.count * part.memory_mib
    asked = quotas.Account(row["user"], row["course"], 1, row["milli"], row["memory_mib"])
    accounts = list(store.use.accounts()) if limits else []
    allowed = quotas.Allowed(request, part.device, store.rules, limits, accounts)
    for limit in limits:
        quotas.check(limit, asked, accounts, allowed)


def _insert_held(store: StoreContext, row: dict[str, Any], parts: tuple[Slice, ...]) -> None:
    granted = store.leases.granted(row, parts)
    row.update(state="held", turn=None, waiting_since=None, first_held_at=granted["now"])
    row.update(held_at=granted.pop("now"), held_from=granted["uptime"], **granted)
    store.db.run("insert_lease", row)
    store.devices.count("take", parts)
    store.db.audit_buffer.decided("granted", row, parts, {"waited": 0.0})


def _insert_waiting(store: StoreContext, row: dict[str, Any]) -> None:
    row.update(state="waiting", turn=store.next_turn(), waiting_since=row["requested_at"])
    row.update(slices="[]", first_held_at=None, held_at=None, held_from=None)
    row.update(ends_by=None, terms=None, deadline=None, deadline_reason=None)
    store.db.run("insert_lease", row)
    store.db.audit_buffer.decided("queued", row)
    store.queue.serve()


def shortage(store: StoreContext, lease_id: str) -> TimedOut:
    """Return the error that says why this lease still waits."""
    with store.db.snapshot():
        row = store.leases.row(lease_id)
        wished = allowed_devices(row)
        statuses = [s for s in store.devices.statuses() if not wished or s.device.uuid in wished]
        ahead = (store.leases.position(row) or 1) - 1
    request = read_request(row["request"])
    drained = [status for status in statuses if status.drained]
    usable = [status for status in statuses if not status.drained]
    message, remedy, largest = admission.shortage(request, usable, ahead, store.rules, drained)
    return TimedOut(message, remedy, largest_now=largest)


def hopeless(store: StoreContext, devices: Sequence[Device]) -> dict[str, NeverFits]:
    """Return the waiting leases that could never have these devices, by id, each with why."""
    with store.db.snapshot():
        rows = store.db.run("waiters").fetchall()
    found: dict[str, NeverFits] = {}
    known: dict[tuple[str, frozenset[str]], NeverFits | None] = {}
    for row in rows:
        shape = row["request"], frozenset(allowed_devices(row))
        if shape not in known:
            usable = [each for each in devices if not shape[1] or each.uuid in shape[1]]
            known[shape] = _why_never(store, read_request(row["request"]), usable)
        error = known[shape]
        if error is not None:
            found[row["id"]] = error
    return found


def _why_never(store: StoreContext, request: SliceRequest, devices: Sequence[Device]) -> NeverFits | None:
    try:
        admission.check(request, devices, store.rules)
    except NeverFits as error:
        return error
    except NotAllowed:
        return None
    return None


def why_waiting(store: StoreContext, lease_id: str) -> Outlook:
    """Say why this lease waits."""
    with store.db.snapshot():
        row = store.leases.row(lease_id)
        place = store.leases.position(row)
        reason = reclaim.why_one_is_over(store.db, row, store.clock.uptime())
        if reason is not None:
            raise gone(store.leases.as_ended(row, reason))
        if place is None:
            raise BadRequest(f"Lease {lease_id} does not wait: it is {row['state']}.")
        return store.queue.why_waiting(row, place)


def prospects(store: StoreContext) -> Situation | None:
    """Return what expected waits are worked out from; None where they are not."""
    with store.db.snapshot():
        return store.queue.prospects()


def foresee(
    store: StoreContext,
    request: SliceRequest,
    holder: Holder,
    within: Collection[str] = (),
    asked: SliceRequest | None = None,
) -> QueueForecast | None:
    """Say what a request would meet now; see :func:`decide` and ``Pool.forecast``."""
    admission.check_rules(request, store.rules)
    row = _draft(store, request, holder, key="")
    row.update(home="", within=",".join(sorted(within)), reserved="", waiting_since=row["requested_at"])
    with store.db.snapshot():
        store.check_course(asked or request, holder)
        _check(store, request, row, list(quotas.scopes(store.sharing, row["user"], row["course"])))
        found = store.queue.foresee(row)
        if found is not None and row["user"]:
            _check_waiting(store, request, row["user"])
        return found


def _check_waiting(store: StoreContext, request: SliceRequest, user: str) -> None:
    waiting = store.db.one("waiting_of_user", user=user)[0]
    admission.check_waiting(request, waiting, store.most_waiting)
