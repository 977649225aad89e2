"""Sessions whose kernel sleeps on disk: when it goes there, and what its user reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpu_pool_client import Activity, EndReason, GpuPoolError, Hibernation, Lease, LeaseState, Terms
from gpu_pool_provisioner.session import TABLE, Session, State, effects, events, step, texts
from gpu_pool_provisioner.session.session import FailedWake, Retry
from gpu_pool_provisioner.session.view import SlicePhase, view
from support.session_world import (
    DRAINED_ONLY,
    ERRORS,
    SLEEPER,
    STARTED,
    a_left_one,
    a_session,
    a_sleeper,
    after,
    lease,
    starting,
)

HELD = lease(LeaseState.HELD)


def looked_at(session: Session, activity: Activity | None, now: float, *, busy: bool = False) -> Session:
    return after(session, events.TimePassed(), events.Observed(HELD, busy, 0.0, activity), now=now)


def parked_to_sleep(launched: events.Launched = SLEEPER) -> Session:
    running = after(a_session(), *starting(launched))
    session = looked_at(running, Activity(initialised=False), 20.0)
    return after(session, events.FoundIdle(), events.Parked(lease(LeaseState.PARKED), False), now=20.0)


def hibernated() -> Session:
    return after(parked_to_sleep(), events.TimePassed(), events.Hibernated(118), now=20.0)


def test_a_kernel_is_looked_at_when_it_has_been_idle_for_as_long_as_it_may() -> None:
    session = a_sleeper()
    assert session.wakes_at == 20.0


def test_its_slice_is_parked_first_and_then_it_goes_to_disk_at_once() -> None:
    session = parked_to_sleep()
    assert session.state is State.PARKED
    assert session.wakes_at == 20.0
    session, due = step(session, events.TimePassed(), 20.0)
    assert session.state is State.HIBERNATING
    assert due == (effects.Answer(), effects.Hibernate())


def test_one_that_gave_way_goes_to_disk_as_long_after_that() -> None:
    session = a_sleeper()
    parked = lease(LeaseState.PARKED)
    session = after(
        session,
        events.Observed(parked, False, 0.0),
        events.FoundIdle(),
        events.Parked(parked, False),
        now=5.0,
    )
    assert (session.state, session.wakes_at) == (State.PARKED, 25.0)


@pytest.mark.parametrize("initialised", [True, None])
def test_one_that_may_keep_something_on_its_gpu_stays_awake_and_is_told_once(
    initialised: bool | None,
) -> None:
    session = after(a_sleeper(), events.TimePassed(), now=20.0)
    seen = events.Observed(HELD, False, 0.0, Activity(initialised=initialised))
    session, due = step(session, seen, 20.0)
    assert session.state is State.RUNNING
    assert due == (effects.Tell(texts.stays_awake(texts.USES_GPU)),)
    _, due = step(session, seen, 50.0)
    assert due == ()


def test_one_that_works_stays_awake() -> None:
    session = looked_at(a_sleeper(), Activity(initialised=False), 20.0, busy=True)
    assert session.state is State.RUNNING


def test_one_that_its_user_keeps_stays_awake_until_then() -> None:
    session = a_sleeper()
    session = after(session, events.Observed(lease_with_yield(), False, 0.0, None), events.KeepRequested(60))
    kept = step(session, events.Observed(lease_with_yield(), False, 0.0, Activity(initialised=False)), 30.0)[
        0
    ]
    assert kept.state is State.RUNNING


def lease_with_yield() -> Lease:
    return replace(HELD, terms=Terms(yield_after=1000.0))


def test_a_cell_wakes_it_and_then_waits_for_its_slice() -> None:
    session, due = step(hibernated(), events.WorkSubmitted(), 30.0)
    assert session.state is State.WAKING
    assert effects.Wake() in due
    session, due = step(session, events.Woken(), 31.0)
    assert session.state is State.RESUMING
    reports = effects.ReportHibernation(Hibernation(is_for_now=True))
    assert due == (reports, effects.HoldWork(), effects.Resume())


def left_one() -> Session:
    """Return the session of a kernel that another server has left, before anybody says that it goes on."""
    return after(a_left_one(), events.StartRequested(), events.LaunchPrepared())


def test_one_that_another_server_has_left_asks_for_nothing_before_a_cell() -> None:
    session, due = step(a_left_one(), events.StartRequested(), 0.0)
    assert (session.state, due) == (State.HIBERNATED, ())
    seen = view(left_one(), (False, 0.0), "", 30.0, is_told=False)
    assert (seen.phase, seen.message) == (SlicePhase.ASLEEP, texts.of_before(a_left_one().left))
    session, due = step(left_one(), events.WorkSubmitted(), 30.0)
    assert session.state is State.ASKING
    assert effects.Ask(session.request, 1) in due


def test_it_says_from_when_it_is_once_it_runs_and_never_again() -> None:
    session = after(left_one(), events.WorkSubmitted(), events.Granted(HELD), events.Launched())
    session, due = step(session, events.Ready(HELD), 30.0)
    assert effects.Tell(texts.went_on(a_left_one().left)) in due
    assert not session.left


def test_one_that_could_not_go_on_gives_its_slice_back_and_is_tried_again_by_the_next_cell() -> None:
    session = after(left_one(), events.WorkSubmitted(), events.Granted(HELD))
    session, due = step(session, events.NotWoken("A file has gone."), 30.0)
    assert session.state is State.HIBERNATED
    assert effects.Refuse(texts.not_run("A file has gone.")) in due
    assert effects.ReleaseLease(HELD.id, EndReason.NOT_READY) in due
    assert after(session, events.WorkSubmitted()).state is State.ASKING


def test_a_restart_of_it_begins_anew() -> None:
    session = after(left_one(), events.StopRequested(), events.StartRequested())
    assert session.state is State.ASKING
    assert not session.left


def test_when_its_server_ends_its_slice_is_parked_first_and_then_it_goes_to_disk_at_once() -> None:
    session = after(a_session(), *STARTED, events.SleepRequested())
    assert session.state is State.PARKING
    session = after(session, events.FoundIdle(), events.Parked(lease(LeaseState.PARKED), False), now=20.0)
    assert (session.state, session.wakes_at) == (State.PARKED, 20.0)
    assert after(session, events.TimePassed(), now=20.0).state is State.HIBERNATING


def test_when_its_server_ends_every_kernel_can_go_to_disk_or_can_in_a_moment() -> None:
    for state in State:
        if state.has_kernel or state is State.STARTING:
            can = events.SleepRequested in TABLE[state]
            assert can + state.is_transient + (state is State.HIBERNATED) == 1, state
        else:
            assert not state.is_transient


def resuming() -> Session:
    return after(hibernated(), events.WorkSubmitted(), events.Woken(), now=30.0)


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_waits_for_its_slice_when_its_server_ends_leaves_the_queue_and_goes_to_disk(
    waits: bool,
) -> None:
    session = after(resuming(), events.Queued(lease(LeaseState.WAITING)), now=30.0) if waits else resuming()
    session, due = step(session, events.SleepRequested(), 31.0)
    assert session.state is State.PARKED
    assert effects.Refuse(texts.not_run(texts.SERVER_ENDS)) in due
    assert due[-1] == effects.ParkAgain()
    session = after(session, events.ParkedAgain(), now=32.0)
    assert (session.state, session.wakes_at) == (State.PARKED, 32.0)
    assert after(session, events.TimePassed(), now=32.0).state is State.HIBERNATING


def test_one_whose_slice_comes_just_then_lends_it_once_more_and_passes_nothing_on() -> None:
    session = after(resuming(), events.SleepRequested(), now=31.0)
    session, due = step(session, events.Resumed(HELD), 31.0)
    assert (session.state, due[-2:]) == (State.PARKING, (effects.HoldWork(), effects.CheckIdle()))
    assert effects.PassOn() not in due
    session = after(session, events.FoundIdle(), events.Parked(lease(LeaseState.PARKED), False), now=32.0)
    assert after(session, events.TimePassed(), now=32.0).state is State.HIBERNATING


def test_one_that_leaves_its_queue_when_its_server_ends_goes_to_disk_once_it_has() -> None:
    session = after(resuming(), events.InterruptRequested(), events.WorkSubmitted(), now=31.0)
    session, due = step(session, events.SleepRequested(), 31.0)
    assert (session.state, due) == (
        State.PARKED,
        (effects.Refuse(texts.not_run(texts.SERVER_ENDS)),),
    )
    session = after(session, events.ParkedAgain(), now=32.0)
    assert after(session, events.TimePassed(), now=32.0).state is State.HIBERNATING


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_one_whose_server_ends_while_its_pool_fails_goes_to_disk_all_the_same(error: GpuPoolError) -> None:
    running = after(a_session(), *STARTED)
    parking = after(running, events.SleepRequested(), events.FoundIdle())
    leaving = after(resuming(), events.SleepRequested(), now=31.0)
    for session, work in ((parking, effects.Park()), (leaving, effects.ParkAgain())):
        going, due = step(session, events.PoolAway(error, work), 31.0)
        assert (going.state, due[-1]) == (State.HIBERNATING, effects.Hibernate(without_pool=True))
        awake = after(going, events.NotHibernated("It has a connection."), now=31.0)
        assert (awake.state, awake.wakes_at) == (State.PARKED, None)
        wanted = after(session, events.WorkSubmitted(), events.PoolAway(error, work), now=31.0)
        assert wanted.state is not State.HIBERNATING


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_one_on_disk_stays_there_whatever_its_pool_says(error: GpuPoolError) -> None:
    follow = effects.FollowLease(False)
    session, due = step(hibernated(), events.PoolAway(error, follow), 30.0)
    assert (session.state, due, session.retry) == (State.HIBERNATED, (), Retry(follow, 32.0))
    assert after(session, events.WorkSubmitted(), now=31.0).retry is None


def test_a_mistake_of_ours_leaves_one_on_disk_to_the_next_server() -> None:
    session, due = step(hibernated(), events.Failed(ValueError("ours")), 30.0)
    assert session.state is State.DOWN
    assert effects.LetGo(leaves_image=True) in due
    _, due = step(hibernated(), events.StopRequested(), 30.0)
    assert effects.LetGo() in due


def test_a_cell_that_comes_while_the_queue_is_left_for_its_servers_end_asks_again() -> None:
    session = after(resuming(), events.SleepRequested(), events.WorkSubmitted(), now=31.0)
    assert after(session, events.Resumed(HELD), now=31.0).state is State.RUNNING
    session = after(session, events.ParkedAgain(), now=31.0)
    assert session.state is State.RESUMING
    assert after(session, events.SleepRequested(), now=31.0).state is State.PARKED


DRAINED = replace(HELD, hibernates=True)
UNUSED = Activity(initialised=False)


def on_disk_for_a_drain() -> Session:
    session = after(a_sleeper(), events.Observed(DRAINED, False, 0.0, UNUSED), now=3.0)
    parked = replace(lease(LeaseState.PARKED), hibernates=True)
    session = after(session, events.FoundIdle(), events.LeaseSeen(parked), now=3.0)
    return after(session, events.Parked(parked, False), events.TimePassed(), events.Hibernated(118), now=3.0)


def reported(due: Iterable[effects.Effect]) -> list[Hibernation]:
    return [each.hibernation for each in due if isinstance(each, effects.ReportHibernation)]


def test_the_pool_knows_of_each_kernel_that_can_go_to_disk() -> None:
    for launched, said in ((SLEEPER, [Hibernation(is_for_now=True)]), (events.Launched(), [])):
        *happened, ready = starting(launched)
        _, due = step(after(a_session(), *happened), ready, 0.0)
        assert reported(due) == said


def test_the_pool_knows_that_a_restarted_kernel_cannot_though_the_one_before_could() -> None:
    before = replace(HELD, hibernation=Hibernation(is_for_now=True))
    _, due = step(after(a_session(), *STARTED[:-1]), events.Ready(before), 0.0)
    assert reported(due) == [Hibernation(None, texts.CANNOT_SLEEP)]


def test_when_its_device_is_drained_for_that_it_goes_to_disk_once_it_is_idle() -> None:
    session = after(a_session(), *starting(DRAINED_ONLY))
    session, due = step(session, events.Observed(DRAINED, True, 0.0, UNUSED), 3.0)
    assert (session.state, reported(due)) == (State.RUNNING, [Hibernation(None, texts.AT_WORK, True)])
    assert session.wakes_at == 5.0  # it is looked at often
    session = after(session, events.Observed(DRAINED, False, 4.0, UNUSED), now=7.0)
    assert session.state is State.PARKING


def test_one_that_keeps_something_on_its_gpu_is_told_to_who_drains_it() -> None:
    session = a_sleeper()
    _, due = step(session, events.Observed(DRAINED, False, 0.0, Activity(initialised=True)), 3.0)
    assert reported(due) == [Hibernation(None, texts.USES_GPU, False)]


def test_one_that_is_parked_goes_to_disk_when_its_device_is_drained_for_that() -> None:
    session, due = step(parked_but_awake(), events.LeaseNews(), 21.0)
    assert (session.state, due) == (State.PARKED, (effects.FollowLease(False),))
    session = after(session, events.LeaseSeen(replace(lease(LeaseState.PARKED), hibernates=True)))
    session, due = step(session, events.LeaseNews(), 21.0)
    assert (session.state, due[-1]) == (State.HIBERNATING, effects.Hibernate())


def parked_but_awake() -> Session:
    parked = lease(LeaseState.PARKED)
    session = after(a_sleeper(), events.Observed(parked, False, 0.0), events.FoundIdle())
    return after(session, events.Parked(parked, False), now=20.0)


def test_while_its_device_is_drained_for_that_no_cell_wakes_it_and_the_one_after_does() -> None:
    session, due = step(on_disk_for_a_drain(), events.WorkSubmitted(), 4.0)
    assert session.state is State.HIBERNATED
    assert due[0] == effects.Refuse(texts.not_run(texts.MACHINE_IS_EMPTIED))
    _, due = step(session, events.ResumeRequested(), 4.0)
    assert effects.Reply(texts.MACHINE_IS_EMPTIED) in due
    session, due = step(after(session, events.LeaseSeen(lease(LeaseState.PARKED))), events.LeaseNews(), 5.0)
    assert due == (effects.FollowLease(False),)
    assert after(session, events.WorkSubmitted()).state is State.WAKING


def test_a_cell_that_comes_on_its_way_to_disk_does_not_wake_it_on_a_drained_device() -> None:
    going = replace(on_disk_for_a_drain(), state=State.HIBERNATING)
    session, due = step(after(going, events.WorkSubmitted()), events.Hibernated(118), 4.0)
    assert session.state is State.HIBERNATED
    assert effects.Refuse(texts.not_run(texts.MACHINE_IS_EMPTIED)) in due
    assert reported(due) == [Hibernation(118)]


def test_a_cell_that_comes_on_its_way_to_disk_is_not_forgotten() -> None:
    session = after(parked_to_sleep(), events.TimePassed(), events.WorkSubmitted(), now=20.0)
    assert after(session, events.Hibernated(118)).state is State.WAKING
    assert after(session, events.NotHibernated("It works.")).state is State.RESUMING


def test_one_that_could_not_be_woken_sleeps_on_and_its_cell_says_why() -> None:
    session, due = step(
        after(hibernated(), events.WorkSubmitted()), events.NotWoken("A file has gone."), 30.0
    )
    assert session.state is State.HIBERNATED
    assert due[0] == effects.Refuse(texts.not_run("A file has gone."))
    assert after(session, events.WorkSubmitted()).state is State.WAKING


@pytest.mark.parametrize("begins", ["left", "parked"])
def test_why_it_could_not_be_woken_is_shown_until_it_is_tried_again(begins: str) -> None:
    asleep = left_one() if begins == "left" else hibernated()
    trying = after(asleep, events.ResumeRequested())
    if begins == "left":
        trying = after(trying, events.Granted(HELD))
    session = after(trying, events.NotWoken("A file has gone."), now=30.0)
    seen = view(session, (False, 0.0), "", 30.0, is_told=False)
    assert (seen.phase, seen.message) == (SlicePhase.ASLEEP, "A file has gone.")
    assert seen.failed_wake == FailedWake("A file has gone.", 30.0)
    again = view(after(session, events.ResumeRequested()), (False, 0.0), "", 30.0, is_told=False)
    assert again.message != "A file has gone."
    assert again.failed_wake is None
    assert not after(session, events.ResumeRequested()).failed_wake
    assert not after(session, events.StopRequested()).failed_wake


def test_one_that_did_not_go_to_disk_says_why_below_the_next_cell_and_is_not_tried_again() -> None:
    session = after(parked_to_sleep(), events.TimePassed(), now=20.0)
    session, due = step(session, events.NotHibernated("It has a connection."), 21.0)
    assert (session.state, session.wakes_at) == (State.PARKED, None)
    assert due == (
        effects.ReportHibernation(Hibernation(None, "It has a connection.")),
        *(effects.HoldWork(), effects.FollowLease(hibernates=False)),
        effects.Tell(texts.stays_awake("It has a connection.")),
    )


def test_one_that_was_at_work_is_tried_again_later() -> None:
    session = after(parked_to_sleep(), events.TimePassed(), events.NotHibernated(), now=20.0)
    assert (session.state, session.wakes_at) == (State.PARKED, 50.0)


def test_when_its_slice_is_back_it_sleeps_as_the_course_says_then() -> None:
    by_terms = events.Launched(events.ToDisk(20.0, is_by_terms=True))
    asks = after(parked_to_sleep(by_terms), events.WorkSubmitted())
    held = replace(HELD, terms=Terms(hibernate_after=40.0))
    back = after(asks, events.Resumed(held), events.Observed(held, False, 0.0, UNUSED), now=30.0)
    assert back.wakes_at == 60.0
    idling = after(asks, events.Resumed(HELD), now=30.0).idling
    assert idling is not None
    assert idling.sleeps_after is None


def test_it_lives_while_it_has_no_process() -> None:
    assert hibernated().stands_in


def test_pages_show_when_it_goes_to_disk_before_it_does() -> None:
    def sleeps_at(session: Session, *, busy: bool = False) -> float | None:
        return view(session, (busy, 3.0), "", 5.0, is_told=False).idle.sleeps_at

    running = a_sleeper()
    assert sleeps_at(running) == 23.0
    assert sleeps_at(running, busy=True) is None
    assert sleeps_at(after(running, events.LeaseSeen(activity=Activity(initialised=True)))) is None
    assert sleeps_at(after(a_session(), *STARTED)) is None
    assert sleeps_at(parked_to_sleep()) == 20.0


def test_pages_show_that_it_is_asleep() -> None:
    seen = view(hibernated(), (False, 0.0), "", 30.0, is_told=False)
    assert (seen.phase, seen.message) == (SlicePhase.ASLEEP, texts.ASLEEP)
    assert seen.on_disk == events.OnDisk(since=20.0, image_mib=118)
    woken = after(hibernated(), events.WorkSubmitted(), events.Woken(), now=30.0)
    assert view(woken, (False, 0.0), "", 30.0, is_told=False).on_disk is None
