"""Trying again what a pool, a cluster or a service could not do now: the pauses, and what is given back.

A request must not outlive its asker. A pool that is restarting or away does not hear that one is withdrawn,
or a lease given back. Where the lease lives as long as a server that asked for it, as one in the queue does,
nothing else would end it for days. So giving back is tried again and again on the background loop; at the end
of the process what it keeps alive ends by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Final

from gpu_pool_client._background import background_loop, in_background
from gpu_pool_client._errors import BadRequest, GpuPoolError, LeaseGone
from gpu_pool_client._log import get_logger

#: What a pool raises that will say no other the next time: there is nothing to give back.
_LASTING: Final = (LeaseGone, BadRequest)
#: Seconds for which whoever gives back waits until it is done.
WAITS: Final = 5.0
#: Seconds to leave a pool alone that was just away, and one that has been away for long.
_SOON: Final = 2.0
_SELDOM: Final = 30.0


class Backoff:
    """Pauses in seconds, each twice as long as the one before: from ``first``, to ``longest`` at most.

    With ``spread``, each is up to that part shorter, by chance, so that many who failed at the same moment
    do not come back at the same moment.
    """

    def __init__(self, first: float, longest: float, *, spread: float = 0.0) -> None:
        self._first, self._longest, self._spread = first, longest, spread
        self.reset()

    def reset(self) -> None:
        """Begin again with the first pause: an attempt has succeeded."""
        self._next = self._first
        #: Whether there was no pause since the last success.
        self.is_fresh = True

    def pause(self) -> float:
        """Return the next pause."""
        now, self._next = self._next, min(2 * self._next, self._longest)
        self.is_fresh = False
        return self.shortened(now)

    def shortened(self, seconds: float) -> float:
        """Return a pause of another length, spread like the others."""
        return seconds * random.uniform(1 - self._spread, 1)  # noqa: S311 - no secret

    async def wait(self) -> None:
        """Sleep for the next pause."""
        await asyncio.sleep(self.pause())


def _is_not_heard(error: BaseException | None) -> bool:
    """Whether a pool may hear the next time what it has answered so.

    It is away, its user has asked too much of it, or it has failed, as a service that cannot write its store.
    """
    return isinstance(error, GpuPoolError) and not isinstance(error, _LASTING)


class GivingBack:
    """What is still to be given back, each by a name that is one for all that gives back the same."""

    def __init__(self) -> None:
        #: Stands for each that is still to be given back.
        self._jobs: dict[Hashable, object] = {}
        #: The try that is under way. Used on the background loop alone.
        self._tries: dict[Hashable, asyncio.Future[None]] = {}

    async def give_back(
        self,
        name: Hashable,
        what: str,
        give: Callable[[], Awaitable[None]],
        waits: float = WAITS,
        again_after: float | None = None,
    ) -> None:
        """Call ``give`` until the pool has taken it; return then, or after ``waits`` seconds.

        It is tried again after ``again_after`` seconds, and then more and more seldom. ``what`` is for the
        log. Where whoever calls this is cancelled, or its event loop ends, it goes on.
        """
        job = object()
        if self._jobs.setdefault(name, job) is not job:
            return
        here, done = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # that loop has ended
                here.call_soon_threadsafe(done.set)

        trying = self._keep_trying(name, job, what, give, _SOON if again_after is None else again_after)
        asyncio.run_coroutine_threadsafe(trying, background_loop()).add_done_callback(tell)
        if waits:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), waits)

    def is_pending(self, name: Hashable) -> bool:
        """Whether that is still to be given back."""
        return name in self._jobs

    async def keep(self, name: Hashable) -> None:
        """Do not give that back any more: it is wanted again. Returns once no try is under way."""
        await in_background(self._call_off(name))

    def forget(self) -> None:
        """Give nothing back: a forked child has nothing of its parent's."""
        self._jobs.clear()
        self._tries.clear()

    async def _keep_trying(
        self,
        name: Hashable,
        job: object,
        what: str,
        give: Callable[[], Awaitable[None]],
        again_after: float,
    ) -> None:
        """Give back until the pool has heard of it, or until :meth:`keep`."""
        backoff = Backoff(again_after, _SELDOM)
        try:
            while self._jobs.get(name) is job:
                self._tries[name] = mine = asyncio.ensure_future(give())
                await asyncio.wait({mine})
                if not mine.cancelled() and not _is_not_heard(error := mine.exception()):
                    if error is not None:
                        get_logger().warning("%s ends when its process is seen gone: %s", what, error)
                    break
                if backoff.is_fresh:
                    why = "the attempt was cancelled" if mine.cancelled() else mine.exception()
                    get_logger().warning("%s is given back once its pool answers: %s", what, why)
                await backoff.wait()
        finally:
            if self._jobs.get(name) is job:
                del self._jobs[name]
                self._tries.pop(name, None)

    async def _call_off(self, name: Hashable) -> None:
        """Try no more; return once no try is under way."""
        self._jobs.pop(name, None)
        last = self._tries.pop(name, None)
        if last is not None:
            await asyncio.wait({last})


#: This process's: a pool that is closed and opened anew knows what the one before had still to give back.
giving_back: Final = GivingBack()
os.register_at_fork(after_in_child=giving_back.forget)
