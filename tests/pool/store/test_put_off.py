"""Decisions that there was no room for: they are made before any other, and stop nobody for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.errors import NoSpace, StoreUnusable
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import EndReason, Lease, LeaseState, parse_request
from support.pools import ME, V100

Decide = Callable[[StoreContext], object]


@pytest.fixture
async def thread(tmp_path: Path) -> AsyncIterator[StoreThread]:
    """Yield a store of one V100."""
    path = tmp_path / "store.db"

    def open_store(_: float | None) -> StoreContext:
        lease_store = StoreContext(Database(path), PoolSettings())
        registration.register(lease_store, [V100])
        return lease_store

    thread = StoreThread(path, open_store)
    yield thread
    await thread.close()


def ask(lease_store: StoreContext, key: str = "key") -> Lease:
    return requests.decide(lease_store, parse_request("2%"), ME, key)


def read(lease_store: StoreContext) -> list[str]:
    return [lease.key for lease in leases.status(lease_store, "").leases]


def withdraw(lease_store: StoreContext) -> None:
    leases.end_request(lease_store, "key", EndReason.WITHDRAWN)


def failing(decide: Decide, *errors: Exception) -> Decide:
    """Return a decision that fails so, time after time, before it is made."""
    left = [*errors]

    def once(lease_store: StoreContext) -> object:
        if left:
            raise left.pop(0)
        return decide(lease_store)

    return once


FULL = NoSpace("The disk is full.")


async def test_a_withdrawal_that_was_put_off_ends_no_later_lease_of_its_key(thread: StoreThread) -> None:
    # Of a request that was given up before it was decided. The second try fails, too: the request
    # that comes then must not be decided before it.
    thread.run_later(failing(withdraw, FULL, FULL))
    lease = await thread.run(ask)
    assert await thread.run(read) == ["key"]
    assert (await thread.run(leases.read, lease.id)).state is LeaseState.HELD


async def test_while_a_decision_is_put_off_the_pool_can_be_read_and_nothing_else(
    thread: StoreThread,
) -> None:
    await thread.run(ask)
    thread.run_later(failing(withdraw, *[FULL] * 4))
    assert await thread.run(read) == ["key"]
    # Both tries of this one come while it is still put off.
    with pytest.raises(NoSpace, match="The disk is full"):
        await thread.run(ask, key="other")
    assert await thread.run(read) == []
    await thread.run(ask, key="other")
    assert await thread.run(read) == ["other"]


async def test_one_that_comes_too_late_for_who_asks_is_kept(thread: StoreThread) -> None:
    await thread.run(ask)
    thread.run_later(failing(withdraw, FULL, StoreUnusable("The store was busy for too long.", "Try again.")))
    assert await thread.run(read) == ["key"]
    assert await thread.run(read) == []


async def test_one_that_fails_is_dropped_and_stops_nobody(
    thread: StoreThread, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await thread.run(ask)
    thread.run_later(failing(lambda lease_store: leases.set_deadline(lease_store, "none", None), FULL))
    thread.run_later(failing(withdraw, FULL))
    with caplog.at_level(logging.WARNING):
        assert await thread.run(read) == []
    assert [each for each in caplog.messages if "What was put off for want of space cannot be done" in each]
    assert (await thread.run(leases.read, lease.id)).end_reason is EndReason.WITHDRAWN


async def test_several_are_made_in_their_order(thread: StoreThread) -> None:
    made: list[int] = []
    for number in range(3):
        thread.run_later(failing(lambda _, number=number: made.append(number), FULL))  # type: ignore[misc]
    await asyncio.gather(*(thread.run(read) for _ in range(3)))
    assert made == [0, 1, 2]
