"""What is told of all leases at once is what is told of each, though little of it is made anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.clock import Clock
from gpu_pool.courses import Courses, parse_course
from gpu_pool.settings import PoolSettings
from gpu_pool.store import reclaim
from gpu_pool.store.database import Database
from gpu_pool.store.leases import LeaseStore
from gpu_pool_client import EndReason, Failure, GpuPoolError, Holder, Lease, Process, parse_request
from support.pools import device

ME = Process.current()
POOL = [device(index) for index in range(2)]
COURSE = """
title: Deep learning
slices: [{name: Some, request: 30%}, {name: All, request: 2}]
longest_lease: 2h
"""


class Office:
    """A book with clocks of its own."""

    def __init__(self, path: Path) -> None:
        self.wall, self.uptime = 1e9, 1e6
        self.database = Database(path)
        clock = Clock(lambda: self.wall, lambda: self.uptime)
        self.book = LeaseStore(self.database, PoolSettings(max_waiting=1000), clock)
        self.book.register(POOL)

    def follow(self, text: str) -> None:
        self.book.follow(Courses({"deep": parse_course("deep.yaml", text.encode())}))

    def ask(self, text: str, key: str, holder: Holder | None = None) -> Lease:
        return self.book.request(parse_request(text), holder or Holder("ada", process=ME), key)

    def told(self) -> list[Lease]:
        status = self.book.status("")
        return [*status.leases, *status.queue]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    opened = Office(tmp_path / "store.db")
    yield opened
    opened.database.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_lease_is_told_of_as_by_itself(seed: int, office: Office) -> None:
    dice = random.Random(seed)
    ids: list[str] = []

    def one() -> str:
        return dice.choice(ids)

    steps = [
        lambda: ids.append(office.ask(dice.choice(["30%", "1", "2"]), f"key-{len(ids)}").id),
        lambda: office.book.release(one(), EndReason.RELEASED),
        lambda: office.book.park(one()),
        lambda: office.book.resume(one()),
        lambda: office.book.attach(one(), ME, None, 5.0),
        lambda: office.book.renew(one(), 60.0),
        lambda: office.book.resize(one(), parse_request("20%")),
        lambda: office.book.set_notice(one(), f"words {dice.random()}"),
        lambda: office.book.record_failure(one(), Failure(1.0, "words", f"pod-{dice.random()}", "n1", "i")),
    ]
    for _ in range(120):
        try:
            (steps[0] if not ids else dice.choice([steps[0], *steps]))()
        except GpuPoolError:
            continue  # not everything can be done with every lease
        office.wall += dice.random()
        told = office.told()
        assert told == [office.book.lease(lease.id) for lease in told]


def test_the_end_of_a_lease_is_told_by_the_clock_as_it_is_now(office: Office) -> None:
    office.follow(COURSE)
    lease = office.ask("30%", "key", Holder("ada", "deep", process=ME))
    assert office.told() == [lease]
    assert lease.terms.ends_at == office.wall + 7_200
    office.wall += 500.0  # set, while no time has passed
    [told] = office.told()
    assert told.terms.ends_at == office.wall + 7_200


def test_a_lease_is_told_of_in_the_terms_of_its_course_as_they_are_now(office: Office) -> None:
    office.follow(COURSE)
    office.ask("1", "held", Holder("ada", "deep", process=ME))
    office.ask("2", "waits", Holder("ada", "deep", process=ME))
    assert [lease.terms.idle_limit for lease in office.told()] == [None, None]
    office.follow(COURSE + "idle_limit: 30min\n")
    assert [lease.terms.idle_limit for lease in office.told()] == [1_800.0, 1_800.0]


def test_a_device_is_everywhere_what_it_is_now(office: Office) -> None:
    lease = office.ask("30%", "key")
    assert office.told() == [*office.book.measured_use.held()] == [lease]
    office.book.register([replace(each, driver="570.2") for each in POOL])
    held, told = office.book.measured_use.held(), office.told()
    assert told == [*held] == [office.book.lease(lease.id)]
    assert told[0].slices[0].device.driver == "570.2"
    assert office.book.measured_use.held() is held


def test_what_has_not_changed_is_not_made_anew(office: Office) -> None:
    for number in range(4):
        office.ask("1", f"key-{number}")
    before = office.told()
    office.ask("1", "another")
    assert all(now is then for now, then in zip(office.told(), before, strict=False))


def test_a_look_reads_each_process_once_however_many_wait_for_it(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Process(ME.pid, start, ME.boot, ME.namespace) for start in (1, 2)]
    for number in range(30):
        office.ask("2", f"key-{number}", Holder("ada", process=[ME, *others][number % 3]))
    judged: list[str] = []

    def judge(text: str, liveness_lock: str, liveness: object) -> bool:
        judged.append(text)
        return False

    monkeypatch.setattr(reclaim, "_is_dead", judge)
    assert reclaim.look(office.database, office.uptime).dead == frozenset()
    assert len(judged) == len(set(judged)) == 3
    monkeypatch.undo()
    office.book.look()
    assert all(lease.holder.process == ME for lease in office.told())


@pytest.mark.parametrize("name", ["lives", "overdue"])
def test_a_look_does_not_go_through_the_line(name: str, office: Office) -> None:
    connection = office.database._connection
    sql = office.database._sql[name]
    plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", {"now": 0, "margin": 0}).fetchall()
    scans = {row["detail"] for row in plan if "SCAN" in row["detail"] and "lease" in row["detail"]}
    # The index that has no more than what is held; older versions of SQLite say SCAN TABLE.
    assert {scan.rpartition(" ")[2] for scan in scans} == {"lease_held"}
