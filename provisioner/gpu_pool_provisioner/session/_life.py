"""What events do to a session, from a kernel's start to its end; how it asks is in ``_asking``."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpu_pool_client import EndReason
from gpu_pool_provisioner.session import _asking as asking
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.session import MARGIN, OBSERVED_IN, Outcome, Session, SliceEnd, State

#: Seconds in which the end of a kernel's process is noticed.
_NOTICED_WITHIN: Final = 1.0


def nothing(session: Session, event: on.Event, now: float) -> Outcome:
    return session, ()


def start(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Ask for the kernel's slice, or look at the one of before."""
    return asking.asks(asking.begun(session, event), now)


def start_first(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Ask for nothing where another server has left the kernel on disk: nobody has said that it goes on."""
    begun = asking.begun(session, event)
    return (replace(begun, state=State.HIBERNATED), ()) if session.left else asking.asks(begun, now)


def start_meanwhile(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Go on with what is under way."""
    begun = replace(asking.begun(session, event), is_granted=session.is_granted)
    return begun, ()


def start_after_the_end(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Start it once the previous kernel has ended, which is about to be noticed."""
    begun = asking.begun(session, event)
    ending = replace(_bare(begun), state=State.ENDING, then=State.ASKING, ends_as=None)
    return ending, (do.HoldSilently(), do.EndKernel(_NOTICED_WITHIN))


def start_once_ended(session: Session, event: on.StartRequested, now: float) -> Outcome:
    return replace(asking.begun(session, event), then=State.ASKING), ()


def prepared_meanwhile(session: Session, event: on.LaunchPrepared, now: float) -> Outcome:
    return replace(session, is_prepared=True, gives_up_at=event.gives_up_at), ()


def lease_seen(session: Session, event: on.LeaseSeen, now: float) -> Outcome:
    if event.lease is not None and event.lease.id == session.lease_id:
        session = replace(session, lease=event.lease, seen_at=now)
    return replace(session, activity=event.activity or session.activity), ()


def size_changed(session: Session, event: on.SizeChanged, now: float) -> Outcome:
    changed = replace(session, request=event.request, pending=None, pending_until=None)
    if event.lease is not None and event.lease.id == session.lease_id:
        changed = replace(changed, lease=event.lease, seen_at=now)
        if session.idling is not None and event.lease.limit_mib:  # its burst is followed from now on
            changed = replace(changed, idling=replace(session.idling, observe_at=now))
    return changed, ()


def size_pending(session: Session, event: on.SizePending, now: float) -> Outcome:
    until = None if event.kept_for is None else now + event.kept_for
    return replace(session, pending=event.request, pending_until=until, notice=event.notice), ()


def interrupt_start(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.Refuse(texts.interrupted(session.size), "KeyboardInterrupt"),)


def interrupt_kernel(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.InterruptKernel(),)


def left_found(session: Session, event: on.LeftFound, now: float) -> Outcome:
    return replace(session, exit_message=event.message, left=event.left, on_disk=event.on_disk), ()


def launched(session: Session, event: on.Launched, now: float) -> Outcome:
    """Note what was launched, and what its user is told of it beside how the kernel before has ended."""
    told = "\n".join(filter(None, (session.exit_message, event.message)))
    return replace(session, is_launched=True, to_disk=event.to_disk, exit_message=told), ()


def ready(session: Session, event: on.Ready, now: float) -> Outcome:
    running = replace(session, state=State.RUNNING, has_run=True, end=None, exit_message="", left="")
    running = asking.without_work(running)
    idling, told = idle.begun(event.lease, now, session.times, session.to_disk, ahead=event.ahead)
    reports = [session.hibernation(is_for_now=True)] if session.to_disk is not None else []
    if event.lease.hibernation is not None and session.to_disk is None:  # that was the kernel before
        reports = [session.hibernation(texts.CANNOT_SLEEP)]
    went_on = texts.went_on(session.left) if session.left else ""
    tells = [do.Tell(text) for text in (session.exit_message, went_on, *told) if text]
    return replace(running, idling=idling), (*reports, *tells, do.PassOn())


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
    return ending, (do.HoldAll(), do.EndKernel(reads_last=True))


def died(session: Session, event: on.Died, now: float) -> Outcome:
    return _down(replace(session, exit_message=event.message), now)


def stop_waiting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    """There is nothing to end. Its place in the queue is kept, for it may be a restart."""
    down, effects = _down(replace(session, is_stopped=True), now)
    return down, (do.Drop(), *effects)


def stop_starting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return replace(session, is_stopped=True), (do.Drop(), do.KillKernel())


def stop_sleeping(session: Session, event: on.StopRequested, now: float) -> Outcome:
    """End what may be left of its process; what is on disk of it goes, too."""
    down, effects = _down(session, now)
    return down, (do.Drop(), do.KillKernel(), *effects)


def stop_kernel(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return session, (do.KillKernel(),)


def _down(session: Session, now: float, *, leaves_image: bool = False) -> Outcome:
    """Hold what is submitted for a kernel that may be launched again; close if nobody does."""
    is_restarted = session.restarted_within == math.inf
    state = State.RESTARTING if is_restarted else State.DOWN
    closes_at = None if is_restarted else _closes_at(session, now)
    down = replace(_bare(session), state=state, closes_at=closes_at)
    return down, (do.LetGo(leaves_image), do.HoldSilently())


def _bare(session: Session) -> Session:
    """Return the session without what is known of its kernel, and without what is asked of the pool."""
    bare = replace(asking.without_work(session), idling=None, parking=None, hibernates_at=None)
    return replace(bare, left="", failed_wake=None)


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
        ended = replace(session, state=State.ENDED, closes_at=None, pending_until=None)
        # The lease stays known: a start that nobody asked for must not get another.
        back = do.ReleaseLease(session.lease_id, EndReason.WITHDRAWN) if session.lease_id else None
        return ended, (do.Drop(), do.Close(), *((back,) if back else ()))
    released: Sequence[do.Effect] = ()
    if session.ends_as is not None:
        session, released = asking.gives_up(session, session.ends_as)
    if session.then is State.ASKING:
        asks, effects = asking.asks(session, now)
        return asks, (do.LetGo(), *released, *asking.answers(session), *effects)
    without = replace(session, state=State.WITHOUT_SLICE)
    return without, (
        do.HoldUnanswered(),
        do.LetGo(),
        *released,
        do.Answer(),
        do.ReportHeldCode(),
        do.Show(""),
    )


def work_without_slice(session: Session, event: on.WorkSubmitted, now: float) -> Outcome:
    if session.untold:
        return replace(session, untold=""), (do.Refuse(session.untold),)
    return asking.asks(replace(session, error=None, within=None, is_explained=True), now)


def time_passed(session: Session, event: on.TimePassed, now: float) -> Outcome:
    """Do the first thing that is due. What else is due comes next."""
    if _is_due(session.closes_at, now):
        # Nobody launches the kernel again, or manages it.
        ending = replace(_bare(session), state=State.ENDING, then=State.ENDED, closes_at=None)
        return ending, (do.HoldSilently(), do.KillKernel(), do.EndKernel(at_most=MARGIN))
    if _is_due(session.pending_until, now):
        return _unreserve(session)
    if session.state is State.QUEUED and _is_due(session.gives_up_at, now):
        return asking.ask_last_time(session)
    if session.retry is not None and now >= session.retry.at:
        return replace(session, retry=None), (session.retry.work,)
    if session.state is State.PARKED and _is_due(session.hibernates_at, now):
        return goes_to_disk(session)
    if _is_due(session.tells_at, now):
        return asking.tell_away(session, now)
    idling = session.idling
    if session.state in OBSERVED_IN and idling is not None and _is_due(idling.observe_at, now):
        return replace(session, idling=replace(idling, observe_at=None)), (do.Observe(),)
    return asking.explains(session, now)


def goes_to_disk(session: Session, *, without_pool: bool = False) -> Outcome:
    """Write a kernel to disk that passes nothing on, and answer for it meanwhile."""
    going = replace(session, state=State.HIBERNATING, hibernates_at=None)
    return going, (do.Answer(), do.Hibernate(without_pool))


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and now >= at


def _unreserve(session: Session) -> Outcome:
    """Give up what was kept for a restart that has not come."""
    given = replace(session, pending=None, pending_until=None)
    lease_id = session.lease_id
    return given, () if lease_id is None else (do.Unreserve(lease_id, session.request),)


def close(session: Session, event: on.CloseRequested, now: float) -> Outcome:
    ended = replace(_bare(session), state=State.ENDED, closes_at=None, pending_until=None)
    return ended, (do.Drop(), do.Close())


def failed(session: Session, event: on.Failed, now: float) -> Outcome:
    """Let no mistake of ours leave cells waiting for ever, nor remove what is on disk of a kernel."""
    failed = replace(session, error=RuntimeError(f"{event.error!r}"))
    down, effects = _down(failed, now, leaves_image=True)
    text = f"The kernel proxy failed: {event.error!r}."
    return down, (do.Refuse(texts.not_run(text)), do.KillKernel(), *effects)
