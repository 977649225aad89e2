"""Kernels in pods that use too much memory: told, interrupted and ended by what the agents of nodes say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.cluster.pod_watchdog import _by_slice
from gpu_pool.enforcement.watchdog import Tolerance
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    EndReason,
    Holder,
    Lease,
    LeaseState,
    Limit,
    PodDeviceUse,
    Slice,
    Strength,
    parse_request,
)
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import CARD, cluster_pool, held, start
from support.pod_watchdog import GPU, NOMINAL, Watched
from support.pools import eventually

#: 2% of 32 GiB.
GRANTED = 655


@pytest.fixture
def there(pool: GpuPool, fake: FakeKubernetes) -> Watched:
    return Watched(pool, fake)


async def test_what_stays_over_its_memory_is_told_then_interrupted_then_ended(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    assert await there.uses(lease, 4000) == {}
    assert there.notices == {}
    await there.uses(lease, 4000, 10)
    told = there.notices[lease]
    assert "This slice uses 4000MiB of GPU 0's memory, and was granted 655MiB." in told
    assert "at 00:17:20 UTC what runs is interrupted, and at 00:18:20 UTC its processes are ended." in told
    assert (await there.lease(lease)).interrupt_at is None
    await there.uses(lease, 4000, 30)
    assert (await there.lease(lease)).interrupt_at == 1040.0
    assert "What ran was interrupted." in there.notices[lease]
    assert await there.uses(lease, 4000, 59) == {}
    over = await there.uses(lease, 4000, 1)
    assert "This slice used 4000MiB of GPU 0's memory, and was granted 655MiB, for too long" in over[lease]
    # Until it has ended, which may take more than one attempt.
    assert await there.look() == over
    await pool.release(lease)
    assert await there.look() == {}


async def test_going_back_forgives_all(there: Watched, pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    for seconds in (0, 10, 30):
        await there.uses(lease, 4000, seconds)
    await there.uses(lease, GRANTED + 64, 1)  # which is tolerated
    assert there.notices[lease] == ""
    await there.uses(lease, 4000, 1)
    assert there.notices[lease] == ""
    assert await there.uses(lease, 4000, 200) == {}
    assert "what runs is interrupted" in there.notices[lease]


async def test_no_step_is_taken_by_what_was_said_before_it_was_due(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    await there.uses(lease, 4000)
    await there.look(29)
    assert there.notices == {}
    await there.uses(lease, 4000, 1)
    assert there.notices[lease]


async def test_while_an_agent_is_away_nothing_ends_and_afterwards_all_begins_anew(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    for seconds in (0, 10, 30):
        await there.uses(lease, 4000, seconds)
    assert await there.look(31) == {}
    assert there.notices[lease] == "", "what was said of its end is not so any more"
    assert await there.look(3600) == {}
    assert await there.uses(lease, 4000) == {}
    assert there.notices[lease] == ""
    assert await there.uses(lease, 4000, 10) == {}
    assert "at 01:18:31 UTC what runs is interrupted" in there.notices[lease]


async def test_what_is_not_known_is_neither_too_much_nor_little(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    for _ in range(30):
        assert await there.uses(lease, None, 10) == {}
    assert there.notices == {}


async def test_who_warned_may_have_been_a_service_that_is_gone(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    there.notices[lease] = "This slice uses 4000MiB of GPU 0's memory, and was granted 655MiB."
    await there.look()
    assert there.notices[lease] == ""


@pytest.mark.parametrize(
    ("limit", "mib", "is_told"),
    [
        (Limit(Strength.HARD, "a MIG instance"), 4000, False),
        (Limit(Strength.COOPERATIVE, "HAMi-core"), GRANTED + 400, False),  # CUDA's own, as the others count
        (Limit(Strength.COOPERATIVE, "HAMi-core"), GRANTED + 500, True),
        (NOMINAL, GRANTED + 400, True),
    ],
)
async def test_what_the_cluster_limits_itself_is_judged_as_far_as_it_can_be_evaded(
    there: Watched, pool: GpuPool, fake: FakeKubernetes, limit: Limit, mib: int, is_told: bool
) -> None:
    lease, there.memory = await start(pool, fake), limit
    for _ in range(3):
        await there.uses(lease, mib, 10)
    assert bool(there.notices.get(lease)) is is_told


async def test_a_system_may_name_a_gpu_otherwise_than_its_driver_does(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    for _ in range(3):
        await there.say(lease, 4000, "GPU-11111111-2222-3333-4444-555555555555")
        await there.look(10)
    assert "uses 4000MiB of GPU 0's memory" in there.notices[lease]


async def test_of_memory_that_nobody_has_granted_nothing_is_too_much(
    there: Watched, pool: GpuPool, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every node shows how much memory its GPUs have."""
    lease = await start(pool, fake)
    describe = there.describe

    def unknown(lease: Lease) -> Lease:
        described = describe(lease)
        return replace(described, slices=tuple(replace(part, memory_mib=0) for part in described.slices))

    monkeypatch.setattr(there, "describe", unknown)
    for _ in range(3):
        await there.uses(lease, 4000, 10)
    assert there.notices == {}


async def test_what_enforces_a_slice_is_said_only_while_somebody_reports(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await held(pool)
    there.memory = NOMINAL

    async def memory() -> Limit:
        return (await there.lease(lease.id)).enforcement.memory

    assert await memory() == NOMINAL
    await there.reports.report("n1", [GPU], [], complete=False)
    assert await memory() == NOMINAL, "not all of its GPUs were looked at"
    await there.reports.report("n1", [GPU], [], complete=True)
    assert await memory() == Limit(Strength.COOPERATIVE, "the pool's watchdog")
    there.now += 30.1
    assert await memory() == NOMINAL
    there.memory = Limit(Strength.COOPERATIVE, "HAMi-core")
    await there.reports.report("n1", [GPU], [], complete=True)
    assert str(await memory()) == "cooperative (HAMi-core; the pool's watchdog)"
    there.memory = Limit(Strength.HARD, "a MIG instance")
    assert await memory() == there.memory


async def test_a_kernel_whose_memory_the_driver_does_not_tell_is_not_said_to_be_watched(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    await there.say(lease, 10)
    assert (await there.lease(lease)).enforcement.memory.by == "the pool's watchdog"
    await there.say(lease, None)
    assert (await there.lease(lease)).enforcement.memory == NOMINAL


async def test_where_nothing_is_ended_nothing_is_said_to_be_enforced(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    there = Watched(pool, fake, Tolerance(ends=False))
    lease = await start(pool, fake)
    for _ in range(30):
        assert await there.uses(lease, 4000, 10) == {}
    assert "what runs is interrupted" not in there.notices[lease]
    described = await there.lease(lease)
    assert (described.enforcement.memory, described.interrupt_at) == (NOMINAL, None)


# -- In a pool -----------------------------------------------------------------


@pytest.fixture
async def watched(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    config, steps = (
        fake.kubeconfig(tmp_path / "kubeconfig"),
        ("watchdog_after", "interrupt_after", "end_after"),
    )
    async with cluster_pool(
        tmp_path / "store.db",
        config,
        "hub",
        watchdog=dict.fromkeys(steps, 0.01),
        node_agent="agents/agent",
    ) as pool:
        yield pool


async def report(pool: GpuPool, fake: FakeKubernetes, lease: str, mib: int) -> None:
    agents = pool.backend.agents
    assert agents is not None
    uid = fake.get("pods", f"gpu-pool-{lease}-1")["metadata"]["uid"]
    await agents.report("n1", [GPU], [PodDeviceUse(uid, "", GPU, mib)], complete=True)


async def test_a_lease_that_uses_too_much_ends_with_its_pod_and_its_user_reads_why(
    watched: GpuPool, fake: FakeKubernetes
) -> None:
    lease, other = await start(watched, fake), await held(watched)
    seen: list[Lease] = []

    async def has_ended() -> bool:
        if f"gpu-pool-{lease}-1" in fake.named("pods"):
            await report(watched, fake, lease, 4000)
        seen.append(await watched.get_lease(lease))
        return seen[-1].state is LeaseState.ENDED

    await eventually(has_ended, within=60)
    assert any("was granted 655MiB" in each.notice and each.interrupt_at is None for each in seen)
    asked = {each.interrupt_at for each in seen if each.state is LeaseState.HELD} - {None}
    assert len(asked) == 1, "it is interrupted once"
    assert seen[-1].end_reason is EndReason.OVER_MEMORY
    assert "Start again with a larger slice." in seen[-1].notice
    assert (await watched.get_lease(other.id)).state is LeaseState.HELD
    await eventually(lambda: f"gpu-pool-{lease}-1" not in fake.named("pods"))


async def test_what_a_pod_is_told_of_its_limits_stays_true(watched: GpuPool, fake: FakeKubernetes) -> None:
    agents = watched.backend.agents
    assert agents is not None
    await agents.report("n1", [GPU], [], complete=True)
    lease = await start(watched, fake)
    assert "the pool's watchdog" in (await watched.get_lease(lease)).environment["GPU_POOL_ENFORCED"]
    (container,) = fake.get("pods", f"gpu-pool-{lease}-1")["spec"]["containers"]
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    assert "HAMi's hook around CUDA" in variables["GPU_POOL_ENFORCED"]
    assert "watchdog" not in variables["GPU_POOL_ENFORCED"]


def test_several_gpus_are_held_against_what_was_granted_in_all() -> None:
    other = replace(CARD, uuid="GPU-n1-1", index=1)
    parts = (Slice(CARD, 20, 655), Slice(other, 20, 655))
    lease = Lease("1-a", "k", parse_request("2x2%"), Holder("ada"), LeaseState.HELD, 0.0, slices=parts)
    assert _by_slice(lease, {"GPU-n1-0": 700, "GPU-n1-1": 10}) == {"GPU-n1-0": 700, "GPU-n1-1": 10}
    assert _by_slice(lease, {"x": 700, "y": 10}) == {"GPU-n1-0": 55}
    assert _by_slice(lease, {"x": 1400, "y": 10}) == {"GPU-n1-0": 755}
