"""Slices that are given back, even while their pool is away: it hears of them once it answers again."""

from __future__ import annotations

import asyncio
from typing import Final

from traitlets.log import get_logger

from gpu_pool_client import EndReason, GpuPoolError, Pool
from gpu_pool_provisioner.outages import NOT_NOW
from gpu_pool_provisioner.proxy.thread import proxy_loop

#: Seconds for which whoever gives back waits until it is done.
_WAITS: Final = 5.0
#: Seconds to leave a pool alone that was just away, and one that has been away for long.
_SOON: Final = 2.0
_SELDOM: Final = 30.0
#: The leases that are tried again and again, by pool. Used on the proxies' thread alone.
_trying: set[tuple[str, str]] = set()


async def give_back(pool: Pool, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
    """Release a lease; where its pool cannot hear of it now, as soon as it can. May be repeated.

    A lease that stands on the process of a server, as one in the queue does, would
    otherwise stay there for as long as the server runs. Whoever shuts a kernel
    down waits for the pool for a moment only.
    """
    telling = asyncio.run_coroutine_threadsafe(_tell(pool, lease_id, reason), proxy_loop())
    await asyncio.wait({asyncio.wrap_future(telling)}, timeout=_WAITS)


async def _tell(pool: Pool, lease_id: str, reason: EndReason) -> None:
    try:
        await pool.release(lease_id, reason)
    except NOT_NOW as error:
        get_logger().warning("GPU lease %s is given back once its pool answers: %s", lease_id, error)
        await _keep_trying(pool, lease_id, reason)
    except GpuPoolError as error:
        get_logger().warning("GPU lease %s ends when its process is seen gone: %s", lease_id, error)


async def _keep_trying(pool: Pool, lease_id: str, reason: EndReason) -> None:
    known = pool.url, lease_id
    if known in _trying:
        return
    _trying.add(known)
    rest = _SOON
    try:
        while not await _is_told(pool, lease_id, reason, rest):
            rest = min(2 * rest, _SELDOM)
    finally:
        _trying.discard(known)


async def _is_told(pool: Pool, lease_id: str, reason: EndReason, rest: float) -> bool:
    """Whether the pool has heard of it, after a rest."""
    await asyncio.sleep(rest)
    try:
        await pool.release(lease_id, reason)
    except NOT_NOW:
        return False
    except GpuPoolError as error:
        get_logger().warning("GPU lease %s is not to be given back any more: %s", lease_id, error)
    return True
