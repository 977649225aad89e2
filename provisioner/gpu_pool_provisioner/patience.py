"""Pools that cannot answer now, and how they are asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gpu_pool_client import OverQuota, PoolUnreachable

#: What a pool raises about a lease that there is where it cannot answer now: it is away, or its user
#: has asked it too much within a minute. (Of a request for a lease, ``OverQuota`` is the answer.)
NOT_NOW: Final = (PoolUnreachable, OverQuota)
#: Seconds to leave such a pool alone.
RETRY_EVERY: Final = 2.0

T = TypeVar("T")


async def patiently(
    ask: Callable[[], Awaitable[T]], tell: Callable[[PoolUnreachable | OverQuota], None]
) -> T:
    """Ask a pool until it answers; ``tell`` why it does not. What else it raises is raised."""
    while True:
        try:
            return await ask()
        except NOT_NOW as error:  # noqa: PERF203 - what is waited for takes seconds
            tell(error)
            await asyncio.sleep(RETRY_EVERY)
