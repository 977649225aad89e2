"""What events do to a session about how long its kernel keeps its slice."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

from dataclasses import replace

from gpu_pool_client import Activity, NotAllowed, OverQuota
from gpu_pool_provisioner.session import _asking as asking
from gpu_pool_provisioner.session import _life as life
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction
from gpu_pool_provisioner.session.session import Outcome, Session, State


def _idling(session: Session) -> idle.Idling:
    assert session.idling is not None
    return session.idling


def _parking(session: Session) -> idle.Parking:
    assert session.parking is not None
    return session.parking


def _with_slice(session: Session, idling: idle.Idling) -> Session:
    """Return the session of a kernel that keeps its slice, for the time being."""
    state = State.ASKED_BACK if idling.is_asked_back else State.RUNNING
    if state is not session.state:  # what followed it has been given up
        idling = replace(idling, is_followed=False)
    return replace(session, state=state, idling=idling, parking=None)


def observed(session: Session, event: on.Observed, now: float) -> Outcome:
    idling, found, told = idle.after_observation(_idling(session), event, now)
    after = _with_slice(session, idling)
    tells: list[do.Effect] = [do.Tell(text) for text in told]
    if idling.burst != _idling(session).burst:
        tells.append(do.ShowBurst(event.lease))
    if idling.interrupted_at != _idling(session).interrupted_at:
        tells.append(do.InterruptKernel())  # once it reads why, below the cell that runs
    if found.act is ExpiryAction.END and not found.if_idle:
        ending, effects = life.terms_over(after, on.TermsOver(found), now)
        return ending, (*tells, *effects)
    if found.act in (ExpiryAction.PARK, ExpiryAction.END):
        parking = idle.Parking(found, given_back=idling.gives_back)
        return replace(after, state=State.PARKING, parking=parking), (*tells, do.HoldWork(), do.CheckIdle())
    if event.activity is None and idle.needs_device(
        idling, event.lease, event.busy, event.last_activity, now
    ):
        # Its time has come while it was looked at, and what it does with its device was not seen.
        return replace(after, idling=replace(idling, observe_at=now)), tells
    if idling.hibernates:
        why, is_for_now = idle.why_awake(idling, event, now)
        tells.append(session.hibernation(why, is_for_now=is_for_now))
    idling, since = idle.told(idling, event, now)
    was = _idling(session)
    if after.state is not State.RUNNING:
        return after, tells  # it goes as soon as it is idle, whoever waits
    if since is not None and not was.is_followed:
        return replace(after, idling=idling), (*tells, do.GiveWay(since))
    if since is None and was.gives_way_since is not None:
        return replace(after, idling=idling), (*tells, do.StayBusy())
    return replace(after, idling=idling), tells


def worked(session: Session, event: on.Worked, now: float) -> Outcome:
    """See that a kernel works again that gave way; the pool has been told."""
    return replace(session, idling=idle.works_again(_idling(session), now)), ()


def asked_to_give_way(session: Session, event: on.LeaseNews, now: float) -> Outcome:
    return replace(session, idling=replace(_idling(session), observe_at=now, is_followed=False)), ()


def not_observed(session: Session, event: on.PoolAway, now: float) -> Outcome:
    idling = idle.without_observation(_idling(session), now)
    if isinstance(event.work, do.GiveWay):
        idling = replace(idling, is_followed=False)
    return replace(session, idling=idling), ()


def keep(session: Session, event: on.KeepRequested, now: float) -> Outcome:
    idling, answer = idle.kept_for(_idling(session), event.seconds, now)
    return _as_asked(session, idling), (do.Reply(answer),)


def give_back(session: Session, event: on.GiveBackRequested, now: float) -> Outcome:
    idling, answer = idle.given_back(_idling(session), session.activity or Activity(), now)
    return _as_asked(session, idling), (do.Reply(answer),)


def _as_asked(session: Session, idling: idle.Idling) -> Session:
    is_resized = session.state is State.RESIZING
    return replace(session, idling=idling) if is_resized else _with_slice(session, idling)


def resize(session: Session, event: on.ResizeRequested, now: float) -> Outcome:
    return replace(session, state=State.RESIZING), (do.HoldWork(), do.ResizeKernel(event.request))


def resized(session: Session, event: on.Resized, now: float) -> Outcome:
    idling = replace(_idling(session), observe_at=now if idle.needs_observation(_idling(session)) else None)
    told = replace(session, changes=session.changes + 1, change=event.change)
    return _with_slice(told, idling), (do.PassOn(),)


def found_idle(session: Session, event: on.FoundIdle, now: float) -> Outcome:
    parking = _parking(session)
    if parking.is_wanted:
        return found_at_work(session, on.FoundAtWork(is_silent=False), now)
    if parking.ends:
        return life.terms_over(session, on.TermsOver(parking.step), now)
    return session, (do.Park(yields=parking.step.yields),)


def found_at_work(session: Session, event: on.FoundAtWork, now: float) -> Outcome:
    parking = _parking(session)
    if not parking.ends:
        return _stays(session, now)
    if event.is_silent and not parking.is_wanted:
        return life.terms_over(session, on.TermsOver(parking.step), now)
    return _with_slice(session, idle.found_at_work(_idling(session), now)), (do.PassOn(),)


def not_needed(session: Session, event: on.NotNeeded, now: float) -> Outcome:
    """Keep the slice, and be ready to give it to the next who waits."""
    return _with_slice(session, replace(_idling(session), observe_at=now)), (do.PassOn(),)


def not_parked(session: Session, event: on.NotParked, now: float) -> Outcome:
    return _stays(session, now, is_refused=True)


def away_while_parking(session: Session, event: on.PoolAway, now: float) -> Outcome:
    """Keep the slice; but where there was no answer it may have gone, or go later."""
    if _goes_without(session):
        return life.goes_to_disk(session, without_pool=True)
    return _stays(session, now, is_unanswered=not isinstance(event.error, (NotAllowed, OverQuota)))


def _stays(session: Session, now: float, *, is_refused: bool = False, is_unanswered: bool = False) -> Outcome:
    parking = _parking(session)
    if parking.step.is_parked:
        # The slice has gone all the same, and the kernel may have begun to work since then: it asks again.
        return resuming(session, replace(parking, is_moved=True))
    idling = idle.not_parked(_idling(session), now, is_refused=is_refused, is_unanswered=is_unanswered)
    return _with_slice(session, idling), (do.PassOn(),)


def parked(session: Session, event: on.Parked, now: float) -> Outcome:
    parking = replace(_parking(session), is_moved=event.is_moved, taken=event.lease.message)
    if parking.is_wanted:
        asks, effects = resuming(session, parking)
        return asks, (do.ShowDevices(None), *effects)
    after, effects = parked_from(session, parking, now)
    return after, (do.ShowDevices(None), *effects)


def parked_from(session: Session, parking: idle.Parking, now: float) -> Outcome:
    """Let a kernel be parked from now on, and go to disk later."""
    sleeps_now = parking.step.sleeps or parking.server_ends or session.is_to_hibernate
    to_disk = session.to_disk
    after = 0.0 if sleeps_now else to_disk.after if to_disk is not None else None
    at = None if session.in_pod or after is None else now + after
    parked = replace(session, state=State.PARKED, parking=parking, hibernates_at=at)
    return parked, follows_lease(parked)


def follows_lease(session: Session) -> tuple[do.FollowLease, ...]:
    """Return what hears of a drained device for a kernel without a slice, if that means anything to it."""
    return (do.FollowLease(session.is_to_hibernate),) if session.to_disk is not None else ()


def resuming(session: Session, parking: idle.Parking) -> Outcome:
    """Ask for a parked kernel's slice again."""
    wanted = replace(parking, is_wanted=False)
    asks = replace(asking.without_work(session), state=State.RESUMING, parking=wanted, has_waited=True)
    return replace(asks, is_explained=True, hibernates_at=None), (do.Resume(),)


def queued_to_resume(session: Session, event: on.Queued, now: float) -> Outcome:
    """Wait in the queue for the slice of a parked kernel."""
    queued, effects = asking.queued(session, event, now)
    return replace(queued, state=State.RESUMING), effects


def granted_to_resume(session: Session, event: on.Granted, now: float) -> Outcome:
    held = asking.seen(asking.without_work(session), event.lease, now)
    return held, (do.Resume(event.lease),)


def _goes_without(session: Session) -> bool:
    """Whether a kernel whose server ends goes to disk without its pool, which sees its process end."""
    parking = _parking(session)
    return parking.server_ends and not parking.is_wanted


def away_while_parked(session: Session, event: on.PoolAway, now: float) -> Outcome:
    if isinstance(event.work, do.FollowLease):  # nobody waits for what it hears
        return asking.tried_again(session, event, now)
    if _goes_without(session):
        left = replace(session, parking=replace(_parking(session), leaves_queue=False))
        return life.goes_to_disk(left, without_pool=True)
    return asking.away_in_queue(session, event, now)


def work_while_parking(session: Session, event: on.WorkSubmitted, now: float) -> Outcome:
    return replace(session, parking=replace(_parking(session), is_wanted=True)), ()


def work_while_parked(session: Session, event: on.Event, now: float) -> Outcome:
    parking = _parking(session)
    if parking.leaves_queue:
        return replace(session, parking=replace(parking, is_wanted=True)), ()
    return resuming(session, parking)


def resume(session: Session, event: on.ResumeRequested, now: float) -> Outcome:
    asks, effects = work_while_parked(session, event, now)
    return asks, (do.Reply(texts.asks_again(session.size)), *effects)


def resume_meanwhile(session: Session, event: on.ResumeRequested, now: float) -> Outcome:
    return session, (do.Reply(texts.asks_again(session.size)),)


def give_up_resuming(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return leaves_queue(session, _parking(session), texts.gave_up(session.size))


def leaves_queue(session: Session, parking: idle.Parking, why: str) -> Outcome:
    """Let what was submitted fail, and leave the slice to others. The kernel stays as it is."""
    parking = replace(parking, leaves_queue=True, is_wanted=False)
    parked = replace(asking.without_work(session), state=State.PARKED, parking=parking)
    return parked, (do.Refuse(why), do.Show(""), do.ParkAgain())


def parked_again(session: Session, event: on.ParkedAgain, now: float) -> Outcome:
    parking = replace(_parking(session), leaves_queue=False)
    return resuming(session, parking) if parking.is_wanted else parked_from(session, parking, now)


def resumed(session: Session, event: on.Resumed, now: float) -> Outcome:
    to_disk = session.to_disk
    if to_disk is not None and to_disk.is_by_terms:
        to_disk = replace(to_disk, after=event.lease.terms.hibernate_after)
        session = replace(session, to_disk=to_disk)
    idling, told = idle.begun(event.lease, now, session.times, to_disk, ahead=event.ahead)
    taken = _parking(session).taken
    tells = [do.Tell(text) for text in (texts.POISONED if event.is_poisoned else "", taken, *told) if text]
    running = _with_slice(asking.without_work(session), idling)
    return running, (do.ShowDevices(event.lease), *tells, do.PassOn())
