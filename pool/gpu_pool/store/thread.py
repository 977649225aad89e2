"""A store that is opened, and used, in a thread of its own."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from gpu_pool.audit.callers import Caller
from gpu_pool.store.context import StoreContext
from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool.worker import Worker
from gpu_pool_client._log import get_logger

T = TypeVar("T")
P = ParamSpec("P")


class _Call(NamedTuple):
    """A transaction with its arguments, in whose name it is made, and the context of that."""

    caller: Caller | None
    context: Context
    transaction: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: Whether the course files are followed first.
    follows_courses: bool = True


class StoreThread:
    """Runs transactions of the store at ``path``, one after another. May be used from several event loops.

    A transaction is a plain function of a :class:`StoreContext`: ``await thread.run(leases.read, lease_id)``
    returns what ``leases.read(store, lease_id)`` does. Each goes by the course files as they are then.
    ``open_store`` opens it at the first call, by ``give_up_at`` (``time.monotonic()``) at the latest;
    ``before_opening`` is waited for before that, however long it takes.

    It is of the process that has made it: a forked child has neither the thread nor the store's locks.
    """

    def __init__(
        self,
        path: Path,
        open_store: Callable[[float | None], StoreContext],
        before_opening: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        #: Seconds after which a transaction is given up that could not begin, and that closing may take.
        self.answer_within, self.close_within = 30.0, 1.0
        self._path = path
        self._pid = os.getpid()
        self._before_opening = before_opening
        self._opened = _OpenedStore(open_store)
        self._worker = Worker("gpu-pool", self._opened.together)
        #: In whose name transactions are made; None for this process.
        self._caller: Caller | None = None

    def for_caller(self, caller: Caller | None) -> StoreThread:
        """Return the same thread for what is asked in a caller's name: it is in the context of the store."""
        asked = copy.copy(self)
        asked._caller = caller
        return asked

    def run(
        self, transaction: Callable[Concatenate[StoreContext, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a transaction with these arguments, and return what it returns.

        Raises ``StoreUnusable`` where it could not begin within :attr:`answer_within` seconds, or is not
        done soon after, and at once in a forked child. What there was no room for is tried once more: what
        was written before may have been moved together meanwhile.
        """
        return self._answer(
            _Call(self._caller, copy_context(), transaction, args, kwargs), self.answer_within
        )

    def run_alone(
        self,
        seconds: float,
        transaction: Callable[Concatenate[StoreContext, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]:
        """Run a transaction like :meth:`run`, within so many seconds, and follow no course files before."""
        return self._answer(_Call(self._caller, copy_context(), transaction, args, kwargs, False), seconds)

    async def _answer(self, call: _Call, seconds: float, tries: int = 2) -> Any:
        if self._is_forked:
            raise StoreUnusable(
                f"Process {os.getpid()} was forked from process {self._pid}, and cannot use the pool's "
                f"store, {self._path}, by what that one has opened.",
                "Connect to the pool in the process that uses it.",
            )
        if self._before_opening is not None and self._opened.store is None:
            await self._before_opening()
        give_up_at = time.monotonic() + seconds
        try:
            return await self._worker.run(partial(self._opened.run, call, give_up_at), seconds + 1)
        except TimeoutError as error:
            raise self._stuck(seconds) from error
        except NoSpace:
            if tries == 1:
                raise
            return await self._answer(call, seconds, tries - 1)

    def run_later(
        self,
        transaction: Callable[Concatenate[StoreContext, P], object],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run a transaction after those already queued, however long they take; nobody waits for it.

        What there is no room for is done as soon as there is. In a forked child there is nothing to do:
        whatever it has asked for was refused.
        """
        if self._is_forked:
            return
        call = _Call(self._caller, copy_context(), transaction, args, kwargs)
        self._worker.submit(partial(self._opened.run_unawaited, call))

    async def close(self) -> None:
        """Close the store once what was begun is done. A forked child has none of it."""
        if self._is_forked:
            return
        self._worker.submit(self._opened.close)
        # Whatever holds the store up has been said already by the call that met it.
        with contextlib.suppress(TimeoutError):
            await self._worker.run(lambda: None, self.close_within)
        self._worker.stop()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _stuck(self, within: float) -> StoreUnusable:
        store = self._opened.store
        holder = None if store is None else store.db.holder()
        who = f" Process {holder} has it." if holder else ""
        return StoreUnusable(
            f"The pool's store, {self._path}, has been locked for {within:.0f} seconds.{who}",
            "If that process is stopped, continue or end it.",
        )


class _OpenedStore:
    """The store, and what is still owed to it. But for a look at :attr:`store`, used in its thread."""

    def __init__(self, open_store: Callable[[float | None], StoreContext]) -> None:
        self._open = open_store
        #: None until the first transaction.
        self.store: StoreContext | None = None
        #: Calls for whose outcome nobody waits, and that there was no room for.
        self._owed: list[_Call] = []
        #: Those that were made in the block of calls that is under way, which may still fail as a whole.
        self._in_block: list[_Call] | None = None

    def run(self, call: _Call, give_up_at: float | None) -> Any:
        """Make a call, after those that there was no room for before.

        While one of these cannot be made, another may read, and decide nothing: a request
        would else be ended by what was decided, of an earlier one of its key, before it.
        """
        store = self.store = self.store or self._open(give_up_at)
        store.give_up_at = give_up_at
        store.db.refusal = self._do_owed(store) if self._owed else None
        try:
            if call.follows_courses and store.course_files is not None:
                call.context.run(store.follow_files)
            store.caller = call.caller
            return call.context.run(call.transaction, store, *call.args, **call.kwargs)
        finally:
            store.db.refusal = None

    def run_unawaited(self, call: _Call) -> None:
        """Make a call for whose outcome nobody waits: later, if there is no room for it now."""
        try:
            self.run(call, give_up_at=None)
        except NoSpace:
            self._owed.append(call)
        else:
            self._note_done(call)

    def _do_owed(self, store: StoreContext) -> StoreUnusable | None:
        """Do what there was no room for before; return why that is still not possible."""
        while self._owed:
            call = self._owed.pop(0)
            try:
                store.caller = call.caller
                call.context.run(call.transaction, store, *call.args, **call.kwargs)
            except StoreUnusable as error:
                self._owed.insert(0, call)
                return error
            except Exception as error:  # noqa: BLE001 - it belongs to nobody who asks now
                get_logger().warning("What was put off for want of space cannot be done: %s", error)
            else:
                self._note_done(call)
        return None

    def _note_done(self, call: _Call) -> None:
        if self._in_block is not None:
            self._in_block.append(call)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make the calls within this in one transaction; see ``Database.together``."""
        done: list[_Call] = []
        self._in_block = done
        try:
            with contextlib.nullcontext() if self.store is None else self.store.db.together():
                yield
        except BaseException:
            # Nothing of the block is in the store.
            self._owed = [*done, *self._owed]
            raise
        finally:
            self._in_block = None

    def close(self) -> None:
        """Close the store; the next call would open it anew."""
        if self.store is not None:
            self.store.db.close()
            self.store = None
