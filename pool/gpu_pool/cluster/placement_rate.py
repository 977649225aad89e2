"""How many pods are placed on one node at a time, where a cluster's scheduler stumbles over many.

HAMi locks a node for each pod that it binds, until the device plugin there has
given out the GPU (``pkg/util/nodelock``). Whoever comes meanwhile is refused, and
is tried again after longer and longer pauses; with some sixty at once that takes
minutes (HAMi#915, #1130). So the next is created when one has been placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.times import ClusterTimes
from gpu_pool_client import PoolUnreachable

#: Where HAMi writes how far it is: ``allocating`` while the node is locked.
_BIND_PHASE: Final = "hami.io/bind-phase"


class PlacementRate:
    """Lets so many pods at a time be placed on each node. Used in one event loop."""

    def __init__(self, times: ClusterTimes) -> None:
        self._times = times
        self._nodes: dict[str, asyncio.Semaphore] = {}
        self._placing: dict[str, tuple[asyncio.Semaphore, asyncio.TimerHandle]] = {}

    @asynccontextmanager
    async def slot(self, node: str, at_once: int) -> AsyncIterator[Callable[[Manifest], None]]:
        """Wait until a pod may be created for a node, and yield what is told of it as soon as it is.

        0 at once, or no node, is for as many as there are. Raises ``PoolUnreachable``.
        """
        if not at_once or not node:
            yield lambda _: None
            return
        slots = self._nodes.setdefault(node, asyncio.Semaphore(at_once))
        await self._acquire(slots)
        handed_on = False

        def placing(pod: Manifest) -> None:
            nonlocal handed_on
            if not is_placed(pod):
                handed_on = True
                self._keep(str(pod["metadata"]["uid"]), slots)

        try:
            yield placing
        finally:
            if not handed_on:
                slots.release()

    async def _acquire(self, slots: asyncio.Semaphore) -> None:
        try:
            await asyncio.wait_for(slots.acquire(), self._times.slot_within)
        except asyncio.TimeoutError:
            raise PoolUnreachable(
                "Many kernels start on the machine of your slice, a few at a time.",
                "Your slice is kept, and your kernel starts soon.",
            ) from None

    def _keep(self, uid: str, slots: asyncio.Semaphore) -> None:
        """Keep a slot for a pod that was created, until it is placed, is gone, or takes too long."""
        timer = asyncio.get_running_loop().call_later(self._times.placed_within, self.release, uid)
        self._placing[uid] = slots, timer

    def release(self, uid: str) -> None:
        """Let the next one come, if that pod kept it back."""
        held = self._placing.pop(uid, None)
        if held is not None:
            held[1].cancel()
            held[0].release()


def is_placed(pod: Manifest) -> bool:
    """Whether a pod has its node, and nothing is locked for it there any more."""
    annotations = mapping(mapping(pod.get("metadata")).get("annotations"))
    bound = bool(mapping(pod.get("spec")).get("nodeName"))
    return bound and annotations.get(_BIND_PHASE) != "allocating"
