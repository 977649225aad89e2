"""A cluster of KAI's as a pool: its GPUs belong to NVIDIA's device plugin, and are shared all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import BadRequest, Holder, Lease, LeaseState, NotAllowed, parse_request
from support.clusters import named, plain
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, command
from support.pools import key

HUB = "hub"


@pytest.fixture
def node() -> dict[str, Any]:
    return plain("n1")


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path, node: dict[str, Any]) -> AsyncIterator[GpuPool]:
    fake.put("nodes", node)
    (queues,) = named("queues.scheduling.run.ai")
    fake.put_of("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", queues)
    config, options = fake.kubeconfig(tmp_path / "kubeconfig"), {"queue": "students"}
    async with cluster_pool(tmp_path / "store.db", config, HUB, options=options) as pool:
        yield pool


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


def ready_for_nvfractions() -> dict[str, Any]:
    node = plain("n1")
    node["status"]["conditions"].append({"type": "gpu-sharing.nvidia.com/Ready", "status": "True"})
    return node


@pytest.mark.parametrize("node", [ready_for_nvfractions()])
async def test_the_guarantee_is_held_and_the_cluster_leaves_the_rest(pool: GpuPool) -> None:
    lease = await asked(pool, "50%..100%")
    other = await asked(pool, "50%..60%")
    assert [each.state for each in (lease, other)] == [LeaseState.HELD] * 2
    [part] = lease.slices
    assert (part.memory_mib, part.allowed_mib) == (16384, 32768)
    [status] = (await pool.status()).devices
    assert (status.held_memory_mib, status.held_milli) == (32768, 1000)
    await pool.launch(lease.id, command())
    # What a pod was made with stays while it runs.
    with pytest.raises(NotAllowed):
        await pool.resize(lease.id, parse_request("50%..80%"))


async def test_without_nvfractions_a_limit_is_refused_with_what_can_be_had(pool: GpuPool) -> None:
    with pytest.raises(
        BadRequest, match=r"no node is ready. Ask for 2%: the guarantee alone can be had here"
    ):
        await asked(pool, "2%..10%")
    with pytest.raises(BadRequest, match="guarantee alone"):
        await pool.forecast(parse_request("2%..10%"), Holder("ada"))
