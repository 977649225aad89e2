"""Whoever waits for news is woken by what happens, and by nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.service import changes
from gpu_pool.service.changes import Changes
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool_client import Lease, LeaseState, Pool
from support.pools import embedded, take

LOG = logging.getLogger("test")


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    """Return a pool at which nobody looks without a reason."""
    monkeypatch.setattr(changes, "_LOOK_EVERY", 1_000.0)
    async with embedded(tmp_path / "ledger.db") as opened:
        yield opened


@pytest.fixture
async def news(pool: Pool) -> AsyncIterator[Changes]:
    made = Changes(pool, LOG, Heartbeats(60, LOG))
    looking = asyncio.create_task(made.run())
    yield made
    looking.cancel()


def is_held(lease: Lease | None) -> bool:
    return lease is not None and lease.state is LeaseState.HELD


async def test_a_decision_wakes_whom_it_concerns(pool: Pool, news: Changes) -> None:
    first, second, third = [await take(pool, "1", key) for key in ("first", "second", "third")]
    waits = [asyncio.create_task(news.wait(each, is_held, 1_000)) for each in (second, third)]
    await asyncio.sleep(0)
    await pool.release(first)
    news.decided()
    await waits[0]
    assert not waits[1].done()
    news.stop()
    await waits[1]


async def test_a_lease_that_has_ended_is_news(pool: Pool, news: Changes) -> None:
    lease = await take(pool, "1", "key")
    wait = asyncio.create_task(news.wait(lease, lambda now: now is None, 1_000))
    await asyncio.sleep(0)
    await pool.release(lease)
    news.decided()
    await wait


async def test_nobody_waits_longer_than_asked_nor_after_the_end(news: Changes) -> None:
    await news.wait("1-00000000", is_held, 0)
    await news.wait("1-00000000", is_held, 0.01)
    news.stop()
    await news.wait("1-00000000", is_held, 1_000)


async def test_a_look_that_fails_is_not_the_last(
    pool: Pool, news: Changes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await take(pool, "1", "key")
    wait = asyncio.create_task(news.wait(lease, is_held, 1_000))
    await asyncio.sleep(0)
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise ValueError("broken")

    with monkeypatch.context() as broken:
        broken.setattr(pool, "status", fail)
        news.decided()
        await failed.wait()
    news.decided()
    await wait
    assert "broken" in caplog.text
