"""Kernels in pods whose slices of whole devices are lent to others: the pods stay, and so do the devices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.dialects.shared import MOST_PODS
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    Activity,
    EndReason,
    Holder,
    Lease,
    LeaseState,
    NotAllowed,
    TakingEffect,
    parse_request,
)
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, held, start
from support.pools import eventually
from support.whole_devices import CLAIM, holders, lists_devices, says, start_whole

HUB, GPU = "hub", "GPU-gpu-0"
#: Opens a pool over the store of the test.
Opens = Callable[..., AbstractAsyncContextManager[GpuPool]]


@pytest.fixture
def fake(dra: FakeKubernetes) -> FakeKubernetes:
    lists_devices(dra, "gpu-0", "gpu-1")
    return dra


@pytest.fixture
def opens(fake: FakeKubernetes, tmp_path: Path) -> Opens:
    config = fake.kubeconfig(tmp_path / "kubeconfig")

    def opened(**settings: Any) -> AbstractAsyncContextManager[GpuPool]:
        settings = {"dialect": "shared", "node_agent": "agents/agent", "shared_empty_for": 0, **settings}
        return cluster_pool(tmp_path / "store.db", config, HUB, **settings)

    return opened


@pytest.fixture
async def pool(opens: Opens) -> AsyncIterator[GpuPool]:
    async with opens() as pool:
        yield pool


async def started(pool: GpuPool, fake: FakeKubernetes, text: str = "2%") -> str:
    """Start a kernel of ada's on the first device, and return its lease's id."""
    lease_id = await start_whole(pool, fake, text)
    (part,) = (await pool.get_lease(lease_id)).slices
    assert part.device.uuid == GPU
    return lease_id


async def parked(pool: GpuPool, fake: FakeKubernetes, text: str = "2%") -> str:
    """Start a kernel that uses nothing, park it, and return its lease's id."""
    lease_id = await started(pool, fake, text)
    await says(pool, fake, {})
    assert (await pool.park(lease_id)).state is LeaseState.PARKED
    return lease_id


async def ended(pool: GpuPool, lease_id: str) -> Lease:
    """Return a lease once it has ended, and its pod has gone."""
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)
    assert [each.id for each in await pool.history()].count(lease_id) == 1
    return await pool.get_lease(lease_id)


async def test_a_kernel_is_parked_once_an_agent_says_that_it_keeps_nothing_on_its_device(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await started(pool, fake, "1")
    terms = (await pool.get_lease(lease_id)).terms
    assert (terms.in_pod, terms.can_be_parked, terms.yield_after) == (True, True, 60.0)
    with pytest.raises(NotAllowed, match="keeps memory on the GPU, or may"):
        await pool.park(lease_id)
    assert await pool.effect_of_taking(lease_id) is TakingEffect.ENDS_KERNEL
    await says(pool, fake, {lease_id: 412})
    with pytest.raises(NotAllowed, match="keeps memory on the GPU, or may"):
        await pool.park(lease_id)
    await says(pool, fake, {})
    assert await pool.activity(lease_id) == Activity(False, working=False, memory_mib=0)
    assert await pool.effect_of_taking(lease_id) is TakingEffect.KEEPS_KERNEL
    assert (await pool.park(lease_id)).state is LeaseState.PARKED
    other = await held(pool, "1")
    assert other.slices[0].device.uuid == GPU
    assert fake.get("pods", f"gpu-pool-{lease_id}-1")
    assert await pool.activity(lease_id) == Activity(False, working=False, memory_mib=0)


async def test_it_resumes_on_its_own_device_though_others_are_free(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake, "1")
    other = await held(pool, "1")
    assert (await pool.resume(lease_id)).state is LeaseState.WAITING
    free = [each.device.uuid for each in (await pool.status()).devices if each.free_milli == 1000]
    assert free == ["GPU-gpu-1"]
    await pool.release(other.id)
    lease = await pool.wait(lease_id, 30)
    assert [part.device.uuid for part in lease.slices] == [GPU]


async def test_its_device_stays_the_pools_until_its_pod_has_gone(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await parked(pool, fake)
    # What is empty is given back at once here; other things come and go meanwhile.
    for _ in range(3):
        lists_devices(fake, "gpu-0", "gpu-1", generation=2)
        await pool.core.reconciler.once()
    assert fake.named("resourceclaims") == [CLAIM]
    assert len(holders(fake)) == 1
    await pool.release(lease_id)
    await eventually(lambda: not fake.named("resourceclaims") and not holders(fake))


async def test_what_is_parked_is_one_of_the_pods_that_a_device_has_at_most(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake)

    async def contexts(number: int) -> bool:
        (first, _) = (await pool.status()).devices
        return first.free_contexts == MOST_PODS - number

    await eventually(lambda: contexts(1))
    await pool.resume(lease_id)
    await eventually(lambda: contexts(1))  # held now, and counted once
    await pool.release(lease_id)
    await eventually(lambda: contexts(0))


async def test_a_claim_that_is_deleted_ends_what_is_parked_as_well(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake)
    fake.remove("resourceclaims", CLAIM)
    lease = await ended(pool, lease_id)
    assert lease.end_reason is EndReason.TAKEN
    assert "deleted the claim by which this pool had the GPU" in lease.notice
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


async def test_a_device_that_is_not_listed_any_more_ends_what_is_parked_as_well(
    opens: Opens, fake: FakeKubernetes, times: Any
) -> None:
    async with opens(times=type(times)(unlisted_for=0)) as pool:
        lease_id = await parked(pool, fake)
        lists_devices(fake, "gpu-1", generation=2)
        lease = await ended(pool, lease_id)
        assert lease.end_reason is EndReason.DEVICE_LOST
        assert "does not list its GPU any more" in lease.notice


async def test_a_pod_that_is_deleted_while_it_is_parked_ends_its_lease(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake)
    fake.remove("pods", f"gpu-pool-{lease_id}-1")
    lease = await ended(pool, lease_id)
    assert (lease.end_reason, lease.notice) == (
        EndReason.TAKEN,
        "Somebody who manages the cluster deleted it.",
    )


async def test_a_notebook_server_that_is_stopped_ends_its_parked_kernels(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake)
    fake.remove("pods", "jupyter-ada")
    lease = await ended(pool, lease_id)
    assert "Your notebook server was stopped, and its kernels with it." in lease.notice
    await eventually(lambda: not fake.named("pods"))


async def test_one_whose_kernel_has_ended_with_its_pod_may_have_any_device(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await parked(pool, fake, "1")
    other = await held(pool, "1")
    terminated = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    fake.change("pods", f"gpu-pool-{lease_id}-1", phase="Failed", containerStatuses=[terminated])
    lease = await pool.resume(lease_id)
    if lease.state is LeaseState.WAITING:
        lease = await pool.wait(lease_id, 30)
    assert [part.device.uuid for part in lease.slices] == ["GPU-gpu-1"]
    assert other.slices[0].device.uuid == GPU
    assert lease.failure is not None
    assert "of memory (not of the GPU), and was ended" in lease.failure.message


async def test_who_drains_a_device_has_it_once_those_that_hold_it_have_ended(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id, holds = await parked(pool, fake), await started(pool, fake)
    await pool.drain(GPU)
    lease = await ended(pool, lease_id)
    assert lease.end_reason is EndReason.TAKEN
    assert "taken out of use by whoever runs the pool" in lease.notice
    assert (await pool.get_lease(holds)).state is LeaseState.HELD
    await pool.release(holds)
    await eventually(lambda: not fake.named("resourceclaims") and not holders(fake))


async def test_a_service_that_starts_anew_knows_what_is_parked_and_where(
    opens: Opens, fake: FakeKubernetes
) -> None:
    async with opens() as first:
        lease_id = await parked(first, fake, "1")
        other = await held(first, "1")
    async with opens() as second:
        assert (await second.get_lease(lease_id)).state is LeaseState.PARKED
        assert fake.named("resourceclaims") == [CLAIM]
        await second.release(other.id)
        lease = await second.resume(lease_id)
        if lease.state is LeaseState.WAITING:
            lease = await second.wait(lease_id, 30)
        assert [part.device.uuid for part in lease.slices] == [GPU]
        # And what it keeps now is not known before an agent has said it again.
        with pytest.raises(NotAllowed, match="or may"):
            await second.park(lease_id)
        assert fake.get("pods", f"gpu-pool-{lease_id}-1")


async def test_who_uses_a_device_while_parked_is_ended_but_not_at_once(
    opens: Opens, fake: FakeKubernetes
) -> None:
    async with opens(watchdog={"end_after": 1}) as pool:
        lease_id, quiet = await parked(pool, fake), await parked(pool, fake)
        await says(pool, fake, {lease_id: 412})
        await pool.core.reconciler.once()
        assert (await pool.get_lease(lease_id)).state is LeaseState.PARKED

        async def is_over() -> bool:
            if f"gpu-pool-{lease_id}-1" in fake.named("pods"):
                await says(pool, fake, {lease_id: 412})
            return (await pool.get_lease(lease_id)).state is LeaseState.ENDED

        await eventually(is_over)
        lease = await pool.get_lease(lease_id)
        assert lease.end_reason is EndReason.OVER_MEMORY
        assert "used 412MiB of a GPU's memory while its slice was lent to others" in lease.notice
        assert (await pool.get_lease(quiet)).state is LeaseState.PARKED


async def test_who_uses_a_device_for_a_moment_and_resumes_goes_on(opens: Opens, fake: FakeKubernetes) -> None:
    async with opens(watchdog={"end_after": 0}) as pool:
        lease_id = await parked(pool, fake)
        await says(pool, fake, {lease_id: 412})
        await pool.resume(lease_id)
        await says(pool, fake, {lease_id: 412})
        await pool.core.reconciler.once()
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_an_administrator_takes_a_slice_from_a_kernel_which_lives_on(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await started(pool, fake)
    await says(pool, fake, {})
    asked = await pool.ask_back(lease_id, "Others need it.", EndReason.REVOKED)
    assert (asked.state, asked.asked_back) == (LeaseState.HELD, EndReason.REVOKED)
    lease = await pool.withdraw(lease_id, "Others need it.", EndReason.REVOKED)
    assert (lease.state, lease.notice) == (LeaseState.PARKED, "Others need it.")
    assert fake.get("pods", f"gpu-pool-{lease_id}-1")


async def test_a_pod_keeps_its_size_while_its_kernel_is_parked(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await parked(pool, fake)
    with pytest.raises(NotAllowed, match="cannot change its size"):
        await pool.resize(lease_id, parse_request("10%"))


async def test_an_idle_kernel_is_asked_to_give_way_to_who_waits(pool: GpuPool, fake: FakeKubernetes) -> None:
    lists_devices(fake, "gpu-0", generation=2)
    idle = await started(pool, fake, "1")
    await says(pool, fake, {})
    waits = await pool.request(parse_request("1"), Holder("bob", kernel="other", yields=True), "waits")
    assert waits.state is LeaseState.WAITING
    now = (await pool.get_lease(idle)).requested_at
    await pool.report_busy(idle, (), gives_way_since=now - 600)
    assert (await pool.get_lease(idle)).asked_back is EndReason.YIELDED
    assert (await pool.park(idle, yields=True)).state is LeaseState.PARKED
    assert (await pool.wait(waits.id, 30)).slices[0].device.uuid == GPU


@pytest.mark.parametrize("settings", [{"node_agent": ""}, {"dialect": "hami"}], ids=["no agent", "hami"])
async def test_elsewhere_kernels_in_pods_keep_their_slices(
    opens: Opens, fake: FakeKubernetes, settings: dict[str, str]
) -> None:
    if settings.get("dialect"):
        fake.put("nodes", hami("n1"))
    async with opens(**settings) as pool:
        lease_id = await (start if settings.get("dialect") else started)(pool, fake)
        await says(pool, fake, {})
        terms = (await pool.get_lease(lease_id)).terms
        assert (terms.can_be_parked, terms.yield_after) == (False, None)
        with pytest.raises(
            NotAllowed, match="The slice of a kernel in a pod or job cannot be lent to others"
        ):
            await pool.park(lease_id)
