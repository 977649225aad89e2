"""Two hundred idle kernels give way to as many newcomers at once, and take their slices again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, Holder, Lease, LeaseState, Pool, Process, connect, parse_request
from support.audit_logs import told
from support.service import ForkServer, Service, serving

#: As many hold all slices of four GPUs as come then.
KERNELS = 200
SETTINGS = """
c.PoolSettings.default_course = {"yield_after": "1s"}
c.PoolSettings.audit_log = "%s"
c.PoolSettings.max_waiting = 1000
"""


@pytest.fixture
async def service(children: ForkServer, tmp_path: Path) -> AsyncIterator[Service]:
    settings = SETTINGS % (tmp_path / "audit.log")
    devices = {"GPU_POOL_DEVICES": "V100-SXM2-32GB:4"}
    async with serving(children, tmp_path / "service", settings, environment=devices) as service:
        yield service


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[Pool]:
    async with connect(service.url) as pool:
        yield pool


async def ask(pool: Pool, name: str) -> Lease:
    """Ask for a kernel's slice, in this test's name, as its session does."""
    lease = await pool.request(parse_request("2%"), Holder(name, kernel="notebook", yields=True), name)
    return await pool.attach(lease.id, Process.current())


async def give_way(pool: Pool, lease: Lease) -> int:
    """Say that a kernel has been idle for a minute, and park it once it is asked.

    Return how often it was told of its lease.
    """
    await pool.report_busy(lease.id, (), gives_way_since=time.time() - 60.0)
    answers = 0
    async for seen in pool.watch(lease.id):
        answers += 1
        if seen.asked_back is EndReason.YIELDED:
            await pool.park(lease.id)
            break
    return answers


async def states(pool: Pool, leases: list[Lease]) -> Counter[LeaseState]:
    status = await pool.status()
    known = {each.id: each.state for each in (*status.leases, *status.queue)}
    return Counter(known[each.id] for each in leases)


@pytest.mark.long
async def test_two_hundred_give_way_at_once_and_all_return(
    service: Service, pool: Pool, tmp_path: Path
) -> None:
    owners = [await ask(pool, f"owner{number}") for number in range(KERNELS)]
    assert await states(pool, owners) == {LeaseState.HELD: KERNELS}
    giving = [asyncio.create_task(give_way(pool, each)) for each in owners]
    newcomers = await asyncio.gather(*(ask(pool, f"new{number}") for number in range(KERNELS)))
    await asyncio.gather(*(pool.wait(each.id, 300.0) for each in newcomers))
    answers = await asyncio.gather(*giving)
    assert await states(pool, list(newcomers)) == {LeaseState.HELD: KERNELS}
    assert await states(pool, owners) == {LeaseState.PARKED: KERNELS}

    # All return at once, and the newcomers, which have run their cell, give way in their turn.
    giving = [asyncio.create_task(give_way(pool, each)) for each in newcomers]
    await asyncio.gather(*(pool.resume(each.id) for each in owners))
    await asyncio.gather(*(pool.wait(each.id, 300.0) for each in owners))
    answers += await asyncio.gather(*giving)
    assert await states(pool, owners) == {LeaseState.HELD: KERNELS}
    assert await states(pool, list(newcomers)) == {LeaseState.PARKED: KERNELS}

    # Nobody is parked or granted once more than is needed, or told of anything else.
    done = Counter(told(tmp_path / "audit.log", "lease"))
    for number, lease in enumerate((*owners, *newcomers)):
        returned = number < KERNELS
        times = {"parked": 1, "resumed": int(returned), "granted": 1 + returned, "ended": 0}
        assert {event: done[event, lease.id] for event in times} == times
    # What one parks goes to the first in line. Where that waited for another, who is asked no more, whoever
    # the one was asked for still waits: so each that parks makes one other be asked anew at most.
    asked = Counter({lease: times for (event, lease), times in done.items() if event == "asked-back"})
    assert asked.keys() == {lease.id for lease in (*owners, *newcomers)}
    assert asked.total() <= 2 * len(asked)
    assert max(answers) <= 2
    assert not await pool.history()
