"""A cluster of KAI's as a pool: its GPUs belong to NVIDIA's device plugin, and are shared all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, Lease, LeaseState, parse_request
from support.clusters import named, plain
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import claim, cluster_pool, command, notebook
from support.pools import key

HUB = "hub"


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[GpuPool]:
    fake = FakeKubernetes()
    await fake.start()
    fake.put("nodes", plain("n1"))
    fake.put("pods", notebook("ada", HUB, node="n1"))
    fake.put("persistentvolumeclaims", claim("ada", HUB))
    (queues,) = named("queues.scheduling.run.ai")
    fake.put_of("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", queues)
    config, options = fake.kubeconfig(tmp_path / "kubeconfig"), {"queue": "students"}
    async with cluster_pool(tmp_path / "store.db", config, HUB, options=options) as pool:
        yield pool
    await fake.stop()


async def asked(pool: GpuPool, text: str) -> Lease:
    return await pool.request(parse_request(text), Holder("ada"), key())


async def test_many_slices_of_one_gpu_are_granted_as_long_as_it_has_room(pool: GpuPool) -> None:
    for text in ("2%", "2%", "1GiB", "50%"):
        lease = await asked(pool, text)
        assert lease.state is LeaseState.HELD
        await pool.launch(lease.id, command())
    assert (await asked(pool, "50%")).state is LeaseState.WAITING


async def test_a_whole_gpu_waits_until_nobody_shares_it(pool: GpuPool) -> None:
    part = await asked(pool, "2%")
    whole = await asked(pool, "1")
    assert whole.state is LeaseState.WAITING
    await pool.release(part.id)
    assert (await pool.wait(whole.id, 30)).state is LeaseState.HELD
    assert (await asked(pool, "2%")).state is LeaseState.WAITING
