"""Idle kernels give way through the store: who is asked, for whom, and where they stand when they return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_pool.clock import Clock
from gpu_pool.devices.inventory import parse_devices
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, records, registration, requests, yielding
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import BadRequest, EndReason, Holder, Lease, LeaseState, parse_request


class School:
    """A store of one GPU and some kernels on it, with a clock of its own."""

    def __init__(self, store: StoreContext, times: list[float]) -> None:
        self.store, self._times, self._asked = store, times, 0

    @property
    def now(self) -> float:
        return self._times[0]

    def pass_time(self, seconds: float) -> None:
        self._times[0] += seconds
        self._times[1] += seconds

    def jump(self, seconds: float) -> None:
        """Set the clock of the wall."""
        self._times[0] += seconds

    def ask(self, size: str = "50%", yields: bool = True) -> str:
        self._asked += 1
        holder = Holder(f"user{self._asked}", yields=yields)
        lease = requests.decide(self.store, parse_request(size), holder, f"key{self._asked}")
        leases.set_deadline(self.store, lease.id, None)
        yielding.ask_back(self.store, at_once=True)
        return lease.id

    def read(self, lease_id: str) -> Lease:
        return self.store.leases.lease(lease_id)

    def idles(self, lease_id: str, seconds: float = 100.0) -> None:
        records.report_busy(self.store, lease_id, (), self.now - seconds)

    def works(self, lease_id: str) -> None:
        records.report_busy(self.store, lease_id, [(self.now, 1.0)])

    def asked(self, *lease_ids: str) -> list[str]:
        return [each for each in lease_ids if self.read(each).asked_back is EndReason.YIELDED]

    def giving_way(self, lease_id: str) -> int:
        return requests.why_waiting(self.store, lease_id).giving_way

    def parks(self, lease_id: str) -> None:
        # As attaching it to a process does, which there is none of here.
        number = lease_id.partition("-")[0]
        self.store.db.run("set_deadline", {"number": number, "deadline": None, "reason": None})
        leases.lend(self.store, lease_id)
        yielding.ask_back(self.store)


@contextlib.contextmanager
def school(folder: Path, node: str = "") -> Iterator[School]:
    times = [1_000_000.0, 5_000.0]
    clock = Clock(lambda: times[0], lambda: times[1])
    with closing(Database(folder / "store.db")) as database:
        store = StoreContext(database, PoolSettings(), clock)
        [device] = parse_devices("V100-SXM2-32GB:1")
        registration.register(store, [replace(device, node=node)])
        yield School(store, times)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[School]:
    with school(tmp_path) as found:
        yield found


def test_an_idle_kernel_is_asked_once_somebody_waits_and_only_then(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one)
    assert ours.asked(one, two) == []
    waiter = ours.ask()
    assert ours.asked(one, two) == [one]
    assert ours.giving_way(waiter) == 1
    ours.parks(one)
    assert [ours.read(each).state for each in (one, waiter)] == [LeaseState.PARKED, LeaseState.HELD]
    assert ours.read(one).asked_back is EndReason.YIELDED


def test_a_kernel_on_another_machine_cannot_give_way_and_is_not_asked(tmp_path: Path) -> None:
    with school(tmp_path, node="n2") as ours:
        one, two = ours.ask(), ours.ask()
        ours.idles(one)
        waiter = ours.ask()
        assert ours.asked(one, two) == []
        assert ours.giving_way(waiter) == 0
        assert ours.read(one).terms.in_pod


def test_one_that_becomes_idle_while_somebody_waits_is_asked_at_once(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.ask()
    ours.idles(one, 30.0)
    assert ours.asked(one, two) == []
    ours.idles(two)
    assert ours.asked(one, two) == [two]
    ours.pass_time(40.0)
    ours.ask()
    assert ours.asked(one, two) == [one, two]


def test_who_says_that_it_works_is_not_asked_any_more_and_another_one_is(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one, 200.0)
    ours.idles(two)
    waiter = ours.ask()
    assert ours.asked(one, two) == [one]
    ours.works(one)
    assert ours.asked(one, two) == [two]
    assert ours.giving_way(waiter) == 1


def test_nobody_is_asked_any_more_once_the_one_who_waited_has_gone(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one)
    waiter = ours.ask()
    leases.end_lease(ours.store, waiter, EndReason.WITHDRAWN)
    assert ours.asked(one, two) == []
    assert not yielding.ask_back(ours.store)
    ours.ask()
    assert ours.asked(one, two) == [one]


def test_nobody_is_asked_any_more_once_the_one_who_waited_is_served_otherwise(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one)
    waiter = ours.ask()
    assert ours.asked(one, two) == [one]
    leases.end_lease(ours.store, two, EndReason.RELEASED)
    assert ours.read(waiter).state is LeaseState.HELD
    assert ours.asked(one) == []


def test_nobody_is_asked_any_more_once_one_that_would_return_leaves_the_queue(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.parks(one)
    waiter = ours.ask()
    leases.queue_again(ours.store, one)
    ours.idles(two)
    assert ours.asked(two, waiter) == [two]
    leases.lend(ours.store, one)
    assert ours.asked(two, waiter) == []


def test_one_that_does_not_answer_is_passed_over_after_a_minute(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one, 200.0)
    ours.idles(two)
    ours.ask()
    ours.pass_time(59.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one, two) == [one]
    ours.pass_time(2.0)
    assert yielding.ask_back(ours.store)
    assert ours.asked(one, two) == [two]


def test_a_long_command_waits_and_one_that_ends_soon_is_yielded_to(ours: School) -> None:
    one, _ = ours.ask(), ours.ask()
    ours.idles(one)
    ours.ask(yields=False)
    assert ours.asked(one) == []
    ours.ask("50% for 10min", yields=False)
    assert ours.asked(one) == [one]


def test_who_returned_is_not_asked_before_it_ran_something(ours: School) -> None:
    one, _ = ours.ask(), ours.ask()
    ours.idles(one)
    waiter = ours.ask()
    ours.parks(one)
    leases.queue_again(ours.store, one)
    leases.end_lease(ours.store, waiter, EndReason.RELEASED)
    assert ours.read(one).state is LeaseState.HELD
    ours.ask()
    ours.pass_time(100.0)
    ours.idles(one)
    assert ours.asked(one) == []
    ours.works(one)
    ours.pass_time(100.0)
    ours.idles(one)
    assert ours.asked(one) == [one]


def test_a_clock_that_is_set_makes_nobody_idle_for_longer_or_less_long(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one, 10.0)
    ours.jump(86_400.0)
    ours.ask()
    assert ours.asked(one, two) == []
    ours.idles(two)
    ours.jump(-200_000.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one, two) == [two]


JUMPS = pytest.mark.parametrize("jump", [3_600.0, -3_600.0, 86_400.0, -86_400.0])


@JUMPS
def test_a_clock_that_is_set_at_any_step_changes_nobody_who_is_asked(ours: School, jump: float) -> None:
    one, works = ours.ask(), ours.ask()
    ours.works(works)
    ours.idles(one)
    ours.jump(jump)
    waiter = ours.ask()
    assert ours.asked(one, works) == [one]
    ours.jump(-jump)
    yielding.ask_back(ours.store)
    assert ours.asked(one, works) == [one]
    ours.parks(one)
    ours.jump(jump)
    assert ours.read(waiter).state is LeaseState.HELD
    leases.queue_again(ours.store, one)
    leases.end_lease(ours.store, waiter, EndReason.RELEASED)
    assert ours.read(one).state is LeaseState.HELD
    # It returned, and is not asked before it ran something, whatever the clock says then.
    ours.ask()
    ours.jump(-2 * jump)
    ours.pass_time(100.0)
    ours.idles(one, 90.0)
    assert ours.asked(one, works) == []
    # Who waits by now has done so for more than a minute, whatever the clock says.
    ours.works(one)
    ours.pass_time(4.0)
    ours.jump(jump)
    ours.idles(one, 4.0)
    assert ours.asked(one, works) == []
    ours.pass_time(1.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one, works) == [one]


@JUMPS
def test_who_has_not_waited_for_long_has_nobody_asked_sooner_if_the_clock_is_set(
    ours: School, jump: float
) -> None:
    one, works = ours.ask(), ours.ask()
    ours.works(works)
    ours.idles(one, 10.0)
    waiter = ours.ask()
    ours.jump(jump)
    ours.pass_time(49.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one, works) == []
    ours.pass_time(1.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one, works) == [one]
    # One that returns has waited since it asked again, and not since it first did.
    ours.parks(one)
    assert ours.read(waiter).state is LeaseState.HELD
    ours.idles(waiter, 30.0)
    leases.queue_again(ours.store, one)
    yielding.ask_back(ours.store)
    assert ours.asked(waiter, works) == []


@JUMPS
def test_a_kernel_is_parked_so_often_in_an_hour_of_the_boots_clock(ours: School, jump: float) -> None:
    one, _ = ours.ask(), ours.ask()
    for _ in range(yielding.MOST_PARKINGS):
        ours.works(one)
        ours.pass_time(61.0)
        ours.idles(one, 61.0)
        waiter = ours.ask()
        assert ours.asked(one) == [one]
        ours.parks(one)
        leases.queue_again(ours.store, one)
        leases.end_lease(ours.store, waiter, EndReason.RELEASED)
        ours.jump(jump)
    ours.works(one)
    ours.pass_time(61.0)
    ours.idles(one, 61.0)
    ours.ask()
    assert ours.asked(one) == []
    ours.jump(jump)
    yielding.ask_back(ours.store)
    assert ours.asked(one) == []
    ours.pass_time(3_600.0 - yielding.MOST_PARKINGS * 61.0)
    yielding.ask_back(ours.store)
    assert ours.asked(one) == [one]


def test_who_asks_and_withdraws_again_and_again_has_a_kernel_put_aside_so_often_in_an_hour(
    ours: School,
) -> None:
    one, other = ours.ask(), ours.ask()
    put_aside = 0
    for _ in range(2 * yielding.MOST_PARKINGS):
        ours.pass_time(1.0)
        ours.idles(one, 61.0)
        waiter = ours.ask()
        if ours.asked(one) == [one]:
            put_aside += 1
            leases.end_lease(ours.store, waiter, EndReason.WITHDRAWN)
            # It is moved off its GPU meanwhile, and back.
            ours.store.db.run(
                "set_deadline", {"number": one.partition("-")[0], "deadline": None, "reason": None}
            )
            assert leases.lend(ours.store, one, yields=True).state is LeaseState.HELD
        else:
            leases.end_lease(ours.store, waiter, EndReason.WITHDRAWN)
    assert put_aside == yielding.MOST_PARKINGS
    assert [ours.read(each).state for each in (one, other)] == [LeaseState.HELD] * 2
    ours.pass_time(3_600.0)
    ours.idles(one, 61.0)
    ours.ask()
    assert ours.asked(one) == [one]


def test_who_never_answers_is_passed_over_and_kept_and_the_queue_goes_on(ours: School) -> None:
    deaf, other = ours.ask(), ours.ask()
    ours.idles(deaf, 200.0)
    ours.idles(other)
    first, second = ours.ask(), ours.ask()
    assert ours.asked(deaf, other) == [deaf, other]
    ours.parks(other)
    assert [ours.read(each).state for each in (first, second)] == [LeaseState.HELD, LeaseState.WAITING]
    for _ in range(10):
        ours.pass_time(61.0)
        yielding.ask_back(ours.store)
        assert not ours.asked(deaf)
        assert (ours.read(deaf).state, ours.giving_way(second)) == (LeaseState.HELD, 0)
    # The slice of the one that answers goes to who waits next, in turns; the other's stays.
    ours.works(first)
    ours.pass_time(61.0)
    ours.idles(first, 61.0)
    assert ours.asked(first, deaf) == [first]
    ours.parks(first)
    assert [ours.read(each).state for each in (deaf, second)] == [LeaseState.HELD] * 2
    # It is heard of again.
    ours.ask()
    ours.idles(deaf)
    assert ours.asked(deaf) == [deaf]


def test_a_kernel_cannot_have_been_idle_since_no_time(ours: School) -> None:
    with pytest.raises(BadRequest):
        records.report_busy(ours.store, ours.ask(), (), float("nan"))


def test_who_returns_comes_before_newcomers_once_and_has_waited_since_it_asked(ours: School) -> None:
    one, two = ours.ask(), ours.ask()
    ours.idles(one)
    waiter = ours.ask()
    ours.pass_time(5.0)
    newcomer = ours.ask()
    ours.parks(one)
    assert ours.read(waiter).state is LeaseState.HELD
    ours.pass_time(5.0)
    leases.queue_again(ours.store, one)
    rows = {row["id"]: row for row in ours.store.db.run("waiters").fetchall()}
    assert rows[one]["waiting_since"] < rows[newcomer]["waiting_since"]
    row = ours.store.db.one("lease_by_number", number=one.partition("-")[0])
    assert row["resumed_at"] == ours.now
    # Parked once more before the newcomer had its turn, it stands behind it.
    leases.lend(ours.store, one)
    leases.queue_again(ours.store, one)
    rows = {row["id"]: row for row in ours.store.db.run("waiters").fetchall()}
    assert rows[one]["waiting_since"] > rows[newcomer]["waiting_since"]
    assert ours.read(two).state is LeaseState.HELD


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaiiwpprrrel"), st.integers(0, 5)), min_size=10, max_size=60))
def test_whatever_happens_no_kernel_overtakes_a_newcomer_twice(steps: list[tuple[str, int]]) -> None:
    """And none is asked that works, nor while nobody waits."""
    overtaken: set[tuple[str, str]] = set()
    with TemporaryDirectory() as folder, school(Path(folder)) as ours:
        known: list[str] = []
        for act, which in steps:
            ours.pass_time(7.0)
            alive = [each for each in known if ours.read(each).state is not LeaseState.ENDED]
            one = alive[which % len(alive)] if alive else ours.ask("25%")
            known = list(dict.fromkeys([*known, one]))
            state = ours.read(one).state
            if act == "a" and len(alive) < 12:
                known.append(ours.ask("25%"))
            elif act == "i" and state is LeaseState.HELD:
                ours.idles(one)
            elif act == "w" and state is LeaseState.HELD:
                ours.works(one)
                assert not ours.asked(one)
            elif act == "p" and ours.asked(one) and state is LeaseState.HELD:
                ours.parks(one)
            elif act == "r" and state is LeaseState.PARKED:
                before = ours.store.db.run("newcomers").fetchall()
                leases.queue_again(ours.store, one)
                number = one.partition("-")[0]
                since = ours.store.db.one("lease_by_number", number=number)["waiting_since"]
                if since is None:
                    continue
                passed = {(one, each["number"]) for each in before if since < each["waiting_since"]}
                assert not passed & overtaken
                overtaken |= passed
            elif act == "e":
                leases.end_lease(ours.store, one, EndReason.RELEASED)
            yielding.ask_back(ours.store)
            if not ours.store.db.one("count_waiters")[0]:
                assert not [
                    each for each in known if ours.read(each).state is LeaseState.HELD and ours.asked(each)
                ]
