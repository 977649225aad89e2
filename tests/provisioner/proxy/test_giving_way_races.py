"""A kernel gives way to who waits while something else happens: at each step it stands still meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_pool_client import EndReason, Lease, LeaseState, NotAllowed, PoolUnreachable
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.session import State
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, eventually, kill, started_kernel
from support.service import asking

#: Idle kernels give way to what is over as soon.
SOON = "1 for 10min"
#: Where parking stands still: the pool is not told yet, it is being told, and it has answered.
STEPS = pytest.mark.parametrize(
    ("verb", "after"),
    [("get_lease", False), ("get_lease", True), ("park", False), ("park", True)],
    ids=["before it is looked at", "before the pool is told", "as the pool is told", "before that is known"],
)


class StandsStill:
    """One verb of a pool that stands still where it is called next while something is so."""

    def __init__(self, pool: Any, verb: str, when: Callable[[], bool], *, after: bool = False) -> None:
        self._ask, self._when, self._after = getattr(pool, verb), when, after
        #: Set once it does, and once it may go on.
        self.stands, self.goes_on = threading.Event(), threading.Event()

    async def __call__(self, lease_id: str, **how: Any) -> Lease:
        if self.stands.is_set() or not self._when():
            return await self._ask(lease_id, **how)
        if self._after:
            lease = await self._ask(lease_id, **how)
            await self._pause()
            return lease
        await self._pause()
        return await self._ask(lease_id, **how)

    async def _pause(self) -> None:
        self.stands.set()
        await asyncio.to_thread(self.goes_on.wait, 120)


async def have_ended(jupyter_env: JupyterEnv, *lease_ids: str) -> None:
    """Wait until these leases are in the history, which have ended; each is there once, and no other."""

    async def ended() -> list[str]:
        return sorted(each.id for each in await jupyter_env.pool.history())

    await eventually(ended, lambda seen: {*lease_ids} <= {*seen})
    assert await ended() == sorted(lease_ids)


@STEPS
@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["withdraws", "is killed"]
)
async def test_who_waits_gives_up_and_the_slice_is_its_owners(
    jupyter_env: JupyterEnv,
    manager: Managers,
    course: Any,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    after: bool,
    is_killed: bool,
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    still = StandsStill(
        jupyter_env.pool, verb, lambda: km.provisioner.session.state is State.PARKING, after=after
    )
    monkeypatch.setattr(jupyter_env.pool, verb, still)

    async with frontend(km) as page:
        await page.run("kept = 42").done()
        mine = await jupyter_env.only_lease()
        with asking(jupyter_env.url, SOON) as (process, (waits,)):
            await eventually(still.stands.is_set)
            if is_killed:
                kill(process.pid)
                async for lease in jupyter_env.pool.watch(waits):
                    assert lease.state in (LeaseState.WAITING, LeaseState.HELD, LeaseState.ENDED)
            else:
                await jupyter_env.pool.release(waits, EndReason.WITHDRAWN)
            still.goes_on.set()
            cell = await page.run("print(kept)").done()
        assert cell.outputs == ["42\n"]
    (lease,) = await jupyter_env.leases()
    assert (lease.id, lease.state, lease.asked_back) == (mine.id, LeaseState.HELD, None)
    # It never was without it, unless it had gone when the one who waited did.
    had_gone = verb == "park" and after
    assert (lease.held_at == mine.held_at) is not had_gone
    await have_ended(jupyter_env, waits)


async def test_who_asks_after_one_that_gave_up_is_given_way_to_as_soon(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    still = StandsStill(jupyter_env.pool, "get_lease", lambda: km.provisioner.session.state is State.PARKING)
    monkeypatch.setattr(jupyter_env.pool, "get_lease", still)
    gave_up = await jupyter_env.fill(SOON)
    await eventually(still.stands.is_set)
    await jupyter_env.pool.release(gave_up.id, EndReason.WITHDRAWN)
    still.goes_on.set()
    await eventually(lambda: km.provisioner.session.state is State.RUNNING, within=20)
    # A kernel that could not be parked is left alone for half a minute: this one could.
    other = await jupyter_env.fill(SOON)
    assert (await jupyter_env.pool.wait(other.id, 20.0)).state is LeaseState.HELD


@STEPS
async def test_a_cell_that_comes_as_parking_begins_runs_once_and_with_the_slice(
    jupyter_env: JupyterEnv,
    manager: Managers,
    course: Any,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    after: bool,
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    still = StandsStill(
        jupyter_env.pool, verb, lambda: km.provisioner.session.state is State.PARKING, after=after
    )
    monkeypatch.setattr(jupyter_env.pool, verb, still)

    async with frontend(km) as page:
        await page.run("import os; runs = 0").done()
        mine = await jupyter_env.only_lease()
        other = await jupyter_env.fill(SOON)
        await eventually(still.stands.is_set)
        cell = page.run("runs += 1; print(runs, os.environ['CUDA_VISIBLE_DEVICES'])")
        await eventually(lambda: km.provisioner.session.parking.is_wanted)
        still.goes_on.set()
        if verb == "park":
            # The pool was told: it waits until the slice is free again.
            assert (await jupyter_env.pool.wait(other.id, 120)).state is LeaseState.HELD
            await cell.shows("You are next in the queue")
            await jupyter_env.pool.release(other.id)
        uuid = mine.slices[0].device.uuid
        assert (await cell.done()).outputs == [f"1 {uuid}\n"]
        assert (await page.run("print(runs)").done()).outputs == ["1\n"]
        if verb == "get_lease":
            assert (await jupyter_env.pool.get_lease(other.id)).state is LeaseState.WAITING
    assert (await jupyter_env.pool.get_lease(mine.id)).state is LeaseState.HELD


async def test_a_cell_that_comes_before_the_kernel_was_seen_to_be_asked_keeps_its_slice(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))

    def has_told() -> bool:
        idling = km.provisioner.session.idling
        return idling is not None and idling.gives_way_since is not None

    still = StandsStill(jupyter_env.pool, "get_lease", has_told)
    monkeypatch.setattr(jupyter_env.pool, "get_lease", still)
    other = await jupyter_env.fill(SOON)
    async with frontend(km) as page:
        await eventually(still.stands.is_set)
        cell = page.run("import time; time.sleep(1.5); print('ran')")
        await eventually(lambda: km.provisioner.driver.state.idle.idle_since is None)
        still.goes_on.set()
        assert (await cell.done()).outputs == ["ran\n"]
        # Once it is idle again, it gives way after all.
        assert (await jupyter_env.pool.wait(other.id, 120)).state is LeaseState.HELD
        assert km.provisioner.session.state in (State.PARKING, State.PARKED)


@pytest.mark.long
@STEPS
async def test_a_kernel_that_is_killed_as_it_is_parked_leaves_its_slice_to_who_waits(
    jupyter_env: JupyterEnv,
    manager: Managers,
    course: Any,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    after: bool,
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    still = StandsStill(
        jupyter_env.pool, verb, lambda: km.provisioner.session.state is State.PARKING, after=after
    )
    monkeypatch.setattr(jupyter_env.pool, verb, still)
    owner, other = await jupyter_env.only_lease(), await jupyter_env.fill(SOON)
    await eventually(still.stands.is_set)
    kill(km.provisioner.process.pid)
    await eventually(lambda: km.provisioner.session.state is not State.PARKING)
    still.goes_on.set()
    assert (await jupyter_env.pool.wait(other.id, 120)).state is LeaseState.HELD
    await jupyter_env.pool.release(other.id)
    mine = (await jupyter_env.fill("1")).id
    assert (await jupyter_env.pool.get_lease(mine)).state is LeaseState.HELD
    await km.shutdown_kernel(now=True)
    assert [lease.id for lease in await jupyter_env.leases()] == [mine]
    await have_ended(jupyter_env, owner.id, other.id)


async def test_what_the_pool_has_not_heard_of_a_kernels_work_is_told_again(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    report, is_lost = jupyter_env.pool.report_busy, threading.Event()

    async def lost(lease_id: str, spans: Any, **more: Any) -> None:
        if spans and not is_lost.is_set():
            is_lost.set()
            raise PoolUnreachable("Nobody answers.")
        await report(lease_id, spans, **more)

    async with frontend(km) as page:
        await page.run("1").done()
        other = await jupyter_env.fill(SOON)
        assert (await jupyter_env.pool.wait(other.id, 120)).state is LeaseState.HELD
        await jupyter_env.pool.release(other.id)
        monkeypatch.setattr(jupyter_env.pool, "report_busy", lost)
        await page.run("2").done()
        await eventually(is_lost.is_set)
        await eventually(lambda: not km.provisioner.session.idling.is_followed)
        # It is looked at now, and not only in half a minute.
        await in_background(km.provisioner.driver.keep(0))
        # A kernel that has returned and run nothing would keep its slice.
        next_one = await jupyter_env.fill(SOON)
        assert (await jupyter_env.pool.wait(next_one.id, 20)).state is LeaseState.HELD


async def test_a_drain_to_disk_is_heard_once_by_a_kernel_that_cannot_go_there(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    km = await started_kernel(manager(jupyter_env.install("all", "1")))
    report, told = jupyter_env.pool.report_busy, list[float]()

    async def counts(lease_id: str, spans: Any, *, gives_way_since: float | None = None) -> None:
        await report(lease_id, spans, gives_way_since=gives_way_since)
        told.extend(() if gives_way_since is None else (gives_way_since,))

    async with frontend(km) as page:
        await page.run("1").done()
        monkeypatch.setattr(jupyter_env.pool, "report_busy", counts)
        await eventually(lambda: len(told) == 1)
        await jupyter_env.pool.drain("0", hibernate=True)
        await eventually(lambda: len(told) > 1)
        for _ in range(200):  # in which it would ask many times
            await jupyter_env.only_lease()
        await jupyter_env.pool.drain("0", drained=False)
        await eventually(lambda: not km.provisioner.session.lease.hibernates)
        await eventually(lambda: len(told) > 2)
        assert len(told) == 3


@pytest.mark.long
async def test_a_kernel_that_stands_still_is_left_alone_and_another_one_goes(
    jupyter_env: JupyterEnv, manager: Managers, course: Any
) -> None:
    course(yield_after="1s")
    still, idles = (manager(jupyter_env.install(name, "50%")) for name in ("still", "idles"))
    await still.start_kernel()
    async with frontend(still) as page:
        await page.run("kept = 42").done()
        os.kill(still.provisioner.process.pid, signal.SIGSTOP)
        mine = await jupyter_env.only_lease()
        await idles.start_kernel()
        async with frontend(idles) as other:
            await other.run("kept = 43").done()
            # The first has been idle for longer, and does not say whether it has done all.
            waits = await jupyter_env.fill("50% for 10min")
            assert (await jupyter_env.pool.wait(waits.id, 120)).state is LeaseState.HELD
            assert (await jupyter_env.pool.get_lease(mine.id)).state is LeaseState.HELD
            os.kill(still.provisioner.process.pid, signal.SIGCONT)
            assert (await page.run("print(kept)").done()).outputs == ["42\n"]
            await jupyter_env.pool.release(waits.id)
            assert (await other.run("print(kept)").done()).outputs == ["43\n"]
    await have_ended(jupyter_env, waits.id)


async def test_where_the_host_has_no_free_memory_the_kernel_keeps_its_slice_and_another_one_goes(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    course(yield_after="1s")
    pool, refused = jupyter_env.pool, threading.Event()
    full, idles = (manager(jupyter_env.install(name, "50%")) for name in ("full", "idles"))
    await full.start_kernel()
    mine = await jupyter_env.only_lease()
    park = pool.park

    async def refuse(lease_id: str, **how: Any) -> Lease:
        if lease_id != mine.id:
            return await park(lease_id, **how)
        refused.set()
        raise NotAllowed("It holds 20480 MiB on its GPU, and 512 MiB of host memory are available to it.")

    monkeypatch.setattr(pool, "park", refuse)
    async with frontend(full) as page:
        await page.run("kept = 42").done()
        await idles.start_kernel()
        async with frontend(idles) as other:
            await other.run("kept = 43").done()
            # The first has been idle for longer, so it is asked first.
            waits = await jupyter_env.fill("50% for 10min")
            assert (await pool.wait(waits.id, 120)).state is LeaseState.HELD
            assert refused.is_set()
            assert full.provisioner.session.state is State.RUNNING
            assert (await pool.get_lease(mine.id)).state is LeaseState.HELD
            assert (await page.run("print(kept)").done()).outputs == ["42\n"]
            await pool.release(waits.id)
            assert (await other.run("print(kept)").done()).outputs == ["43\n"]
    await have_ended(jupyter_env, waits.id)
