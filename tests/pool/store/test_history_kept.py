"""The history stays of a bounded size, and what is reported of it stays right."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.policy.usage_report import has_used, line, living
from gpu_pool.settings import PoolSettings
from gpu_pool.store import burst, device_table, leases, records, registration, requests, usage
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.usage import Measured
from gpu_pool_client import EndedLease, EndReason, Holder, LeaseGone, LeaseState, Process, parse_request
from support.pools import device, embedded, take

ME = Process.current()
DAY = 86_400.0


class Days:
    """A store whose days pass as a test wants."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.now = 1.7e9
        self.database = Database(path)
        clock = Clock(lambda: self.now, lambda: self.now)
        self.store = StoreContext(self.database, PoolSettings(**settings), clock)
        registration.register(self.store, [device(0)])

    def use(self, key: str, user: str = "ada", seconds: float = 60.0) -> str:
        lease = requests.decide(self.store, parse_request("10%"), Holder(user, process=ME), key)
        self.now += seconds
        leases.end_request(self.store, key, EndReason.RELEASED)
        return lease.id

    def count(self, table: str) -> int:
        with closing(sqlite3.connect(self.path)) as store:
            return int(store.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture
def days(tmp_path: Path) -> Iterator[Days]:
    made = Days(tmp_path / "store.db", history_days=10)
    yield made
    made.database.close()


def test_old_leases_become_sums_and_every_report_stays_right(days: Days) -> None:
    for number in range(30):
        days.use(f"key-{number}", "ada" if number % 2 else "bob")
        days.now += DAY
    while records.forget_old(days.store):
        pass
    assert days.count("history") == 9
    rows = records.history(days.store, 0.0)
    total = line("total", rows)
    assert (total.leases, total.people, total.reasons) == (30, 2, {"released": 30})
    assert total.gpu_hours == pytest.approx(30 * 0.1 * 60 / 3600)
    assert line("ada", records.history(days.store, 0.0, "ada")).leases == 15
    # By days, too: what ended in the last twenty.
    assert line("total", records.history(days.store, days.now - 20 * DAY)).leases == 19
    assert [each.ended_at for each in rows] == sorted(each.ended_at for each in rows)


def test_each_end_tidies_up_a_little_where_no_service_does(days: Days) -> None:
    for number in range(20):
        days.use(f"key-{number}")
    days.now += 11 * DAY
    for number in range(5):
        days.use(f"late-{number}")
    assert (days.count("history"), days.count("past_use")) == (5, 1)


def test_a_user_who_asks_without_end_fills_no_disk(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_OF_USER", 50)
    days.use("bobs", "bob")
    for number in range(300):
        days.use(f"key-{number}", seconds=1.0)
    assert days.count("history") <= 51
    assert days.count("past_use") <= 2
    assert line("ada", records.history(days.store, 0.0, "ada")).leases == 300
    # Those of others are kept one by one.
    assert [row.id != "" for row in records.history(days.store, 0.0, "bob")] == [True]


def test_what_is_too_much_to_read_one_by_one_is_added_up(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        days.use(f"key-{number}")
    monkeypatch.setattr(usage, "MOST_ROWS", 5)
    rows = records.history(days.store, 0.0)
    assert [row.id == "" for row in rows] == [True, *[False] * 5]
    assert line("total", rows).leases == 30
    assert line("total", rows).gpu_hours == pytest.approx(30 * 0.1 * 60 / 3600)


def test_no_number_is_given_out_twice(days: Days) -> None:
    first = days.use("first")
    days.now += 11 * DAY
    assert not records.forget_old(days.store)
    last = days.use("last")
    assert int(last.partition("-")[0]) == int(first.partition("-")[0]) + 1


def test_tidying_writes_little_at_a_time(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        days.use(f"key-{number}")
    days.now += 11 * DAY
    monkeypatch.setattr(usage, "AT_A_TIME", 10)
    steps = 0
    while records.forget_old(days.store):
        steps += 1
    assert steps == 3
    assert days.count("history") == 1


def test_what_was_measured_is_added_up(days: Days) -> None:
    for number in range(6):
        days.store.measured_use.add({days.use(f"key-{number}"): Measured(100 + number, 600.0, 6.0, 6.0)})
    days.use("unmeasured")
    before = line("total", records.history(days.store, 0.0))
    days.now += 11 * DAY
    while records.forget_old(days.store):
        pass
    days.use("new")
    after = line("total", records.history(days.store, 0.0))
    assert (after.peak_mib, after.measured, after.untouched) == (105, 6, 0)
    assert after.mean_mib == pytest.approx(before.mean_mib) == 100.0


async def test_a_parked_lease_is_in_the_report(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id = await take(pool, "10%", "key")
        await pool.attach(lease_id, ME, grace=60.0)
        await pool.park(lease_id)
        (lease,) = (await pool.status()).leases
    assert has_used(lease)
    assert lease.held_before > 0
    row = living(lease, lease.requested_at + 1e6)
    assert row.held_seconds == lease.held_before
    assert row.gpu_seconds == pytest.approx(0.1 * lease.held_before)


def test_what_others_could_have_of_a_lease_is_added_up_and_stays_right(tmp_path: Path) -> None:
    """It is parked for two hours at 10%, and for one at 20%, half of which it waits in the queue."""
    days = Days(tmp_path / "store.db", history_days=10, attach_within="3650d")
    lease = requests.decide(days.store, parse_request("10%"), Holder("ada", process=ME), "key")
    days.now += 60.0
    leases.lend(days.store, lease.id)
    days.now += 7_200.0
    assert living(leases.read(days.store, lease.id), days.now).lent_gpu_seconds == pytest.approx(720.0)
    leases.queue_again(days.store, lease.id)
    days.now += 60.0
    assert leases.read(days.store, lease.id).lent_before == pytest.approx(720.0)
    leases.change_size(days.store, lease.id, parse_request("20%"))
    leases.lend(days.store, lease.id)
    other = requests.decide(days.store, parse_request("1"), Holder("bob", process=ME), "other")
    days.now += 1_800.0
    assert leases.queue_again(days.store, lease.id).state is LeaseState.WAITING
    days.now += 1_800.0
    leases.end_lease(days.store, lease.id, EndReason.RELEASED)
    leases.end_lease(days.store, other.id, EndReason.RELEASED)
    (row,) = records.history(days.store, 0.0, "ada")
    assert row.lent_gpu_seconds == pytest.approx(720.0 + 720.0)
    assert row.gpu_seconds == pytest.approx(12.0)
    days.now += 11 * DAY
    days.use("new")
    while records.forget_old(days.store):
        pass
    total = line("total", records.history(days.store, 0.0))
    assert total.lent_gpu_hours == pytest.approx(0.4)
    days.database.close()


def test_what_it_could_use_on_top_is_added_up_and_stays_right(tmp_path: Path) -> None:
    """It has an hour with all of the rest, one with less, and one with none, parked; then it is back."""
    days = Days(tmp_path / "store.db", history_days=10, attach_within="3650d")
    lease = requests.decide(days.store, parse_request("10%..100%"), Holder("ada", process=ME), "key")
    guarantee, whole = 3276, 32768

    def hour() -> EndedLease:
        """Decide on bursts, and let an hour pass; return the lease as if it ended then."""
        burst.update(days.store, {}, lambda _: True)
        days.now += 3600.0
        return living(leases.read(days.store, lease.id), days.now)

    all_of_it = whole - guarantee
    assert hour().burst_mib_seconds == all_of_it * 3600
    other = requests.decide(days.store, parse_request("50%"), Holder("bob", process=ME), "other")
    assert hour().burst_mib_seconds == (2 * all_of_it - whole // 2) * 3600
    leases.change_size(days.store, lease.id, parse_request("10%..90%"))
    leases.change_size(days.store, lease.id, parse_request("20%..90%"))
    assert leases.read(days.store, lease.id).burst_since is None, "a resize takes it until the next look"
    leases.lend(days.store, lease.id)
    expected = hour().burst_mib_seconds
    assert expected == (2 * all_of_it - whole // 2) * 3600, "what is parked has nothing on top"
    leases.queue_again(days.store, lease.id)
    days.now += 3600.0
    leases.end_lease(days.store, other.id, EndReason.RELEASED)
    leases.end_lease(days.store, lease.id, EndReason.RELEASED)
    (row,) = records.history(days.store, 0.0, "ada")
    assert (row.burst_mib_seconds, row.burst_peak_mib) == (expected, all_of_it)
    (plain,) = records.history(days.store, 0.0, "bob")
    assert (plain.burst_mib_seconds, plain.burst_peak_mib) == (0.0, 0)
    days.now += 11 * DAY
    days.use("new")
    while records.forget_old(days.store):
        pass
    total = line("total", records.history(days.store, 0.0))
    assert (total.burst_gib_hours, total.burst_peak_mib) == (expected / 1024 / 3600, all_of_it)
    days.database.close()


def test_the_jobs_of_a_leases_kernels_are_kept_in_order(days: Days) -> None:
    ended = {}
    for key, jobs in (("none", ()), ("one", ("Slurm job 4711",)), ("two", ("Slurm job 7", "Slurm job 8"))):
        lease = requests.decide(days.store, parse_request("10%"), Holder("ada", process=ME), key)
        for job in jobs:
            leases.add_job(days.store, lease.id, job)
        leases.end_lease(days.store, lease.id, EndReason.RELEASED)
        with pytest.raises(LeaseGone):
            leases.add_job(days.store, lease.id, "Slurm job 9")
        ended[lease.id] = ", ".join(jobs)
    assert {row.id: row.job for row in records.history(days.store, 0.0)} == ended


def test_a_burst_from_before_it_was_noted_is_noted_from_the_next_look_on(days: Days) -> None:
    lease = requests.decide(days.store, parse_request("10%..100%"), Holder("ada", process=ME), "key")
    burst.update(days.store, {}, lambda _: True)
    days.now += 3600.0
    with closing(sqlite3.connect(days.path)) as store, store:  # as an older version has left it
        store.execute("UPDATE lease SET burst_mib = 0, burst_since = NULL, burst_peak_mib = 0")
    assert burst.update(days.store, {}, lambda _: True)
    assert not burst.update(days.store, {}, lambda _: True)
    days.now += 60.0
    leases.end_lease(days.store, lease.id, EndReason.RELEASED)
    (row,) = records.history(days.store, 0.0)
    assert (row.burst_mib_seconds, row.burst_peak_mib) == (29492 * 60, 29492)


def test_devices_long_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_table, "MOST_GONE", 3)
    with closing(Database(tmp_path / "store.db")) as database:
        store = StoreContext(database, PoolSettings())
        for number in range(20):
            registration.register(store, [device(number)])
        while records.forget_old(store):
            pass
        assert len(leases.status(store, "").devices) == 1
        lease = requests.decide(store, parse_request("10%"), Holder("ada", process=ME), "key")
        assert lease.slices[0].device == device(19)
    with closing(sqlite3.connect(tmp_path / "store.db")) as found:
        assert found.execute("SELECT count(*) FROM device").fetchone() == (4,)
