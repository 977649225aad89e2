"""Leases that change their size, as the store keeps them. Time is the test's own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from gpu_pool.store import leases, reclaim, records, registration
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Lease,
    LeaseState,
    NotAllowed,
    OverQuota,
    TimedOut,
    parse_request,
)
from support.pools import device
from support.stores import START, TimedStore


def test_the_own_device_is_preferred_and_another_is_taken_where_it_is_full(pools: Any) -> None:
    pool = pools(device(0), device(1))
    other, lease = pool.ask("60%"), pool.ask("50%")
    assert (pool.placed(lease), pool.held()) == ([1], [600, 500])
    pool.resize(lease, "40%")
    assert pool.placed(lease) == [1]
    pool.resize(other, "70%")
    assert (pool.placed(other), pool.held()) == ([0], [700, 400])
    pool.resize(lease, "30%")
    pool.resize(other, "20%")
    pool.resize(lease, "90%")
    assert pool.held() == [200, 900]
    pool.resize(other, "2x5%")
    assert pool.held() == [50, 950]


def test_only_those_who_could_use_the_same_device_stand_in_the_way(pools: Any) -> None:
    pool = pools(device(0, "V100"), device(1, "T4"))
    small, large = pool.ask("50% model=V100"), pool.ask("50% model=T4")
    assert pool.ask("1 model=V100").state is LeaseState.WAITING
    with pytest.raises(TimedOut, match="others are waiting"):
        pool.resize(small, "60% model=V100")
    assert pool.resize(large, "1 model=T4").state is LeaseState.HELD
    assert pool.held() == [500, 1000]


def test_on_a_drained_device_a_slice_may_only_become_smaller(pools: Any) -> None:
    pool = pools()
    lease = pool.ask("50%")
    registration.close_device(pool.lease_store, "0", drained=True)
    with pytest.raises(TimedOut, match="not as much is free"):
        pool.resize(lease, "60%")
    pool.resize(lease, "40%")
    assert pool.held() == [400]


def test_a_limit_changes_at_once_and_leaves_all_else(pools: Any) -> None:
    pool = pools(device(0), device(1), courses={"ml": {"per_user": {"share": "20%"}}})
    lease, _ = pool.ask("20%", course="ml"), pool.ask("1", "grace")
    assert pool.ask("1", "lin").state is LeaseState.WAITING
    with pytest.raises(OverQuota):
        pool.ask("2%", course="ml")
    (before,) = leases.read(pool.lease_store, lease.id).slices
    for size, limit in (("20%..50%", 16384), ("20%..100%", 32768), ("20%..30%", 9830), ("20%", 0)):
        changed = pool.resize(lease, size)
        assert (str(changed.request), changed.slices) == (size, (replace(before, limit_mib=limit),))
    assert sorted(pool.held()) == [200, 1000]


def test_what_is_lent_goes_with_the_limit_and_never_the_guarantee(pools: Any) -> None:
    pool = pools(device(0))
    lease = pool.ask("20%..50%")
    with closing(sqlite3.connect(pool.lease_store.db.path)) as store, store:
        store.execute("UPDATE lease SET slices = '[[1, 200, 6553, 0, 16384, 9000]]'")
    assert pool.resize(lease, "20%..90%").slices[0].burst_mib == 9000
    assert pool.resize(lease, "20%..40%").slices[0].burst_mib == 13107 - 6553
    assert pool.resize(lease, "20%").slices[0].allowed_mib == 6553


@pytest.mark.parametrize("size", ["20%..30%", "50%..70%", "5%..10%", "2x10%..20%"])
def test_a_size_with_a_limit_is_taken_ahead_as_its_guarantee(pools: Any, size: str) -> None:
    pool = pools(device(0), device(1))
    lease = pool.ask("20%..40%")
    before = leases.read(pool.lease_store, lease.id)
    taken = ahead(pool, lease, size)
    assert all(part.limit_mib == 0 or part.limit_mib > part.memory_mib for part in taken.slices)
    assert taken.request == before.request
    assert ahead(pool, lease, "20%..40%").slices == before.slices
    pool.resize(lease, size)
    assert leases.read(pool.lease_store, lease.id).request == parse_request(size)


def test_a_waiting_request_keeps_its_turn_with_another_limit(pools: Any) -> None:
    pool = pools(device(0))
    pool.ask("1", "lin")
    first, second = pool.ask("50%"), pool.ask("50%", "grace")
    assert pool.resize(first, "50%..70%").position == 1
    assert leases.read(pool.lease_store, second.id).position == 2
    assert pool.resize(first, "50%").position == 1


def test_a_device_of_one_size_is_left_alone_or_kept_to_its_size(pools: Any) -> None:
    pool = pools(device(0, one_size=True))
    lease, other = pool.ask("10%"), pool.ask("10%")
    with pytest.raises(TimedOut):
        pool.resize(lease, "20%")
    leases.end_lease(pool.lease_store, other.id, EndReason.RELEASED)
    pool.resize(lease, "20%")
    assert pool.held() == [200]


def test_what_was_used_at_either_size_adds_up(pools: Any) -> None:
    pool = pools(courses={"ml": {"per_user": {"gpu_hours_per_week": 1.2}}})
    lease = pool.ask("100%", course="ml")
    pool.now += 3600
    pool.resize(lease, "10%")
    pool.now += 3600
    leases.lend(pool.lease_store, lease.id)
    pool.now += 3600
    leases.queue_again(pool.lease_store, lease.id)
    pool.now += 1800
    leases.end_lease(pool.lease_store, lease.id, EndReason.RELEASED)
    (row,) = records.history(pool.lease_store, 0)
    assert row.held_seconds == pytest.approx(2.5 * 3600)
    assert row.gpu_seconds == pytest.approx(1.15 * 3600)
    assert row.held_at == pytest.approx(START, abs=1)
    # The same sum is what quotas go by: 1.15 of 1.2 hours.
    last = pool.ask("100%", course="ml")
    pool.now += 200
    with pytest.raises(OverQuota, match=r"used 1\.2 GPU-hours"):
        pool.ask("10%", course="ml")
    assert leases.read(pool.lease_store, last.id).state is LeaseState.HELD


def test_the_longest_lease_goes_on_from_the_first_grant(pools: Any) -> None:
    pool = pools(default_course={"longest_lease": "1h"})
    lease = pool.ask("50%")
    before = leases.read(pool.lease_store, lease.id).terms.ends_at
    pool.now += 1800
    pool.resize(lease, "10%")
    assert leases.read(pool.lease_store, lease.id).terms.ends_at == pytest.approx(before)
    leases.lend(pool.lease_store, lease.id)
    assert leases.queue_again(pool.lease_store, lease.id).terms.ends_at == pytest.approx(before)


def test_a_length_stays_when_the_size_changes_and_once_it_is_granted(pools: Any) -> None:
    pool = pools(device(0), default_course={"longest_lease": "1h"})
    lease, waiting = pool.ask("50% for 20min"), pool.ask("1 for 20min")
    ends_at = lease.terms.ends_at
    assert ends_at == pytest.approx(START + 1200, abs=1)
    pool.now += 600
    resized = pool.resize(lease, "10%")
    assert (str(resized.request), resized.terms.ends_at) == ("10% for 20min", pytest.approx(ends_at))
    assert pool.resize(lease, "10% for 20min").request == resized.request
    with pytest.raises(BadRequest, match="stays once it has been granted") as refused:
        pool.resize(lease, "10% for 30min")
    assert refused.value.remedy.startswith("Ask for 10% alone")
    assert str(pool.resize(waiting, "1 for 2h").request) == "1 for 2h"
    leases.end_lease(pool.lease_store, lease.id, EndReason.RELEASED)
    reclaim.serve_queue(pool.lease_store)
    held = leases.read(pool.lease_store, waiting.id)
    assert (held.state, held.terms.ends_as_asked) == (LeaseState.HELD, False)
    assert held.terms.ends_at == pytest.approx(pool.now + 3600, abs=1), "the course allows no more"


def test_a_quota_counts_the_new_size_in_place_of_the_old(pools: Any) -> None:
    pool = pools(per_user={"share": "60%", "slices": 1})
    lease = pool.ask("50%")
    assert pool.resize(lease, "60%").state is LeaseState.HELD
    with pytest.raises(OverQuota, match="may hold 60% of a GPU at most; you asked for 61% of a GPU. .* 60%"):
        pool.resize(lease, "61%")
    assert pool.held() == [600]


def test_whoever_is_over_a_quota_that_was_lowered_may_take_less(pools: Any) -> None:
    lease = pools().ask("50%")
    pool = pools(per_user={"share": "30%"})
    pool.resize(lease, "40%")
    assert pool.held() == [400]


def test_a_rule_of_the_pool_holds_for_a_change_too(pools: Any) -> None:
    pool = pools(max_share=0.5)
    lease = pool.ask("2%")
    with pytest.raises(NotAllowed, match="the most this pool gives"):
        pool.resize(lease, "51%")


def test_a_parked_lease_need_not_return_to_a_device_that_cannot_hold_its_new_size(pools: Any) -> None:
    pool = pools(device(0, "T4", 16384), device(1, "V100"))
    lease = pool.ask("10%")
    leases.lend(pool.lease_store, lease.id)
    pool.resize(lease, "20GiB")
    assert leases.queue_again(pool.lease_store, lease.id).state is LeaseState.HELD
    assert pool.placed(lease) == [1]


def test_asking_for_what_it_has_changes_nothing(pools: Any) -> None:
    pool = pools()
    lease = pool.ask("50%")
    pool.ask("1")
    pool.now += 60
    assert pool.resize(lease, "0.5").held_at == lease.held_at


def ahead(pool: TimedStore, lease: Lease, text: str) -> Lease:
    return leases.change_size(pool.lease_store, lease.id, parse_request(text), ahead=True)


def test_what_is_taken_ahead_is_nobody_elses_and_is_had_once_the_process_has_ended(pools: Any) -> None:
    pool = pools(device(0), device(1))
    other, lease = pool.ask("60%"), pool.ask("30%")
    # More than its own device has: it keeps its part there, and takes the other device.
    assert str(ahead(pool, lease, "1").request) == "30%"
    assert (pool.placed(lease), pool.held()) == ([0, 1], [900, 1000])
    waiting = pool.ask("20%")
    assert waiting.state is LeaseState.WAITING
    assert pool.resize(lease, "1").state is LeaseState.HELD
    assert (pool.placed(lease), pool.held()) == ([1], [800, 1000])
    assert pool.placed(waiting) == [0]
    leases.end_lease(pool.lease_store, other.id, EndReason.RELEASED)


@pytest.mark.parametrize("size", ["50%", "80%", "1", "20GiB", "5%", "2x10%"])
def test_what_was_taken_ahead_can_be_given_up(pools: Any, size: str) -> None:
    pool = pools(device(0), device(1))
    lease, _ = pool.ask("20%"), pool.ask("30%")
    before = leases.read(pool.lease_store, lease.id)
    held = pool.held()
    ahead(pool, lease, size)
    assert all(now >= then for now, then in zip(pool.held(), held, strict=True))
    after = ahead(pool, lease, "20%")
    assert (after.request, after.slices, pool.held()) == (before.request, before.slices, held)


def test_what_is_not_free_cannot_be_taken_ahead(pools: Any) -> None:
    pool = pools(device(0))
    lease, other = pool.ask("20%"), pool.ask("50%")
    with pytest.raises(TimedOut, match="up to 50% of one GPU"):
        ahead(pool, lease, "60%")
    assert pool.held() == [700]
    # Twice, of which the first may still come to be used.
    ahead(pool, lease, "50%")
    with pytest.raises(TimedOut):
        pool.resize(other, "60%")
    assert ahead(pool, lease, "10%").slices[0].milli == 200
    assert pool.held() == [700]
    pool.resize(lease, "10%")
    assert pool.held() == [600]


def test_a_quota_counts_what_is_taken_ahead_once(pools: Any) -> None:
    pool = pools(device(0), device(1), per_user={"share": "100%", "slices": 1})
    pool.ask("70%", "grace")
    lease = pool.ask("30%")
    ahead(pool, lease, "90%")
    assert pool.held() == [1000, 900]
    assert pool.resize(lease, "90%").slices[0].milli == 900
    with pytest.raises(OverQuota):
        ahead(pool, lease, "2x60%")
