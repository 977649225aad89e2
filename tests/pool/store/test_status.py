"""What is told of all leases at once is what is told of each, though little of it is made anew."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.clock import Clock
from gpu_pool.courses import Courses, parse_course
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, reclaim, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import EndReason, Failure, GpuPoolError, Holder, Lease, Process, parse_request
from support.pools import device

ME = Process.current()
POOL = [device(index) for index in range(2)]
COURSE = """
title: Deep learning
slices: [{name: Some, request: 30%}, {name: All, request: 2}]
longest_lease: 2h
"""


class ClockedStore:
    """A store with clocks of its own."""

    def __init__(self, path: Path) -> None:
        self.wall, self.uptime = 1e9, 1e6
        self.database = Database(path)
        clock = Clock(lambda: self.wall, lambda: self.uptime)
        self.lease_store = StoreContext(self.database, PoolSettings(max_waiting=1000), clock)
        registration.register(self.lease_store, POOL)

    def follow(self, text: str) -> None:
        self.lease_store.follow(Courses({"deep": parse_course("deep.yaml", text.encode())}))

    def ask(self, text: str, key: str, holder: Holder | None = None) -> Lease:
        return requests.decide(
            self.lease_store, parse_request(text), holder or Holder("ada", process=ME), key
        )

    def told(self) -> list[Lease]:
        status = leases.status(self.lease_store, "")
        return [*status.leases, *status.queue]


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[ClockedStore]:
    opened = ClockedStore(tmp_path / "store.db")
    yield opened
    opened.database.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_lease_is_told_of_as_by_itself(seed: int, clocked: ClockedStore) -> None:
    dice = random.Random(seed)
    ids: list[str] = []

    def one() -> str:
        return dice.choice(ids)

    steps = [
        lambda: ids.append(clocked.ask(dice.choice(["30%", "1", "2"]), f"key-{len(ids)}").id),
        lambda: leases.end_lease(clocked.lease_store, one(), EndReason.RELEASED),
        lambda: leases.lend(clocked.lease_store, one()),
        lambda: leases.queue_again(clocked.lease_store, one()),
        lambda: leases.bind_process(clocked.lease_store, one(), ME, None, 5.0),
        lambda: leases.set_deadline(clocked.lease_store, one(), 60.0),
        lambda: leases.change_size(clocked.lease_store, one(), parse_request("20%")),
        lambda: leases.set_notice(clocked.lease_store, one(), f"words {dice.random()}"),
        lambda: leases.record_failure(
            clocked.lease_store, one(), Failure(1.0, "words", f"pod-{dice.random()}", "n1", "i")
        ),
    ]
    for _ in range(120):
        try:
            (steps[0] if not ids else dice.choice([steps[0], *steps]))()
        except GpuPoolError:
            continue  # not everything can be done with every lease
        clocked.wall += dice.random()
        told = clocked.told()
        assert told == [leases.read(clocked.lease_store, lease.id) for lease in told]


def test_the_end_of_a_lease_is_told_by_the_clock_as_it_is_now(clocked: ClockedStore) -> None:
    clocked.follow(COURSE)
    lease = clocked.ask("30%", "key", Holder("ada", "deep", process=ME))
    assert clocked.told() == [lease]
    assert lease.terms.ends_at == clocked.wall + 7_200
    clocked.wall += 500.0  # set, while no time has passed
    [told] = clocked.told()
    assert told.terms.ends_at == clocked.wall + 7_200


def test_a_held_lease_is_told_of_in_the_terms_of_its_grant_and_a_waiting_one_in_those_of_now(
    clocked: ClockedStore,
) -> None:
    clocked.follow(COURSE)
    clocked.ask("1", "held", Holder("ada", "deep", process=ME))
    clocked.ask("2", "waits", Holder("ada", "deep", process=ME))
    assert [lease.terms.idle_limit for lease in clocked.told()] == [None, None]
    clocked.follow(COURSE + "idle_limit: 30min\n")
    assert [lease.terms.idle_limit for lease in clocked.told()] == [None, 1_800.0]


def test_a_device_is_everywhere_what_it_is_now(clocked: ClockedStore) -> None:
    lease = clocked.ask("30%", "key")
    assert clocked.told() == [*clocked.lease_store.measured_use.held()] == [lease]
    registration.register(clocked.lease_store, [replace(each, driver="570.2") for each in POOL])
    held, told = clocked.lease_store.measured_use.held(), clocked.told()
    assert told == [*held] == [leases.read(clocked.lease_store, lease.id)]
    assert told[0].slices[0].device.driver == "570.2"
    assert clocked.lease_store.measured_use.held() is held


def test_what_has_not_changed_is_not_made_anew(clocked: ClockedStore) -> None:
    for number in range(4):
        clocked.ask("1", f"key-{number}")
    before = clocked.told()
    clocked.ask("1", "another")
    assert all(now is then for now, then in zip(clocked.told(), before, strict=False))


def test_where_nothing_was_written_nothing_is_read(
    clocked: ClockedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked.follow(COURSE)
    lease = clocked.ask("1", "key", Holder("ada", "deep", process=ME))
    before, ran, run = clocked.told(), list[str](), clocked.database.run

    def noted(name: str, *values: Any) -> sqlite3.Cursor:
        ran.append(name)
        return run(name, *values)

    monkeypatch.setattr(clocked.database, "run", noted)
    assert clocked.told() == before
    assert "leases" not in ran
    # By whomever it was written.
    with closing(sqlite3.connect(clocked.database.path)) as other:
        other.execute("UPDATE lease SET notice = 'by another'")
        other.commit()
    assert [each.notice for each in clocked.told()] == ["by another"]
    leases.set_notice(clocked.lease_store, lease.id, "by us")
    assert [each.notice for each in clocked.told()] == ["by us"]
    clocked.wall += 100.0
    [now] = clocked.told()
    assert now.terms.ends_at == clocked.wall + 7_200


def test_what_is_undone_is_not_told_afterwards(clocked: ClockedStore) -> None:
    lease = clocked.ask("1", "key")
    before = clocked.told()

    def changed_in_vain() -> None:
        with clocked.database.together():
            leases.set_notice(clocked.lease_store, lease.id, "undone")
            assert [each.notice for each in clocked.told()] == ["undone"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        changed_in_vain()
    assert clocked.told() == before


def test_an_end_is_not_worked_out_anew_unless_the_clock_has_been_set(clocked: ClockedStore) -> None:
    clocked.follow(COURSE)
    clocked.ask("30%", "key", Holder("ada", "deep", process=ME))
    [before] = clocked.told()
    clocked.wall += 0.001  # two clocks are not read at the same moment
    [now] = clocked.told()
    assert now is before
    for _ in range(20):  # and may not go at the same pace
        clocked.wall += 0.1
        [now] = clocked.told()
        assert now.terms.ends_at == pytest.approx(clocked.wall + 7_200, abs=0.5)


def test_a_look_reads_each_process_once_however_many_wait_for_it(
    clocked: ClockedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Process(ME.pid, start, ME.boot, ME.namespace) for start in (1, 2)]
    for number in range(30):
        clocked.ask("2", f"key-{number}", Holder("ada", process=[ME, *others][number % 3]))
    judged: list[Process] = []

    def judge(process: Process) -> bool:
        judged.append(process)
        return True

    monkeypatch.setattr(Process, "is_alive", judge)
    assert reclaim.find_over(clocked.lease_store).dead == frozenset()
    assert len(judged) == len(set(judged)) == 3
    monkeypatch.undo()
    reclaim.end_over(clocked.lease_store)
    assert all(lease.holder.process == ME for lease in clocked.told())


@pytest.mark.parametrize("name", ["lives", "overdue"])
def test_a_look_does_not_go_through_the_line(name: str, clocked: ClockedStore) -> None:
    connection = clocked.database._connection
    sql = clocked.database._sql[name]
    plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", {"now": 0, "margin": 0}).fetchall()
    scans = {row["detail"] for row in plan if "SCAN" in row["detail"] and "lease" in row["detail"]}
    # The index that has no more than what is held; older versions of SQLite say SCAN TABLE.
    assert {scan.rpartition(" ")[2] for scan in scans} == {"lease_held"}
