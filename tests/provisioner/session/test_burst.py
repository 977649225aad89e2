"""A kernel is told what it may use whenever that changes, whether a cell runs or not. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool_client import Device, Holder, Lease, LeaseState, Slice, parse_request
from gpu_pool_provisioner.session import Session, State, effects, events, idling, step

V100 = Device("GPU-0", 0, "V100", 32_768)
HELD = Lease(
    "1-abc",
    "key",
    parse_request("2%..10%"),
    Holder("ada"),
    LeaseState.HELD,
    0.0,
    slices=(Slice(V100, 20, 655),),
)


def bursting(mib: int, limit: int = 3_276) -> Lease:
    return replace(HELD, slices=(Slice(V100, 20, 655, limit_mib=limit, burst_mib=mib),))


def running(lease: Lease) -> Session:
    begun, _ = idling.begun(lease, 0.0)
    return Session(lease.request, 1.0, 60.0, State.RUNNING, lease_id=lease.id, lease=lease, idling=begun)


def shown(session: Session, lease: Lease, *, busy: bool) -> tuple[Session, list[effects.Effect]]:
    after, due = step(session, events.Observed(lease, busy, 0.0), 2.0)
    return after, [each for each in due if isinstance(each, effects.ShowBurst)]


@pytest.mark.parametrize("busy", [True, False])
def test_a_burst_is_shown_when_it_changes_and_then_no_more(busy: bool) -> None:
    session, effect = shown(running(bursting(1_000)), bursting(1_000), busy=busy)
    assert effect == [effects.ShowBurst(bursting(1_000))], "its kernel may know what was before it was parked"
    session, effect = shown(session, bursting(1_000), busy=busy)
    assert effect == []
    _, effect = shown(session, HELD, busy=busy)
    assert effect == [effects.ShowBurst(HELD)], "it has no limit any more"
    _, effect = shown(session, bursting(200), busy=busy)
    assert effect == [effects.ShowBurst(bursting(200))]


def test_a_lease_with_a_limit_is_looked_at_every_two_seconds_and_another_only_for_its_terms() -> None:
    session, _ = shown(running(bursting(0)), bursting(0), busy=True)
    assert session.wakes_at == 4.0
    without = running(HELD)
    assert without.idling is not None
    assert without.idling.observe_at is None
