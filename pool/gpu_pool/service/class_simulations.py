"""Classes that come all at once, simulated for those who edit their courses: one at a time, and not for long.

Others wait meanwhile, and whoever looks at the page of an editor waits with it. So each is given up after a
while, while it waits as well as while it runs; and at once when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpu_pool.courses.arithmetic import Rush, RushGivenUp
from gpu_pool_client import format_duration

_NEWER: Final = "a newer check of yours has taken its place."


@dataclass(frozen=True, slots=True)
class SimulationLimits:
    """For how long a class is simulated, and waits for that."""

    #: Seconds for which one is simulated.
    seconds: float = 5.0
    #: Seconds for which one waits until those before it are done.
    waiting: float = 15.0
    #: What tells the seconds of a simulation; also asked by its thread.
    clock: Callable[[], float] = time.monotonic


class _Attempt:
    """One simulation that was asked for."""

    def __init__(self) -> None:
        self.is_stopped = threading.Event()
        self.replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def replace(self) -> None:
        """End it, since the same user asks for another one."""
        self.is_stopped.set()
        if not self.replaced.done():
            self.replaced.set_result(None)


class ClassSimulations:
    """The simulations of one service."""

    def __init__(self, limits: SimulationLimits | None = None) -> None:
        self._limits = limits or SimulationLimits()
        self._turn = asyncio.Lock()
        self._latest: dict[str, _Attempt] = {}

    async def rush(self, user: str, simulate: Callable[[Callable[[], bool]], Rush]) -> Rush:
        """Return what ``simulate`` returns, which is called in a thread with what says whether to go on.

        Of one user the latest is simulated. Cancelling ends it. Raises ``RushGivenUp`` with why, in words.
        """
        if user in self._latest:
            self._latest[user].replace()
        attempt = self._latest[user] = _Attempt()
        try:
            await self._wait(attempt)
            return await self._run(attempt, simulate)
        finally:
            if self._latest.get(user) is attempt:
                del self._latest[user]

    async def _wait(self, attempt: _Attempt) -> None:
        """Wait for those before."""
        taking = asyncio.create_task(self._turn.acquire())
        either: tuple[asyncio.Future[Any], ...] = taking, attempt.replaced
        try:
            await asyncio.wait(either, timeout=self._limits.waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave(taking)
            raise
        if attempt.replaced.done():
            self._leave(taking)
            raise RushGivenUp(_NEWER)
        if not taking.done():
            self._leave(taking)
            waited = format_duration(self._limits.waiting)
            raise RushGivenUp(f"others are checking their courses, too, and were not done within {waited}.")

    def _leave(self, taking: asyncio.Task[Literal[True]]) -> None:
        """Wait no more; where the turn has come meanwhile, leave it to the next."""
        if not taking.cancel():
            self._turn.release()

    async def _run(self, attempt: _Attempt, simulate: Callable[[Callable[[], bool]], Rush]) -> Rush:
        clock, seconds = self._limits.clock, self._limits.seconds
        ends = clock() + seconds

        def goes_on() -> bool:
            return not attempt.is_stopped.is_set() and clock() < ends

        running = asyncio.ensure_future(asyncio.to_thread(simulate, goes_on))
        # Its thread goes on for a moment once it is stopped: the next one begins after it.
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        except RushGivenUp:
            if attempt.replaced.done():
                raise RushGivenUp(_NEWER) from None
            raise RushGivenUp(f"that takes more than {format_duration(seconds)}.") from None
        except asyncio.CancelledError:
            attempt.is_stopped.set()
            raise

    def _ended(self, running: asyncio.Future[Rush]) -> None:
        self._turn.release()
        if not running.cancelled():
            running.exception()  # of one for which nobody waits any more, nobody else asks
