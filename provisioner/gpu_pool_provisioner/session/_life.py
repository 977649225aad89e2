"""What events do to a session, from a kernel's start to its end."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from gpu_pool_client import EndReason, Lease, LeaseState
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.session import LOOKED_AT, MARGIN, Outcome, Session, State
from gpu_pool_provisioner.slice_state import SliceEnd

#: Seconds in which the end of a kernel's process is noticed.
_NOTICED_WITHIN: Final = 1.0


def nothing(session: Session, event: on.Event, now: float) -> Outcome:
    return session, ()


def start(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Begin to answer for the kernel."""
    # Whoever read a lease may have done so before the previous kernel, in its last moment, parked it.
    asked, effects = _with_lease(_begun(session, event), None if session.is_begun else event.lease)
    return asked, (do.Answer(), *effects)


def start_again(session: Session, event: on.StartRequested, now: float) -> Outcome:
    return start(session, replace(event, lease=None), now)


def _begun(session: Session, event: on.StartRequested) -> Session:
    return replace(
        session,
        is_begun=True,
        is_granted=False,
        is_launched=False,
        has_run=False,
        is_stopped=False,
        error=None,
        untold="",  # whoever restarts it knows that it has ended
        gives_up_at=event.gives_up_at,
        closes_at=None,
        restarted_within=0.0,
    )


def start_meanwhile(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Go on with what is under way."""
    return _begun(session, event), (do.Answer(),)


def start_after_the_end(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Start it once the previous kernel has ended, which is about to be noticed."""
    ending = replace(_bare(_begun(session, event)), state=State.ENDING, then=State.ASKING, ends_as=None)
    return ending, (do.HoldSilently(), do.EndKernel(_NOTICED_WITHIN))


def start_once_ended(session: Session, event: on.StartRequested, now: float) -> Outcome:
    return replace(_begun(session, event), then=State.ASKING), ()


def _with_lease(session: Session, lease: Lease | None) -> Outcome:
    if lease is None or lease.state not in (LeaseState.WAITING, LeaseState.HELD):
        return replace(session, state=State.ASKING), (do.Ask(),)
    if lease.state is LeaseState.WAITING:
        return queued(session, on.Queued(lease), 0.0)
    return granted(session, on.Granted(lease), 0.0)


def queued(session: Session, event: on.Queued, now: float) -> Outcome:
    queued = replace(session, state=State.QUEUED, in_pod=event.lease.terms.in_pod)
    return queued, (do.AwaitGrant(event.lease),)


def granted(session: Session, event: on.Granted, now: float) -> Outcome:
    starting = replace(
        session, state=State.STARTING, in_pod=event.lease.terms.in_pod, is_granted=True, gives_up_at=None
    )
    return starting, (do.Launch(event.lease),)


def refused(session: Session, event: on.Refused, now: float) -> Outcome:
    """There is no slice for it: say so, and let the next cell ask again."""
    end = SliceEnd(getattr(event.error, "reason", None), str(event.error))
    without = replace(session, state=State.WITHOUT_SLICE, end=end, error=event.error)
    return without, _cells_fail(texts.not_run(str(event.error)))


def give_up(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    end = SliceEnd(None, texts.left_queue(session.size))
    without = replace(session, state=State.WITHOUT_SLICE, end=end)
    return without, _cells_fail(texts.gave_up(session.size))


def _cells_fail(why: str) -> tuple[do.Effect, ...]:
    return do.Answer(), do.Refuse(why), do.Show(""), do.GiveBack(EndReason.WITHDRAWN)


def interrupt_start(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.Refuse(texts.interrupted(session.size), "KeyboardInterrupt"),)


def interrupt_kernel(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.InterruptKernel(),)


def launched(session: Session, event: on.Launched, now: float) -> Outcome:
    return replace(session, is_launched=True), ()


def ready(session: Session, event: on.Ready, now: float) -> Outcome:
    running = replace(session, state=State.RUNNING, has_run=True, end=None, exit_message="")
    idling = idle.begun(event.lease.terms, now)
    return replace(running, idling=idling), (do.Relay(session.exit_message),)


def not_ready(session: Session, event: on.NotReady, now: float) -> Outcome:
    end = SliceEnd(getattr(event.error, "reason", None), str(event.error))
    down, effects = _down(replace(session, end=end, error=event.error), now)
    return down, (do.Refuse(texts.not_run(str(event.error))), *effects)


def not_started(session: Session, event: on.NotStarted, now: float) -> Outcome:
    end = SliceEnd(EndReason.NOT_READY.value, str(event.error))
    failed = replace(session, end=end, error=event.error)
    return _without_kernel(failed, texts.not_run(str(event.error)), EndReason.NOT_READY)


def terms_over(session: Session, event: on.TermsOver, now: float) -> Outcome:
    why = event.why
    over = replace(session, end=SliceEnd(why.ended_as or why.reason.value, why.message))
    return _without_kernel(over, texts.gone(why.message), why.reason)


def _without_kernel(session: Session, untold: str, reason: EndReason) -> Outcome:
    """End the kernel and its lease; the next cell is told why, the one after starts anew."""
    ending = replace(
        _bare(session), state=State.ENDING, then=State.WITHOUT_SLICE, ends_as=reason, untold=untold
    )
    return ending, (do.HoldUnanswered(), do.EndKernel())


def died(session: Session, event: on.Died, now: float) -> Outcome:
    return _down(replace(session, exit_message=event.message), now)


def stop_waiting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    """There is nothing to end. Its place in the queue is kept, for it may be a restart."""
    down, effects = _down(replace(session, is_stopped=True), now)
    return down, (do.Drop(), *effects)


def stop_starting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return replace(session, is_stopped=True), (do.Drop(), do.KillKernel())


def stop_kernel(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return session, (do.KillKernel(),)


def _down(session: Session, now: float) -> Outcome:
    """Hold what is submitted for a kernel that may be launched again; close if nobody does."""
    is_restarted = session.restarted_within == math.inf
    state = State.RESTARTING if is_restarted else State.DOWN
    closes_at = None if is_restarted else _closes_at(session, now)
    down = replace(_bare(session), state=state, closes_at=closes_at)
    return down, (do.LetGo(), do.HoldSilently())


def _bare(session: Session) -> Session:
    """Return the session without what is known of its kernel."""
    return replace(session, idling=None, parking=None)


def _closes_at(session: Session, now: float) -> float:
    return now + session.restarted_within + session.grace + MARGIN


def restart_began(session: Session, event: on.RestartBegan, now: float) -> Outcome:
    return replace(session, state=State.RESTARTING, restarted_within=math.inf, closes_at=None), ()


def restart_began_unseen(session: Session, event: on.RestartBegan, now: float) -> Outcome:
    """Its process has ended, which is noticed here later."""
    return replace(session, restarted_within=math.inf), ()


def restart_expected(session: Session, event: on.RestartExpected, now: float) -> Outcome:
    expected = replace(session, restarted_within=event.within)
    return replace(expected, closes_at=_closes_at(expected, now)), ()


def restart_expected_unseen(session: Session, event: on.RestartExpected, now: float) -> Outcome:
    return replace(session, restarted_within=event.within), ()


def manager_expected(session: Session, event: on.ManagerExpected, now: float) -> Outcome:
    return replace(session, closes_at=now + event.within), ()


def manager_came(session: Session, event: on.ManagerCame, now: float) -> Outcome:
    return replace(session, closes_at=None), ()


def gone(session: Session, event: on.Gone, now: float) -> Outcome:
    if session.then is State.ENDED:
        ended = replace(session, state=State.ENDED, closes_at=None)
        return ended, (do.Drop(), do.Close(), do.GiveBack(EndReason.WITHDRAWN, ask_anew=False))
    back = (do.GiveBack(session.ends_as),) if session.ends_as is not None else ()
    if session.then is State.ASKING:
        asking, effects = _with_lease(session, None)
        return asking, (do.LetGo(), *back, do.Answer(), *effects)
    without = replace(session, state=State.WITHOUT_SLICE)
    return without, (do.LetGo(), *back, do.Answer(), do.ReportHeldCode(), do.Show(""))


def work_without_slice(session: Session, event: on.WorkSubmitted, now: float) -> Outcome:
    if session.untold:
        return replace(session, untold=""), (do.Refuse(session.untold),)
    return _with_lease(replace(session, error=None), None)


def time_passed(session: Session, event: on.TimePassed, now: float) -> Outcome:
    if session.closes_at is not None and now >= session.closes_at:
        # Nobody launches the kernel again, or manages it.
        ending = replace(_bare(session), state=State.ENDING, then=State.ENDED, closes_at=None)
        return ending, (do.HoldSilently(), do.KillKernel(), do.EndKernel(at_most=MARGIN))
    if session.state is State.QUEUED and session.gives_up_at is not None and now >= session.gives_up_at:
        return replace(session, gives_up_at=None), (do.AskLastTime(),)
    idling = session.idling
    if session.state in LOOKED_AT and idling is not None and now >= (idling.look_at or math.inf):
        return replace(session, idling=replace(idling, look_at=None)), (do.Look(),)
    return session, ()


def close(session: Session, event: on.CloseRequested, now: float) -> Outcome:
    return replace(_bare(session), state=State.ENDED, closes_at=None), (do.Drop(), do.Close())


def failed(session: Session, event: on.Failed, now: float) -> Outcome:
    """Let no mistake of ours leave cells waiting for ever."""
    down, effects = _down(session, now)
    text = f"The kernel proxy failed: {event.error!r}."
    return down, (do.Refuse(texts.not_run(text)), do.KillKernel(), *effects)
