"""A slice that its user gives back: what they were promised is kept, whatever the kernel does until then."""

from __future__ import annotations

from gpu_pool_client import Activity, LeaseState
from gpu_pool_provisioner.session import Session, State, effects, events, step
from support.session_world import STARTED, a_session, after, lease

UNUSED = Activity(initialised=False, working=False)
USED = Activity(initialised=True, working=False)
HELD = lease(LeaseState.HELD)
LATER = 3600.0


def running() -> Session:
    """Return the session of a kernel whose course has no idle limit."""
    return after(a_session(), *STARTED)


def replied(session: Session, *happened: events.Event) -> tuple[Session, str]:
    """Return the session after a user's request, and what the user reads."""
    session, due = step(after(session, *happened[:-1]), happened[-1], LATER)
    return session, next(each.text for each in due if isinstance(each, effects.Reply))


def looked_at(session: Session, activity: Activity) -> tuple[Session, tuple[effects.Effect, ...]]:
    """Return the session after a look at a kernel that is idle."""
    session, due = step(session, events.TimePassed(), LATER)
    assert due == (effects.Observe(),), "nobody looks"
    return step(session, events.Observed(HELD, False, 0.0, activity), LATER)


def test_one_that_can_be_parked_is_parked() -> None:
    session, answer = replied(running(), events.LeaseSeen(activity=UNUSED), events.GiveBackRequested())
    assert "its variables are kept" in answer
    assert session.state is State.ASKED_BACK
    session, _ = looked_at(session, UNUSED)
    assert session.state is State.PARKING
    assert session.parking
    assert not session.parking.ends


def test_one_whose_user_knows_that_it_ends_is_ended() -> None:
    session, answer = replied(running(), events.LeaseSeen(activity=USED), events.GiveBackRequested())
    assert "with its variables" in answer
    session, _ = looked_at(session, USED)
    assert session.parking
    assert session.parking.ends
    assert step(session, events.FoundIdle(), LATER)[0].state is State.ENDING


def test_one_that_has_begun_to_use_the_device_is_not_ended_and_says_so() -> None:
    session, _ = replied(running(), events.LeaseSeen(activity=UNUSED), events.GiveBackRequested())
    session, due = looked_at(session, USED)
    (tell,) = due
    assert isinstance(tell, effects.Tell)
    assert "keeps its GPU slice" in tell.text
    assert session.state is State.RUNNING


def test_what_is_kept_is_not_given_back() -> None:
    session, _ = replied(running(), events.LeaseSeen(activity=UNUSED), events.GiveBackRequested())
    session, answer = replied(session, events.KeepRequested(60))
    assert "however long it is idle" in answer
    session, due = looked_at(session, UNUSED)
    assert session.state is State.RUNNING
    assert not due
