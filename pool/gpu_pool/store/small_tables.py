"""How long nodes took to start, where an autoscaler starts them: what whoever waits for one is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.store.database import Database

#: Starts of each group that are kept, the latest.
_MOST: Final = 20


class NodeStartTable:
    """Reads and writes starts. Each call is a transaction of its own."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db, self._clock = database, clock

    def add(self, group: str, seconds: float) -> None:
        """Add a start of a group's node, and forget the oldest."""
        with self._db.transaction():
            values = {"node_group": group, "seconds": seconds, "now": self._clock.wall()}
            self._db.run("add_node_start", values)
            self._db.run("forget_node_starts", {"node_group": group, "most": _MOST})

    def latest(self, group: str) -> list[float]:
        """Return how many seconds the latest starts of a group took."""
        with self._db.snapshot():
            rows = self._db.run("node_starts", {"node_group": group}).fetchall()
        return [row["seconds"] for row in rows]


#: Versions that are kept of each course, the latest.
MOST_VERSIONS: Final = 100


class CourseVersionTable:
    """Reads and writes versions. Each call is a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def latest(self, course: str, most: int, before: int | None = None) -> tuple[CourseVersion, ...]:
        """Return the latest versions, the last first; with ``before``, of those with smaller numbers."""
        values = {"course": course, "before": before, "most": most}
        with self._db.snapshot():
            rows = self._db.run("course_versions", values).fetchall()
        return tuple(CourseVersion(row["user"], row["text"], row["saved_at"], row["number"]) for row in rows)

    def add(self, course: str, versions: Sequence[CourseVersion]) -> int:
        """Add versions in this order, and forget the oldest; return the number of the last."""
        number = 0
        with self._db.transaction():
            for each in versions:
                values = {"course": course, "user": each.user, "text": each.text, "saved_at": each.saved_at}
                number = self._db.run("add_course_version", values).lastrowid or 0
            self._db.run("forget_course_versions", {"course": course, "most": MOST_VERSIONS})
        return number

    def remove(self, number: int) -> None:
        """Remove a version that has come to nothing."""
        with self._db.transaction():
            self._db.run("remove_course_version", {"number": number})
