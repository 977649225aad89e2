"""A pool that divides the only GPU of a node by replicas of the device plugin, over a real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import LeaseState
from support.clusters import plain
from support.control_plane import Cluster
from support.kernel_pods import backend_of, command, notebook, running, volume
from support.node_agent import NodeAgent
from support.pools import eventually, take

from .test_shared import Pools, installed, started

__all__ = ["installed"]

NODE, REPLICAS = "replicas-1", 3


@pytest.fixture
def cluster(kubeconfig: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A node with a GPU in three replicas. What its pods run does not matter here."""
    with NodeAgent(kubeconfig, tmp_path / "nodes", hollow=True) as agent:
        yield Cluster(kubeconfig, agent)


@pytest.fixture
async def pools(cluster: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[Pools]:
    made = plain(NODE, replicas=REPLICAS, strategy="time-slicing")
    made["spec"]["taints"] = [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "jupyter-gpu-pool/shared", "value": namespace, "effect": "NoSchedule"},
    ]
    cluster.add(made)
    # Servers of users are elsewhere.
    cluster.add(plain("users-1", gpus=0))
    cluster.apply(
        *volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace), namespace=namespace
    )
    async with AsyncExitStack() as stack:
        yield Pools(cluster, namespace, tmp_path, stack)


def rival(name: str, *tolerations: dict[str, str]) -> dict[str, Any]:
    """Return a pod of somebody else that asks for a replica."""
    limits = {"nvidia.com/gpu": "1"}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "c", "image": "example.org/c:1", "resources": {"limits": limits}}
    profile = {"type": "RuntimeDefault"}
    spec = {
        "containers": [{**container, "securityContext": security}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": profile},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}, *tolerations],
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def test_kernels_take_replicas_which_nobody_else_gets_and_their_number_is_the_most(
    pools: Pools, installed: Path
) -> None:
    pool = await pools.open(installed)
    ids = [await started(pool, text) for text in ("2%", "0.5GiB", "30%")]
    pods = [pools.cluster.get("pod", f"gpu-pool-{each}-1", "-n", pools.namespace) for each in ids]
    assert {pod["spec"]["nodeName"] for pod in pods} == {NODE}
    limits = [pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    assert limits == ["1"] * REPLICAS
    assert not pools.claims()
    assert not pools.holders()
    # All replicas are taken, though most of the GPU is free.
    waiting = await take(pool, "2%", "waits")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    await pool.release(ids[0])
    lease = await pool.wait(waiting, 120)
    await pool.release(lease.id)
    # The scheduler lets nobody in who does not tolerate the pool's taint, though a replica is free.
    pools.cluster.apply(rival("rival"), namespace=pools.namespace)
    await eventually(lambda: pools.is_refused_a_gpu("rival"), within=60)
    await started(pool)


async def test_while_a_pod_of_others_has_a_replica_nothing_more_is_granted_and_nothing_ends(
    pools: Pools,
) -> None:
    pool = await pools.open()
    first = await started(pool)
    tolerates = {"key": "jupyter-gpu-pool/shared", "operator": "Exists"}
    pools.cluster.apply(rival("rival", tolerates), namespace=pools.namespace)
    await eventually(
        lambda: pools.cluster.get("pod", "rival", "-n", pools.namespace)["spec"].get("nodeName") == NODE,
        within=60,
    )

    async def is_full() -> bool:
        (device,) = (await pool.status()).devices
        return device.free_milli == 0

    await eventually(is_full)
    waiting = await take(pool, "2%", "waits")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    assert (await pool.get_lease(first)).state is LeaseState.HELD
    pools.cluster.kubectl("delete", "pod", "rival", "-n", pools.namespace)
    lease = await pool.wait(waiting, 120)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    # It goes on as it is, for longer than a device without a claim would.
    for _ in range(3):
        await pool.core.reconciler.once()
    assert (await pool.get_lease(first)).state is LeaseState.HELD
    assert not backend_of(pool).view.claims()
