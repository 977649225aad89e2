"""A clock that is wrong for a while changes nothing of what counts once it is right."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, Lease, LeaseState, OverQuota, Process, parse_request
from support.clocked import DAY, YEAR, SetClock, clocked_pool

WEEK = 7 * DAY
#: Before its time server answers a machine may be in 1970; others are set to another week by hand.
WRONG = [-55 * YEAR, -WEEK, WEEK, 10 * YEAR]


class Users:
    """A pool, and what its users do."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.times = SetClock()
        self.pool: GpuPool = clocked_pool(path, self.times, **settings)
        self._count = 0

    async def ask(self, size: str = "10%", user: str = "ada", course: str | None = None) -> Lease:
        self._count += 1
        holder = Holder(user, course, None, Process.current())
        return await self.pool.request(parse_request(size), holder, f"key-{self._count}")

    async def use(self, size: str, seconds: float, user: str = "ada") -> None:
        lease = await self.ask(size, user)
        assert lease.state is LeaseState.HELD
        self.times.uptime += seconds
        await self.pool.release(lease.id)

    async def is_over(self) -> bool:
        """Whether ada has used up her GPU-hours."""
        try:
            await self.pool.release((await self.ask("2%")).id)
        except OverQuota:
            return True
        return False

    def weeks(self) -> int:
        with closing(sqlite3.connect(self.path)) as store:
            return int(store.execute("SELECT count(*) FROM week_use").fetchone()[0])


@pytest.fixture
async def users(tmp_path: Path) -> AsyncIterator[Users]:
    made = Users(tmp_path / "store.db", per_user={"gpu_hours_per_week": 1})
    async with made.pool:
        yield made


@pytest.mark.parametrize("ahead", WRONG)
async def test_what_ends_while_the_clock_is_wrong_forgives_nothing_of_the_week(
    users: Users, ahead: float
) -> None:
    await users.use("1", 1.5 * 3600)
    assert await users.is_over()
    users.times.ahead = ahead
    assert not await users.is_over(), "of another week nothing is known"
    await users.use("10%", 60)
    users.times.ahead = 0.0
    assert await users.is_over()
    users.times.uptime += WEEK
    assert not await users.is_over()


async def test_a_clock_that_is_wrong_again_and_again_forgives_nothing(users: Users) -> None:
    await users.use("1", 1.5 * 3600)
    for ahead in WRONG:
        users.times.ahead = ahead
        await users.use("1", 60)
        users.times.ahead = 0.0
        assert await users.is_over()


async def test_of_each_user_a_few_weeks_are_kept(users: Users) -> None:
    for _ in range(20):
        await users.use("1", 600)
        users.times.uptime += WEEK
    assert users.weeks() == 5
    for ahead in range(-20, 0):
        users.times.ahead = ahead * WEEK - 10 * YEAR
        await users.use("1", 600)
    users.times.ahead = 0.0
    await users.use("1", 600)
    assert users.weeks() <= 6


#: While a lease is held: set right after a wrong start, set wrong, and both in turn.
JUMPS = [(-55 * YEAR, 0.0), (2 * DAY, 0.0), (0.0, 2 * DAY), (0.0, -55 * YEAR), (10 * YEAR, 0.0), (0.0, -DAY)]


@pytest.mark.parametrize(("before", "after"), JUMPS)
async def test_what_is_held_while_the_clock_is_set_counts_for_as_long_as_it_is_held(
    users: Users, before: float, after: float
) -> None:
    users.times.ahead = before
    lease = await users.ask("1")
    users.times.uptime += 1800
    users.times.ahead = after
    assert not await users.is_over(), "half an hour of one hour"
    await users.pool.release(lease.id)
    assert not await users.is_over()
    (row,) = [each for each in await users.pool.history() if each.id == lease.id]
    assert (row.held_seconds, row.gpu_seconds) == (1800, 1800)
    await users.use("1", 1790)
    assert not await users.is_over()
    await users.use("1", 20)
    assert await users.is_over(), "both counted"


async def test_a_clock_that_is_set_uses_up_no_longest_lease(tmp_path: Path) -> None:
    users = Users(tmp_path / "store.db", default_course={"longest_lease": "2h"})
    async with users.pool as pool:
        users.times.ahead = -YEAR
        lease = await users.ask("1")
        users.times.uptime += 1800
        users.times.ahead = 0.0
        await pool.park(lease.id)
        again = await pool.resume(lease.id)
        assert again.terms.ends_at == pytest.approx(users.times.wall + 5400, abs=1)
        users.times.ahead = YEAR
        resized = await pool.resize(lease.id, parse_request("50%"))
        users.times.uptime += 600
        assert resized.held_before == 1800
        await pool.release(lease.id)
        (row,) = await pool.history()
        assert (row.held_seconds, row.gpu_seconds) == (2400, 1800 + 300)


async def test_who_was_granted_by_a_clock_that_was_behind_is_not_last_in_the_queue(tmp_path: Path) -> None:
    users = Users(tmp_path / "store.db")
    async with users.pool as pool:
        await users.ask("30%", "bob")
        users.times.uptime += 1800
        users.times.ahead = -YEAR
        await users.ask("30%", "ada")
        users.times.ahead = 0.0
        rest = await users.ask("40%", "eve")
        waiting = [await users.ask("40%", name) for name in ("bob", "ada")]
        users.times.uptime += 60
        await pool.release(rest.id)
        states = [(await pool.get_lease(lease.id)).state for lease in waiting]
    assert states == [LeaseState.WAITING, LeaseState.HELD]


@pytest.mark.parametrize("ahead", [10 * DAY, 10 * YEAR])
async def test_what_ended_while_the_clock_was_ahead_fades_once_it_is_right(
    users: Users, ahead: float
) -> None:
    users.times.ahead = ahead
    await users.use("1", 300, "ada")
    users.times.ahead = 0.0
    users.times.uptime += DAY  # what ada used a day ago is nothing beside what bob has just used
    await users.use("1", 60, "bob")
    held = await users.ask("1", "eve")
    waiting = [await users.ask("1", name) for name in ("bob", "ada")]
    await users.pool.release(held.id)
    states = [(await users.pool.get_lease(lease.id)).state for lease in waiting]
    assert states == [LeaseState.WAITING, LeaseState.HELD]
