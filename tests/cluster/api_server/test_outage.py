"""The API server is away for a while, and what it forgot (410 Gone): nobody loses anything by it.

etcd and kube-apiserver are this module's own, since it stops them. There is no
kubelet: the test says what runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, Lease, LeaseGone, LeaseState, PodPhase, PoolUnreachable, parse_request
from support.api_server import ASSETS, ApiServer, missing_programs
from support.clusters import hami
from support.control_plane import write_kubeconfig
from support.kernel_pods import backend_of, cluster_pool, command, launched, notebook, running, until_pod
from support.outages import Outage, stoppable_api
from support.pools import eventually, key, take

pytestmark = pytest.mark.long
HUB = "hub"


@pytest.fixture
async def outage(tmp_path: Path) -> AsyncIterator[Outage]:
    """An API server of the test's own, with a node of one GPU, ada's notebook server and her home."""
    if missing := missing_programs():
        pytest.skip(f"no {' and no '.join(missing)} in {ASSETS}")
    with stoppable_api(tmp_path / "api") as outage:
        server = outage.server
        server.create("/api/v1/namespaces", {"metadata": {"name": HUB}})
        add_node(server)
        claim = {
            "metadata": {"name": "claim-ada"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        server.create(f"/api/v1/namespaces/{HUB}/persistentvolumeclaims", claim)
        server.create(f"/api/v1/namespaces/{HUB}/pods", notebook("ada", HUB))
        yield outage


@pytest.fixture
async def pool(outage: Outage, times: ClusterTimes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    server = outage.server
    config = write_kubeconfig(tmp_path / "kubeconfig", server.url, server.token, server.certificate)
    async with cluster_pool(tmp_path / "store.db", config, HUB, times=times) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        yield pool


def add_node(server: ApiServer) -> None:
    node = hami("n1", count=50)
    server.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **node, "status": {}})
    put_status(server, "/api/v1/nodes/n1", node["status"])
    # A new node is not ready until a controller says so, and there is none.
    _, found = server.call("GET", "/api/v1/nodes/n1")
    code, answer = server.call("PUT", "/api/v1/nodes/n1", {**found, "spec": node["spec"]})
    assert code == 200, answer


def put_status(server: ApiServer, path: str, status: dict[str, Any]) -> None:
    _, found = server.call("GET", path)
    code, answer = server.call("PUT", f"{path}/status", {**found, "status": status})
    assert code == 200, answer


def names(server: ApiServer) -> set[str]:
    _, found = server.call("GET", f"/api/v1/namespaces/{HUB}/pods")
    # No kubelet takes away what has been told to end.
    living = [each["metadata"] for each in found["items"] if "deletionTimestamp" not in each["metadata"]]
    return {each["name"] for each in living} - {"jupyter-ada"}


def name_of(lease: Lease) -> str:
    return f"gpu-pool-{lease.id}-1"


async def on_server(job: Any, *arguments: Any) -> Any:
    """Ask the API server beside the pool, which runs in this thread."""
    return await asyncio.to_thread(job, *arguments)


async def started(pool: GpuPool, server: ApiServer, text: str = "25%") -> Lease:
    """Return a lease whose kernel runs."""
    lease = await pool.get_lease(await take(pool, text, key()))
    await pool.launch(lease.id, command())
    await on_server(run, server, name_of(lease))
    await running(pool, lease.id)
    return lease


def run(server: ApiServer, name: str) -> None:
    """Do what a scheduler and a kubelet do."""
    path = f"/api/v1/namespaces/{HUB}/pods/{name}"
    binding = {"kind": "Binding", "apiVersion": "v1", "metadata": {"name": name}}
    node = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    code, answer = server.call("POST", f"{path}/binding", {**binding, "target": node})
    assert code == 201, json.dumps(answer)
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    container = {"name": "kernel", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
    status = {"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}]}
    ready = {"phase": "Running", "containerStatuses": [{**container, "state": state}]}
    put_status(server, path, {**status, **ready})


@pytest.mark.parametrize("times", [ClusterTimes(retried_for=0.5)])
async def test_while_the_api_server_is_away_nothing_is_lost_and_nothing_is_granted_twice(
    pool: GpuPool, outage: Outage
) -> None:
    server = outage.server
    kept, given_back = await started(pool, server), await started(pool, server)
    last = await pool.get_lease(await take(pool, "50%", "last"))
    first_in_line, second_in_line = await take(pool, "25%", "first"), await take(pool, "25%", "second")
    places = [(await pool.get_lease(each)).position for each in (first_in_line, second_in_line)]
    await on_server(outage.stop)
    # What runs is told from memory, launches say what is the matter, and the line stays as it is.
    assert (await pool.pod(kept.id)).phase is PodPhase.RUNNING
    kernel = command()
    with pytest.raises(PoolUnreachable, match="cluster does not answer at the moment.*Your slice is kept"):
        await pool.launch(last.id, kernel)
    assert (
        [(await pool.get_lease(each)).position for each in (first_in_line, second_in_line)]
        == places
        == [1, 2]
    )
    # What is given back meanwhile goes to the first in the queue, once and no more.
    await pool.release(given_back.id)
    granted = await pool.wait(first_in_line, 30)
    assert (await pool.get_lease(second_in_line)).position == 1
    assert sum(part.milli for each in (await pool.status()).leases for part in each.slices) == 1000
    assert granted.state is LeaseState.HELD
    await on_server(outage.start)
    await asyncio.wait_for(launched(pool, last.id, kernel), 120)
    await pool.launch(last.id, kernel)
    await until_names(server, {name_of(kept), name_of(last)})
    assert (await pool.pod(kept.id)).phase is PodPhase.RUNNING
    await pool.release(kept.id)
    assert (await pool.wait(second_in_line, 30)).state is LeaseState.HELD
    await until_names(server, {name_of(last)})


async def until_names(server: ApiServer, expected: set[str]) -> None:
    await eventually(lambda: on_server(names, server), lambda seen: seen == expected)


async def test_what_the_api_server_forgot_is_listed_again_and_nothing_is_missed(
    pool: GpuPool, outage: Outage
) -> None:
    """A watch that goes on where etcd remembers nothing any more: 410 Gone."""
    server = outage.server
    kept, deleted = await started(pool, server), await started(pool, server)
    lists = backend_of(pool).api.counts["LIST"]
    await on_server(outage.stop)
    await on_server(outage.remove, "pods", HUB, name_of(deleted))
    await on_server(outage.compact)
    await on_server(outage.start)
    with pytest.raises(LeaseGone, match="Somebody who manages the cluster deleted it"):
        await until_pod(pool, deleted.id, lambda _: False)
    assert (await pool.pod(kept.id)).phase is PodPhase.RUNNING
    assert backend_of(pool).api.counts["LIST"] > lists
    again = await pool.request(parse_request("50%"), Holder("ada"), "again")
    assert again.state is LeaseState.HELD
    await until_names(server, {name_of(kept)})
