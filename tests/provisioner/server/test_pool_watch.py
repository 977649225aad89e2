"""The watch of one pool in the name of all pages, beside a pool that answers as the test says."""

from __future__ import annotations

import asyncio
import time
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
from gpu_pool_provisioner.kernel_slice import KernelSlice
from gpu_pool_provisioner.server import pool_watch
from gpu_pool_provisioner.server.pool_watch import PoolWatch

LEASE = Lease("one", "one", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0)


class FakePool:
    """Answers with what it is given, or raises it."""

    def __init__(self) -> None:
        self.leases: Any = (LEASE,)
        self.lease = LEASE
        self.memory: Any = 512

    async def status(self) -> PoolStatus:
        if isinstance(self.leases, Exception):
            raise self.leases
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
    monkeypatch.setattr(pool_watch, "shared_pool", lambda _: pool)
    return pool


@pytest.fixture
def kernel_slice() -> KernelSlice:
    found = KernelSlice("fake:", LEASE.request)
    found.lease_id = LEASE.id
    found.see(LEASE)
    return found


async def test_memory_is_measured_and_what_is_old_is_forgotten(
    pool: FakePool, kernel_slice: KernelSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = PoolWatch("fake:", 0.0)
    began = time.time()
    for minutes, used in ((0, 100), (1, 512), (10.5, None), (11.5, 700)):
        monkeypatch.setattr(time, "time", lambda now=began + 60 * minutes: now)
        pool.memory = used
        await watch._look({"kernel": kernel_slice})
    assert [mib for _, mib in watch.samples["kernel"]] == [700]
    assert kernel_slice.activity == Activity(memory_mib=700)
    await watch._look({})
    assert watch.samples == {}


async def test_what_the_pool_knows_is_seen_unless_somebody_has_seen_it_since(
    pool: FakePool, kernel_slice: KernelSlice
) -> None:
    watch = PoolWatch("fake:", 0.0)
    pool.leases = (replace(LEASE, notice="Save your work."),)
    await watch._look({"kernel": kernel_slice})
    assert kernel_slice.lease is not None
    assert kernel_slice.lease.message == "Save your work."
    parked = replace(LEASE, state=LeaseState.PARKED)
    kernel_slice.see(parked)
    kernel_slice.seen_at += 60  # while the status was under way
    await watch._look({"kernel": kernel_slice})
    assert kernel_slice.lease is parked


async def test_a_lease_that_the_pool_has_no_more_is_looked_for(
    pool: FakePool, kernel_slice: KernelSlice
) -> None:
    pool.leases = ()
    pool.lease = replace(LEASE, state=LeaseState.ENDED, end_reason=EndReason.REVOKED)
    await PoolWatch("fake:", 0.0)._look({"kernel": kernel_slice})
    assert kernel_slice.lease is pool.lease


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PoolUnreachable("It is away.", "Wait."), "It is away. Wait."),
        (OverQuota("You asked too much."), "You asked too much."),
        (ValueError("a mistake of ours"), "does not answer"),
    ],
)
async def test_what_goes_wrong_is_told_and_is_over_with_the_next_answer(
    pool: FakePool, kernel_slice: KernelSlice, error: Exception, said: str
) -> None:
    watch = PoolWatch("fake:", 0.0)
    pool.leases = error
    await watch._look({"kernel": kernel_slice})
    assert not watch.state.reachable
    assert said in watch.state.message
    pool.leases, pool.memory = (LEASE,), OverQuota("You asked too much.")
    await watch._look({"kernel": kernel_slice})
    assert "too much" in watch.state.message
    pool.memory = 512
    await watch._look({"kernel": kernel_slice})
    assert watch.state.reachable
    assert kernel_slice.lease is LEASE


async def test_a_pool_that_hangs_is_told_as_such(
    pool: FakePool, kernel_slice: KernelSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_watch, "_ANSWERS_WITHIN", 0.01)
    monkeypatch.setattr(pool, "status", lambda: asyncio.sleep(600))
    watch = PoolWatch("fake:", 0.0)
    await watch._look({"kernel": kernel_slice})
    assert "does not answer" in watch.state.message
