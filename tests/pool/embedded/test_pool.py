"""What is particular to the embedded pool: its URL, its devices, its settings, its history."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.clock import Clock
from gpu_pool.embedded.pool import store_path
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, reclaim, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.errors import StoreUnusable
from gpu_pool.store.locks import FairLock
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    PoolUnreachable,
    Process,
    connect,
    parse_request,
)
from support.pools import ME, V100, embedded, take


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert store_path("embedded:") == tmp_path / "gpu-pool/store.db"
    assert store_path("embedded:/a%20b/c.db") == Path("/a b/c.db")
    assert store_path("embedded:///x/y") == Path("/x/y")
    assert store_path("embedded:~/x") == Path.home() / "x"
    monkeypatch.chdir(tmp_path)
    assert store_path("embedded:x.db") == tmp_path / "x.db"
    for nonsense in ("embedded:/x?y=1", "embedded://[x", "embedded:/a%00b", "embedded:/a%0Ab"):
        with pytest.raises(BadRequest, match="embedded:\\[path\\]"):
            store_path(nonsense)


@pytest.mark.parametrize("left", ["ledger.db", "ledger.db.lock"])
def test_a_store_of_before_its_file_had_this_name_is_used_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "gpu-pool").mkdir()
    (tmp_path / "gpu-pool" / left).touch()
    assert store_path("embedded:") == tmp_path / "gpu-pool/ledger.db"


def test_what_only_course_files_need_is_not_imported() -> None:
    code = "import sys, gpu_pool.embedded.pool; print({'pydantic', 'yaml'} & sys.modules.keys() or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


async def test_a_pool_is_found_again_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "a%41 b").mkdir(mode=0o700)
    async with embedded(tmp_path / "a%41 b" / "store.db") as pool:
        lease = await take(pool, "2%", "key")
        async with connect(pool.url) as same:
            assert (await same.get_lease(lease)).key == "key"


async def test_connect_finds_simulated_devices_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:2")
    monkeypatch.setenv("GPU_POOL_URL", f"embedded:{tmp_path}/store.db")
    async with connect() as pool:
        status = await pool.status()
    assert [each.device.label for each in status.devices] == ["V100-SXM2-32GB (simulated)"] * 2


async def test_the_pools_rules_hold_whatever_is_asked(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db", max_share=0.1) as pool:
        with pytest.raises(NotAllowed):
            await take(pool, "11%", "key")


async def test_one_pool_serves_several_event_loops(tmp_path: Path) -> None:
    pool = embedded(tmp_path / "store.db")
    first = await take(pool, "2%", "here")
    there: list[str] = []
    thread = threading.Thread(target=lambda: there.append(asyncio.run(take(pool, "2%", "there"))))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert {lease.id for lease in (await pool.status()).leases} == {first, *there}
    await pool.close()


async def test_a_repeated_request_is_answered_whatever_would_be_said_of_a_new_one(tmp_path: Path) -> None:
    courses = tmp_path / "courses"
    courses.mkdir()
    (courses / "ml.yaml").write_text(
        "title: ML\nwho: {users: [ada]}\nslices: [{name: Small, request: 50%}]\n"
    )
    async with embedded(tmp_path / "store.db", courses_dir=str(courses)) as pool:
        lease_id = await take(pool, "50%", "key", Holder("ada", "ml"))
    (courses / "ml.yaml").write_text("title: ML\nwho: {users: [bob]}\nslices: [{name: Small, request: 5%}]\n")
    async with embedded(tmp_path / "store.db", courses_dir=str(courses), max_share=0.1) as pool:
        assert await take(pool, "50%", "key", Holder("ada", "ml")) == lease_id
        with pytest.raises(NotAllowed):
            await take(pool, "50%", "another", Holder("ada", "ml"))
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_a_request_that_fails_ends_nothing_that_another_of_its_key_was_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        looks, may_fail = asyncio.Event(), asyncio.Event()

        async def fail_late(*_: object) -> tuple[str, ...]:
            looks.set()
            await may_fail.wait()
            raise PoolUnreachable("The cluster is away.")

        with monkeypatch.context() as away:
            away.setattr(pool.backend, "adapt", fail_late)
            failing = asyncio.create_task(take(pool, "1", "key"))
            await looks.wait()
        lease_id = await take(pool, "1", "key")
        may_fail.set()
        with pytest.raises(PoolUnreachable):
            await failing
        assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_the_history_keeps_how_long_what_was_held_and_why_it_ended(tmp_path: Path) -> None:
    path, now = tmp_path / "store.db", [1000.0]
    database = Database(path)
    lease_store = StoreContext(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    registration.register(lease_store, [V100])
    lease = requests.decide(lease_store, parse_request("50%"), ME, "key")
    now[0] += 60
    leases.lend(lease_store, lease.id)
    now[0] += 1000
    leases.queue_again(lease_store, lease.id)
    now[0] += 30
    leases.end_lease(lease_store, lease.id, EndReason.REVOKED)
    database.close()
    with sqlite3.connect(path) as store:
        row = store.execute("SELECT held_seconds, ended_at, reason, slices, user FROM history").fetchone()
    store.close()
    assert row == (90.0, 2090.0, "revoked", "[[1, 500, 16384, 0]]", "ada")


async def test_a_grant_that_nobody_picks_up_ends(tmp_path: Path) -> None:
    now = [1000.0]
    database = Database(tmp_path / "store.db")
    lease_store = StoreContext(
        database, PoolSettings(attach_within=120), Clock(lambda: now[0], lambda: now[0])
    )
    registration.register(lease_store, [V100])
    first = requests.decide(lease_store, parse_request("1"), ME, "first")
    second = requests.decide(lease_store, parse_request("1"), ME, "second")
    now[0] += 119
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, second.id).state is LeaseState.WAITING
    now[0] += 2
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, first.id).end_reason is EndReason.NEVER_ATTACHED
    assert leases.read(lease_store, second.id).state is LeaseState.HELD
    now[0] += 119
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, second.id).state is LeaseState.HELD, (
        "its own time began when it was granted"
    )
    database.close()


@pytest.mark.parametrize(
    ("renewals", "after", "reason"),
    [
        ([None], 121, EndReason.NEVER_ATTACHED),
        ([600], 121, EndReason.NEVER_ATTACHED),
        ([60], 61, EndReason.EXPIRED),
        ([60, None], 61, EndReason.EXPIRED),
    ],
)
async def test_renewing_does_not_prolong_what_nothing_is_attached_to(
    tmp_path: Path, renewals: list[float | None], after: float, reason: EndReason
) -> None:
    now = [1000.0]
    database = Database(tmp_path / "store.db")
    lease_store = StoreContext(
        database, PoolSettings(attach_within=120), Clock(lambda: now[0], lambda: now[0])
    )
    registration.register(lease_store, [V100])
    lease = requests.decide(lease_store, parse_request("1"), ME, "key")
    for ttl in renewals:
        leases.set_deadline(lease_store, lease.id, ttl)
    now[0] += after
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, lease.id).end_reason is reason
    database.close()


async def test_renewing_does_not_prolong_the_grace_after_a_death(tmp_path: Path) -> None:
    now = [1000.0]
    database = Database(tmp_path / "store.db")
    lease_store = StoreContext(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    registration.register(lease_store, [V100])
    lease = requests.decide(lease_store, parse_request("1"), ME, "key")
    dead = replace(Process.current(), start=1)
    leases.bind_process(lease_store, lease.id, dead, ready_within=None, grace=10)
    reclaim.end_over(lease_store)
    leases.set_deadline(lease_store, lease.id, None)
    now[0] += 9
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, lease.id).state is LeaseState.HELD
    now[0] += 2
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, lease.id).end_reason is EndReason.PROCESS_GONE
    database.close()


@pytest.mark.parametrize(
    ("why", "reason"), [("has ended", EndReason.PROCESS_GONE), ("is not ready", EndReason.NOT_READY)]
)
async def test_what_is_about_to_end_is_not_parked(tmp_path: Path, why: str, reason: EndReason) -> None:
    now = [1000.0]
    database = Database(tmp_path / "store.db")
    lease_store = StoreContext(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    registration.register(lease_store, [V100])
    lease = requests.decide(lease_store, parse_request("1"), ME, "key")
    if reason is EndReason.PROCESS_GONE:
        leases.bind_process(
            lease_store, lease.id, replace(Process.current(), start=1), ready_within=None, grace=10
        )
        reclaim.end_over(lease_store)
    else:
        leases.bind_process(lease_store, lease.id, Process.current(), ready_within=10, grace=0)
    with pytest.raises(NotAllowed, match=f"cannot be lent to others: its process {why}"):
        leases.lend(lease_store, lease.id)
    now[0] += 11
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, lease.id).end_reason is reason
    database.close()


@pytest.mark.parametrize(("ttl", "reason"), [(None, EndReason.NEVER_ATTACHED), (60, EndReason.EXPIRED)])
async def test_parking_lifts_no_deadline(tmp_path: Path, ttl: float | None, reason: EndReason) -> None:
    now = [1000.0]
    database = Database(tmp_path / "store.db")
    lease_store = StoreContext(database, PoolSettings(), Clock(lambda: now[0], lambda: now[0]))
    registration.register(lease_store, [V100])
    lease = requests.decide(lease_store, parse_request("1"), ME, "key")
    if ttl is not None:
        leases.bind_process(lease_store, lease.id, Process.current(), ready_within=None, grace=0)
        leases.set_deadline(lease_store, lease.id, ttl)
    assert leases.lend(lease_store, lease.id).state is LeaseState.PARKED
    now[0] += 121
    reclaim.end_over(lease_store)
    assert leases.read(lease_store, lease.id).end_reason is reason
    database.close()


def test_one_of_those_who_share_a_store_keeps_it_in_order(tmp_path: Path) -> None:
    now = [1000.0]
    clock = Clock(lambda: now[0], lambda: now[0])
    databases = [Database(tmp_path / "store.db") for _ in range(3)]
    first, second, third = [StoreContext(each, PoolSettings(), clock) for each in databases]
    registration.register(first, [V100])
    for key in ("held", "waits"):
        requests.decide(first, parse_request("1"), ME, key)
    assert reclaim.leads(first, 2.5)
    reclaim.serve_queue(first)
    assert [reclaim.leads(each, 2.5) for each in (second, third, first)] == [False, False, True]
    now[0] += 3  # it stands still, and somebody waits
    assert reclaim.leads(second, 2.5)
    reclaim.serve_queue(second)
    assert not reclaim.leads(third, 2.5)
    databases[0].close()  # as at its end
    assert reclaim.leads(third, 2.5)
    for database in databases[1:]:
        database.close()


async def test_a_withdrawal_is_not_lost_however_long_the_store_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        await take(pool, "1", "first")
        second = await take(pool, "1", "second")
        wait, waits = pool.wait, asyncio.Event()

        async def noted(*args: Any) -> Lease:
            waits.set()
            return await wait(*args)

        monkeypatch.setattr(pool, "wait", noted)
        acquiring = asyncio.create_task(pool.acquire(parse_request("1"), ME, "second"))
        await waits.wait()
        usual = pool.store.answer_within
        pool.store.answer_within = -0.9  # as if every decision had been waiting for too long already
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        pool.store.answer_within = usual
        assert (await pool.get_lease(second)).end_reason is EndReason.WITHDRAWN


async def test_a_store_that_others_keep_locked_is_closed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    pool = embedded(path)
    await pool.status()  # which may take its time
    pool.store.answer_within = pool.core.store.close_within = 0.1
    with closing(FairLock(path.with_name("store.db.lock"))) as lock, lock:
        with pytest.raises(StoreUnusable, match="has been locked"):
            await take(pool, "1", "key")
        await pool.close()


async def test_whoever_loses_a_slice_to_an_administrator_reads_why(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id = await take(pool, "2%", "mine")
        await pool.revoke(lease_id, "The GPU\nis needed for an exam.")
        ended = await pool.get_lease(lease_id)
        assert (ended.end_reason, ended.notice) == (EndReason.REVOKED, "The GPU?is needed for an exam.")
        with pytest.raises(LeaseGone, match=r"revoked\. The GPU\?is needed for an exam\."):
            await pool.renew(lease_id)
        [row] = await pool.history()
        assert row.note == "The GPU?is needed for an exam."
        with pytest.raises(LeaseGone):
            await pool.revoke(lease_id, "twice")


async def test_the_history_of_one_user_is_nobody_elses(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        for user in ("ada", "grace", "ada"):
            await pool.release(await take(pool, "2%", f"{user}-{len(await pool.history())}", Holder(user)))
        assert [row.user for row in await pool.history()] == ["ada", "grace", "ada"]
        assert [row.user for row in await pool.history(user="grace")] == ["grace"]


async def test_who_has_a_limit_that_changes_nothing_reads_so(tmp_path: Path) -> None:
    instance = replace(V100, mig_profile="1g.5gb", memory_mib=4864, milli=142)
    async with embedded(tmp_path / "store.db", instance) as pool:
        lease = await pool.get_lease(await take(pool, "2%..10%", "limited"))
        assert lease.slices[0].allowed_mib == lease.memory_mib == 4864
        held_by = "cooperative (MIG instance; the limit above it changes nothing here)"
        assert lease.environment["GPU_POOL_ENFORCED"].startswith(f"memory: 4864 MiB, {held_by}")
