"""A group of nodes at zero, over a real API server and scheduler: it grows for those who wait."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, LeaseState
from support.autoscaler import Autoscaler
from support.clusters import hami
from support.control_plane import Cluster
from support.kernel_pods import backend_of, cluster_pool, command, notebook, running, volume
from support.node_agent import NodeAgent
from support.pools import eventually, take

ADA = Holder("ada")
SELECT = {"cloud.example.org/node-pool": "v100"}


def grown(name: str) -> dict[str, Any]:
    """Return a node of the group: one GPU, shared by HAMi, and a taint of its own."""
    node = hami(name, count=50)
    node["metadata"]["labels"] |= SELECT
    node["spec"]["taints"] += [{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    return node


@pytest.fixture
def empty(cluster: Cluster, tmp_path: Path) -> Iterator[NodeAgent]:
    """A cluster whose only node has no GPU; return who keeps nodes of it."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    with NodeAgent(cluster.kubeconfig, tmp_path / "nodes", hollow=True) as agent:
        bare = hami("cpu-1", gpus=0)
        bare["metadata"] |= {"annotations": {}, "labels": {}}
        agent.add(bare)
        yield agent


@pytest.fixture
def autoscaler(cluster: Cluster, empty: NodeAgent) -> Iterator[Autoscaler]:
    with Autoscaler(cluster, empty, SELECT, grown, most=1) as autoscaler:
        yield autoscaler


@pytest.fixture
async def pool(cluster: Cluster, empty: NodeAgent, namespace: str, tmp_path: Path) -> AsyncIterator[GpuPool]:
    cluster.apply(
        *volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace), namespace=namespace
    )
    example = tmp_path / "node.json"
    example.write_text(json.dumps({"kind": "Node", **grown("old")}))
    groups = {"v100": {"example": str(example), "select": SELECT, "most": 2, "usual_minutes": 3}}
    settings = {"node_groups": groups, "tolerations": ["dedicated"], "memory_mib": 64}
    async with cluster_pool(tmp_path / "store.db", cluster.kubeconfig, namespace, **settings) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        yield pool


async def until_told(pool: GpuPool, lease_id: str, words: str) -> None:
    await eventually(lambda: pool.explain(lease_id), lambda explanation: words in explanation.why)


def placeholders(cluster: Cluster, namespace: str) -> list[Any]:
    found: list[Any] = cluster.get("pods", "-n", namespace, "-l", "jupyter-gpu-pool/placeholder")["items"]
    return found


async def test_a_group_at_zero_grows_for_who_waits_and_its_kernel_runs_there(
    pool: GpuPool, cluster: Cluster, autoscaler: Autoscaler, namespace: str
) -> None:
    autoscaler.go_on.clear()
    waiting = await take(pool, "2%", "first", ADA)
    await until_told(pool, waiting, "A machine is being started, about 3 min more.")
    autoscaler.go_on.set()
    lease = await pool.wait(waiting, 120)
    await eventually(lambda: [lease.slices[0].device.node] == autoscaler.added)
    await pool.launch(waiting, command())
    assert (await running(pool, waiting)).address
    await eventually(lambda: placeholders(cluster, namespace) == [])
    # Whoever comes next has room there, and no further node is asked for.
    assert (await pool.wait(await take(pool, "98%", "second", ADA), 60)).state is LeaseState.HELD
    assert len(autoscaler.added) == 1


@pytest.mark.long
async def test_a_group_that_cannot_grow_is_told_until_it_can(
    pool: GpuPool, cluster: Cluster, autoscaler: Autoscaler, namespace: str
) -> None:
    autoscaler.go_on.clear()
    leases = [await take(pool, "98%", f"key-{number}", ADA) for number in range(2)]
    await until_told(pool, leases[1], "A machine is being started")
    await eventually(lambda: len(placeholders(cluster, namespace)) == 2)
    autoscaler.go_on.set()
    await pool.wait(leases[0], 120)
    await until_told(pool, leases[1], "none can be started for it at the moment")
    assert len(placeholders(cluster, namespace)) == 1
    autoscaler.most = 2
    held = await pool.wait(leases[1], 120)
    await eventually(lambda: held.slices[0].device.node == autoscaler.added[-1])
    await eventually(lambda: placeholders(cluster, namespace) == [])
