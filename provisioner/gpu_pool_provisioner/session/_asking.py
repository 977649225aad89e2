"""What events do to a session that asks for its slice, and waits for it."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

from dataclasses import replace

from gpu_pool_client import (
    EndReason,
    GpuPoolError,
    Lease,
    LeaseState,
    OverQuota,
    PoolUnreachable,
    format_duration,
)
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.session import (
    SOON,
    Outcome,
    Retry,
    Session,
    SliceEnd,
    State,
    Wait,
)


def begun(session: Session, event: on.StartRequested) -> Session:
    """Return the session of a kernel that is to be started."""
    return replace(
        session,
        is_begun=True,
        is_prepared=False,
        is_granted=False,
        is_launched=False,
        has_run=False,
        is_stopped=False,
        error=None,
        untold="",  # whoever restarts it knows that it has ended
        within=event.within,
        gives_up_at=None,
        closes_at=None,
        restarted_within=0.0,
    )


def answers(session: Session) -> tuple[do.Effect, ...]:
    """Return that the kernel is answered for, where whoever starts it is ready for that."""
    return (do.Answer(),) if session.is_prepared else ()


def asks(session: Session, now: float) -> Outcome:
    """Ask the pool for the slice."""
    asking = replace(
        without_work(session),
        state=State.ASKING,
        asked_at=now,
        away="",
        tells_at=now + SOON,
        has_waited=False,
    )
    at_once = not asking.is_prepared and asking.within is None
    return asking, (do.Ask(asking.request, asking.asked, asking.lease_id, asking.within, at_once=at_once),)


def without_work(session: Session) -> Session:
    """Return the session of a state in which nothing is asked of the pool, or waited for."""
    return replace(session, tells_at=None, retry=None, wait=None)


def seen(session: Session, lease: Lease, now: float) -> Session:
    """Return the session once the lease was seen; a new one may be of another size than was asked for."""
    notice = session.notice
    if lease.id != session.lease_id and lease.request.size != session.request.size:
        notice = texts.other_size(session.request.of_gpus, lease.request.size)
    return replace(session, lease_id=lease.id, lease=lease, seen_at=now, notice=notice)


def gives_up(session: Session, reason: EndReason) -> Outcome:
    """Give the slice back, or leave the queue. What is asked for next is another lease."""
    given = replace(
        session, lease_id=None, lease=None, activity=None, pending=None, pending_until=None,
        asked=session.asked + 1,
    )  # fmt: skip
    return given, () if session.lease_id is None else (do.ReleaseLease(session.lease_id, reason),)


# -- What the pool answers ------------------------------------------------------


def queued(session: Session, event: on.Queued, now: float) -> Outcome:
    queued = replace(
        seen(without_work(session), event.lease, now),
        state=State.QUEUED,
        in_pod=event.lease.terms.in_pod,
        wait=Wait(event.lease.id, event.lease.position),
        has_waited=True,
    )
    explained, effects = explains(queued, now)
    return explained, (do.FollowQueue(event.lease.id), *effects)


def granted(session: Session, event: on.Granted, now: float) -> Outcome:
    held = replace(
        seen(without_work(session), event.lease, now),
        state=State.HELD,
        in_pod=event.lease.terms.in_pod,
        is_granted=True,
        gives_up_at=None,
    )
    if not held.is_prepared:
        return held, ()
    return replace(held, state=State.STARTING), (do.StartKernel(event.lease),)


def launch_prepared(session: Session, event: on.LaunchPrepared, now: float) -> Outcome:
    """Answer for the kernel from now on; where nobody watches it, whoever starts it reads why it waits."""
    is_explained = session.is_explained or event.gives_up_at is not None
    prepared = replace(session, is_prepared=True, gives_up_at=event.gives_up_at, is_explained=is_explained)
    explained, effects = explains(prepared, now)
    return explained, (do.Answer(), *effects)


def launch_held(session: Session, event: on.LaunchPrepared, now: float) -> Outcome:
    assert session.lease is not None
    starting = replace(session, state=State.STARTING, is_prepared=True)
    return starting, (do.Answer(), do.StartKernel(session.lease))


def refused(session: Session, event: on.Refused, now: float) -> Outcome:
    """There is no slice for it: say so, and let the next cell ask again."""
    if not session.is_prepared:
        # Whoever starts it reads why, and lets go of what there may be.
        return replace(without_work(session), state=State.DOWN, error=event.error, restarted_within=0.0), ()
    end = SliceEnd(getattr(event.error, "reason", None), str(event.error))
    failed = replace(session, end=end, error=event.error)
    return _cells_fail(failed, texts.not_run(str(event.error)))


def give_up(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    end = SliceEnd(None, texts.left_queue(session.size))
    return _cells_fail(replace(session, end=end), texts.gave_up(session.size))


def _cells_fail(session: Session, why: str) -> Outcome:
    without, released = gives_up(without_work(session), EndReason.WITHDRAWN)
    effects = (*answers(without), do.Refuse(why), do.Show(""), *released)
    return replace(without, state=State.WITHOUT_SLICE), effects


def away(session: Session, event: on.PoolAway, now: float) -> Outcome:
    """Ask a pool again that does not answer a start, for as long as a start may wait for that."""
    error, limit = event.error, session.outage_timeout
    may_pass = isinstance(error, PoolUnreachable) and error.may_pass
    if not may_pass or not limit or session.within is not None:
        return refused(session, on.Refused(error), now)
    # Whoever starts a kernel that is not answered for yet waits for a moment only; its first cell reads why.
    if session.is_prepared and now >= session.asked_at + limit:
        waited = f"{error.message} This kernel has waited for it for {format_duration(limit)}."
        return refused(session, on.Refused(PoolUnreachable(waited, error.remedy)), now)
    silent = replace(session, away=error.message)
    if isinstance(event.work, do.Ask) and event.work.at_once:
        # It may just be restarted. From now on nobody waits for the answer but the kernel's first cell.
        patient = replace(event.work, at_once=False)
        return tell_away(replace(silent, retry=Retry(patient, now)), now)
    return tell_away(again(silent, event, now), now)


def tell_away(session: Session, now: float) -> Outcome:
    """Tell whoever waits that the pool does not answer."""
    waited = f"{format_duration(now - session.asked_at)} of at most {format_duration(session.outage_timeout)}"
    told = replace(session, has_waited=True, tells_at=now + SOON)
    return told, (do.Show(texts.away(session.size, session.away or texts.NO_ANSWER, waited)),)


def again(session: Session, event: on.PoolAway, now: float) -> Session:
    """Return the session of which the same is tried again in a moment."""
    return replace(session, retry=Retry(event.work, now + session.times.ask_again))


def tried_again(session: Session, event: on.PoolAway, now: float) -> Outcome:
    """Try the same again in a moment. Nothing else changes, whatever the pool says."""
    return again(session, event, now), ()


def away_in_queue(session: Session, event: on.PoolAway, now: float) -> Outcome:
    """Ask again: the place in the queue is kept, and so are variables."""
    if isinstance(event.work, do.Explain):
        return explained(session, on.Explained(error=event.error), now)
    return again(session, event, now), (_shows_fault(session, event.error),)


def _shows_fault(session: Session, error: GpuPoolError) -> do.Show:
    """Return what the waiting cell shows of a pool that has not done what it was asked for."""
    if session.parking is None or isinstance(error, (PoolUnreachable, OverQuota)):
        return _shows(session, texts.unreachable(session.size, error))
    return _shows(session, texts.kept_meanwhile(session.size, error))


# -- The queue ------------------------------------------------------------------


def _waiting(session: Session) -> Wait:
    assert session.wait is not None
    return session.wait


def _shows(session: Session, text: str) -> do.Show:
    """Return what the waiting cell shows; that of a parked kernel shows as well why it has no slice."""
    return do.Show(f"{session.parking.why} {text}" if session.parking is not None else text)


def positioned(session: Session, event: on.Positioned, now: float) -> Outcome:
    wait = session.wait
    if wait is None:  # it has been granted meanwhile
        return session, ()
    if event.error is None:
        return explains(replace(session, wait=replace(wait, position=event.position)), now)
    unknown = replace(session, wait=replace(wait, outlook=None))
    told = (_shows_fault(session, event.error),) if session.is_explained else ()
    return unknown, told


def left_queue(session: Session, event: on.LeftQueue, now: float) -> Outcome:
    return session, () if session.wait is None else (do.AwaitGrant(session.wait.lease_id),)


def explains(session: Session, now: float) -> Outcome:
    """Ask why the lease waits, where that is due."""
    at, wait = session.explains_at, session.wait
    if at is None or wait is None or now < at:
        return session, ()
    return replace(session, wait=replace(wait, is_asked=True)), (do.Explain(wait.lease_id),)


def explained(session: Session, event: on.Explained, now: float) -> Outcome:
    if session.wait is None:  # it has been granted meanwhile
        return session, ()
    wait = replace(session.wait, is_asked=False, explained_at=now)
    if event.outlook is None:
        told = () if event.error is None else (_shows_fault(session, event.error),)
        return replace(session, wait=wait), told
    text = texts.waiting(session.size, f"{event.outlook} {event.hint}".rstrip())
    wait = replace(wait, outlook=event.outlook, explained=wait.position)
    return replace(session, wait=wait), (_shows(session, text),)


def explanation_wanted(session: Session, event: on.Event, now: float) -> Outcome:
    return explains(replace(session, is_explained=True), now)


def ask_last_time(session: Session) -> Outcome:
    """Take the slice if it is free now: the start has waited for as long as it may."""
    return replace(session, gives_up_at=None), (do.AskLastTime(_waiting(session).lease_id),)


def resize_queued(session: Session, event: on.ResizeRequested, now: float) -> Outcome:
    """Change the size of what is waited for. Whether it is held meanwhile is seen afterwards."""
    wait = _waiting(session)
    resizing = replace(session, state=State.QUEUED_RESIZING, wait=None, retry=None)
    return resizing, (do.ResizeQueued(wait.lease_id, event.request),)


def queue_resized(session: Session, event: on.Resized, now: float) -> Outcome:
    """Go on waiting; it may be held by now, also where the answer to the change was lost."""
    lease = session.lease
    assert lease is not None
    told = replace(session, changes=session.changes + 1, change=event.change)
    if lease.state is LeaseState.HELD:
        return granted(told, on.Granted(lease), now)
    return queued(told, on.Queued(lease), now)
