"""One open pool per URL and process, asked again while it cannot answer, and told what is given back."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from traitlets.log import get_logger

from gpu_pool_client import (
    EndReason,
    GpuPoolError,
    OverQuota,
    Pool,
    PoolUnreachable,
    connect,
    format_duration,
)
from gpu_pool_client._pool import DEFAULT_URL, URL_VARIABLE
from gpu_pool_provisioner.proxy.loops import proxy_loop

#: What a pool raises about a lease that there is where it cannot answer now: it is away, or its user
#: has asked it too much within a minute. (Of a request for a lease, ``OverQuota`` is the answer.)
NOT_NOW: Final = (PoolUnreachable, OverQuota)
#: Seconds to leave such a pool alone.
RETRY_EVERY: Final = 2.0
#: Seconds for which a kernel waits for a pool that is away: behind a JupyterHub as long as it takes to
#: move the service to another machine, elsewhere as long as it takes to restart it.
_BEHIND_HUB, _ELSEWHERE = 300.0, 10.0

T = TypeVar("T")


def default_outage_timeout() -> float:
    """Return for how many seconds a kernel waits for a pool that is away, where nobody has set that."""
    return _BEHIND_HUB if os.environ.get("JUPYTERHUB_API_TOKEN") else _ELSEWHERE


class OutageTimer:
    """For how long a pool has been away, and for how long that is borne."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since = time.monotonic()

    @property
    def progress(self) -> str:
        """How long it has been, and may be: ``12s of at most 5min``."""
        return f"{format_duration(time.monotonic() - self._since)} of at most {format_duration(self.limit)}"

    @property
    def left(self) -> float:
        """Seconds until it has been away for too long."""
        return self._since + self.limit - time.monotonic()

    def too_long(self, error: PoolUnreachable) -> PoolUnreachable:
        """Return what to raise then, with what was last heard."""
        waited = f"{error.message} This kernel has waited for it for {format_duration(self.limit)}."
        return PoolUnreachable(waited, error.remedy)


async def retry(
    ask: Callable[[], Awaitable[T]],
    tell: Callable[[PoolUnreachable | OverQuota], None],
    limit: float | None = None,
) -> T:
    """Ask a pool until it answers; ``tell`` why it does not. What else it raises is raised.

    With a ``limit``, ``PoolUnreachable`` is raised once it has been away for so many seconds.
    """
    outage = None if limit is None else OutageTimer(limit)
    while True:
        try:
            return await ask()
        except NOT_NOW as error:  # noqa: PERF203 - what is waited for takes seconds
            if outage is not None and outage.left <= 0 and isinstance(error, PoolUnreachable):
                raise outage.too_long(error) from error
            tell(error)
            await asyncio.sleep(RETRY_EVERY)


def resolve_url(url: str) -> str:
    """Return ``url``, or, if it is empty, the one that :func:`gpu_pool_client.connect` would use."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def shared_pool(url: str) -> Pool:
    """Return this process's pool for ``url``, opened at the first call and open until the process ends.

    Raises what :func:`gpu_pool_client.connect` raises; a failure is not remembered.
    """
    return _open(url, os.getpid())


@functools.cache
def _open(url: str, pid: int) -> Pool:  # noqa: ARG001 - a forked child must not use its parent's pool
    return connect(url)


#: Seconds for which whoever gives back waits until it is done.
_WAITS: Final = 5.0
#: Seconds to leave a pool alone that was just away, and one that has been away for long.
_SOON: Final = 2.0
_SELDOM: Final = 30.0
#: The leases that are tried again and again, by pool. Used on the proxies' thread alone.
_trying: set[tuple[str, str]] = set()


async def give_back(pool: Pool, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
    """Release a lease; where its pool cannot hear of it now, as soon as it can. May be repeated.

    A lease that is attached to the process of a server, as one in the queue is, would
    otherwise stay there for as long as the server runs. Whoever shuts a kernel
    down waits for the pool for a moment only.
    """
    released = asyncio.run_coroutine_threadsafe(_release(pool, lease_id, reason), proxy_loop())
    await asyncio.wait({asyncio.wrap_future(released)}, timeout=_WAITS)


async def _release(pool: Pool, lease_id: str, reason: EndReason) -> None:
    try:
        await pool.release(lease_id, reason)
    except NOT_NOW as error:
        get_logger().warning("GPU lease %s is given back once its pool answers: %s", lease_id, error)
        await _keep_trying(pool, lease_id, reason)
    except GpuPoolError as error:
        get_logger().warning("GPU lease %s ends when its process is seen gone: %s", lease_id, error)


async def _keep_trying(pool: Pool, lease_id: str, reason: EndReason) -> None:
    key = pool.url, lease_id
    if key in _trying:
        return
    _trying.add(key)
    pause = _SOON
    try:
        while True:
            await asyncio.sleep(pause)
            try:
                await pool.release(lease_id, reason)
            except NOT_NOW:
                pause = min(2 * pause, _SELDOM)
            else:
                return
    except GpuPoolError as error:
        get_logger().warning("GPU lease %s is not to be given back any more: %s", lease_id, error)
    finally:
        _trying.discard(key)
