"""Kernels in pods that change their size: where the pool divides whole devices, their pods stay."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects.shared import SLICES
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import NotAllowed, TimedOut, parse_request
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import held
from support.pools import eventually
from support.whole_devices import says

from .test_parked import GPU, Opens, fake, opens, pool, started

__all__ = ["fake", "opens", "pool"]


def written(fake: FakeKubernetes, lease_id: str) -> str:
    """Return what the pod of a lease says that it has of its devices."""
    return str(fake.get("pods", f"gpu-pool-{lease_id}-1")["metadata"]["annotations"][SLICES])


async def test_a_kernel_that_uses_nothing_has_another_size_at_once_in_its_pod(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await started(pool, fake)
    assert written(fake, lease_id) == f"{GPU}=20/655"
    await says(pool, fake, {})
    lease = await pool.resize(lease_id, parse_request("10%"))
    assert [(part.device.uuid, part.memory_mib) for part in lease.slices] == [(GPU, 3276)]
    await eventually(lambda: written(fake, lease_id) == f"{GPU}=100/3276")
    assert fake.named("pods").count(f"gpu-pool-{lease_id}-1") == 1


async def test_what_it_uses_must_be_within_its_new_size(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await started(pool, fake, "10%")
    with pytest.raises(NotAllowed, match="its process has initialised CUDA, or may have"):
        await pool.resize(lease_id, parse_request("20%"))
    await says(pool, fake, {lease_id: 2000})
    with pytest.raises(NotAllowed, match="its process has initialised CUDA, or may have"):
        await pool.resize(lease_id, parse_request("2%"))
    assert (await pool.resize(lease_id, parse_request("20%"))).memory_mib == 6553
    assert (await pool.resize(lease_id, parse_request("8%"))).memory_mib == 2621


async def test_it_stays_on_its_device_though_there_is_room_on_another_one(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await started(pool, fake)
    await says(pool, fake, {})
    other = await held(pool, "90%")
    assert other.slices[0].device.uuid == GPU
    with pytest.raises(TimedOut, match="It stays as it is"):
        await pool.resize(lease_id, parse_request("50%"))
    with pytest.raises(TimedOut):
        await pool.resize(lease_id, parse_request("2x2%"))
    lease = await pool.get_lease(lease_id)
    assert [(part.device.uuid, part.milli) for part in lease.slices] == [(GPU, 20)]
    # What is taken ahead, for a restart, may be on another one; its kernel does not get that in its pod.
    taken = await pool.resize(lease_id, parse_request("50%"), ahead=True)
    assert [part.device.uuid for part in taken.slices] == [GPU, "GPU-gpu-1"]
    with pytest.raises(TimedOut):
        await pool.resize(lease_id, parse_request("50%"))
    lease = await pool.resize(lease_id, parse_request("5%"))
    assert [(part.device.uuid, part.milli) for part in lease.slices] == [(GPU, 50)]


async def test_its_limit_alone_changes_whatever_it_uses(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await started(pool, fake)
    await says(pool, fake, {lease_id: 600})
    assert (await pool.resize(lease_id, parse_request("2%..10%"))).slices[0].limit_mib == 3276
    assert (await pool.resize(lease_id, parse_request("2%"))).slices[0].limit_mib == 0


async def test_without_node_agents_a_pod_has_the_size_that_it_was_made_with(
    opens: Opens, fake: FakeKubernetes
) -> None:
    async with opens(node_agent="") as pool:
        lease_id = await started(pool, fake)
        for size in ("10%", "2%..10%"):
            with pytest.raises(NotAllowed, match="its process has initialised CUDA, or may have"):
                await pool.resize(lease_id, parse_request(size))
