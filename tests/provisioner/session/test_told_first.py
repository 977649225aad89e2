"""What is to be read of a slice as soon as it is there comes before what was submitted runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool_client import Activity, EndReason, Lease, LeaseState, Terms
from gpu_pool_provisioner.session import Session, effects, events, step
from support.session_world import STARTED, a_session, after, lease

SHORT = replace(lease(LeaseState.HELD), terms=Terms(ends_at=50.0, ends_as_asked=True))
LONG = replace(SHORT, terms=replace(SHORT.terms, ends_at=7200.0))
WARNING = (
    "This GPU slice ends in 50s, and the kernel with it, because nothing longer was asked for. "
    "Save what you need."
)
ASKED = replace(LONG, asked_back=EndReason.REVOKED)
ASKS = "An administrator asks for this kernel's GPU slice: it goes back as soon as the kernel is idle."


def ready(held: Lease, exit_message: str = "") -> tuple[Session, list[str]]:
    """Return the session of a kernel that has just answered, and what is told before all is passed on."""
    starting = replace(after(a_session(), *STARTED[:-1]), exit_message=exit_message)
    return _told_before(starting, events.Ready(held))


def _told_before(session: Session, event: events.Event, now: float = 0.0) -> tuple[Session, list[str]]:
    session, due = step(session, event, now)
    (passed_on,) = (n for n, each in enumerate(due) if isinstance(each, effects.PassOn))
    assert not [each for each in due[passed_on:] if isinstance(each, effects.Tell)]
    return session, [each.text for each in due if isinstance(each, effects.Tell)]


@pytest.mark.parametrize(("held", "told"), [(SHORT, [WARNING]), (LONG, []), (ASKED, [ASKS])])
def test_what_is_to_be_read_at_once_is_told_before_the_first_cell_runs(held: Lease, told: list[str]) -> None:
    session, before = ready(held)
    assert before == told
    # And once, not again by the first look.
    session = after(session, events.TimePassed())
    _, due = step(session, events.Observed(held, True, 0.0, Activity()), 0.0)
    assert not [each for each in due if isinstance(each, effects.Tell)]


def test_why_the_one_before_ended_is_read_first() -> None:
    assert ready(SHORT, "The kernel ended by itself.")[1] == ["The kernel ended by itself.", WARNING]


def test_what_became_of_the_one_on_disk_is_read_before_why_this_one_stays_awake() -> None:
    found = after(a_session(), events.LeftFound("It was removed."))
    *happened, _, answered = STARTED
    starting = after(found, *happened, events.Launched(message="The disk is full."))
    assert _told_before(starting, answered)[1] == ["It was removed.\nThe disk is full."]


def test_it_is_told_before_the_cell_that_takes_a_parked_slice_again() -> None:
    idle = replace(LONG, terms=replace(LONG.terms, idle_limit=60.0))
    look = events.Observed(idle, False, 0.0, Activity(initialised=False, working=False))
    parked = events.Parked(replace(idle, state=LeaseState.PARKED), is_moved=False)
    session = after(ready(idle)[0], events.TimePassed(), look, events.FoundIdle(), parked, now=100.0)
    session = after(session, events.WorkSubmitted(), now=7150.0)
    assert _told_before(session, events.Resumed(idle), now=7150.0)[1] == [WARNING]
