"""A backend of another package: found by its entry point, with a queue of somebody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import BadRequest, LeaseState, Place, Process, TimedOut, _pool, connect
from support.passes import NO_PASSES
from support.pools import held_milli, take
from support.racks import RackBackend, open_racks


async def test_it_is_found_by_the_scheme_of_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "racks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: racks\nVersion: 1\n")
    opens = f"racks = {open_racks.__module__}:{open_racks.__name__}"
    (info / "entry_points.txt").write_text(f"[{_pool.BACKENDS}]\n{opens}\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with connect(f"racks:{tmp_path}/store.db") as pool:
        lease = await take(pool, "50%", "key")
        assert await held_milli(pool) == 500
        assert isinstance(pool, GpuPool)
        assert isinstance(pool.backend, RackBackend)
        assert pool.backend.bound == {lease}


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[GpuPool]:
    """Racks whose pool is kept in order by the test."""
    async with open_racks(f"racks:{tmp_path}/store.db", tuning=NO_PASSES) as pool:
        yield pool


def backend_of(pool: GpuPool) -> RackBackend:
    assert isinstance(pool.backend, RackBackend)
    return pool.backend


async def test_what_waits_in_somebody_elses_queue_holds_nothing_until_it_is_let_in(pool: GpuPool) -> None:
    backend = backend_of(pool)
    backend.queue.full = "All racks are in use."
    waits = await take(pool, "1", "waits")
    assert (await held_milli(pool), backend.bound) == (0, set())
    backend.queue.full = ""
    other = await take(pool, "1", "other")
    await pool.core.reconciler.once()
    assert (await held_milli(pool), backend.bound) == (1000, {other})
    await pool.release(other)
    backend.queue.let_in(waits)
    await pool.core.reconciler.once()
    assert (await held_milli(pool), backend.bound) == (1000, {waits})
    backend.queue.full = "All racks are in use."
    given_up = await take(pool, "1", "given-up")
    await pool.release(given_up)
    assert given_up not in backend.queue.waiting


async def test_who_waits_there_reads_the_place_the_reason_and_the_expected_start(pool: GpuPool) -> None:
    queue = backend_of(pool).queue
    queue.full, queue.expected_start = "All racks are in use.", time.time() + 720
    first, second = [await take(pool, "1", each) for each in ("first", "second")]
    lease = await pool.get_lease(second)
    assert (lease.state, lease.is_queued) == (LeaseState.PARKED, True)
    assert lease.place == Place(2, "its racks", "All racks are in use.")
    assert [each.place for each in (await pool.status()).leases] == [queue.place(first), lease.place]
    why = "It waits in the cluster's own queue. All racks are in use."
    assert str(await pool.explain(first)) == f"You are next in the queue, perhaps about 12 min. {why}"
    assert str(await pool.explain(second)) == f"You are number 2 in the queue. {why}"
    with pytest.raises(TimedOut, match="number 2 in the queue. It waits in the cluster's own"):
        await pool.wait(second, 0)
    assert await pool.resume(second) == lease


async def test_who_has_been_let_in_waits_until_the_pool_has_seen_it(pool: GpuPool) -> None:
    queue = backend_of(pool).queue
    queue.full = "All racks are in use."
    lease = await take(pool, "1", "waits")
    queue.let_in(lease)
    assert (await pool.get_lease(lease)).place == Place()
    assert str(await pool.explain(lease)).startswith("You wait in the queue.")


async def test_who_waits_there_is_told_when_it_is_their_turn(pool: GpuPool) -> None:
    queue = backend_of(pool).queue
    queue.full = "All racks are in use."
    lease = await take(pool, "1", "waits")
    waiting = asyncio.create_task(pool.wait(lease))
    queue.let_in(lease)
    await pool.core.reconciler.once()
    assert (await waiting).state is LeaseState.HELD


async def test_what_its_holder_parks_is_not_taken_for_one_that_was_let_in(pool: GpuPool) -> None:
    queue = backend_of(pool).queue
    queue.full = "All racks are in use."
    lease = await take(pool, "1", "waits")
    queue.let_in(lease)
    await pool.core.reconciler.once()
    await pool.park(lease)
    for _ in range(2):
        await pool.core.reconciler.once()
        found = await pool.get_lease(lease)
        assert (found.state, found.is_queued) == (LeaseState.PARKED, False)
    with pytest.raises(BadRequest, match="does not wait"):
        await pool.explain(lease)


async def test_what_was_handed_over_at_once_is_neither_granted_nor_used_until_it_is_let_in(
    pool: GpuPool,
) -> None:
    queue = backend_of(pool).queue
    waits = await take(pool, "1", "waits")
    await pool.attach(waits, Process.current(), ready_within=600)
    queue.full = "All racks are in use."
    await queue.submit(await pool.get_lease(waits))  # as its kernel is launched
    await pool.core.reconciler.once()
    given_up = await take(pool, "1", "given-up")
    await pool.release(given_up)
    assert (await pool.get_lease(waits)).first_held_at is None
    let_in_at, began = time.time(), Clock().uptime()
    queue.let_in(waits)
    await pool.core.reconciler.once()
    await pool.release(waits)
    used_at_most = Clock().uptime() - began
    rows = {row.id: row for row in await pool.history()}
    assert (rows[given_up].held_at, rows[given_up].gpu_seconds) == (None, 0)
    held_at = rows[waits].held_at
    assert held_at is not None
    assert held_at >= let_in_at
    assert 0 < rows[waits].gpu_seconds <= used_at_most


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_was_used_before_its_kernel_is_handed_over_again_is_counted(
    pool: GpuPool, restarts: bool
) -> None:
    queue = backend_of(pool).queue
    used = await take(pool, "1", "used")
    first_held_at = (await pool.get_lease(used)).first_held_at
    await pool.attach(used, Process.current())
    if restarts:
        await pool.report_busy(used, [(time.time(), 0.01)])
        await pool.attach(used, Process.current(), ready_within=600)
    queue.full = "All racks are in use."
    await queue.submit(await pool.get_lease(used))
    await pool.core.reconciler.once()
    await pool.release(used)
    [row] = await pool.history()
    assert row.held_at == first_held_at
    assert row.gpu_seconds > 0


NOW = 1_000.0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(), ""),
        (Place(reason="No quota is left."), "No quota is left."),
        (Place(1), "It is next in the queue."),
        (Place(3, "its course"), "It is number 3 in the queue of its course."),
        (
            Place(3, "its partition", "Too little is free.", NOW + 720),
            "It is number 3 in the queue of its partition, perhaps about 12 min. Too little is free.",
        ),
        (Place(expected_start=NOW + 720), "The wait is perhaps about 12 min."),
        (Place(expected_start=NOW - 5), "The wait is perhaps less than a minute."),
    ],
)
def test_a_place_is_told_as_far_as_it_is_known(place: Place, words: str) -> None:
    assert place.told(NOW) == words


def test_a_wait_of_which_nobody_knows_the_place_is_told_all_the_same() -> None:
    assert str(Place(reason="No quota is left.").outlook(NOW)) == (
        "You wait in the queue. It waits in the cluster's own queue. No quota is left."
    )
