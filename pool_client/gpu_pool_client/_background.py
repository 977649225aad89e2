"""What goes on in a process whatever becomes of its asker: the background loop, and giving back.

A server that does much at once does not hold up what is done on the background loop, and nothing done there
holds up the server. A blocking ``KernelManager`` needs it, since its own loop stands still between its calls.

A request must not outlive its asker. A pool that is restarting or away does not hear that one is withdrawn,
or a lease given back. Where the lease lives as long as a server that asked for it, as one in the queue does,
nothing else would end it for days. So it is tried again and again there; at the end of the process what it
keeps alive ends by itself.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, TypeVar

from gpu_pool_client._errors import OverQuota, PoolUnreachable
from gpu_pool_client._log import get_logger

T = TypeVar("T")

#: What a pool raises where it cannot hear of it now: it is away, or its user has asked too much of it.
_NOT_NOW: Final = (PoolUnreachable, OverQuota)
#: Seconds for which whoever gives back waits until it is done.
WAITS: Final = 5.0
#: Seconds to leave a pool alone that was just away, and one that has been away for long.
_SOON: Final = 2.0
_SELDOM: Final = 30.0

#: Seconds after which a loop that waits looks by itself whether it has been answered. One that was made
#: before a fork shares the pipe that wakes it with its parent and siblings, any of whom may empty it.
_AWAKE_EVERY: Final = 0.5

#: Stands for each that is still to be given back, by its name.
_jobs: Final[dict[Hashable, object]] = {}
#: The try that is under way, by the same name. Used on the background loop alone.
_tries: Final[dict[Hashable, asyncio.Future[None]]] = {}
# A forked child has nothing of its parent's to give back.
os.register_at_fork(after_in_child=_jobs.clear)
os.register_at_fork(after_in_child=_tries.clear)

_starting = threading.Lock()
# A forked child could otherwise find it taken for ever.
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on this process's background loop and return what it returns.

    Work that is no longer waited for is cancelled.
    """
    answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))
    try:
        while not answer.done():
            await asyncio.wait({answer}, timeout=_AWAKE_EVERY)
    except asyncio.CancelledError:
        answer.cancel()
        raise
    return answer.result()


def background_loop(name: str = "background") -> asyncio.AbstractEventLoop:
    """Return an event loop of this process that runs on a thread of its own, the same for the same name.

    It is started at the first use: a forked child has none of its parent's.
    """
    with _starting:
        return _loop(name, os.getpid())


@functools.cache
def _loop(name: str, pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"gpu-pool-{name}-{pid}", daemon=True).start()
    return loop


async def give_back(
    name: Hashable,
    what: str,
    give: Callable[[], Awaitable[None]],
    waits: float = WAITS,
    again_after: float | None = None,
) -> None:
    """Call ``give`` until the pool has taken it; return then, or after ``waits`` seconds.

    It is tried again after ``again_after`` seconds, and then more and more seldom.

    ``name`` is one for all that gives back the same, and ``what`` is for the log. Where whoever calls this
    is cancelled, or its event loop ends, it goes on.
    """
    job = object()
    if _jobs.setdefault(name, job) is not job:
        return
    here, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # that loop has ended
            here.call_soon_threadsafe(done.set)

    trying = _keep_trying(name, job, what, give, _SOON if again_after is None else again_after)
    asyncio.run_coroutine_threadsafe(trying, background_loop()).add_done_callback(tell)
    if waits:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(done.wait(), waits)


def is_given_back(name: Hashable) -> bool:
    """Whether that is still to be given back."""
    return name in _jobs


async def keep(name: Hashable) -> None:
    """Do not give that back any more: it is wanted again. Returns once no try is under way."""
    await in_background(_call_off(name))


async def _keep_trying(
    name: Hashable, job: object, what: str, give: Callable[[], Awaitable[None]], again_after: float
) -> None:
    """Give back until the pool has heard of it, or until :func:`keep`."""
    backoff = Backoff(again_after, _SELDOM)
    while _jobs.get(name) is job:
        _tries[name] = mine = asyncio.ensure_future(give())
        await asyncio.wait({mine})
        error = mine.exception()
        if not isinstance(error, _NOT_NOW):
            if error is not None:
                _warn("%s ends when its process is seen gone: %s", what, error)
            break
        if backoff.is_fresh:
            _warn("%s is given back once its pool answers: %s", what, error)
        await backoff.wait()
    if _jobs.get(name) is job:
        del _jobs[name], _tries[name]


async def _call_off(name: Hashable) -> None:
    """Try no more; return once no try is under way."""
    _jobs.pop(name, None)
    last = _tries.pop(name, None)
    if last is not None:
        await asyncio.wait({last})


def _warn(text: str, what: str, error: BaseException | None) -> None:
    get_logger().warning(text, what, error)


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
