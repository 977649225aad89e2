"""What is kept beside the leases that live: history, when kernels worked, course files, starts of nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.store import yielding
from gpu_pool.store.context import StoreContext
from gpu_pool.store.lease_table import plain, write_hibernation
from gpu_pool_client import BadRequest, EndedLease, Hibernation
from gpu_pool_client._requests import MAX_MIB

#: Starts that are kept of each group of nodes, the latest, and versions of each course.
_MOST_STARTS: Final = 20
MOST_VERSIONS: Final = 100
#: Unix seconds of a begin, and seconds.
Span: TypeAlias = tuple[float, float]
#: Spans that are kept of one lease, and those that are read at once.
_MOST_OF_LEASE: Final = 10_000
_MOST_READ: Final = 1_000_000


def history(store: StoreContext, since: float, user: str | None = None) -> list[EndedLease]:
    """Return the leases, or those of a user, that have ended since then; see ``Pool.history``."""
    with store.db.snapshot():
        return store.history.read(since, user)


def ended_after(store: StoreContext, place: int, since: float) -> tuple[list[EndedLease], int]:
    """Return what has ended after a place in the order of ends; see ``HistoryTable.ended_after``."""
    with store.db.snapshot():
        return store.history.ended_after(place, since)


def report_busy(
    store: StoreContext, lease_id: str, spans: Iterable[Span], gives_way_since: float | None = None
) -> None:
    """Keep when a lease's kernel worked, as long as the history keeps the lease; see ``Pool.report_busy``.

    A span with a begin that is known replaces that one. Too many are left out.
    """
    with store.db.transaction(store.give_up_at):
        row, worked_at = store.leases.row(lease_id), None
        number = row["number"]
        kept = int(store.db.one("busy_of_lease", number=number)[0])
        for began, seconds in spans:
            if not (math.isfinite(began) and math.isfinite(seconds) and seconds >= 0):
                raise BadRequest(
                    f"A kernel cannot have been busy at {began} for {seconds} s.",
                    "Accepted: Unix seconds, and seconds.",
                )
            if kept < _MOST_OF_LEASE:
                store.db.run("add_busy", {"number": number, "began": began, "seconds": seconds})
                kept += 1
            worked_at = max(began + seconds, worked_at or 0.0)
        yielding.note(store, row, gives_way_since, worked_at)


def report_hibernation(store: StoreContext, lease_id: str, hibernation: Hibernation) -> None:
    """Keep how a lease's kernel stands that can go to disk; see ``Pool.report_hibernation``."""
    mib = hibernation.image_mib
    if mib is not None and not 0 <= mib <= MAX_MIB:
        raise BadRequest(f"An image of {mib} MiB cannot be.", f"Accepted: from 0 to {MAX_MIB} MiB, or null.")
    kept = replace(hibernation, why_awake=plain(hibernation.why_awake))
    with store.db.transaction(store.give_up_at):
        number = store.leases.row(lease_id)["number"]
        store.db.run("set_hibernation", {"number": number, "hibernation": write_hibernation(kept)})


def busy_times(store: StoreContext, since: float) -> dict[str, tuple[Span, ...]]:
    """Return when the kernels of leases worked that have ended since then; see ``Pool.busy_times``."""
    found: dict[str, list[Span]] = defaultdict(list)
    with store.db.snapshot():
        for row in store.db.run("busy_times", {"since": since, "most": _MOST_READ}).fetchall():
            found[row["id"]].append((row["began"], row["seconds"]))
    return {lease: tuple(spans) for lease, spans in found.items()}


def forget_old(store: StoreContext) -> bool:
    """Keep less of what ended long ago, and of devices long gone; return whether there is more of it.

    Each call is one short transaction, so that others are served in between.
    """
    with store.db.transaction(store.give_up_at):
        return store.history.forget() + store.devices.forget_gone() > 0


def course_versions(
    store: StoreContext, course: str, most: int, before: int | None = None
) -> tuple[CourseVersion, ...]:
    """Return the latest versions of a course file, the last first, numbered below ``before`` if given."""
    values = {"course": course, "before": before, "most": most}
    with store.db.snapshot():
        rows = store.db.run("course_versions", values).fetchall()
    return tuple(CourseVersion(row["user"], row["text"], row["saved_at"], row["number"]) for row in rows)


def add_course_versions(store: StoreContext, course: str, versions: Sequence[CourseVersion]) -> int:
    """Add versions in this order, and forget the oldest; return the number of the last."""
    number = 0
    with store.db.transaction(store.give_up_at):
        for each in versions:
            values = {"course": course, "user": each.user, "text": each.text, "saved_at": each.saved_at}
            number = store.db.run("add_course_version", values).lastrowid or 0
        store.db.run("forget_course_versions", {"course": course, "most": MOST_VERSIONS})
    return number


def remove_course_version(store: StoreContext, number: int) -> None:
    """Remove a version of a course file that has come to nothing."""
    with store.db.transaction(store.give_up_at):
        store.db.run("remove_course_version", {"number": number})


def add_node_start(store: StoreContext, group: str, seconds: float) -> None:
    """Add how long a node of a group took to start, and forget the oldest."""
    with store.db.transaction(store.give_up_at):
        values = {"node_group": group, "seconds": seconds, "now": store.clock.wall()}
        store.db.run("add_node_start", values)
        store.db.run("forget_node_starts", {"node_group": group, "most": _MOST_STARTS})


def node_starts(store: StoreContext, group: str) -> list[float]:
    """Return how many seconds the latest starts of a group's nodes took."""
    with store.db.snapshot():
        rows = store.db.run("node_starts", {"node_group": group}).fetchall()
    return [row["seconds"] for row in rows]


def try_writing(store: StoreContext) -> None:
    """Write something that says nothing. Raises ``StoreUnusable`` where no decision could be kept."""
    with store.db.transaction(store.give_up_at):
        store.db.run("set_tried_at", {"now": store.clock.wall()})
    # So little is written over what was written before; a grant needs more.
    store.db.check_room()
