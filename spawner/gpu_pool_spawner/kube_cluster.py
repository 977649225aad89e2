"""The cluster as the Hub sees it: nodes, pods and how GPUs are shared, asked once for all who choose.

What the Hub's service account needs for this stands in the documentation with
its reasons. Without the right to list nodes nothing is known of any GPU;
everything else that may not be read counts as not there, and the log says so.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final

import aiohttp
from kubernetes_asyncio.client import ApiClient
from kubernetes_asyncio.client.exceptions import ApiException
from traitlets.log import get_logger

from gpu_pool.cluster.dialects import AUTO, Cluster, DialectOptions, Pod
from gpu_pool.cluster.dialects.choosing import Memory, away, look
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool_spawner.kube_capacity import ClusterSupply, PodHolding

#: Seconds for which nodes and pods, and for which definitions and classes, are believed.
_FRESH: Final = 2.0
_FRESH_CLASSES: Final = 300.0
#: Seconds within which the API server answers.
_WITHIN: Final = 10.0
_MOST_TOLD: Final = 200
#: Seconds for which a node that shows no GPUs any more has them and gives none out: a server with a slice
#: is told that there is no room now, and not that there never is.
_AWAY_FOR: Final = 180.0
#: Of definitions the names are enough: the whole of them is megabytes.
_NAMES_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_CLASSES: Final = {
    "crds": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "runtime_classes": "/apis/node.k8s.io/v1/runtimeclasses",
    "device_classes": "/apis/resource.k8s.io/v1/deviceclasses",
}
_CLAIMS: Final = {
    "resource_slices": "/apis/resource.k8s.io/v1/resourceslices",
    "resource_claims": "/apis/resource.k8s.io/v1/resourceclaims",
}


class ClusterReader:
    """One cluster, in one dialect."""

    def __init__(self, api: ApiClient, dialect: str = AUTO, options: DialectOptions | None = None) -> None:
        self._api, self._dialect, self._options = api, dialect, options or DialectOptions()
        self._answer: asyncio.Task[ClusterSupply | None] | None = None
        self._asked_at = 0.0
        self._classes: dict[str, list[dict[str, Any]]] = {}
        self._classes_at = -_FRESH_CLASSES
        self._told: set[str] = set()
        self._known: Memory = {}

    async def look(self, *, fresh: bool = False) -> ClusterSupply | None:
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
            self.tell(f"The cluster does not answer within {_WITHIN:.0f} s.")
        except (ApiException, aiohttp.ClientError) as error:
            self.tell(f"The cluster's nodes cannot be read, so no GPU can be granted: {_say(error)}")
        return None

    async def _read(self) -> ClusterSupply | None:
        nodes = await self._list("/api/v1/nodes")
        if time.monotonic() - self._classes_at > _FRESH_CLASSES:
            self._classes = {key: await self._allowed(path, _NAMES_ONLY) for key, path in _CLASSES.items()}
            self._classes_at = time.monotonic()
        claims: dict[str, list[dict[str, Any]]] = {}
        if self._classes["device_classes"]:
            claims = {key: await self._allowed(path) for key, path in _CLAIMS.items()}
        shown, now = Cluster.read(nodes, **self._classes, **claims), time.monotonic()
        choice, cluster, self._known = look(self._known, shown, self._options, self._dialect, now, _AWAY_FOR)
        self.tell(str(choice))
        if choice.dialect is None:
            return None
        held = tuple(filter(None, map(_held, await self._allowed("/api/v1/pods"))))
        unready = {node.name for node in cluster.nodes if "Ready" not in node.conditions}
        return ClusterSupply(choice.dialect, held, away(self._known) | unready)

    async def _allowed(self, path: str, accept: str = "application/json") -> list[dict[str, Any]]:
        """Return a list, an empty one where it may not be read or there is no such kind."""
        try:
            return await self._list(path, accept)
        except ApiException as error:
            if error.status not in (403, 404):
                raise
            if error.status == 403:
                self.tell(f"No permission to read {path}; it is treated as empty.")
            return []

    async def _list(self, path: str, accept: str = "application/json") -> list[dict[str, Any]]:
        # Version 0: as the API server remembers it, which costs etcd nothing.
        answer = await self._api.call_api(
            path,
            "GET",
            query_params=[("resourceVersion", "0")],
            header_params={"Accept": accept},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
        )
        content = await answer.read()
        if answer.status != 200:
            raise ApiException(status=answer.status, reason=answer.reason)
        found: list[dict[str, Any]] = json.loads(content).get("items") or []
        return found

    def tell(self, words: str) -> None:
        """Log it, once."""
        if words not in self._told:
            # Words with numbers in them come in many forms: some are repeated once in a while.
            self._told = self._told if len(self._told) < _MOST_TOLD else set()
            self._told.add(words)
            get_logger().warning("GPUs of the cluster: %s", words)


def _held(manifest: Mapping[str, Any]) -> PodHolding | None:
    """Read a pod that is on a node and has not finished."""
    pod = Pod.read(manifest)
    return PodHolding(pod, _ends(manifest)) if pod is not None and pod.node else None


def _ends(manifest: Mapping[str, Any]) -> datetime | None:
    """Return when its deadline ends it."""
    seconds = mapping(manifest.get("spec")).get("activeDeadlineSeconds")
    started = mapping(manifest.get("status")).get("startTime")
    if not isinstance(seconds, int) or not isinstance(started, str):
        return None
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(started.replace("Z", "+00:00")) + timedelta(seconds=seconds)
    return None


def _say(error: Exception) -> str:
    return f"status {error.status}" if isinstance(error, ApiException) else str(error)


@functools.cache
def cluster_reader_of(api: ApiClient, dialect: str, options: DialectOptions) -> ClusterReader:
    """Return the view of a cluster that all spawners with this client share."""
    return ClusterReader(api, dialect, options)
