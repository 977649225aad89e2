"""Memory on top of guarantees, on GPUs that the pool divides: lent, taken back, and only where it is seen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, Lease, LeaseState, Slice
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, command, held
from support.pools import eventually
from support.whole_devices import says, start_whole

HUB, GPU = "hub", "GPU-gpu-0"
#: 2% and 10% of 32 GiB, in MiB.
GUARANTEE, LIMIT = 655, 3276
#: Opens a pool over the store of the test.
Opens = Callable[..., AbstractAsyncContextManager[GpuPool]]
#: The watchdog's steps as soon as an agent has reported.
AT_ONCE = {"burst_after": 0.0, "burst_interrupt_after": 0.1, "burst_end_after": 0.1}


@pytest.fixture
def fake(dra: FakeKubernetes) -> FakeKubernetes:
    return dra


@pytest.fixture
def opens(fake: FakeKubernetes, tmp_path: Path) -> Opens:
    config = fake.kubeconfig(tmp_path / "kubeconfig")

    def opened(**settings: Any) -> AbstractAsyncContextManager[GpuPool]:
        settings = {"dialect": "shared", "node_agent": "agents/agent", **settings}
        return cluster_pool(tmp_path / "store.db", config, HUB, **settings)

    return opened


@pytest.fixture
async def pool(opens: Opens) -> AsyncIterator[GpuPool]:
    async with opens(watchdog=AT_ONCE) as pool:
        yield pool


async def part(pool: GpuPool, lease_id: str) -> Slice:
    return (await pool.get_lease(lease_id)).slices[0]


async def until_allowed(pool: GpuPool, lease_id: str, mib: int) -> None:
    """Return once a lease may use so much."""
    await eventually(lambda: part(pool, lease_id), lambda seen: seen.allowed_mib == mib)


async def until_notice(pool: GpuPool, fake: FakeKubernetes, text: str, lease_id: str, mib: int) -> Lease:
    """Let the agent report until the lease's user reads this."""

    async def is_told() -> bool:
        await says(pool, fake, {lease_id: mib})
        return text in (await pool.get_lease(lease_id)).notice

    await eventually(is_told)
    return await pool.get_lease(lease_id)


async def test_what_nobody_holds_is_lent_and_goes_to_whoever_is_granted_it(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start_whole(pool, fake, "2%..10%")
    await says(pool, fake, {lease_id: 3000})
    await until_allowed(pool, lease_id, LIMIT)
    lease = await pool.get_lease(lease_id)
    assert (lease.memory_mib, lease.limit_mib) == (GUARANTEE, LIMIT)
    assert "655 MiB, up to 3276 MiB" in lease.describe_limits()
    assert "the pool's watchdog" in lease.describe_limits()
    # Nobody waits for what is lent; and none of a guarantee is taken.
    other = await held(pool, "95%")
    await until_allowed(pool, lease_id, 32768 - other.memory_mib)
    assert "now up to" in (await pool.get_lease(lease_id)).describe_limits()
    third = await held(pool, "3%")
    await until_allowed(pool, lease_id, 32768 - other.memory_mib - third.memory_mib)
    assert (await part(pool, lease_id)).allowed_mib == GUARANTEE + 1
    for each in (other, third):
        assert (await part(pool, each.id)).allowed_mib == each.memory_mib
    await pool.release(other.id)
    await until_allowed(pool, lease_id, LIMIT)


async def test_who_keeps_what_is_taken_back_is_told_interrupted_and_ended_in_this_order(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start_whole(pool, fake, "2%..10%")
    await says(pool, fake, {lease_id: 3000})
    await until_allowed(pool, lease_id, LIMIT)
    other = await held(pool, "98%")
    await until_allowed(pool, lease_id, GUARANTEE + 1)
    needs = "may use 656MiB now: others need what it had on top of its slice"
    assert (await until_notice(pool, fake, needs, lease_id, 3000)).state is LeaseState.HELD
    lease = await until_notice(pool, fake, "What ran was interrupted.", lease_id, 3000)
    assert (lease.state, lease.interrupt_at is None) == (LeaseState.HELD, False)

    async def has_ended() -> bool:
        if (await pool.get_lease(lease_id)).state is LeaseState.HELD:
            await says(pool, fake, {lease_id: 3000})
        return (await pool.get_lease(lease_id)).state is LeaseState.ENDED

    await eventually(has_ended)
    ended = await pool.get_lease(lease_id)
    assert ended.end_reason is EndReason.OVER_MEMORY
    assert "that was on top of its slice, and did not come back in time" in ended.notice
    assert (await pool.get_lease(other.id)).state is LeaseState.HELD


async def test_who_lets_go_in_time_goes_on(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await start_whole(pool, fake, "2%..10%")
    await says(pool, fake, {lease_id: 3000})
    await until_allowed(pool, lease_id, LIMIT)
    await held(pool, "98%")
    await until_allowed(pool, lease_id, GUARANTEE + 1)
    await until_notice(pool, fake, "others need what it had on top", lease_id, 3000)
    await says(pool, fake, {lease_id: 600})
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.notice == "")
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_nothing_is_lent_where_no_agent_reports_and_it_is_taken_back_when_one_is_silent(
    opens: Opens, fake: FakeKubernetes
) -> None:
    times = ClusterTimes(use_holds=0.0)
    async with opens(times=times) as pool:
        lease_id = await start_whole(pool, fake, "2%..10%")
        await says(pool, fake, {lease_id: 600})
        await pool.core.reconciler.once()
        lease = await pool.get_lease(lease_id)
        assert (lease.allowed_mib, lease.limit_mib) == (GUARANTEE, LIMIT)
        assert "nothing on top of it at the moment, since the agent of its node" in lease.describe_limits()
    async with opens() as pool:
        await says(pool, fake, {lease_id: 600})
        await until_allowed(pool, lease_id, LIMIT)
    async with opens(times=times) as pool:
        await until_allowed(pool, lease_id, GUARANTEE)


async def test_a_service_that_starts_anew_takes_nothing_back_before_agents_could_say_anything(
    opens: Opens, fake: FakeKubernetes
) -> None:
    async with opens() as pool:
        lease_id = await start_whole(pool, fake, "2%..10%")
        await says(pool, fake, {lease_id: 3000})
        await until_allowed(pool, lease_id, LIMIT)
    async with opens(times=ClusterTimes(use_holds=600.0)) as pool:
        for _ in range(3):
            await pool.core.reconciler.once()
            assert (await part(pool, lease_id)).allowed_mib == LIMIT


async def test_without_node_agents_the_guarantee_is_granted_and_it_is_said_that_the_limit_changes_nothing(
    opens: Opens, fake: FakeKubernetes
) -> None:
    async with opens(node_agent="") as pool:
        lease_id = await start_whole(pool, fake, "2%..10%")
        await pool.core.reconciler.once()
        lease = await pool.get_lease(lease_id)
        assert (lease.memory_mib, lease.allowed_mib, lease.limit_mib) == (GUARANTEE, GUARANTEE, 0)
        assert "the limit above it changes nothing here" in lease.describe_limits()
        environment = fake.get("pods", f"gpu-pool-{lease_id}-1")["spec"]["containers"][0]["env"]
        told = {each["name"]: each["value"] for each in environment}
        assert "the limit above it changes nothing here" in told["GPU_POOL_ENFORCED"]
        assert "GPU_POOL_LIMIT_MIB" not in told


async def test_a_kernel_begins_with_what_it_has_on_top_then(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await held(pool, "2%..10%")
    await says(pool, fake, {})
    await until_allowed(pool, lease.id, LIMIT)
    await pool.launch(lease.id, command())
    environment = fake.get("pods", f"gpu-pool-{lease.id}-1")["spec"]["containers"][0]["env"]
    told = {each["name"]: each["value"] for each in environment}
    assert (told["GPU_POOL_ALLOWED_MIB"], told["GPU_POOL_LIMIT_MIB"]) == (str(LIMIT), str(LIMIT))
    # Torch can follow a change; what JAX reads is of the guarantee.
    fractions = float(told["GPU_POOL_TORCH_FRACTION"]), float(told["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    assert fractions[0] > 4 * fractions[1]
