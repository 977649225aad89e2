"""Slices that are lent, taken back and changed in size, in every pool."""

from __future__ import annotations

import pytest

from gpu_pool_client import (
    BadRequest,
    Device,
    Holder,
    LeaseGone,
    LeaseState,
    NeverFits,
    NotAllowed,
    Pool,
    TimedOut,
    parse_request,
)
from support.pools import held_milli, key, take
from support.service import asking

HALF = parse_request("50%")


async def test_a_parked_lease_gives_its_slice_away_and_returns_to_its_device(
    pool: Pool, device: Device
) -> None:
    first = await take(pool, "1", key())
    second = await take(pool, "1", key())
    assert (await pool.park(first)).slices == ()
    assert (await pool.get_lease(second)).state is LeaseState.HELD
    assert (await pool.resume(first)).position == 1
    await pool.release(second)
    lease = await pool.get_lease(first)
    assert (lease.state, lease.slices[0].device.uuid) == (LeaseState.HELD, device.uuid)
    assert await held_milli(pool) == 1000


async def test_one_that_yields_stays_held_unless_it_is_asked_back(pool: Pool) -> None:
    first = await take(pool, "1", key())
    held = await pool.park(first, yields=True)
    assert (held.state, held.asked_back) == (LeaseState.HELD, None)
    assert held.slices
    waits = await take(pool, "1", key(), Holder("bob", yields=True))
    assert (await pool.get_lease(waits)).state is LeaseState.WAITING
    assert (await pool.park(first)).state is LeaseState.PARKED
    assert (await pool.get_lease(waits)).state is LeaseState.HELD


async def test_a_waiting_lease_cannot_be_parked(pool: Pool) -> None:
    await take(pool, "1", key())
    second = await take(pool, "1", key())
    with pytest.raises(BadRequest, match="holds nothing to park"):
        await pool.park(second)


async def test_whoever_waits_to_resume_may_leave_the_line(pool: Pool) -> None:
    parked, other = await take(pool, "1", key()), await take(pool, "1", key())
    await pool.park(parked)
    assert (await pool.resume(parked)).position == 1
    assert (await pool.park(parked)).state is LeaseState.PARKED
    await pool.release(other)
    assert (await pool.get_lease(parked)).state is LeaseState.PARKED
    assert (await pool.resume(parked)).slices


async def test_a_held_lease_changes_its_size_and_keeps_its_id(pool: Pool) -> None:
    lease = await take(pool, "2%", key())
    grown = await pool.resize(lease, HALF)
    assert (grown.id, grown.state, grown.request) == (lease, LeaseState.HELD, HALF)
    assert (grown.slices[0].milli, grown.environment["GPU_POOL_MEMORY_MIB"]) == (500, "16384")
    assert await held_milli(pool) == 500
    assert (await pool.resize(lease, parse_request("2%"))).slices[0].milli == 20
    assert await held_milli(pool) == 20


async def test_a_length_is_the_end_of_its_lease_at_whatever_size(pool: Pool) -> None:
    lease = await pool.get_lease(await take(pool, "2% for 20min", key()))
    assert str(lease.request) == "2% for 20min"
    assert lease.held_at is not None
    assert (lease.terms.ends_at, lease.terms.ends_as_asked) == (
        pytest.approx(lease.held_at + 1200, abs=5),
        True,
    )
    assert lease.environment["GPU_POOL_ENDS_AS_ASKED"] == "1"
    grown = await pool.resize(lease.id, HALF)
    assert (str(grown.request), grown.terms.ends_at) == (
        "50% for 20min",
        pytest.approx(lease.terms.ends_at, abs=5),
    )
    with pytest.raises(BadRequest, match="stays once it has been granted"):
        await pool.resize(lease.id, parse_request("50% for 2h"))


async def test_what_does_not_fit_now_changes_nothing(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    await take(pool, "20%", key())
    with pytest.raises(TimedOut, match="up to 80% of one GPU") as caught:
        await pool.resize(lease, parse_request("90%"))
    assert caught.value.largest_now == "80%"
    assert (await pool.get_lease(lease)).slices[0].milli == 500
    with pytest.raises(NeverFits):
        await pool.resize(lease, parse_request("2x50%"))
    assert await held_milli(pool) == 700


async def test_nobody_grows_past_those_who_wait_and_what_is_given_back_serves_them(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    waiting = await take(pool, "60%", key())
    with pytest.raises(TimedOut, match="others are waiting for it in the queue") as caught:
        await pool.resize(lease, parse_request("60%"))
    assert caught.value.largest_now == "50%"
    await pool.resize(lease, parse_request("40%"))
    assert (await pool.get_lease(waiting)).state is LeaseState.HELD
    assert await held_milli(pool) == 1000


async def test_what_is_taken_ahead_is_kept_for_a_process_to_come(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    taken = await pool.resize(lease, parse_request("80%"), ahead=True)
    assert (taken.request, taken.state) == (HALF, LeaseState.HELD)
    other = await take(pool, "30%", key())
    assert (await pool.get_lease(other)).state is LeaseState.WAITING
    with pytest.raises(TimedOut, match="cannot become 90% now"):
        await pool.resize(lease, parse_request("90%"), ahead=True)
    assert (await pool.resize(lease, parse_request("80%"))).slices[0].milli == 800
    await pool.release(other)
    # What does not come to be used is given back.
    await pool.resize(lease, parse_request("1"), ahead=True)
    assert await held_milli(pool) == 1000
    await pool.resize(lease, parse_request("80%"), ahead=True)
    assert await held_milli(pool) == 800


async def test_batch_work_that_waits_keeps_batch_work_alone_from_growing(pool: Pool) -> None:
    lease = await take(pool, "10%", key())
    grading = await pool.request(parse_request("20%"), Holder("grader", batch=True), key())
    await take(pool, "60%", key())
    await pool.request(HALF, Holder("grader", batch=True), key())
    assert grading.state is LeaseState.HELD
    with pytest.raises(TimedOut, match="others are waiting for it in the queue"):
        await pool.resize(grading.id, parse_request("25%"))
    assert (await pool.resize(lease, parse_request("15%"))).slices[0].milli == 150


async def test_whoever_waits_keeps_the_place_only_for_no_more_than_before(pool: Pool) -> None:
    await take(pool, "1", key())
    first, second = [await take(pool, "50%", key()) for _ in range(2)]
    assert (await pool.resize(first, parse_request("40%"))).position == 1
    assert (await pool.resize(first, parse_request("41%"))).position == 2
    assert (await pool.get_lease(second)).position == 1


async def test_a_parked_lease_resumes_with_the_size_it_was_given_meanwhile(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    await pool.park(lease)
    assert (await pool.resize(lease, parse_request("10%"))).state is LeaseState.PARKED
    assert (await pool.resume(lease)).slices[0].milli == 100
    await pool.release(lease)
    with pytest.raises(LeaseGone, match="released"):
        await pool.resize(lease, HALF)


async def test_nobody_but_its_keeper_takes_slices_from_under_a_process(pool: Pool) -> None:
    with asking(pool.url, "50%") as (_, [lease]):
        for attempt in (pool.park(lease), pool.resize(lease, parse_request("2%"))):
            with pytest.raises(NotAllowed, match="only the process that asked for it"):
                await attempt
        assert await held_milli(pool) == 500


async def test_the_history_tells_the_first_grant_and_all_use(pool: Pool) -> None:
    lease = await take(pool, "1", key())
    first = (await pool.get_lease(lease)).held_at
    await pool.park(lease)
    await pool.resume(lease)
    await pool.resize(lease, parse_request("2%"))
    await pool.park(lease)
    await pool.release(lease)
    (row,) = await pool.history()
    assert (row.held_at, row.milli) == (first, 20)
    assert 0.02 * row.held_seconds < row.gpu_seconds < row.held_seconds
