"""Slices taken back, courses' offers, kernels in pods: what every pool does, or says that it cannot."""

from __future__ import annotations

import pytest

from gpu_pool_client import (
    Activity,
    BadRequest,
    EndReason,
    GpuPoolError,
    Holder,
    KernelCommand,
    LeaseGone,
    NotAllowed,
    Pool,
    TakingEffect,
    parse_request,
)
from support.pools import ME, key, take

ON_PAGES = "on its web pages alone"
NO_PODS = "This pool starts no kernels"


async def test_what_taking_a_slice_back_does(pool: Pool, is_remote: bool) -> None:
    held, waiting = await take(pool, "1", key()), await take(pool, "1", key())
    if is_remote:
        with pytest.raises(NotAllowed, match=ON_PAGES):
            await pool.effect_of_taking(held)
        return
    # Neither is a kernel's.
    assert await pool.effect_of_taking(held) is TakingEffect.FREES_SLICE
    assert await pool.effect_of_taking(waiting) is TakingEffect.LEAVES_QUEUE
    with pytest.raises(LeaseGone):
        await pool.effect_of_taking("1-00000000")


async def test_what_is_revoked_has_ended_and_its_history_says_so(pool: Pool, is_remote: bool) -> None:
    lease = await take(pool, "1", key())
    if is_remote:
        with pytest.raises(NotAllowed, match=ON_PAGES):
            await pool.revoke(lease, "The exam begins.")
        return
    await pool.revoke(lease, "The exam begins.")
    assert (await pool.get_lease(lease)).end_reason is EndReason.REVOKED
    (row,) = await pool.history()
    assert row.reason == "revoked"
    with pytest.raises(LeaseGone):
        await pool.revoke(lease, "Once more.")


async def test_a_slice_that_no_kernel_has_is_not_taken_from_under_a_process(
    pool: Pool, is_remote: bool
) -> None:
    lease = await take(pool, "1", key())
    with pytest.raises(NotAllowed, match=ON_PAGES if is_remote else "cannot go without its kernel"):
        await pool.withdraw(lease, "The exam begins.")
    with pytest.raises(GpuPoolError, match=ON_PAGES if is_remote else "Only a kernel's slice"):
        await pool.ask_back(lease, "The exam begins.")
    assert [each.id for each in (await pool.status()).leases] == [lease]


async def test_a_request_is_found_by_its_key(pool: Pool, is_remote: bool) -> None:
    mine = key()
    lease = await take(pool, "2%", mine)
    if is_remote:
        with pytest.raises(NotAllowed, match="by their ids alone"):
            await pool.find(mine)
        return
    found = await pool.find(mine)
    assert found is not None
    assert (found.id, found.key) == (lease, mine)
    assert await pool.find(key()) is None


async def test_where_no_course_file_lists_slices_none_are_offered(pool: Pool) -> None:
    assert await pool.offers(Holder("ada", "cs101")) is None


async def test_a_slice_that_nothing_uses_is_idle(pool: Pool) -> None:
    lease = await take(pool, "2%", key())
    assert not (await pool.activity(lease)).working
    assert isinstance(await pool.activity(lease), Activity)
    await pool.release(lease)
    with pytest.raises(LeaseGone):
        await pool.activity(lease)


async def test_kernels_are_started_in_pods_or_that_is_refused(pool: Pool, backend: str) -> None:
    lease = await pool.request(parse_request("2%"), ME, key())
    in_pods = backend in ("kubernetes", "whole-devices")
    assert lease.terms.in_pod == in_pods
    with pytest.raises(
        BadRequest if in_pods else NotAllowed, match="No kernel was started" if in_pods else NO_PODS
    ):
        await pool.pod(lease.id)
    if in_pods:
        await pool.end_pod(lease.id)
        return
    with pytest.raises(NotAllowed, match=NO_PODS):
        await pool.launch(lease.id, KernelCommand(("python3",), {}))
    with pytest.raises(NotAllowed, match=NO_PODS):
        await pool.end_pod(lease.id)
