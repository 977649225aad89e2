"""A store that is opened, and used, in a thread of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Final, TypeVar

from traitlets.log import get_logger

from gpu_pool.store.database import Database
from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool.store.leases import LeaseStore
from gpu_pool.worker import Worker

T = TypeVar("T")

#: A decision that could not begin for this long is given up.
ANSWER_WITHIN: Final = 30.0
#: Seconds that closing may take.
_CLOSE_WITHIN: Final = 1.0


class StoreThread:
    """Runs jobs on the store at ``path``, one after another. May be used from several event loops.

    ``open_store`` opens it at the first job, by ``give_up_at`` (``time.monotonic()``) at the latest.
    """

    def __init__(self, path: Path, open_store: Callable[[float | None], tuple[Database, LeaseStore]]) -> None:
        self._path = path
        self._open = open_store
        self._worker = Worker("gpu-pool", self._together)
        self._opened: tuple[Database, LeaseStore] | None = None
        #: Jobs for whose outcome nobody waits, and that there was no room for.
        self._owed: list[Callable[[LeaseStore], object]] = []
        #: Those that were done in the block of jobs that is under way, which may still fail as a whole.
        self._in_block: list[Callable[[LeaseStore], object]] | None = None

    async def do(self, job: Callable[[LeaseStore], T], within: float | None = None) -> T:
        """Run a job and return what it returns.

        Raises ``StoreUnusable`` where it has not begun ``within`` so many seconds (by default
        ``ANSWER_WITHIN``), or is not done soon after. A job that there was no room for is done
        again: what was written before may have been moved together meanwhile.
        """
        within = ANSWER_WITHIN if within is None else within
        try:
            return await self._do(job, within)
        except NoSpace:
            return await self._do(job, within)

    async def _do(self, job: Callable[[LeaseStore], T], within: float) -> T:
        give_up_at = time.monotonic() + within
        context = copy_context()  # who asks is known there, too
        try:
            return await self._worker.run(lambda: context.run(self._run, job, give_up_at), within + 1)
        except TimeoutError as error:
            raise self._stuck(within) from error

    def later(self, job: Callable[[LeaseStore], object]) -> None:
        """Run a job after those already queued, however long they take; nobody waits for it.

        One that there is no room for is done as soon as there is.
        """
        context = copy_context()  # who asks is known there, too

        def run(lease_store: LeaseStore) -> object:
            return context.run(job, lease_store)

        self._worker.submit(lambda: self._run_later(run))

    async def close(self) -> None:
        """Close the store once what was begun is done."""
        self._worker.submit(self._close)
        # Whatever holds the store up has been said already by the call that met it.
        with contextlib.suppress(TimeoutError):
            await self._worker.run(lambda: None, _CLOSE_WITHIN)
        self._worker.stop()

    def _run(self, job: Callable[[LeaseStore], T], give_up_at: float | None) -> T:
        """Run a job, after those that there was no room for before.

        While one of these cannot be done, a job may read, and decide nothing: a request
        would else be ended by what was decided, of an earlier one of its key, before it.
        """
        database, lease_store = self._store(give_up_at)
        with database.refusing(self._do_owed(lease_store)):
            return job(lease_store)

    def _do_owed(self, lease_store: LeaseStore) -> StoreUnusable | None:
        """Do what there was no room for before; return why that is still not possible."""
        while self._owed:
            job = self._owed.pop(0)
            try:
                job(lease_store)
            except StoreUnusable as error:
                self._owed.insert(0, job)
                return error
            except Exception as error:  # noqa: BLE001 - it belongs to nobody who asks now
                get_logger().warning("What was put off for want of space cannot be done: %s", error)
            else:
                self._done(job)
        return None

    def _run_later(self, job: Callable[[LeaseStore], object]) -> None:
        try:
            self._run(job, give_up_at=None)
        except NoSpace:
            self._owed.append(job)
        else:
            self._done(job)

    def _done(self, job: Callable[[LeaseStore], object]) -> None:
        if self._in_block is not None:
            self._in_block.append(job)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        done: list[Callable[[LeaseStore], object]] = []
        self._in_block = done
        try:
            with contextlib.nullcontext() if self._opened is None else self._opened[0].together():
                yield
        except BaseException:
            # Nothing of the block is in the store.
            self._owed = [*done, *self._owed]
            raise
        finally:
            self._in_block = None

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    def _store(self, give_up_at: float | None) -> tuple[Database, LeaseStore]:
        """Return the store, whose decisions wait for others until ``give_up_at`` at most."""
        if self._opened is None:
            self._opened = self._open(give_up_at)
        self._opened[1].give_up_at = give_up_at
        return self._opened

    def _stuck(self, within: float) -> StoreUnusable:
        holder = self._opened[0].holder() if self._opened else None
        who = f" Process {holder} has it." if holder else ""
        return StoreUnusable(
            f"The pool's store, {self._path}, has been locked for {within:.0f} seconds.{who}",
            "If that process is stopped, continue or end it.",
        )
