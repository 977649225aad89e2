"""A cluster, read by listing what it has: once for the command line, again and again for the spawner.

What is listed here is what the service watches, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, connect
from gpu_pool.cluster.dialects import Cluster, Manifest, Pod
from gpu_pool_client import PoolUnreachable

NODES: Final = "/api/v1/nodes"
PODS: Final = "/api/v1/pods"
_DRA: Final = "/apis/resource.k8s.io/v1"
#: Versions of DeviceTaintRules, the newest first: clusters serve different ones.
_RULES: Final = tuple(f"{_DRA}{version}/devicetaintrules" for version in ("", "beta2", "alpha3"))
#: What a dialect is read from besides nodes: where it is (the first that the cluster serves), and whether
#: names are enough, since the whole of the definitions is megabytes.
SOURCES: Final[Mapping[str, tuple[tuple[str, ...], bool]]] = {
    "crds": (("/apis/apiextensions.k8s.io/v1/customresourcedefinitions",), True),
    "runtime_classes": (("/apis/node.k8s.io/v1/runtimeclasses",), True),
    "device_classes": ((f"{_DRA}/deviceclasses",), True),
    "resource_slices": ((f"{_DRA}/resourceslices",), False),
    "resource_claims": ((f"{_DRA}/resourceclaims",), False),
    "device_taint_rules": (_RULES, False),
}
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
    #: In which versions Kueue's objects are served; none where there is no Kueue, or it is not told.
    kueue: tuple[str, ...] = ()


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
    nodes = await list_all(api, NODES)
    pods = await list_pods(api, problems.append)
    cluster = Cluster.read(nodes, **await list_sources(api, SOURCES, problems.append))
    version, versions = await _version(api), tuple[str, ...]()
    try:
        versions = await served_of_kueue(api)
    except ApiRefused as refused:
        problems.append(f"Whether the cluster has Kueue is not told: {refused.message}")
    return ClusterSnapshot(api.url, cluster, pods, tuple(problems), version, versions)


async def served_of_kueue(api: Api) -> tuple[str, ...]:
    """Return in which versions a cluster serves Kueue's objects. Raises ``ApiAway``, ``ApiRefused``."""
    try:
        return kueue.served(await api.ask("GET", kueue.DISCOVERY))
    except ApiRefused as refused:
        if refused.status == _NOT_FOUND:
            return ()
        raise


async def _version(api: Api) -> tuple[int, int]:
    try:
        told = await api.ask("GET", "/version")
    except ApiRefused:
        return 0, 0
    major, minor = (re.match(r"[0-9]{1,4}", str(told.get(key))) for key in ("major", "minor"))
    return (int(major[0]), int(minor[0])) if major and minor else (0, 0)


async def list_pods(api: Api, note: Callable[[str], object], *, cached: bool = False) -> tuple[Pod, ...]:
    """Return the pods of all namespaces that are on a node and have not finished, as :func:`list_sources`.

    Raises ``ApiRefused`` where they are said not to be served, as they are in every cluster.
    """
    found = map(Pod.read, await _list_readable(api, (PODS,), note, cached=cached, required=True))
    return tuple(pod for pod in found if pod is not None and pod.node)


async def list_sources(
    api: Api, names: Iterable[str], note: Callable[[str], object], *, cached: bool = False
) -> dict[str, list[Manifest]]:
    """Return the objects of these :data:`SOURCES`.

    What may not be read is as if it was not there; ``note`` is told, in a sentence.
    """
    found: dict[str, list[Manifest]] = {}
    for name in names:
        paths, names_only = SOURCES[name]
        found[name] = await _list_readable(api, paths, note, names_only=names_only, cached=cached)
    return found


async def _list_readable(
    api: Api,
    paths: Sequence[str],
    note: Callable[[str], object],
    *,
    names_only: bool = False,
    cached: bool = False,
    required: bool = False,
) -> list[Manifest]:
    for path in paths:
        try:
            return await list_all(api, path, names_only=names_only, cached=cached)
        except ApiRefused as refused:  # noqa: PERF203 - three at most
            if refused.status == _NOT_FOUND and required:
                raise
            if refused.status != _NOT_FOUND:
                note(f"{path.rpartition('/')[2]} cannot be read: {refused.message}")
                return []
        except ApiAway as away:  # so answers an API server that has no version of a group, such as DRA's
            if required or not away.no_such_path:
                raise
    return []


async def list_all(api: Api, path: str, *, names_only: bool = False, cached: bool = False) -> list[Manifest]:
    """Return all objects below a path. Raises ``ApiAway`` and ``ApiRefused``.

    ``cached``: as the API server remembers them, which costs etcd nothing.
    """
    found: list[Manifest] = []
    query = {"resourceVersion": "0"} if cached else {"limit": _PAGE}
    while True:
        page = await api.list(path, query, names_only=names_only)
        found += page.get("items") or ()
        more = page.get("metadata", {}).get("continue")
        if not more:
            return found
        query = {"limit": _PAGE, "continue": more}
