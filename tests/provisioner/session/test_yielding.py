"""A kernel that gives way to who waits: when it does, when it stays, and what its user reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool_client import Activity, EndReason, Lease, LeaseState, Terms
from gpu_pool_provisioner.session import Session, State, effects, events, idling, step, texts
from gpu_pool_provisioner.session.view import GAVE_WAY, GIVING_WAY, SlicePhase, view
from support.session_world import STARTED, a_session, after, lease

UNUSED = Activity(initialised=False, working=False)
YIELDS = Terms(yield_after=60.0)
HELD = replace(lease(LeaseState.HELD), terms=YIELDS)
ASKED = replace(HELD, asked_back=EndReason.YIELDED)
LATER = 100.0


def running() -> Session:
    """Return the session of a kernel that gives way to who waits once it has been idle for a minute."""
    return after(a_session(), *STARTED[:-1], events.Ready(HELD))


@pytest.mark.parametrize(
    ("age", "last_activity", "is_believed"),
    [
        (0.0, 100.0, True),  # seen now, as on the kernel's own machine
        (5.0, 92.9, True),
        (5.0, 93.1, False),  # it may have been seen before the kernel's last cell
        (30.0, 0.0, True),
    ],
)
def test_that_a_kernel_keeps_nothing_on_its_device_counts_if_it_was_seen_after_it_worked(
    age: float, last_activity: float, is_believed: bool
) -> None:
    seen = idling.believed(replace(UNUSED, age=age), last_activity, 100.0)
    assert seen.initialised is (False if is_believed else None)
    assert seen.working is False


def test_what_it_keeps_there_counts_whenever_that_was_seen() -> None:
    kept = Activity(initialised=True, memory_mib=412, age=30.0)
    assert idling.believed(kept, 100.0, 100.0) == kept


def looked_at(session: Session, seen: Lease, now: float = LATER) -> Session:
    """Return the session after a look at a kernel that has been idle from its start."""
    return after(
        session,
        events.TimePassed(),
        events.LeaseSeen(seen),
        events.Observed(seen, False, 0.0, UNUSED),
        now=now,
    )


def parked() -> Session:
    session = looked_at(running(), ASKED)
    lent = replace(ASKED, state=LeaseState.PARKED)
    return after(session, events.FoundIdle(), events.Parked(lent, False), now=LATER)


def read(session: Session) -> tuple[SlicePhase, str]:
    """Return where the slice is, and what the kernel's user reads."""
    seen = view(session, (False, 0.0), "", LATER, is_told=True)
    return seen.phase, seen.message


def test_one_that_is_asked_goes_and_says_so_before_and_after() -> None:
    assert read(looked_at(running(), HELD)) == (SlicePhase.HELD, "")
    going = looked_at(running(), ASKED)
    assert going.state is State.PARKING
    assert read(after(running(), events.LeaseSeen(ASKED))) == (SlicePhase.HELD, GIVING_WAY)
    assert read(going) == (SlicePhase.HELD, GIVING_WAY)
    assert read(parked()) == (SlicePhase.PARKED, GAVE_WAY)


@pytest.mark.parametrize("asked_back", [None, EndReason.REVOKED])
def test_one_that_is_parked_for_another_reason_says_that_one(asked_back: EndReason | None) -> None:
    lent = replace(HELD, state=LeaseState.PARKED, asked_back=asked_back)
    session = replace(parked(), lease=lent)
    assert read(session) == (SlicePhase.PARKED, texts.PARKED)


def test_one_whose_user_gave_it_back_says_that() -> None:
    session = after(running(), events.LeaseSeen(activity=UNUSED), events.GiveBackRequested())
    session = after(looked_at(session, ASKED), events.FoundIdle(), now=LATER)
    session = after(session, events.Parked(replace(ASKED, state=LeaseState.PARKED), False), now=LATER)
    assert read(session) == (SlicePhase.PARKED, texts.GIVEN_BACK)


def test_one_that_is_said_to_be_in_use_stays_without_an_idle_limit_too() -> None:
    session, due = step(running(), events.KeepRequested(600), LATER)
    (reply,) = (each.text for each in due if isinstance(each, effects.Reply))
    assert reply == "This kernel keeps its GPU slice for 10min."
    assert looked_at(session, ASKED).state is State.RUNNING
    assert looked_at(session, ASKED, now=LATER + 601).state is State.PARKING


@pytest.mark.parametrize(("idle", "says"), [(4.9, False), (5.0, True), (60.0, True)])
def test_it_says_after_a_pause_already_that_it_gives_way(idle: float, says: bool) -> None:
    """To whom it does is decided by the pool: somebody may have waited for a minute."""
    session = after(running(), events.TimePassed(), now=5.0)
    session, due = step(session, events.Observed(HELD, False, 0.0, UNUSED), idle)
    assert [each for each in due if isinstance(each, effects.GiveWay)] == (
        [effects.GiveWay(0.0)] if says else []
    )
    if says:  # and what it is asked for then goes at once
        session = after(session, events.LeaseNews(), events.TimePassed(), now=idle)
        assert after(session, events.Observed(ASKED, False, 0.0, UNUSED), now=idle).state is State.PARKING


@pytest.mark.parametrize("seen", [HELD, ASKED, replace(ASKED, asked_back=EndReason.REVOKED)])
def test_one_whose_time_comes_while_it_is_looked_at_is_looked_at_again_at_once(seen: Lease) -> None:
    """Whether its device works is not asked before: a look that takes long says nothing of it."""
    session = after(running(), events.TimePassed(), now=4.9)
    session, due = step(session, events.Observed(seen, False, 0.0, None), 5.3)
    assert not [each for each in due if isinstance(each, effects.GiveWay | effects.StayBusy)]
    assert session.idling is not None
    assert session.idling.observe_at == 5.3
    session = after(session, events.TimePassed(), now=5.3)
    session, due = step(session, events.Observed(seen, False, 0.0, UNUSED), 5.4)
    goes = session.state is State.PARKING
    assert goes or [each for each in due if isinstance(each, effects.GiveWay)] == [effects.GiveWay(0.0)]


def test_one_that_has_worked_gives_way_again_after_the_next_pause() -> None:
    session = after(running(), events.TimePassed(), now=5.0)
    session, _ = step(session, events.Observed(HELD, False, 0.0, UNUSED), 5.0)
    session, _ = step(session, events.Worked(), 8.0)
    assert session.idling is not None
    assert session.idling.observe_at == 13.0
    session = after(session, events.TimePassed(), now=13.0)
    session, _ = step(session, events.Observed(HELD, False, 8.1, None), 13.0)
    assert session.idling is not None
    assert session.idling.observe_at == pytest.approx(13.2)
    session = after(session, events.TimePassed(), now=13.2)
    session, due = step(session, events.Observed(HELD, False, 8.1, UNUSED), 13.2)
    assert effects.GiveWay(8.1) in due


def test_one_that_begins_to_work_while_it_is_looked_at_is_looked_at_once() -> None:
    session = after(running(), events.TimePassed(), now=5.0)
    session, _ = step(session, events.Observed(HELD, False, 0.0, UNUSED), 5.0)
    assert session.idling is not None
    session, _ = step(session, events.TimePassed(), session.idling.observe_at or 0.0)
    session, due = step(session, events.Worked(), 36.0)
    assert session.idling is not None
    assert (session.idling.observe_at, due) == (None, ())
