"""The watch of one pool in the name of all pages, beside a pool that answers as the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpu_pool_client import (
    Activity,
    EndReason,
    Holder,
    Lease,
    LeaseState,
    OverQuota,
    PoolStatus,
    PoolUnreachable,
    parse_request,
)
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.server import slices
from gpu_pool_provisioner.server.slices import PoolWatch
from gpu_pool_provisioner.session import Session, events

LEASE = Lease("one", "one", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0)


class FakePool:
    """Answers with what it is given, or raises it."""

    def __init__(self) -> None:
        self.leases: Any = (LEASE,)
        self.lease = LEASE
        self.memory: Any = 512
        #: What happens while the status is under way.
        self.meanwhile: Callable[[], None] = lambda: None

    async def status(self) -> PoolStatus:
        if isinstance(self.leases, Exception):
            raise self.leases
        self.meanwhile()
        return PoolStatus("fake:", (), self.leases, ())

    async def get_lease(self, lease_id: str) -> Lease:
        return self.lease

    async def activity(self, lease_id: str) -> Activity:
        if isinstance(self.memory, Exception):
            raise self.memory
        return Activity(memory_mib=self.memory)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    pool = FakePool()
    monkeypatch.setattr(slices, "shared_pool", lambda _: pool)
    return pool


@pytest.fixture
def driver() -> SessionDriver:
    session = Session(LEASE.request, 1.0, lease_id=LEASE.id, lease=LEASE)
    return SessionDriver(session, "fake:", lambda: LEASE.holder)


def watching(driver: SessionDriver) -> PoolWatch:
    watch = PoolWatch("fake:", 0.0)
    watch.drivers = {"kernel": driver}
    return watch


async def test_memory_is_measured_and_what_is_old_is_forgotten(
    pool: FakePool, driver: SessionDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watching(driver)
    began = time.time()
    for minutes, used in ((0, 100), (1, 512), (10.5, None), (11.5, 700)):
        monkeypatch.setattr(time, "time", lambda now=began + 60 * minutes: now)
        pool.memory = used
        await watch.refresh()
    assert [mib for _, mib in watch.samples["kernel"]] == [700]
    assert driver.session.activity == Activity(memory_mib=700)
    watch.drivers = {}
    await watch.refresh()
    assert watch.samples == {}


async def test_what_the_pool_knows_is_seen_unless_somebody_has_seen_it_since(
    pool: FakePool, driver: SessionDriver
) -> None:
    watch = watching(driver)
    pool.leases = (replace(LEASE, notice="Save your work."),)
    await watch.refresh()
    assert driver.session.lease is not None
    assert driver.session.lease.message == "Save your work."
    parked = replace(LEASE, state=LeaseState.PARKED)
    pool.meanwhile = lambda: driver.post(events.LeaseSeen(parked))
    await watch.refresh()
    assert driver.session.lease is parked


async def test_a_lease_that_the_pool_has_no_more_is_looked_for(pool: FakePool, driver: SessionDriver) -> None:
    pool.leases = ()
    pool.lease = replace(LEASE, state=LeaseState.ENDED, end_reason=EndReason.REVOKED)
    await watching(driver).refresh()
    assert driver.session.lease is pool.lease


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PoolUnreachable("It is away.", "Wait."), "It is away. Wait."),
        (OverQuota("You asked too much."), "You asked too much."),
        (ValueError("a mistake of ours"), "does not answer"),
    ],
)
async def test_what_goes_wrong_is_told_and_is_over_with_the_next_answer(
    pool: FakePool, driver: SessionDriver, error: Exception, said: str
) -> None:
    watch = watching(driver)
    pool.leases = error
    await watch.refresh()
    assert not watch.state.reachable
    assert said in watch.state.message
    pool.leases, pool.memory = (LEASE,), OverQuota("You asked too much.")
    await watch.refresh()
    assert "too much" in watch.state.message
    pool.memory = 512
    await watch.refresh()
    assert watch.state.reachable
    assert driver.session.lease is LEASE


async def test_a_pool_that_hangs_is_told_as_such(
    pool: FakePool, driver: SessionDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "status", lambda: asyncio.sleep(600))
    watch = PoolWatch("fake:", 0.0, answers_within=0.01)
    watch.drivers = {"kernel": driver}
    await watch.refresh()
    assert "does not answer" in watch.state.message
