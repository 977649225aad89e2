"""How long nodes took to start, where an autoscaler starts them: what whoever waits for one is told."""

from __future__ import annotations

from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.ledger.database import Database

#: Starts of each group that are kept, the latest.
_MOST: Final = 20


class StartTable:
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
