"""What an agent that lies, comes twice or says the same again can do to kernels, and what it cannot."""

from __future__ import annotations

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import NotAllowed, PodDeviceUse
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import backend_of, command, held, running, start
from support.pod_watchdog import GPU, Watched
from support.pools import eventually

#: More than a slice of 2% has.
TOO_MUCH = 4000


@pytest.fixture
def there(pool: GpuPool, fake: FakeKubernetes) -> Watched:
    return Watched(pool, fake)


async def on_second_node(pool: GpuPool, fake: FakeKubernetes) -> str:
    """Start a kernel on n2; return its lease."""
    lease = await held(pool)
    await pool.launch(lease.id, command())
    fake.run(f"gpu-pool-{lease.id}-1", node="n2")
    await running(pool, lease.id)
    return lease.id


@pytest.mark.usefixtures("second_node")
async def test_no_kernel_of_another_node_is_warned_or_ended(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    here, other = await start(pool, fake), await on_second_node(pool, fake)
    for _ in range(30):
        there.now += 10
        with pytest.raises(NotAllowed):
            await there.say(other, 30_000)
        await there.say(other, 10, "GPU-n2-0", "n2")
        assert await there.look() == {}
    assert there.notices == {}
    # Of its own node it is believed, for as long as it takes: that is what the watchdog is.
    for _ in range(12):
        over = await there.uses(here, TOO_MUCH, 10)
        await there.say(other, 10, "GPU-n2-0", "n2")
    assert over.keys() == {here}
    assert there.notices.keys() == {here}


@pytest.mark.usefixtures("second_node")
async def test_a_lie_about_another_node_takes_back_what_was_said_of_its_own(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    here, other = await start(pool, fake), await on_second_node(pool, fake)
    for seconds in (0, 10, 30):
        await there.uses(here, TOO_MUCH, seconds)
    assert there.notices[here]
    with pytest.raises(NotAllowed):
        await there.say(other, 30_000)
    assert await there.look(60) == {}
    assert there.notices[here] == ""


async def test_many_reports_at_once_are_no_more_than_one(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    """Such as one that was recorded, and is sent again and again: time is counted by the service's clock."""
    lease = await start(pool, fake)
    for _ in range(200):
        await there.uses(lease, TOO_MUCH, 0.04)
    assert there.notices == {}


async def test_of_two_agents_on_one_node_the_last_one_counts_and_no_step_comes_sooner(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    """While an agent is replaced there may be two; and whoever has the node may start one more."""
    lease = await start(pool, fake)
    for _ in range(30):
        await there.uses(lease, TOO_MUCH, 5)
        await there.uses(lease, 10, 5)
    assert there.notices == {}
    for _ in range(2):
        await there.uses(lease, TOO_MUCH, 0.1)
        await there.uses(lease, TOO_MUCH, 4.8)
    assert there.notices == {}
    await there.uses(lease, TOO_MUCH, 0.4)
    assert "what runs is interrupted" in there.notices[lease]


@pytest.mark.usefixtures("second_node")
async def test_what_was_said_under_a_node_s_former_name_is_nothing_under_its_new_one(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await on_second_node(pool, fake)
    await there.say(lease, 412, "GPU-n2-0", "n2")
    assert there.reports.activity(lease).memory_mib == 412
    with pytest.raises(NotAllowed, match="is not on node 'renamed'"):
        await there.say(lease, TOO_MUCH, "GPU-n2-0", "renamed")
    assert there.reports.activity(lease).memory_mib == 412
    fake.remove("nodes", "n2")
    await eventually(lambda: not backend_of(pool).view.has_node("n2"))
    there.now += 10
    there.reports.news((await pool.status()).leases)
    assert "n2" not in there.reports.ages()


async def test_an_agent_that_says_nothing_of_a_pod_can_keep_it_from_being_ended_and_no_more(
    there: Watched, pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    for seconds in (0, 10, 30):
        await there.uses(lease, TOO_MUCH, seconds)
    there.now += 1
    await there.reports.report("n1", [GPU], [PodDeviceUse("somebody-else", "", GPU, 1)], complete=True)
    assert await there.look() == {}
    assert there.notices[lease] == ""
    # Of its own pod nobody knows anything where not all was looked at.
    await there.reports.report("n1", [GPU], [], complete=False)
    assert await there.look(1) == {}
    assert there.reports.activity(lease).memory_mib is None
