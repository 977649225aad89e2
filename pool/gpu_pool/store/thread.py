"""A store that is opened, and used, in a thread of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from gpu_pool.store.database import Database
from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool.store.leases import LeaseStore
from gpu_pool.worker import Worker
from gpu_pool_client._log import get_logger

T = TypeVar("T")
P = ParamSpec("P")

#: Seconds after which a decision is given up that could not begin.
ANSWER_WITHIN: Final = 30.0
#: Seconds that closing may take.
_CLOSE_WITHIN: Final = 1.0


class _Call(NamedTuple):
    """A function of the store with its arguments, and the context of its caller: who asks, above all."""

    context: Context
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: Whether the course files are followed first.
    follows_courses: bool = True


class StoreThread:
    """Calls functions of the store at ``path``, one after another. May be used from several event loops.

    ``await thread.run(LeaseStore.lease, lease_id)`` returns what ``store.lease(lease_id)`` does; any function
    whose first argument is the store will do. ``open_store`` opens it at the first call, by ``give_up_at``
    (``time.monotonic()``) at the latest; ``before_opening`` is waited for before that, however long it takes.
    ``follow_courses``, if any, is called with the store before each
    function, so that every decision goes by the course files as they are now.
    """

    def __init__(
        self,
        path: Path,
        open_store: Callable[[float | None], tuple[Database, LeaseStore]],
        follow_courses: Callable[[LeaseStore], None] | None = None,
        before_opening: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._path = path
        self._open = open_store
        self._follow_courses = follow_courses
        self._before_opening = before_opening
        self._worker = Worker("gpu-pool", self._together)
        self._opened: tuple[Database, LeaseStore] | None = None
        #: Calls for whose outcome nobody waits, and that there was no room for.
        self._owed: list[_Call] = []
        #: Those that were made in the block of calls that is under way, which may still fail as a whole.
        self._in_block: list[_Call] | None = None

    def run(
        self, function: Callable[Concatenate[LeaseStore, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Call a function with the store and these arguments, and return what it returns.

        Raises ``StoreUnusable`` where it could not begin within ``ANSWER_WITHIN`` seconds, or is not
        done soon after. What there was no room for is tried once more: what was written before may have
        been moved together meanwhile.
        """
        return self._answer(_Call(copy_context(), function, args, kwargs), ANSWER_WITHIN)

    def run_alone(
        self,
        seconds: float,
        function: Callable[Concatenate[LeaseStore, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]:
        """Call a function as :meth:`run` does, within so many seconds, and follow no course files before."""
        return self._answer(_Call(copy_context(), function, args, kwargs, False), seconds)

    async def _answer(self, call: _Call, seconds: float, tries: int = 2) -> Any:
        if self._opened is None and self._before_opening is not None:
            await self._before_opening()
        give_up_at = time.monotonic() + seconds
        try:
            return await self._worker.run(partial(self._run, call, give_up_at), seconds + 1)
        except TimeoutError as error:
            raise self._stuck(seconds) from error
        except NoSpace:
            if tries == 1:
                raise
            return await self._answer(call, seconds, tries - 1)

    def run_later(
        self, function: Callable[Concatenate[LeaseStore, P], object], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a function after those already queued, however long they take; nobody waits for it.

        What there is no room for is done as soon as there is.
        """
        self._worker.submit(partial(self._run_later, _Call(copy_context(), function, args, kwargs)))

    async def close(self) -> None:
        """Close the store once what was begun is done."""
        self._worker.submit(self._close)
        # Whatever holds the store up has been said already by the call that met it.
        with contextlib.suppress(TimeoutError):
            await self._worker.run(lambda: None, _CLOSE_WITHIN)
        self._worker.stop()

    # -- In the thread -------------------------------------------------------

    def _run(self, call: _Call, give_up_at: float | None) -> Any:
        """Make a call, after those that there was no room for before.

        While one of these cannot be made, another may read, and decide nothing: a request
        would else be ended by what was decided, of an earlier one of its key, before it.
        """
        if self._opened is None:
            self._opened = self._open(give_up_at)
        database, store = self._opened
        store.give_up_at = give_up_at
        database.refusal = self._do_owed(store) if self._owed else None
        try:
            if call.follows_courses and self._follow_courses is not None:
                call.context.run(self._follow_courses, store)
            return call.context.run(call.function, store, *call.args, **call.kwargs)
        finally:
            database.refusal = None

    def _do_owed(self, store: LeaseStore) -> StoreUnusable | None:
        """Do what there was no room for before; return why that is still not possible."""
        while self._owed:
            call = self._owed.pop(0)
            try:
                call.context.run(call.function, store, *call.args, **call.kwargs)
            except StoreUnusable as error:
                self._owed.insert(0, call)
                return error
            except Exception as error:  # noqa: BLE001 - it belongs to nobody who asks now
                get_logger().warning("What was put off for want of space cannot be done: %s", error)
            else:
                self._note_done(call)
        return None

    def _run_later(self, call: _Call) -> None:
        try:
            self._run(call, give_up_at=None)
        except NoSpace:
            self._owed.append(call)
        else:
            self._note_done(call)

    def _note_done(self, call: _Call) -> None:
        if self._in_block is not None:
            self._in_block.append(call)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        done: list[_Call] = []
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

    def _stuck(self, within: float) -> StoreUnusable:
        holder = self._opened[0].holder() if self._opened else None
        who = f" Process {holder} has it." if holder else ""
        return StoreUnusable(
            f"The pool's store, {self._path}, has been locked for {within:.0f} seconds.{who}",
            "If that process is stopped, continue or end it.",
        )
