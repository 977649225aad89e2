"""The cluster as the Hub sees it: nodes, pods and how GPUs are shared, asked once for all who choose.

What the Hub's service account needs for this stands in the documentation with
its reasons. Without the right to list nodes nothing is known of any GPU;
everything else that may not be read counts as not there, and the log says so.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Final

from kubernetes_asyncio.client import ApiClient

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import AUTO, Cluster, DialectOptions, Manifest
from gpu_pool.cluster.dialects.choosing import Memory, away, look
from gpu_pool.cluster.snapshot import NODES, list_all, list_pods, list_sources
from gpu_pool_spawner.kube_capacity import ClusterSupply
from gpu_pool_spawner.pool_view import log_once

#: Seconds for which nodes and pods, and for which definitions and classes, are believed.
_FRESH: Final = 2.0
_FRESH_CLASSES: Final = 300.0
#: Seconds within which the API server answers.
_WITHIN: Final = 10.0
#: Seconds for which a node that shows no GPUs any more has them and gives none out: a server with a slice
#: is told that there is no room now, and not that there never is.
_AWAY_FOR: Final = 180.0
_CLASSES: Final = ("crds", "runtime_classes", "device_classes")
_CLAIMS: Final = ("resource_slices", "resource_claims", "device_taint_rules")


class ClusterReader:
    """One cluster, in one dialect."""

    def __init__(self, api: Api, dialect: str = AUTO, options: DialectOptions | None = None) -> None:
        self._api, self._dialect, self._options = api, dialect, options or DialectOptions()
        self._answer: asyncio.Task[ClusterSupply | None] | None = None
        self._asked_at = 0.0
        self._classes: dict[str, list[Manifest]] = {}
        self._classes_at = -_FRESH_CLASSES
        self._known: Memory = {}

    async def supply(self, *, fresh: bool = False) -> ClusterSupply | None:
        """Return what the cluster has; None if that cannot be seen. ``fresh``: not what was seen before."""
        believed = 0.0 if fresh else _FRESH
        if self._answer is None or (self._answer.done() and time.monotonic() - self._asked_at > believed):
            self._asked_at = time.monotonic()
            self._answer = asyncio.create_task(self._ask())
        # Whoever closes the page does not end it for the others.
        return await asyncio.shield(self._answer)

    async def _ask(self) -> ClusterSupply | None:
        try:
            return await asyncio.wait_for(self._read(), _WITHIN)
        except asyncio.TimeoutError:
            _warn(f"The cluster does not answer within {_WITHIN:.0f} s.")
        except (ApiAway, ApiRefused) as error:
            _warn(f"The cluster's nodes cannot be read, so no GPU can be granted: {error}")
        return None

    async def _read(self) -> ClusterSupply | None:
        nodes = await list_all(self._api, NODES, cached=True)
        if time.monotonic() - self._classes_at > _FRESH_CLASSES:
            self._classes = await list_sources(self._api, _CLASSES, _warn_unreadable, cached=True)
            self._classes_at = time.monotonic()
        asked = _CLAIMS if self._classes["device_classes"] else ()
        claims = await list_sources(self._api, asked, _warn_unreadable, cached=True)
        shown, now = Cluster.read(nodes, **self._classes, **claims), time.monotonic()
        choice, _, self._known = look(self._known, shown, self._options, self._dialect, now, _AWAY_FOR)
        _warn(str(choice))
        if choice.dialect is None:
            return None
        pods = await list_pods(self._api, _warn_unreadable, cached=True)
        return ClusterSupply(choice.dialect, pods, away(self._known))


def _warn_unreadable(problem: str) -> None:
    _warn(f"No permission to read this part of the cluster; it is treated as empty: {problem}")


def _warn(text: str) -> None:
    log_once(f"GPUs of the cluster: {text}", logging.WARNING)


@functools.cache
def cluster_reader_of(client: ApiClient, dialect: str, options: DialectOptions) -> ClusterReader:
    """Return the reader of a cluster that all spawners with this client share."""
    return ClusterReader(Api(client, namespace=""), dialect, options)
