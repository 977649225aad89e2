"""Pools that cannot answer now, and how they are asked again."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gpu_pool_client import OverQuota, PoolUnreachable, format_duration

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


class Outage:
    """For how long a pool has been away, and for how long that is borne."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since = time.monotonic()

    @property
    def words(self) -> str:
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
    outage = None if limit is None else Outage(limit)
    while True:
        try:
            return await ask()
        except NOT_NOW as error:  # noqa: PERF203 - what is waited for takes seconds
            if outage is not None and outage.left <= 0 and isinstance(error, PoolUnreachable):
                raise outage.too_long(error) from error
            tell(error)
            await asyncio.sleep(RETRY_EVERY)
