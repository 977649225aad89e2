"""Reading a pool changes nothing of it: what is over is shown as over, and ended by the reconciler alone."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.tiers import Accounting
from gpu_pool.pool.pool import GpuPool
from gpu_pool.pool.reconciler import Facts, Reconciler, Step
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.metrics import Metrics
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    PoolUnreachable,
    Process,
    parse_request,
)
from support.dashboard import ADMIN, courses_of, showing
from support.passes import NO_PASSES
from support.pools import ME, V100, embedded, eventually, identity, running, take

LOG = logging.getLogger("reading-test")


@contextmanager
def nothing_written(path: Path) -> Iterator[None]:
    """Fail where anybody has written to the store within this."""
    with closing(sqlite3.connect(path)) as observer:

        def version() -> int:
            found: int = observer.execute("PRAGMA data_version").fetchone()[0]
            return found

        before = version()
        yield
        assert version() == before


async def read_all(pool: GpuPool, *leases: str) -> None:
    """Ask all that can be asked without changing anything."""
    await pool.status()
    await pool.history()
    await pool.offers(ME)
    await pool.forecast(parse_request("50%"), ME)
    await pool.positions()
    await pool.core.device_fault()
    for lease in leases:
        await pool.get_lease(lease)
        await pool.find((await pool.get_lease(lease)).key)
        with suppress(LeaseGone, BadRequest):
            await pool.explain(lease)
        with suppress(LeaseGone):
            await pool.activity(lease)
            await pool.effect_of_taking(lease)


async def test_what_is_over_is_shown_as_over_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path, tuning=NO_PASSES) as pool:
        with running() as kernel:
            gone, expired = await take(pool, "50%", "gone"), await take(pool, "25%", "expired")
            await pool.attach(gone, identity(kernel))
            await pool.attach(expired, Process.current())
            given_up = await pool.request(parse_request("1"), Holder("bob", process=identity(kernel)), "up")
            waits = await take(pool, "1", "waits")
        await pool.renew(expired, 0)
        with nothing_written(path):
            await read_all(pool, gone, expired, given_up.id, waits)
            status = await pool.status()
            assert (status.leases, [lease.id for lease in status.queue]) == ((), [waits])
            assert status.queue[0].position == 1
            assert (status.devices[0].held_milli, status.devices[0].leases) == (0, 0)
            reasons = [
                (await pool.get_lease(each)).end_reason for each in (gone, expired, given_up.id, waits)
            ]
            assert reasons == [EndReason.PROCESS_GONE, EndReason.EXPIRED, EndReason.PROCESS_GONE, None]
            with pytest.raises(LeaseGone, match="process-gone"):
                await pool.explain(given_up.id)
        assert await pool.core.reconciler.once()
        assert (await pool.get_lease(waits)).state is LeaseState.HELD
        assert {lease.id for lease in await pool.history()} == {gone, expired, given_up.id}


class Noting(Accounting):
    """A tier that notes what it opens."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, lease: Lease) -> None:
        self.opened.append(lease.id)


async def test_who_follows_a_lease_writes_nothing_and_binds_nothing(tmp_path: Path) -> None:
    path, tier = tmp_path / "store.db", Noting()

    def opened() -> GpuPool:
        inventory, isolation = Inventory((V100,), "test"), Isolation(lambda _: (tier,))
        return local_pool(path, PoolSettings(tuning=NO_PASSES), lambda: inventory, isolation)

    async with opened() as pool, opened() as other:
        await other.status()
        held, waits = await take(pool, "1", "held"), await take(pool, "1", "waits")
        assert tier.opened == [held]
        with nothing_written(path):
            for lease in (held, waits):
                seen = [await anext(aiter(each.watch(lease))) for each in (pool, other)]
                assert [each.id for each in seen] == [lease, lease]
                assert seen[0].environment == seen[1].environment
        assert tier.opened == [held]


async def test_the_service_shows_it_too_and_writes_nothing(tmp_path: Path) -> None:
    async with showing(tmp_path, 2, courses_of({"ml": "Machine Learning"}), tuning=NO_PASSES) as site:
        lease = await site.take("50%", "ada", "ml")
        with running() as kernel:
            await site.pool.attach(lease, identity(kernel))
        held, metrics = await site.take("50%", "ada", "ml"), Metrics(site.pool, lambda: ("ml",))
        health = Health(site.pool, LeaseChanges(site.pool, LOG, Heartbeats(60, LOG)), LOG)
        await health.try_once()
        with nothing_written(site.store):
            for path in (
                "",
                "history",
                "courses",
                "courses/ml",
                "admin",
                f"leases/{lease}",
                f"leases/{held}",
            ):
                for user in ("ada", ADMIN):
                    assert (await site.get(path, user)).code < 500
            page = (await metrics.page())[0].decode()
            assert await health.problem() is None
            assert (await site.pool.get_lease(lease)).state is LeaseState.ENDED
        assert 'gpu_pool_leases{course="ml",state="held"} 1.0' in page


async def test_what_is_over_is_ended_by_itself_where_one_waits(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        with running() as kernel:
            first = await take(pool, "1", "first")
            await pool.attach(first, identity(kernel))
            second = await take(pool, "1", "second")
        assert (await pool.wait(second, 60)).state is LeaseState.HELD
        assert [lease.id for lease in await pool.history()] == [first]
        counts = pool.core.reconciler.counts["end what is gone"]
        assert (counts.times > 0, counts.failures) == (True, 0)


async def test_a_pool_in_which_nothing_lives_rests_until_somebody_asks(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", tuning=Tuning(passes_every=0.01)) as pool:
        reconciler = pool.core.reconciler
        for name in ("first", "second"):
            lease = await take(pool, "50%", name)
            await eventually(lambda: not reconciler.rests)
            await pool.release(lease)
            await eventually(lambda: reconciler.rests)
            made = reconciler.counts["observe"].times
            for _ in range(20):
                await read_all(pool, lease)
            assert (reconciler.rests, reconciler.counts["observe"].times) == (True, made)


async def test_a_step_that_fails_keeps_no_other_from_being_done() -> None:
    done: list[str] = []

    async def fail(_: Facts) -> bool:
        raise PoolUnreachable("The cluster is away.")

    async def do(_: Facts) -> bool:
        done.append("done")
        return True

    reconciler = Reconciler([Step("observe", fail), Step("serve the queue", do)])
    for _ in range(2):
        with pytest.raises(PoolUnreachable):
            await reconciler.once()
    assert done == ["done", "done"]
    counts = {name: (count.times, count.failures) for name, count in reconciler.counts.items()}
    assert counts == {"observe": (2, 2), "serve the queue": (2, 0)}
