"""What events do to a session whose kernel goes to disk, is there, or comes back."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

from dataclasses import replace

from gpu_pool_client import EndReason
from gpu_pool_provisioner.session import _asking as asking
from gpu_pool_provisioner.session import _keeping as keeping
from gpu_pool_provisioner.session import _life as life
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep
from gpu_pool_provisioner.session.session import FailedWake, Outcome, Session, State


def _parking(session: Session) -> idle.Parking:
    assert session.parking is not None
    return session.parking


def _wanted(session: Session, *, is_wanted: bool) -> Session:
    if session.parking is None:  # it is another server's, and nothing is asked for before a cell
        return session
    return replace(session, parking=replace(_parking(session), is_wanted=is_wanted))


def work(session: Session, event: on.WorkSubmitted, now: float) -> Outcome:
    """Note that the kernel is wanted; what goes on is seen through, for it cannot be left half done."""
    return _wanted(session, is_wanted=True), ()


def resume(session: Session, event: on.ResumeRequested, now: float) -> Outcome:
    return _wanted(session, is_wanted=True), (do.Reply(texts.wakes(session.size)),)


def give_up(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    """Let what was submitted fail. The kernel stays as it is, or as it will be in a moment."""
    refuse = do.Refuse(texts.gave_up(session.size))
    return _wanted(session, is_wanted=False), (refuse, do.Show(""))


def hibernated(session: Session, event: on.Hibernated, now: float) -> Outcome:
    asleep = replace(session, state=State.HIBERNATED, on_disk=on.OnDisk(now, event.image_mib))
    reports = _reports(session, image_mib=event.image_mib)
    if not _parking(session).is_wanted:
        return asleep, (*reports, *keeping.follows_lease(asleep))
    if session.is_to_hibernate:
        asleep, effects = _stays_on_disk(asleep)
        return asleep, (*reports, *effects, *keeping.follows_lease(asleep))
    waking, effects = _wakes(asleep)
    return waking, (*reports, *effects)


def _reports(
    session: Session, why_awake: str = "", image_mib: int | None = None, *, is_for_now: bool = False
) -> tuple[do.ReportHibernation, ...]:
    """Return what the pool is told of its way to disk, where it was told that it can go there."""
    if session.to_disk is None:
        return ()
    return (session.hibernation(why_awake, image_mib=image_mib, is_for_now=is_for_now),)


def _stays_on_disk(session: Session) -> Outcome:
    """Let what was submitted fail: its machine is being emptied."""
    asleep = _wanted(session, is_wanted=False)
    return asleep, (do.Refuse(texts.not_run(texts.MACHINE_IS_EMPTIED)), do.Show(""))


def lease_news(session: Session, event: on.LeaseNews, now: float) -> Outcome:
    """See that its device is drained, or that this is over."""
    if session.state is State.PARKED and session.is_to_hibernate:
        return life.goes_to_disk(session)
    return session, keeping.follows_lease(session)


def not_hibernated(session: Session, event: on.NotHibernated, now: float) -> Outcome:
    """Go on as a parked kernel, and say why it did not sleep, unless that is tried again."""
    awake, effects = _awake(session, now)
    again = None if event.why or awake.state is not State.PARKED else now + session.times.park_again
    awake = replace(awake, hibernates_at=again)
    reports = _reports(session, event.why, is_for_now=again is not None)
    return awake, (*reports, *effects, *((do.Tell(texts.stays_awake(event.why)),) if event.why else ()))


def sleep(session: Session, event: on.SleepRequested, now: float) -> Outcome:
    """Lend the slice to others first, as always."""
    parking = idle.Parking(ExpiryStep(ExpiryAction.PARK, sleeps=True), server_ends=True)
    return replace(session, state=State.PARKING, parking=parking), (do.HoldWork(), do.CheckIdle())


def sleep_parked(session: Session, event: on.SleepRequested, now: float) -> Outcome:
    parking = replace(_parking(session), server_ends=True)
    if parking.leaves_queue:  # it goes once it has left: what sleeps waits for no slice
        refuse = do.Refuse(texts.not_run(texts.SERVER_ENDS))
        return replace(session, parking=replace(parking, is_wanted=False)), (refuse,)
    return life.goes_to_disk(replace(session, parking=parking))


def sleep_resuming(session: Session, event: on.SleepRequested, now: float) -> Outcome:
    """Leave the queue first: what waits for the slice is not passed on any more."""
    parking = replace(_parking(session), server_ends=True)
    return keeping.leaves_queue(session, parking, texts.not_run(texts.SERVER_ENDS))


def resumed_parked(session: Session, event: on.Resumed, now: float) -> Outcome:
    """See that the slice came just as its queue was left; a kernel whose server ends lends it once more."""
    parking, (running, effects) = _parking(session), keeping.resumed(session, event, now)
    if not parking.server_ends or parking.is_wanted:
        return running, effects
    again, sleeps = sleep(running, on.SleepRequested(), now)
    return again, (*(each for each in effects if not isinstance(each, do.PassOn)), *sleeps)


def launch_prepared(session: Session, event: on.LaunchPrepared, now: float) -> Outcome:
    """Answer for a kernel that another server has left, and launch nothing before a cell."""
    return replace(session, is_prepared=True), (do.Answer(),)


def resume_hibernated(session: Session, event: on.ResumeRequested, now: float) -> Outcome:
    waking, effects = goes_on(session, event, now)
    stays = waking.state is State.HIBERNATED
    return waking, (do.Reply(texts.MACHINE_IS_EMPTIED if stays else texts.wakes(session.size)), *effects)


def goes_on(session: Session, event: on.Event, now: float) -> Outcome:
    """Wake the kernel; one that another server has left needs a slice of its own, and has it first."""
    if session.is_to_hibernate:
        return _stays_on_disk(session)
    session = replace(session, failed_wake=None)
    if session.parking is not None:
        return _wakes(session)
    asks, effects = asking.asks(replace(session, error=None, is_explained=True), now)
    return asks, (do.Show(texts.goes_on(session.left)), *effects)


def not_continued(session: Session, event: on.NotWoken, now: float) -> Outcome:
    """Say why, and give its new slice back: it is on disk as before, and the next cell tries again."""
    asleep, released = asking.gives_up(asking.without_work(session), EndReason.NOT_READY)
    asleep = replace(asleep, state=State.HIBERNATED, is_granted=False, is_launched=False)
    asleep = replace(asleep, failed_wake=FailedWake(event.why, now))
    return asleep, (do.Refuse(texts.not_run(event.why)), do.Show(""), *released)


def _wakes(session: Session) -> Outcome:
    waking = replace(_wanted(session, is_wanted=True), state=State.WAKING)
    return waking, (do.Show(texts.waking(session.size)), do.Wake())


def woken(session: Session, event: on.Woken, now: float) -> Outcome:
    awake, effects = _awake(session, now)
    return awake, (*_reports(session, is_for_now=True), *effects)


def not_woken(session: Session, event: on.NotWoken, now: float) -> Outcome:
    """Say why, and lose nothing: the next cell tries again, and a restart begins afresh."""
    asleep = replace(_wanted(session, is_wanted=False), state=State.HIBERNATED)
    asleep = replace(asleep, failed_wake=FailedWake(event.why, now))
    told = do.Refuse(texts.not_run(event.why)), do.Show("")
    return asleep, (*told, *keeping.follows_lease(asleep))


def _awake(session: Session, now: float) -> Outcome:
    """Go on as a parked kernel: ask for the slice where something was submitted, else wait for that."""
    parked, follows = keeping.parked_from(session, _parking(session), now)
    if not _parking(session).is_wanted:
        return parked, (do.HoldWork(), *follows)
    resuming, effects = keeping.resuming(parked, _parking(session))
    return resuming, (do.HoldWork(), *effects)
