"""A restart, as a session sees it: in whatever order its manager and the end of the kernel are heard."""

from __future__ import annotations

from gpu_pool_provisioner.session import Session, State, effects, events, step
from support.session_world import STARTED, a_session, after

FAR = 1e6


def running() -> Session:
    return after(a_session(), *STARTED)


def test_a_kernel_whose_end_is_seen_late_keeps_its_slice_over_a_restart() -> None:
    session = after(running(), events.RestartBegan(), events.Died())
    assert session.state is State.RESTARTING
    assert after(session, events.TimePassed(), now=FAR).state is State.RESTARTING


def test_so_does_one_whose_end_is_seen_when_the_pool_was_told() -> None:
    session = after(running(), events.RestartBegan(), events.RestartExpected(5.0), events.Died())
    assert session.wakes_at is not None
    assert session.wakes_at > 5.0
    assert after(session, events.TimePassed(), now=5.0).state is State.DOWN
    assert after(session, events.StartRequested(), now=5.0).state is State.ASKING


def test_one_that_nobody_starts_again_gives_its_slice_back_and_is_closed() -> None:
    session = after(running(), events.Died(), events.TimePassed(), now=0.0)
    session, due = step(session, events.TimePassed(), FAR)
    assert session.state is State.ENDING
    session, due = step(session, events.Gone(), FAR)
    assert session.state is State.ENDED
    assert {type(each) for each in due} >= {effects.Close, effects.ReleaseLease}


def test_two_restarts_at_once_start_one_kernel() -> None:
    session = after(running(), events.StartRequested(), events.StartRequested(), events.Gone())
    assert session.state is State.ASKING
