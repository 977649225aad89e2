"""What events do to a session whose kernel goes to disk, is there, or comes back."""
# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

from dataclasses import replace

from gpu_pool_provisioner.session import _keeping as keeping
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import idling as idle
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.session import OnDisk, Outcome, Session, State


def _parking(session: Session) -> idle.Parking:
    assert session.parking is not None
    return session.parking


def _wanted(session: Session, *, is_wanted: bool) -> Session:
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
    asleep = replace(session, state=State.HIBERNATED, on_disk=OnDisk(now, event.image_mib))
    return _wakes(asleep) if _parking(session).is_wanted else (asleep, ())


def not_hibernated(session: Session, event: on.NotHibernated, now: float) -> Outcome:
    """Go on as a parked kernel, and say why it did not sleep, unless that is tried again."""
    awake, effects = _awake(session, now)
    again = None if event.why or awake.state is not State.PARKED else now + session.times.park_again
    awake = replace(awake, hibernates_at=again)
    return awake, (*effects, do.Tell(event.why)) if event.why else effects


def work_hibernated(session: Session, event: on.WorkSubmitted, now: float) -> Outcome:
    return _wakes(session)


def resume_hibernated(session: Session, event: on.ResumeRequested, now: float) -> Outcome:
    waking, effects = _wakes(session)
    return waking, (do.Reply(texts.wakes(session.size)), *effects)


def _wakes(session: Session) -> Outcome:
    waking = replace(_wanted(session, is_wanted=True), state=State.WAKING)
    return waking, (do.Show(texts.waking(session.size)), do.Wake())


def woken(session: Session, event: on.Woken, now: float) -> Outcome:
    return _awake(session, now)


def not_woken(session: Session, event: on.NotWoken, now: float) -> Outcome:
    """Say why, and lose nothing: the next cell tries again, and a restart begins afresh."""
    asleep = replace(_wanted(session, is_wanted=False), state=State.HIBERNATED)
    return asleep, (do.Refuse(texts.not_run(event.why)), do.Show(""))


def _awake(session: Session, now: float) -> Outcome:
    """Go on as a parked kernel: ask for the slice where something was submitted, else wait for that."""
    parked = keeping.parked_from(session, _parking(session), now)
    if not _parking(session).is_wanted:
        return parked, (do.HoldWork(),)
    resuming, effects = keeping.resuming(parked, _parking(session))
    return resuming, (do.HoldWork(), *effects)
