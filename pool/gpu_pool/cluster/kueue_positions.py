"""Where those are who wait in the cluster's queue. Asked only while somebody waits there."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.kernel_pods import KernelPods

#: Seconds between two looks, of one request for each queue in which somebody waits.
_EVERY: Final = 10.0


class KueuePositions:
    """Follows the places of one pool's kernels in Kueue's queues."""

    def __init__(self, api: Api, kernels: KernelPods, log: logging.Logger) -> None:
        self._api, self._kernels, self._log = api, kernels, log
        self._refused = False

    async def run(self) -> None:
        """Look for as long as the service runs."""
        while True:
            await self.look()
            await asyncio.sleep(_EVERY)

    async def look(self) -> None:
        """Tell everybody who waits where that is, as far as the cluster says it."""
        found: dict[str, int] = {}
        for namespace, queue in sorted(self._kernels.queues()):
            found.update(await self._look_into(namespace, queue))
        self._kernels.tell_places(found)

    async def _look_into(self, namespace: str, queue: str) -> dict[str, int]:
        try:
            answer = await self._api.ask("GET", kueue.pending_path(namespace, queue))
        except ApiAway:
            return {}
        except ApiRefused as refused:  # no such API, or no right to ask: the wait is told without a place
            if not self._refused:
                self._log.warning("Places in Kueue's queues are not told: %s", refused)
            self._refused = True
            return {}
        self._refused = False
        return dict(kueue.positions(answer))
