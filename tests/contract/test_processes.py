"""What keeps a lease in every pool, and what ends it: processes and deadlines."""

from __future__ import annotations

import pytest

from gpu_pool_client import (
    EndReason,
    LeaseState,
    Pool,
    Process,
)
from support.pools import eventually, identity, key, running, take
from support.service import asking


async def test_the_attached_process_keeps_the_lease(pool: Pool) -> None:
    with running() as kernel:
        lease = await take(pool, "1", key())
        await pool.attach(lease, identity(kernel))
        second = await take(pool, "1", key())
        kernel.kill()
        kernel.wait()
        assert (await pool.wait(second, 20)).state is LeaseState.HELD
    assert (await pool.get_lease(lease)).end_reason is EndReason.PROCESS_GONE


async def test_a_killed_but_unreaped_process_counts_as_gone(pool: Pool) -> None:
    with running() as kernel:
        lease = await take(pool, "1", key())
        seen = identity(kernel)
        await pool.attach(lease, seen)
        kernel.kill()
        await eventually(lambda: not seen.is_alive())
        assert (await pool.status()).leases == ()


async def test_attaching_while_waiting_is_legal(pool: Pool) -> None:
    with running() as kernel:
        await take(pool, "1", key())
        second = await take(pool, "1", key())
        lease = await pool.attach(second, identity(kernel))
        assert (lease.state, lease.position) == (LeaseState.WAITING, 1)
        kernel.kill()
        kernel.wait()
        assert (await pool.status()).queue == ()


async def test_the_requesters_death_ends_what_nothing_was_attached_to(pool: Pool) -> None:
    with asking(pool.url, "50%", "1") as (server, leases):
        assert [(await pool.get_lease(each)).position for each in leases] == [None, 1]
        server.kill()
        server.wait()
        status = await pool.status()
    assert (status.leases, status.queue) == ((), ())


async def test_the_kernel_outlives_the_requester(pool: Pool) -> None:
    with asking(pool.url, "50%") as (server, [lease]), running() as kernel:
        await pool.attach(lease, identity(kernel), grace=60)
        server.kill()
        server.wait()
        assert [each.id for each in (await pool.status()).leases] == [lease]
        kernel.kill()
        kernel.wait()
        assert (await pool.status()).leases == ()


async def test_grace_lets_the_holder_bring_another_process(pool: Pool) -> None:
    with running() as first, running() as second:
        lease = await take(pool, "50%", key())
        await pool.attach(lease, identity(first), grace=60)
        first.kill()
        first.wait()
        assert [each.id for each in (await pool.status()).leases] == [lease]
        await pool.attach(lease, identity(second), grace=60)
        assert (await pool.status()).leases[0].process == identity(second)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pool, lease: pool.attach(lease, Process.current(), ready_within=0), EndReason.NOT_READY),
        (lambda pool, lease: pool.renew(lease, 0), EndReason.EXPIRED),
    ],
)
async def test_a_deadline_that_passes_ends_the_lease(pool: Pool, change, reason) -> None:  # type: ignore[no-untyped-def]
    lease = await take(pool, "50%", key())
    await change(pool, lease)
    assert (await pool.status()).leases == ()
    assert (await pool.get_lease(lease)).end_reason is reason


async def test_renewing_lifts_the_deadline(pool: Pool) -> None:
    lease, other = await take(pool, "50%", key()), await take(pool, "50%", key())
    await pool.attach(lease, Process.current(), ready_within=3)
    await pool.renew(lease)
    await pool.attach(other, Process.current(), ready_within=3)
    async for each in pool.watch(other):
        ended = each.end_reason
    assert ended is EndReason.NOT_READY
    assert [each.id for each in (await pool.status()).leases] == [lease]


async def test_what_is_granted_while_its_process_is_awaited_does_not_wait_for_ever(pool: Pool) -> None:
    first = await take(pool, "1", key())
    second = await take(pool, "1", key())
    await pool.attach(second, Process.current(), ready_within=0)
    assert (await pool.get_lease(second)).state is LeaseState.WAITING
    await pool.release(first)
    assert (await pool.status()).leases == ()
    assert (await pool.get_lease(second)).end_reason is EndReason.NOT_READY


async def test_who_promised_to_renew_while_waiting_has_to_once_it_holds(pool: Pool) -> None:
    first = await take(pool, "1", key())
    second = await take(pool, "1", key())
    await pool.attach(second, Process.current())
    await pool.renew(second, 1)
    await pool.release(first)
    states = [lease.state async for lease in pool.watch(second)]
    assert states == [LeaseState.HELD, LeaseState.ENDED]
    assert (await pool.get_lease(second)).end_reason is EndReason.EXPIRED
