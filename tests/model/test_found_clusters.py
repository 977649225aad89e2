"""What working out the model of a pool over a cluster has shown, each on its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_asyncio", reason="the extra [kubernetes] is not installed")

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, LeaseState
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes
from support.kernel_pods import claim, cluster_pool, command, held, notebook
from support.pools import eventually, take

HUB = "hub"


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        fake.put("nodes", hami("n1"))
        fake.put("nodes", hami("n2", model="T4", memory=16384))
        fake.put("pods", notebook("ada", HUB))
        fake.put("persistentvolumeclaims", claim("ada", HUB))
        yield fake


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    async with cluster_pool(tmp_path / "store.db", fake.kubeconfig(tmp_path / "kubeconfig"), HUB) as pool:
        yield pool


async def _has_ended(pool: GpuPool, lease_id: str) -> None:
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)


async def test_what_went_with_its_node_is_given_to_nobody_who_waits(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put("nodes", hami("n3"))
    await eventually(lambda: _there(pool, 3))
    first = (await held(pool, "1 model=v100")).id
    other = (await held(pool, "1 model=v100")).id
    waiting = await take(pool, "1 model=v100", "waiting")
    for lease_id, node in ((first, "n1"), (other, "n3")):
        await pool.launch(lease_id, command())
        fake.run(f"gpu-pool-{lease_id}-1", node=node)
    fake.remove("nodes", "n1")
    await _has_ended(pool, first)
    await eventually(lambda: _there(pool, 2))
    assert (await pool.get_lease(first)).end_reason is EndReason.DEVICE_LOST
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING


async def _there(pool: GpuPool, devices: int) -> bool:
    return len((await pool.status()).devices) == devices


async def test_a_node_that_joins_before_it_can_take_kernels_serves_nobody(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    await held(pool, "1 model=t4")
    waiting = await take(pool, "1 model=t4", "waiting")
    joining = hami("n3", model="T4", memory=16384)
    joining["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    fake.put("nodes", joining)
    await eventually(lambda: _there(pool, 3))
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.change("nodes", "n3", conditions=[{"type": "Ready", "status": "True"}])
    await eventually(lambda: pool.get_lease(waiting), lambda lease: lease.state is LeaseState.HELD)
    assert (await pool.get_lease(waiting)).slices[0].device.node == "n3"
