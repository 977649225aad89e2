"""A pool that divides the only GPU of a node by replicas of the device plugin, in a cluster without DRA."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, LeaseState
from support.clusters import plain
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes
from support.kernel_pods import claim, cluster_pool, held, notebook, start
from support.pools import eventually
from support.whole_devices import says

HUB = "hub"
#: As its driver names the node's GPU, which the device plugin does not show.
GPU = "GPU-9f1c"


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        for name, gpus in (("n1", 1), ("n2", 2)):
            made = plain(name, gpus=gpus, replicas=10)
            made["spec"]["taints"] = [
                {"key": "jupyter-gpu-pool/shared", "value": HUB, "effect": "NoSchedule"}
            ]
            fake.put("nodes", made)
        fake.put("pods", notebook("ada", HUB, node="n1"))
        fake.put("persistentvolumeclaims", claim("ada", HUB))
        yield fake


@pytest.fixture
async def pool(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[GpuPool]:
    caplog.set_level(logging.WARNING)
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    settings = {"dialect": "shared", "node_agent": "agents/agent"}
    async with cluster_pool(tmp_path / "store.db", config, HUB, **settings) as pool:
        yield pool


async def test_a_node_that_cannot_be_divided_is_left_out_and_the_log_says_why(
    pool: GpuPool, caplog: pytest.LogCaptureFixture
) -> None:
    assert [(each.device.node, each.device.contexts) for each in (await pool.status()).devices] == [
        ("n1", 10)
    ]
    assert "The node 'n2' is set aside for the pool, and its GPU cannot be had: it has 2 GPUs" in "".join(
        record.getMessage() for record in caplog.get_records("setup")
    )


async def test_memory_is_lent_there_by_what_the_agent_says_of_the_gpu_by_its_own_name(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start(pool, fake, "2%..10%")
    await says(pool, fake, {lease_id: 3000}, GPU)
    used = pool.backend.memory_in_use()
    (device,) = (await pool.status()).devices
    assert used == {lease_id: {device.device.uuid: 3000}}
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.allowed_mib == 3276)
    # What is in use stays before what is not.
    await held(pool, "90%..1", user="bob")
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.allowed_mib == 3000)


async def test_it_goes_on_without_a_claim_however_soon_one_would_be_missed(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    config, times = fake.kubeconfig(tmp_path / "config"), ClusterTimes(assigned_within=0.0, unlisted_for=0.0)
    async with cluster_pool(tmp_path / "own.db", config, HUB, dialect="shared", times=times) as pool:
        lease_id = await start(pool, fake)
        for _ in range(3):
            await pool.core.reconciler.once()
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD
        # Its node is taken from the pool.
        fake.put("nodes", plain("n1", replicas=10))
        await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)
        assert (await pool.get_lease(lease_id)).end_reason is EndReason.DEVICE_LOST


async def test_a_kernel_parks_and_comes_back_and_ends_where_its_gpu_is_drained(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start(pool, fake)
    await says(pool, fake, {}, GPU)
    assert (await pool.park(lease_id)).state is LeaseState.PARKED
    (device,) = (await pool.status()).devices
    await eventually(pool.status, lambda status: status.devices[0].free_contexts == 9)
    await pool.resume(lease_id)
    assert (await pool.wait(lease_id, 60)).state is LeaseState.HELD
    await says(pool, fake, {}, GPU)
    await pool.park(lease_id)
    await pool.drain(device.device.uuid)
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)
    assert (await pool.get_lease(lease_id)).end_reason is EndReason.TAKEN
