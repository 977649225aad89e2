"""One look at a cluster, for whoever looks after it: what it has, who has it, and what may not be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, connect
from gpu_pool.cluster.dialects import Cluster, Pod
from gpu_pool.cluster.view import MORE
from gpu_pool_client import PoolUnreachable

_PAGE: Final = "500"
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at one moment."""

    url: str
    cluster: Cluster
    #: Those that hold something, of all namespaces.
    pods: tuple[Pod, ...]
    #: What may not be read, each in a sentence.
    problems: tuple[str, ...]
    #: Kubernetes' own, such as (1, 36); (0, 0) where it is not told.
    version: tuple[int, int] = (0, 0)


async def take_snapshot(kubeconfig: str = "") -> ClusterSnapshot:
    """Read a cluster once, with the rights of whoever asks. Raises ``PoolUnreachable`` in words."""
    api = await connect(kubeconfig)
    problems: list[str] = []
    try:
        try:
            return await _seen(api, problems)
        except ApiAway as away:
            if not away.too_lax:
                raise
            # A service would not come that far. Whoever only looks sees the cluster all the same.
            problems.append(f"A service with this Python cannot read the API server: {away}.")
        await api.close()
        api = await connect(kubeconfig, lax=True)
        return await _seen(api, problems)
    except ApiRefused as refused:
        raise PoolUnreachable(
            f"The cluster does not let you read its nodes: {refused.message}",
            "Use an account with the rights of an administrator in KUBECONFIG.",
        ) from refused
    except ApiAway as away:
        raise PoolUnreachable(
            f"The cluster's API server at {api.url} does not answer: {away}",
            "Check that KUBECONFIG names the right cluster, and that it can be reached from here.",
        ) from away
    finally:
        await api.close()


async def _seen(api: Api, problems: list[str]) -> ClusterSnapshot:
    nodes = await _list(api, "/api/v1/nodes")
    pods = await _if_allowed(api, "/api/v1/pods", problems)
    more: dict[str, Any] = {
        name: await _if_allowed(api, path, problems, names_only=names_only)
        for name, (path, names_only) in MORE.items()
    }
    read = tuple(filter(None, (Pod.read(each) for each in pods)))
    return ClusterSnapshot(api.url, Cluster.read(nodes, **more), read, tuple(problems), await _version(api))


async def _version(api: Api) -> tuple[int, int]:
    try:
        told = await api.ask("GET", "/version")
    except ApiRefused:
        return 0, 0
    major, minor = (re.match(r"[0-9]{1,4}", str(told.get(key))) for key in ("major", "minor"))
    return (int(major[0]), int(minor[0])) if major and minor else (0, 0)


async def _if_allowed(
    api: Api, path: str, problems: list[str], *, names_only: bool = False
) -> list[Mapping[str, Any]]:
    """Return a list; what may not be read is as if it was not there, and is noted."""
    try:
        return await _list(api, path, names_only=names_only)
    except ApiRefused as refused:
        if refused.status != _NOT_FOUND:
            problems.append(f"{path.rpartition('/')[2]} cannot be read: {refused.message}")
        return []


async def _list(api: Api, path: str, *, names_only: bool = False) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    query = {"limit": _PAGE}
    while True:
        page = await api.list(path, query, names_only=names_only)
        found += page.get("items") or ()
        more = page.get("metadata", {}).get("continue")
        if not more:
            return found
        query = {"limit": _PAGE, "continue": more}
