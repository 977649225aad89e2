"""Whoever waits for news is woken by what happens, and by nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.pool.reconciler import rest_after
from gpu_pool.service.decisions import spread
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool_client import Holder, Lease, LeaseState, Pool, parse_request
from support.pools import embedded, take

LOG = logging.getLogger("test")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with embedded(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
async def news(pool: Pool) -> AsyncIterator[LeaseChanges]:
    """Return what looks at the pool for a reason alone."""
    made = LeaseChanges(pool, LOG, Heartbeats(60, LOG), look_every=1_000.0)
    looking = asyncio.create_task(made.run())
    yield made
    looking.cancel()


def is_held(lease: Lease | None) -> bool:
    return lease is not None and lease.state is LeaseState.HELD


async def test_a_decision_wakes_whom_it_concerns(pool: Pool, news: LeaseChanges) -> None:
    first, second, third = [await take(pool, "1", key) for key in ("first", "second", "third")]
    waits = [asyncio.create_task(news.wait(each, is_held, 1_000)) for each in (second, third)]
    await asyncio.sleep(0)
    await pool.release(first)
    news.decided()
    assert await waits[0]
    assert not waits[1].done()
    news.stop()
    assert not await waits[1]


async def test_a_lease_that_has_ended_is_news(pool: Pool, news: LeaseChanges) -> None:
    lease = await take(pool, "1", "key")
    wait = asyncio.create_task(news.wait(lease, lambda now: now is None, 1_000))
    await asyncio.sleep(0)
    await pool.release(lease)
    news.decided()
    await wait


async def test_nobody_waits_longer_than_asked_nor_after_the_end(news: LeaseChanges) -> None:
    assert not await news.wait("1-00000000", is_held, 0)
    assert not await news.wait("1-00000000", is_held, 0.01)
    news.stop()
    assert not await news.wait("1-00000000", is_held, 1_000)


def test_a_class_that_waits_together_does_not_ask_anew_together() -> None:
    times = [spread(40.0) for _ in range(200)]
    assert all(24.0 <= each <= 40.0 for each in times)
    assert len({round(each) for each in times}) > 10


def test_a_look_that_stood_still_is_no_reason_to_rest_for_long() -> None:
    assert [rest_after(took) for took in (0.001, 0.1, 60.0)] == [0.02, pytest.approx(0.9), 2.0]


async def test_who_waits_is_known_as_of_the_last_look(pool: Pool, news: LeaseChanges) -> None:
    leases = [await take(pool, "1", f"key-{number}") for number in range(2)]
    await look(news)
    assert [news.knows_to_wait(lease) for lease in leases] == [False, True]
    await pool.release(leases[0])
    await look(news)
    assert not news.knows_to_wait(leases[1])


async def look(news: LeaseChanges, user: str = "") -> None:
    """Return after the next look, which somebody's decision is the reason for."""
    looking = asyncio.create_task(news.any(1_000))
    await asyncio.sleep(0)
    news.decided(user)
    await looking


async def test_places_are_those_of_the_last_look_except_to_whoever_has_done_something_since(
    pool: Pool, news: LeaseChanges
) -> None:
    await take(pool, "1", "held")
    mine, theirs = [
        (await pool.request(parse_request("1"), Holder(user), user)).id for user in ("grace", "hopper")
    ]
    assert news.positions("grace") is None  # nobody has looked yet
    await look(news)
    assert [news.positions(user) for user in ("grace", "hopper", "turing")] == [{mine: 1}, {theirs: 2}, {}]
    await pool.release(mine)
    news.decided("grace")
    assert news.positions("grace") is None
    assert news.positions("hopper") == {theirs: 2}
    await look(news)
    assert [news.positions(user) for user in ("grace", "hopper")] == [{}, {theirs: 1}]


async def test_a_look_that_fails_is_not_the_last(
    pool: Pool, news: LeaseChanges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, waits = [await take(pool, "1", key) for key in ("held", "waits")]
    wait = asyncio.create_task(news.wait(waits, is_held, 1_000))
    await look(news)
    assert news.knows_to_wait(waits)
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise ValueError("broken")

    with monkeypatch.context() as broken:
        broken.setattr(pool, "status", fail)
        news.decided()
        await failed.wait()
        # Whoever asks is to learn what is wrong.
        assert not news.knows_to_wait(waits)
        assert news.positions("somebody") is None
    await pool.release(held)
    news.decided()
    await wait
    assert "broken" in caplog.text


async def test_one_whose_question_fails_learns_it_and_keeps_nobody_else_waiting(
    pool: Pool, news: LeaseChanges
) -> None:
    held, waits = [await take(pool, "1", key) for key in ("held", "waits")]

    def broken(_: Lease | None) -> bool:
        raise ZeroDivisionError

    failing = asyncio.create_task(news.wait(waits, broken, 1_000))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(news.wait(waits, is_held, 1_000))
    await asyncio.sleep(0)
    await pool.release(held)
    news.decided()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(failing, 60)
    assert await asyncio.wait_for(waiting, 60)
    await look(news)
    assert news.problem is None
