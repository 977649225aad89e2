"""What all spawners of a Hub share: the courses, and the pool's answers about what is free."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from gpu_pool.courses import CourseFolder, Courses
from gpu_pool_client import (
    BadRequest,
    DeviceStatus,
    GpuPoolError,
    Holder,
    NeverFits,
    NotAllowed,
    Outlook,
    OverQuota,
    Pool,
    PoolStatus,
    SliceRequest,
    connect,
)
from gpu_pool_client._log import get_logger

#: Seconds for which an answer is good enough for somebody who chooses.
_FRESH: Final = 2.0
#: Answers that are kept at once.
_MOST_KEPT: Final = 256

#: A course by its name, and what it offers.
Offered: TypeAlias = tuple[str, SliceRequest]


@dataclass(frozen=True, slots=True)
class PoolSupply:
    """What a pool said of itself."""

    devices: tuple[DeviceStatus, ...] = ()
    #: How somebody who asked for it now would wait, to follow a comma; without what would be granted at once.
    waits: Mapping[Offered, str] = field(default_factory=dict)
    #: Why somebody who asked for it now would be refused, as sentences.
    refusals: Mapping[Offered, str] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether any device is simulated."""
        return any(status.device.simulated for status in self.devices)


class PoolView:
    """A pool as the Hub sees it."""

    def __init__(self, url: str, within: float = 3.0) -> None:
        """``within`` is the seconds in which the pool answers, or the page says that it does not."""
        self._url, self._within = url, within
        self._pool: Pool | None = None
        self._answers: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def supply(self, offered: Collection[Offered] = ()) -> PoolSupply | None:
        """Return what the pool has, with the waits for what is offered; None if it does not answer."""
        try:
            return await asyncio.wait_for(self._read(offered), self._within)
        except asyncio.TimeoutError:
            get_logger().warning("The pool at %s does not answer within %g s.", self._url, self._within)
        except GpuPoolError as error:
            get_logger().warning("Asking the pool at %s failed: %s", self._url, error)
        return None

    async def _read(self, offered: Collection[Offered]) -> PoolSupply:
        if self._pool is None:
            self._pool = connect(self._url)
        pool = self._pool
        status: PoolStatus = await self._recent("status", pool.status)
        # Of what is free, too: it may be kept for those in the queue, whom not everybody sees.
        met = await asyncio.gather(
            *(self._recent(each, functools.partial(_met, pool, *each)) for each in offered)
        )
        found = dict(zip(offered, met, strict=True))
        return PoolSupply(
            status.devices,
            {each: words.wait for each, words in found.items() if words.wait},
            {each: words.refusal for each, words in found.items() if words.refusal},
        )

    async def _recent(self, question: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question that anybody has asked lately, or ask it."""
        asked_at, answer = self._answers.get(question, (0.0, None))
        if answer is None or (answer.done() and time.monotonic() - asked_at > _FRESH):
            if len(self._answers) >= _MOST_KEPT:
                self._answers.clear()
            answer = asyncio.ensure_future(ask())
            # Nobody may be there any more to hear of its failure.
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._answers[question] = time.monotonic(), answer
        # Whoever closes the page does not end it for the others.
        return await asyncio.shield(answer)


class _Outcome(NamedTuple):
    """What happens to somebody who asks; see :class:`PoolSupply`."""

    wait: str = ""
    refusal: str = ""


async def _met(pool: Pool, course: str, request: SliceRequest) -> _Outcome:
    """Return what somebody would meet who is in the course and has used nothing."""
    try:
        outlook = await pool.forecast(request, Holder("", course))
    except OverQuota as error:  # what is allowed, and when, is in its remedy
        return _Outcome(refusal=str(error))
    except NeverFits as error:
        return _Outcome(refusal=error.message)
    except (NotAllowed, BadRequest):  # this Hub may not ask for others, or the pool is an older one
        return _Outcome()
    return _Outcome() if outlook is None else _Outcome(_say(outlook))


def _say(outlook: Outlook) -> str:
    if outlook.expected:
        return f"a wait of {outlook.expected}"
    before = (outlook.position or 1) - 1
    return f"{before} in the queue before you" if before else "you would be next in the queue"


# Texts with numbers in them come in many forms: some are repeated once in a while.
@functools.lru_cache(maxsize=256)
def log_once(text: str, level: int = logging.ERROR) -> None:
    """Log what is wrong with the configuration or with the cluster, once."""
    get_logger().log(level, "%s", text)


@functools.cache
def view_of(url: str) -> PoolView:
    """Return this process's view of the pool at ``url``; all spawners share it."""
    return PoolView(url)


class Catalogue:
    """A folder of course files."""

    def __init__(self, folder: Path) -> None:
        self._folder = CourseFolder(folder)
        self._told: frozenset[str] = frozenset()

    async def read(self) -> None:
        """Read what is new in the files, in a thread: the Hub has one event loop for all of its users."""
        await self._folder.current_in_thread()

    def courses(self) -> Courses:
        """Return the courses as they are now; log what is newly wrong with their files."""
        courses = self._folder.current()
        problems = frozenset(map(str, courses.problems))
        for problem in sorted(problems - self._told):
            get_logger().warning("Course files: %s", problem)
        self._told = problems
        return courses


@functools.cache
def catalogue_of(folder: str) -> Catalogue:
    """Return this process's catalogue of a folder."""
    return Catalogue(Path(folder))
