"""A pool that asks for what runs to be interrupted: it is done once, after its user was told why. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpu_pool_client import Device, Holder, Lease, LeaseState, Slice, parse_request
from gpu_pool_provisioner.session import Session, State, effects, events, idling, step

HELD = Lease(
    "1-abc",
    "key",
    parse_request("2%"),
    Holder("ada"),
    LeaseState.HELD,
    0.0,
    slices=(Slice(Device("GPU-0", 0, "V100", 32_768), 20, 655),),
)
ASKED = replace(HELD, notice="This slice uses too much. What ran was interrupted.", interrupt_at=1e9)


def running(lease: Lease) -> Session:
    begun, _ = idling.begun(lease, 0.0)
    return Session(lease.request, 1.0, 60.0, State.RUNNING, lease_id=lease.id, lease=lease, idling=begun)


def looked(session: Session, lease: Lease) -> tuple[Session, list[effects.Effect]]:
    after, due = step(session, events.Observed(lease, True, 0.0), 2.0)
    return after, [each for each in due if isinstance(each, (effects.Tell, effects.InterruptKernel))]


def test_what_runs_is_interrupted_once_after_its_user_was_told() -> None:
    session, done = looked(running(HELD), ASKED)
    assert done == [effects.Tell(ASKED.notice), effects.InterruptKernel()]
    session, done = looked(session, ASKED)
    assert done == []
    session, done = looked(session, replace(ASKED, interrupt_at=2e9))
    assert done == [effects.InterruptKernel()]
    # A service that was restarted does not know it any more, and may ask anew.
    session, done = looked(session, replace(ASKED, interrupt_at=None))
    assert done == []
    _, done = looked(session, replace(ASKED, interrupt_at=3e9))
    assert done == [effects.InterruptKernel()]


def test_a_kernel_that_has_just_begun_is_not_interrupted_for_what_was_before() -> None:
    _, done = looked(running(ASKED), ASKED)
    assert done == []
