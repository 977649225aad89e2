"""A ledger that is opened, and used, in a thread of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from pathlib import Path
from typing import Final, TypeVar

from gpu_pool.ledger.book import Book
from gpu_pool.ledger.database import Database
from gpu_pool.ledger.errors import LedgerUnusable
from gpu_pool.worker import Worker

T = TypeVar("T")

#: A decision that could not begin for this long is given up.
ANSWER_WITHIN: Final = 30.0
#: Seconds that closing may take.
_CLOSE_WITHIN: Final = 1.0


class LedgerThread:
    """Runs jobs on the ledger at ``path``, one after another. May be used from several event loops.

    ``open_ledger`` opens it at the first job, by ``give_up_at`` (``time.monotonic()``) at the latest.
    """

    def __init__(self, path: Path, open_ledger: Callable[[float | None], tuple[Database, Book]]) -> None:
        self._path = path
        self._open = open_ledger
        self._worker = Worker("gpu-pool", self._together)
        self._opened: tuple[Database, Book] | None = None

    async def do(self, job: Callable[[Book], T], within: float | None = None) -> T:
        """Run a job and return what it returns.

        Raises ``LedgerUnusable`` where it has not begun ``within`` so many seconds (by default
        ``ANSWER_WITHIN``), or is not done soon after.
        """
        within = ANSWER_WITHIN if within is None else within
        give_up_at = time.monotonic() + within
        context = copy_context()  # who asks is known there, too
        try:
            return await self._worker.run(lambda: context.run(job, self._book(give_up_at)), within + 1)
        except TimeoutError as error:
            raise self._stuck(within) from error

    def later(self, job: Callable[[Book], object]) -> None:
        """Run a job after those already queued, however long they take; nobody waits for it."""
        context = copy_context()
        self._worker.submit(lambda: context.run(job, self._book(give_up_at=None)))

    async def close(self) -> None:
        """Close the ledger once what was begun is done."""
        self._worker.submit(self._close)
        # Whatever holds the ledger up has been said already by the call that met it.
        with contextlib.suppress(TimeoutError):
            await self._worker.run(lambda: None, _CLOSE_WITHIN)
        self._worker.stop()

    def _together(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._opened is None else self._opened[0].together()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    def _book(self, give_up_at: float | None) -> Book:
        """Return the book, whose decisions wait for others until ``give_up_at`` at most."""
        if self._opened is None:
            self._opened = self._open(give_up_at)
        book = self._opened[1]
        book.give_up_at = give_up_at
        return book

    def _stuck(self, within: float) -> LedgerUnusable:
        holder = self._opened[0].holder() if self._opened else None
        who = f" Process {holder} has it." if holder else ""
        return LedgerUnusable(
            f"The pool's ledger, {self._path}, has been locked for {within:.0f} seconds.{who}",
            "If that process is stopped, continue or end it.",
        )
