"""What people read of idle kernels that give way to those who wait."""

from __future__ import annotations

import pytest

from gpu_pool_client import EndReason, Holder, Lease, LeaseState, Outlook, parse_request


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "You are next in the queue. All is taken."),
        (1, "You are next in the queue. 1 idle kernel is giving way. All is taken."),
        (2, "You are next in the queue. 2 idle kernels are giving way. All is taken."),
    ],
)
def test_who_waits_reads_how_many_idle_kernels_give_way(number: int, words: str) -> None:
    assert str(Outlook(1, "All is taken.", giving_way=number)) == words


@pytest.mark.parametrize("notice", ["", "It uses too much memory."])
@pytest.mark.parametrize("state", [LeaseState.HELD, LeaseState.PARKED])
def test_who_gives_way_is_warned_of_nothing_by_that(state: LeaseState, notice: str) -> None:
    holder, request = Holder("ada"), parse_request("2%")
    lease = Lease("1-a", "key", request, holder, state, 0.0, notice=notice, asked_back=EndReason.YIELDED)
    assert lease.message == notice
