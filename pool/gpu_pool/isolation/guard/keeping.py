"""The ledger as a guard's own thread uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_pool.gate import CourseGate
from gpu_pool.ledger.accounts import Measured
from gpu_pool.ledger.book import Book
from gpu_pool.ledger.database import Database
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Device, EndReason, Lease


class OwnLedger:
    """A connection of its own to the ledger at ``path``, opened when it is first needed.

    So a guard and whoever else in the process decides about leases never wait
    for each other's thread, only for each other's transactions.
    """

    def __init__(self, path: Path, settings: PoolSettings) -> None:
        self._path = path
        self._settings = settings
        self._gate = CourseGate(settings)
        self._opened: tuple[Database, Book] | None = None

    def held(self) -> Sequence[Lease]:
        """See ``AccountTable.held``."""
        return self._book().accounts.held()

    def devices(self) -> Sequence[Device]:
        """See ``AccountTable.devices``."""
        return self._book().accounts.devices()

    def add(self, news: Mapping[str, Measured]) -> None:
        """See ``AccountTable.add``."""
        self._book().accounts.add(news)

    def tell(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        """See ``AccountTable.tell``."""
        self._book().accounts.tell(lease_id, notice, ending)

    def end(self, lease_id: str, reason: EndReason) -> None:
        """See ``Book.release``."""
        self._book().release(lease_id, reason)

    def close(self) -> None:
        """Close the connection."""
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    def _book(self) -> Book:
        if self._opened is None:
            database = Database(self._path)
            self._opened = database, Book(database, self._settings)
        # Whoever ends a lease serves the line, whose order the course files know.
        return self._gate.keep_up(self._opened[1])
