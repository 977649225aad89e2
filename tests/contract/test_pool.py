"""What every pool promises, whatever is behind its URL."""

from __future__ import annotations

import asyncio
import math
import re
import time

import pytest

from gpu_pool_client import (
    BadRequest,
    Device,
    EndReason,
    Hibernation,
    Holder,
    LeaseGone,
    LeaseState,
    MoveOutcome,
    MoveResult,
    NeverFits,
    NotAllowed,
    PodDeviceUse,
    Pool,
    Process,
    SliceRequest,
    TimedOut,
    parse_request,
)
from support.pools import ME, held_milli, key, take

HALF = parse_request("50%")
#: When something was, as people read it.
SINCE = r"\d{4}-\d\d-\d\d \d\d:\d\d \S+"


async def test_a_free_slice_is_granted_at_once(pool: Pool, device: Device) -> None:
    lease = await pool.request(parse_request("2%"), ME, key())
    assert lease.state is LeaseState.HELD
    assert [(part.milli, part.memory_mib) for part in lease.slices] == [(20, 655)]
    assert lease.environment["CUDA_VISIBLE_DEVICES"] == device.uuid
    assert lease.environment.get("GPU_POOL_SIMULATED") == ("1" if device.simulated else None)


async def test_fifty_times_two_percent_is_exactly_one_gpu(pool: Pool) -> None:
    leases = [await pool.request(parse_request("2%"), ME, key()) for _ in range(50)]
    assert {lease.state for lease in leases} == {LeaseState.HELD}
    assert await held_milli(pool) == 1000
    assert (await pool.request(parse_request("2%"), ME, key())).state is LeaseState.WAITING


async def test_the_same_key_is_the_same_request(pool: Pool) -> None:
    mine = key()
    first = await pool.request(HALF, ME, mine)
    assert (await pool.request(HALF, ME, mine)).id == first.id
    await pool.release(first.id)
    again = await pool.request(HALF, ME, mine)
    assert (again.id, again.state, again.end_reason) == (first.id, LeaseState.ENDED, EndReason.RELEASED)
    assert await held_milli(pool) == 0


async def test_cancelling_a_repeated_request_ends_nothing_that_is_in_use(pool: Pool) -> None:
    mine = key()
    first = await pool.request(HALF, ME, mine)
    await pool.attach(first.id, Process.current())
    for seconds in (0, 0, 0.1):
        repeated = asyncio.create_task(pool.request(HALF, ME, mine))
        await asyncio.sleep(seconds)
        repeated.cancel()
        await asyncio.wait([repeated])
    await pool.status()
    assert (await pool.get_lease(first.id)).state is LeaseState.HELD


@pytest.mark.parametrize("bad", ["", "x" * 129, "two words", "tab\t", "ü"])
async def test_a_key_is_short_printable_ascii(pool: Pool, bad: str) -> None:
    with pytest.raises(BadRequest, match="128 printable ASCII"):
        await pool.request(HALF, ME, bad)


async def test_what_can_never_fit_is_refused_at_once_with_the_largest_that_would(pool: Pool) -> None:
    with pytest.raises(NeverFits, match="Ask for at most 32GiB"):
        await pool.request(parse_request("33GiB"), ME, key())
    with pytest.raises(NeverFits, match="is 163 MiB.*CUDA itself takes about 350 MiB"):
        await pool.request(parse_request("0.5%"), ME, key())
    assert (await pool.status()).queue == ()


async def test_the_queue_is_first_come_first_served(pool: Pool) -> None:
    first = await take(pool, "1", key())
    waiting = [await take(pool, "50%", key()) for _ in range(4)]
    assert [(await pool.get_lease(each)).position for each in waiting] == [1, 2, 3, 4]
    await pool.release(first)
    states = [(await pool.get_lease(each)).state for each in waiting]
    assert states == [LeaseState.HELD] * 2 + [LeaseState.WAITING] * 2
    assert (await pool.get_lease(waiting[2])).position == 1


async def test_ones_own_positions_are_those_of_what_one_has_done(pool: Pool) -> None:
    assert await pool.positions() == {}
    first = await take(pool, "1", key())
    assert await pool.positions() == {}
    waiting = [await take(pool, "1", key()) for _ in range(3)]
    assert await pool.positions() == {each: place for place, each in enumerate(waiting, 1)}
    await pool.release(waiting[0])
    assert await pool.positions() == {waiting[1]: 1, waiting[2]: 2}
    await pool.release(first)
    assert await pool.positions() == {waiting[2]: 1}


async def test_a_small_request_need_not_wait_for_what_a_large_one_cannot_use(pool: Pool) -> None:
    await take(pool, "50%", key())
    whole = await take(pool, "1", key())
    small = await take(pool, "2%", key())
    assert (await pool.get_lease(whole)).position == 1
    assert (await pool.get_lease(small)).state is LeaseState.HELD


async def test_wait_returns_when_the_slice_is_granted(pool: Pool) -> None:
    first = await take(pool, "1", key())
    second = await take(pool, "1", key())
    waiting = asyncio.create_task(pool.wait(second))
    await pool.release(first)
    assert (await waiting).state is LeaseState.HELD


async def test_wait_keeps_the_position_after_a_timeout(pool: Pool) -> None:
    await take(pool, "1", key())
    second = await take(pool, "2%", key())
    with pytest.raises(TimedOut, match="No GPU slice of 2% is free now") as caught:
        await pool.wait(second, 0)
    assert caught.value.largest_now is None
    assert (await pool.get_lease(second)).position == 1


async def test_the_shortage_names_what_is_free(pool: Pool) -> None:
    await take(pool, "70%", key())
    second = await take(pool, "50%", key())
    with pytest.raises(TimedOut, match="up to 30% of one GPU") as caught:
        await pool.wait(second, 0)
    assert caught.value.largest_now == "30%"


async def test_cancelling_a_wait_changes_nothing(pool: Pool) -> None:
    first = await take(pool, "1", key())
    second, third = await take(pool, "1", key()), await take(pool, "1", key())
    for seconds in (0, 0, 0.3):
        waiting = asyncio.create_task(pool.wait(second))
        await asyncio.sleep(seconds)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await pool.positions() == {second: 1, third: 2}
    await pool.release(first)
    assert (await pool.wait(second)).state is LeaseState.HELD


async def test_acquire_leaves_nothing_behind_when_time_is_up(pool: Pool) -> None:
    await take(pool, "1", key())
    mine = key()
    with pytest.raises(TimedOut):
        await pool.acquire(HALF, ME, mine, timeout=0)
    assert (await pool.request(HALF, ME, mine)).end_reason is EndReason.WITHDRAWN
    assert (await pool.status()).queue == ()


async def test_acquire_leaves_nothing_behind_when_it_is_cancelled(pool: Pool) -> None:
    await take(pool, "1", key())
    for delay in range(5):
        asking = asyncio.create_task(pool.acquire(HALF, ME, key()))
        for _ in range(delay * 3):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert (await pool.status()).queue == ()


@pytest.mark.parametrize("size", ["50%", HALF])
async def test_a_lease_lasts_as_long_as_its_block(pool: Pool, size: str | SliceRequest) -> None:
    async with pool.lease(size, ME) as lease:
        assert (lease.state, lease.request) == (LeaseState.HELD, HALF)
        assert await held_milli(pool) == 500
    assert (await pool.get_lease(lease.id)).end_reason is EndReason.RELEASED


async def test_a_lease_is_released_when_its_block_fails(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError):
        async with pool.lease("50%"):
            _ = 1 / 0
    assert await held_milli(pool) == 0


async def test_a_block_waits_for_its_lease(pool: Pool) -> None:
    first = await take(pool, "1", key())

    async def hold() -> LeaseState:
        async with pool.lease("1", ME) as lease:
            return lease.state

    holding = asyncio.create_task(hold())
    while not (await pool.status()).queue:  # noqa: ASYNC110 - the pool has no event for it
        await asyncio.sleep(0.05)
    await pool.release(first)
    assert await holding is LeaseState.HELD
    assert await held_milli(pool) == 0


async def test_a_block_whose_time_is_up_never_begins_and_leaves_nothing_behind(pool: Pool) -> None:
    await take(pool, "1", key())
    with pytest.raises(TimedOut):
        async with pool.lease("2%", ME, timeout=0):
            pytest.fail("the block began without a slice")
    with pytest.raises(BadRequest, match="is not a GPU slice"):
        async with pool.lease("much", ME):
            pytest.fail("the block began without a slice")
    assert (await pool.status()).queue == ()


async def test_release_may_be_repeated_and_is_silent_about_the_unknown(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    await pool.release(lease)
    await pool.release(lease, EndReason.REVOKED)
    await pool.release("1-00000000")
    await pool.release("../../etc/passwd")
    assert (await pool.get_lease(lease)).end_reason is EndReason.RELEASED
    assert await held_milli(pool) == 0


async def test_an_ended_or_unknown_lease_is_gone(pool: Pool) -> None:
    lease = await take(pool, "50%", key())
    await pool.release(lease)
    for change in (pool.renew(lease), pool.park(lease), pool.resume(lease), pool.wait(lease)):
        with pytest.raises(LeaseGone, match="released") as caught:
            await change
        assert caught.value.reason == "released"
    with pytest.raises(LeaseGone, match="no lease 'nonsense'"):
        await pool.attach("nonsense", Process.current())


async def test_watch_tells_every_change_and_ends_with_the_lease(pool: Pool) -> None:
    first, second, third = [await take(pool, "1", key()) for _ in range(3)]
    seen: list[tuple[str, int | None]] = []
    follow: dict[tuple[str, int | None], str] = {
        ("waiting", 2): first,
        ("waiting", 1): second,
        ("held", None): third,
    }
    async for lease in pool.watch(third):
        seen.append((lease.state.value, lease.position))
        if seen[-1] in follow:
            await pool.release(follow.pop(seen[-1]))
    assert seen == [("waiting", 2), ("waiting", 1), ("held", None), ("ended", None)]


async def test_status_is_one_snapshot(pool: Pool, device: Device) -> None:
    held = await take(pool, "70%", key(), Holder("ada", "cs101", "Python 3 (GPU 70%)"))
    waiting = await take(pool, "50%", key())
    status = await pool.status()
    assert [lease.id for lease in status.leases] == [held]
    assert [(lease.id, lease.position) for lease in status.queue] == [(waiting, 1)]
    assert (status.leases[0].holder.course, status.leases[0].holder.kernel) == ("cs101", "Python 3 (GPU 70%)")
    assert (status.devices[0].free_milli, status.devices[0].free_memory_mib) == (300, 32768 - 22937)
    assert status.simulated == device.simulated


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9])
async def test_a_deadline_that_is_none_is_refused(pool: Pool, seconds: float) -> None:
    lease = await take(pool, "2%", "key")
    for attempt in (
        lambda: pool.renew(lease, seconds),
        lambda: pool.attach(lease, Process.current(), ready_within=seconds),
        lambda: pool.attach(lease, Process.current(), grace=seconds),
    ):
        with pytest.raises(BadRequest, match="0 to 86400 seconds"):
            await attempt()


async def test_names_are_kept_short_and_printable(pool: Pool) -> None:
    name = "a\ud800\x1b[31m" + "b" * 1_000
    lease = await pool.request(parse_request("2%"), Holder("ada", kernel=name), "key")
    kept = lease.holder.kernel
    assert kept is not None
    assert kept.startswith("a??[31mbbb")
    assert len(kept) == 200


async def test_why_a_lease_waits(pool: Pool) -> None:
    held = await take(pool, "1", "held")
    await take(pool, "1", "first")
    waiting = await take(pool, "2%", "second")
    outlook = await pool.explain(waiting)
    assert outlook.position == 2
    assert "2%" in outlook.why
    with pytest.raises(BadRequest, match="does not wait"):
        await pool.explain(held)
    await pool.release(waiting)
    with pytest.raises(LeaseGone):
        await pool.explain(waiting)


@pytest.mark.parametrize("name", ["ada", ""])
async def test_what_a_request_would_meet(pool: Pool, name: str) -> None:
    holder, half = Holder(name, "cs101"), parse_request("50%")
    assert await pool.forecast(half, holder) is None
    await take(pool, "60%", "held")
    outlook = await pool.forecast(half, holder)
    assert outlook is not None
    assert outlook.position == 1
    assert "50%" in outlook.why
    # There is room for this one, and nothing was asked for.
    assert await pool.forecast(parse_request("40%"), holder) is None
    status = await pool.status()
    assert ([lease.key for lease in status.leases], status.queue) == (["held"], ())
    assert await pool.history() == []


async def test_what_is_forecast_of_a_refused_request_is_its_refusal(pool: Pool) -> None:
    with pytest.raises(NeverFits, match="32"):
        await pool.forecast(parse_request("64GiB"), Holder("ada"))


async def test_a_drained_device_grants_nothing_until_it_is_undrained(pool: Pool, device: Device) -> None:
    held = await take(pool, "50%", key())
    assert (await pool.drain("0")).drained
    waiting = await take(pool, "2%", key())
    assert (await pool.get_lease(held)).state is LeaseState.HELD
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    assert (await pool.status()).devices[0].drained
    assert not (await pool.drain(device.uuid, drained=False)).drained
    assert (await pool.get_lease(waiting)).state is LeaseState.HELD


async def test_whoever_waits_for_a_drained_device_is_told_so(pool: Pool) -> None:
    before = time.time()
    await pool.drain("0")
    (drained,) = (await pool.status()).devices
    assert (drained.free_milli, drained.free_memory_mib) == (0, 0)
    assert before - 1 <= (drained.drained_at or 0) <= time.time() + 1
    waiting = await take(pool, "2%", key())
    said = rf"An administrator has drained GPU 0 \(since {SINCE}\): nothing new is granted on it\."
    outlook = await pool.explain(waiting)
    assert re.search(rf"2% of one GPU is needed\. {said} Ask the administrator", outlook.why)
    meets = await pool.forecast(parse_request("2%"), Holder("ada"))
    assert meets is not None
    assert re.search(said, meets.why)
    with pytest.raises(TimedOut, match=rf"No GPU slice of 2% is free now\. {said}") as caught:
        await pool.wait(waiting, 0)
    assert caught.value.remedy == "Ask the administrator when it is in use again."
    assert (await pool.drain("0", drained=False)).drained_at is None


async def test_draining_again_does_not_change_since_when(pool: Pool) -> None:
    first = await pool.drain("0")
    assert (await pool.drain("0")).drained_at == first.drained_at


async def test_a_device_that_is_not_there_cannot_be_drained(pool: Pool, device: Device) -> None:
    with pytest.raises(BadRequest, match=rf"There is: 0 \({device.uuid}\)"):
        await pool.drain("7")


async def test_a_device_can_be_drained_so_that_the_kernels_on_it_go_to_disk(pool: Pool) -> None:
    held = await take(pool, "50%", key())
    assert not (await pool.get_lease(held)).hibernates
    await pool.report_hibernation(held, Hibernation(None, "It has a connection.", outlives_server=True))
    await pool.drain("0", hibernate=True)
    lease = await pool.get_lease(held)
    # Why it stayed awake before is tried anew.
    assert (lease.hibernates, lease.hibernation) == (True, Hibernation(None, "", True, True))
    await pool.report_hibernation(held, Hibernation(118))
    assert [each.hibernation for each in (await pool.status()).leases] == [Hibernation(118)]
    await pool.drain("0", drained=False)
    lease = await pool.get_lease(held)
    assert (lease.hibernates, lease.hibernation) == (False, Hibernation(118, "", True))
    await pool.drain("0")
    assert not (await pool.get_lease(held)).hibernates


async def test_a_device_is_drained_for_the_disk_until_it_is_undrained(pool: Pool) -> None:
    held = await take(pool, "50%", key())
    assert [each.hibernates for each in (await pool.status()).devices] == [False]
    assert (await pool.drain("0", hibernate=True)).hibernates
    assert (await pool.drain("0")).hibernates
    assert (await pool.get_lease(held)).hibernates
    assert not (await pool.drain("0", drained=False)).hibernates
    assert not (await pool.get_lease(held)).hibernates


@pytest.mark.parametrize("mib", [-1, 2**62])
async def test_no_image_has_such_a_size(pool: Pool, mib: int) -> None:
    lease = await take(pool, "20%", key())
    with pytest.raises(BadRequest):
        await pool.report_hibernation(lease, Hibernation(mib))


async def test_the_history_says_what_became_of_every_lease(pool: Pool) -> None:
    await pool.release(await take(pool, "50%", "first", Holder("ada", "cs101", "notebook")))
    await pool.release(await take(pool, "2%", "second"), EndReason.REVOKED)
    rows = await pool.history()
    # A pool that sees who asks does not believe what is said about it.
    (user,) = {(await pool.get_lease(row.id)).holder.user for row in rows}
    assert [(row.user, row.course, row.milli, row.reason) for row in rows] == [
        (user, "cs101", 500, "released"),
        (user, "", 20, "revoked"),
    ]
    assert await pool.history(rows[-1].ended_at + 1) == []


async def test_the_history_keeps_when_kernels_worked(pool: Pool) -> None:
    lease, silent = await take(pool, "20%", key()), await take(pool, "20%", key())
    await pool.report_busy(lease, [(2000.5, 1.5)])
    await pool.report_busy(lease, [(1000.0, 60.0)])
    assert lease not in await pool.busy_times()
    for each in (lease, silent):
        await pool.release(each)
    found = await pool.busy_times()
    assert {number: [tuple(span) for span in spans] for number, spans in found.items()} == {
        lease: [(1000.0, 60.0), (2000.5, 1.5)]
    }
    assert await pool.busy_times((await pool.history())[-1].ended_at + 1) == {}


@pytest.mark.parametrize("span", [(math.inf, 1.0), (1.0, math.nan), (1.0, -1.0)])
async def test_a_kernel_cannot_have_worked_at_no_time(pool: Pool, span: tuple[float, float]) -> None:
    lease = await take(pool, "20%", key())
    with pytest.raises(BadRequest):
        await pool.report_busy(lease, [span])


async def test_nobody_but_a_node_s_agent_says_what_is_used_there(pool: Pool) -> None:
    with pytest.raises(NotAllowed):
        await pool.report_use(["GPU-1"], [PodDeviceUse("", "abc", "GPU-1", 412)])


async def test_nobody_but_a_node_s_agent_moves_what_is_kept_there(pool: Pool) -> None:
    with pytest.raises(NotAllowed):
        await pool.move_memory({"GPU-1": ""}, [MoveResult("m", MoveOutcome.DONE)], known=["m"], seconds=0.1)


async def test_batch_work_comes_after_all_that_is_not(pool: Pool) -> None:
    held = await take(pool, "1", key())
    grader = Holder("ada", batch=True)
    batch = await pool.request(HALF, grader, key())
    later = await pool.request(HALF, ME, key())
    assert batch.holder.batch
    assert not later.holder.batch
    assert [lease.id for lease in (await pool.status()).queue] == [later.id, batch.id]
    assert "This request is batch work" in (await pool.explain(batch.id)).why
    assert "batch" not in (await pool.explain(later.id)).why
    meets = [await pool.forecast(HALF, each) for each in (grader, ME)]
    assert [outlook and outlook.position for outlook in meets] == [3, 2]
    # A kernel of a grader's that was parked comes back as what it was.
    await pool.release(held)
    await pool.park(batch.id)
    await take(pool, "50%", key())
    await pool.resume(batch.id)
    last = await take(pool, "50%", key())
    assert [lease.id for lease in (await pool.status()).queue] == [last, batch.id]
    await pool.release(batch.id)
    assert (await pool.get_lease(batch.id)).holder.batch
