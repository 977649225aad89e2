"""What everybody has used, kept so that fairness and quotas need not read the history."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_pool.clock import Clock
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.records import Row
from gpu_pool.queueing import Policy, Usage, faded_use
from gpu_pool.quotas import Account


class UseTable:
    """Reads and writes use, inside the transactions of its caller. Times are Unix seconds."""

    def __init__(self, database: Database, policy: Policy, clock: Clock, term_began: float) -> None:
        self._db = database
        self._policy = policy
        self._clock = clock
        self._term_began = term_began

    def add(self, lease: Row) -> None:
        """Count what a lease has used since it was granted, as it ends or is parked."""
        if lease["held_at"] is None:
            return
        times = self._times()
        now, milli = times["now"], lease["milli"]
        since = min(lease["held_at"], now)
        used = {
            "by_course": faded_use(milli, since, now, now, self._policy.course_half_life),
            "by_user": faded_use(milli, since, now, now, self._policy.user_half_life),
            "in_week": milli * max(0.0, now - max(since, times["week_began"])),
            "in_term": milli * max(0.0, now - max(since, times["term_began"])),
        }
        self._db.run("add_use", {"course": lease["course"], "user": lease["user"], **used, **times})

    def usage(self) -> Usage:
        """Return what the queue compares courses and users by."""
        courses: dict[str, float] = {}
        users: dict[tuple[str, str], float] = {}
        for row in self._db.run("uses_now", self._times()).fetchall():
            courses[row["course"]] = courses.get(row["course"], 0.0) + row["by_course"]
            users[row["course"], row["user"]] = row["by_user"]
        return Usage(courses, users)

    def accounts(self) -> Iterator[Account]:
        """Yield what quotas count: what is held, parked or waited for, and what was used before."""
        times = self._times()
        for row in self._db.run("accounts", {**times, "uptime": self._clock.uptime()}).fetchall():
            yield Account(**{**dict(row), "in_week": row["in_week"] or 0.0, "in_term": row["in_term"] or 0.0})
        for row in self._db.run("uses_now", times).fetchall():
            yield Account(row["user"], row["course"], in_week=row["in_week"], in_term=row["in_term"])

    def _times(self) -> dict[str, float]:
        return {
            "now": self._clock.wall(),
            "week_began": self._clock.week_began(),
            "term_began": self._term_began,
            "course_half_life": self._policy.course_half_life,
            "user_half_life": self._policy.user_half_life,
        }
