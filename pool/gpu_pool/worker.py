"""A thread that does a pool's blocking work, one job after another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")
#: Where an outcome is waited for; None for nowhere.
_Answer: TypeAlias = "asyncio.Future[Any] | Future[Any] | None"
_Job: TypeAlias = tuple[Callable[[], Any], _Answer]
_Outcome: TypeAlias = tuple[Any, "BaseException | None"]

#: Jobs that are done together at most: the first of them has to wait for the last.
_MOST_TOGETHER: Final = 32


class Worker:
    """Run jobs in order in one thread; any event loop may wait for them.

    The thread is a daemon, unlike those of ``concurrent.futures``: a job stuck
    behind a stopped process must not keep an interpreter from exiting. Answers
    go straight to the loop that asked, since a ``concurrent.futures.Future``
    in between would cost as much as a decision of the pool.

    Jobs that have queued up are done together, in one block of what ``together``
    returns. Their answers follow its end; where that fails, all are told so.
    """

    def __init__(
        self, name: str, together: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._together = together
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a job for whose outcome nobody waits."""
        self._jobs.put((job, None))

    async def run(self, job: Callable[[], T], timeout: float) -> T:
        """Queue a job and wait for what it returns.

        Raises ``TimeoutError`` when that takes longer; the job is not undone.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        alarm = loop.call_later(timeout, _settle, [(answer, (None, TimeoutError()))])
        self._jobs.put((job, answer))
        try:
            return await answer
        finally:
            alarm.cancel()

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Queue a job and block the calling thread until it is done. Raises ``TimeoutError``."""
        answer: Future[T] = Future()
        self._jobs.put((job, answer))
        try:
            return answer.result(timeout)
        except FutureTimeoutError as error:
            raise TimeoutError from error

    def stop(self) -> None:
        """End the thread after the jobs already queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        jobs: list[_Job] = []
        while (job := self._jobs.get()) is not None:
            jobs.append(job)
            if len(jobs) == _MOST_TOGETHER or self._jobs.empty():
                self._do(jobs)
                # Hold on to nothing while waiting for the next job.
                jobs.clear()
            del job
        if jobs:
            self._do(jobs)

    def _do(self, jobs: list[_Job]) -> None:
        """Do what has queued up, and tell those who wait for it."""
        if len(jobs) == 1:
            outcomes = [_outcome(jobs[0])]
        else:
            try:
                with self._together():
                    outcomes = [_outcome(job) for job in jobs]
            except BaseException:  # noqa: BLE001 - each that somebody waits for says below what became of it
                # Nothing of this is done, perhaps because of one alone: no room is needed to read.
                outcomes = [(None, None) if job[1] is None else _outcome(job) for job in jobs]
        _tell(jobs, outcomes)


def _outcome(job: _Job) -> _Outcome:
    try:
        return job[0](), None
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
        return None, error


def _tell(jobs: list[_Job], outcomes: list[_Outcome]) -> None:
    """Pass on outcomes, waking each event loop once."""
    told: dict[asyncio.AbstractEventLoop, list[tuple[_Answer, _Outcome]]] = {}
    for (_, answer), outcome in zip(jobs, outcomes, strict=True):
        if isinstance(answer, asyncio.Future):
            told.setdefault(answer.get_loop(), []).append((answer, outcome))
        else:
            _settle([(answer, outcome)])
    for loop, some in told.items():
        # The loop may have been closed meanwhile: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, some)


def _settle(told: Iterable[tuple[_Answer, _Outcome]]) -> None:
    for answer, (result, error) in told:
        if answer is None or answer.done():
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
