"""A thread that does a pool's blocking work, one job after another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Answer = Callable[[Any, BaseException | None], None]


class Worker:
    """Run jobs in order in one thread; any event loop may wait for them.

    The thread is a daemon, unlike those of ``concurrent.futures``: a job stuck
    behind a stopped process must not keep an interpreter from exiting. Answers
    go straight to the loop that asked, since a ``concurrent.futures.Future``
    in between would cost as much as a decision of the pool.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a job for whose outcome nobody waits."""
        self._jobs.put((job, _ignore))

    async def run(self, job: Callable[[], T], timeout: float) -> T:
        """Queue a job and wait for what it returns.

        Raises ``TimeoutError`` when that takes longer; the job is not undone.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            # The loop may have been closed meanwhile: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result, error)

        alarm = loop.call_later(timeout, _settle, answer, None, TimeoutError())
        self._jobs.put((job, tell))
        try:
            return await answer
        finally:
            alarm.cancel()

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Queue a job and block the calling thread until it is done. Raises ``TimeoutError``."""
        answer: Future[T] = Future()

        def tell(result: T | None, error: BaseException | None) -> None:
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        self._jobs.put((job, tell))
        try:
            return answer.result(timeout)
        except FutureTimeoutError as error:
            raise TimeoutError from error

    def stop(self) -> None:
        """End the thread after the jobs already queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, tell = item
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                tell(None, error)
            else:
                tell(result, None)
            # Hold on to nothing while waiting for the next job.
            item = job = tell = result = None  # type: ignore[assignment]


def _ignore(_: object, __: BaseException | None) -> None:
    """Take an answer that nobody waits for."""


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
