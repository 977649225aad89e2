"""What a session knows of how long its kernel keeps its slice, and what comes of a look at it. Pure.

The rules themselves are in ``expiry_policy``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from gpu_pool_client import Activity, EndReason, Lease, LeaseState, Terms
from gpu_pool_client._leases import gives_way_after, why_over
from gpu_pool_provisioner.session import expiry_policy, texts
from gpu_pool_provisioner.session.events import Observed, ToDisk
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep, KernelObservation
from gpu_pool_provisioner.session.times import DEFAULT, SessionTimes

#: Seconds by which what is told of a device on another machine may be older than it says.
_SEEN_WITHIN: Final = 2.0
_USED_MEANWHILE: Final = "The kernel was ended: it used the GPU after its slice had been taken back."


@dataclass(frozen=True, slots=True)
class Idling:
    """What is known since the slice was granted, or came back."""

    #: Those of the lease, with its end by the session's clock.
    terms: Terms
    #: From when its idleness counts, at the least.
    idle_since: float
    #: When it is looked at next; None where nothing comes of it, or while that is done.
    observe_at: float | None
    times: SessionTimes = DEFAULT
    kept_until: float = 0.0
    postponed_until: float = 0.0
    #: Whether what it keeps on its device cannot be moved although it seemed so.
    kept: bool = False
    warned: frozenset[str] = frozenset()
    #: What the pool has to say, as far as its user was told.
    notice: str = ""
    #: Until when the pool may park the lease because this side has asked for it and heard no answer.
    parks_until: float = 0.0
    #: Whether the pool asks for the slice; and whether its user gives it back, and knows that it ends.
    asked_back: bool = False
    gives_back: bool = False
    may_end: bool = False
    #: Whether somebody waits for it.
    yields: bool = False
    #: Since when the kernel gives way, as the pool was told; None where it was told nothing, or that it
    #: does not. And whether it is followed since then whether somebody asks.
    gives_way_since: float | None = None
    is_followed: bool = False
    #: Whether it may burst, and by how much when it was last looked, by device;
    #: nothing before the first look: what its kernel knows may be of before it was parked.
    may_burst: bool = False
    burst: tuple[int, ...] = ()
    #: When the pool asked last for what runs to be interrupted, as far as that was done.
    interrupted_at: float | None = None
    #: How it goes to disk, once it has been parked for that; None where it stays awake.
    to_disk: ToDisk | None = None
    #: Whether it is to go there as soon as it is idle: its device is drained so.
    hibernates: bool = False

    @property
    def sleeps_after(self) -> float | None:
        """For how many seconds it is idle before it is parked to go to disk; None for never."""
        return self.to_disk.after if self.to_disk is not None else None

    @property
    def is_asked_back(self) -> bool:
        """Whether the slice is to go as soon as the kernel is idle."""
        return self.asked_back or self.gives_back

    @property
    def sleeps_once_idle_for(self) -> float | None:
        """For how many seconds it is idle now before it is parked to go to disk; None for never."""
        return self.times.pause if self.hibernates else self.sleeps_after


@dataclass(frozen=True, slots=True)
class IdleState:
    """What idleness will come to, for who looks at it. None for never."""

    #: Since when nothing was submitted; None while the kernel works.
    idle_since: float | None = None
    #: Until when its user has said that it is in use.
    kept_until: float | None = None
    #: When its slice goes back if nothing happens.
    gives_back_at: float | None = None
    #: Whether the kernel is ended then, and not parked.
    ends: bool = False
    #: From when on its slice goes to somebody who waits.
    yields_at: float | None = None
    #: When its kernel goes to disk if nothing happens.
    sleeps_at: float | None = None
    #: Whether its user, here, asked for the slice to go back as soon as the kernel is idle.
    gives_back_when_idle: bool = False
    #: For how many seconds, from now on, its user may say that it is in use.
    keep_at_most: float = 0.0


@dataclass(frozen=True, slots=True)
class Parking:
    """One time that a kernel is parked, or ended for its idleness."""

    #: What is to come of it.
    step: ExpiryStep
    #: Whether its user gave the slice back.
    given_back: bool = False
    #: Whether something was submitted meanwhile.
    is_wanted: bool = False
    #: Whether what it kept on its device was moved away.
    is_moved: bool = False
    #: Whether it leaves the queue for its slice.
    leaves_queue: bool = False
    #: Whether its server ends: it is lost unless it goes to disk.
    server_ends: bool = False
    #: Who took the slice, where it was not for its idleness alone.
    taken: str = field(default="")

    @property
    def ends(self) -> bool:
        """Whether the kernel is ended if it is idle."""
        return self.step.act is ExpiryAction.END

    @property
    def why(self) -> str:
        """Why it has no slice, in sentences."""
        return self.taken or (texts.GIVEN_BACK if self.given_back else texts.PARKED)


def begun(
    lease: Lease,
    now: float,
    times: SessionTimes = DEFAULT,
    to_disk: ToDisk | None = None,
    *,
    ahead: float = 0.0,
) -> tuple[Idling, list[str]]:
    """Return what is known of a kernel that has just got the slice of a lease, and what its user is told.

    That is told before anything is passed on: a cell that waited for the slice may have ended before the
    first look, and nothing is printed below one that has. The session's clock is ``ahead``
    seconds ahead of Unix time.
    """
    terms, may_burst = expiry_policy.by_clock(lease.terms, ahead), bool(lease.limit_mib)
    sleeps_after = to_disk.after if to_disk is not None else None
    observe_at = now if terms.has_limits or may_burst else _first_observation(terms, sleeps_after, now)
    if to_disk is not None:  # whether its device is drained is seen then
        seldom = now + times.seldom
        observe_at = seldom if observe_at is None else min(observe_at, seldom)
    step = expiry_policy.warning_at_start(terms, now)
    told = [text for text in (lease.message, step.message) if text]
    warned = frozenset({step.warns_of}) if step.warns_of else frozenset[str]()
    idling = Idling(terms, now, observe_at, times, warned=warned, notice=lease.message, may_burst=may_burst)
    # What was asked for before is not meant for what it has not begun to run.
    return replace(idling, interrupted_at=lease.interrupt_at, to_disk=to_disk), told


def _burst(lease: Lease) -> tuple[int, ...]:
    return tuple(part.burst_mib for part in lease.slices) if lease.limit_mib else ()


def _first_observation(terms: Terms, sleeps_after: float | None, now: float) -> float | None:
    """Return when it is seen first whether a kernel gives way, or sleeps, that nothing else happens to."""
    gives_way = None if terms.yield_after is None else gives_way_after(terms.yield_after)
    after = min((each for each in (gives_way, sleeps_after) if each is not None), default=None)
    return None if after is None else now + after


def needs_observation(idling: Idling) -> bool:
    """Whether anything comes of the terms, or of what its user has asked for."""
    terms = idling.terms
    is_limited = terms.has_limits or terms.yield_after is not None
    return is_limited or idling.may_burst or idling.gives_back or idling.to_disk is not None


def observed(
    idling: Idling, busy: bool, last_activity: float, activity: Activity | None = None
) -> KernelObservation:
    """Return what the rules are to decide by."""
    return KernelObservation(
        busy,
        max(idling.idle_since, last_activity),
        idling.kept_until,
        idling.postponed_until,
        activity=activity or Activity(),
        kept=idling.kept,
        asked_back=idling.is_asked_back,
        yields=idling.yields,
        warned=idling.warned,
    )


def believed(activity: Activity, last_activity: float, now: float) -> Activity:
    """Return what was seen of a kernel's device, but for what was seen before it worked last.

    What it had not initialised by then, it may have since.
    """
    is_old = activity.age > 0 and now - activity.age < last_activity + _SEEN_WITHIN
    return replace(activity, initialised=None) if is_old and activity.initialised is False else activity


def needs_device(idling: Idling, lease: Lease, busy: bool, last_activity: float, now: float) -> bool:
    """Whether what the kernel does with its device decides anything yet: to look at it costs more."""
    if lease.state is not LeaseState.HELD:
        return lease.asked_back not in (None, EndReason.YIELDED)
    asked = _as_asked(replace(idling, terms=lease.terms), lease)
    seen = observed(asked, busy, last_activity)
    if seen.asked_back and not seen.busy and now >= seen.postponed_until:
        return True
    at = expiry_policy.idle_at(lease.terms, seen)
    if at is not None and now >= at - lease.terms.warn_before:
        return True
    sleeps_after = asked.sleeps_once_idle_for
    if sleeps_after is not None and not busy and now >= seen.idle_since + sleeps_after:
        return True
    gives_way_at = expiry_policy.gives_way_at(lease.terms, seen)
    return gives_way_at is not None and now >= gives_way_at


def _as_asked(idling: Idling, lease: Lease) -> Idling:
    """Return what is known of a kernel with what the pool asks of it."""
    yields = lease.asked_back is EndReason.YIELDED
    asked = replace(idling, yields=yields, asked_back=lease.asked_back is not None and not yields)
    return replace(asked, hibernates=lease.hibernates and idling.to_disk is not None)


def told(idling: Idling, event: Observed, now: float) -> tuple[Idling, float | None]:
    """Return what the pool is to be told after an observation: since when its kernel gives way, else None."""
    seen = observed(idling, event.busy, event.last_activity, event.activity)
    gives_way = event.lease.state is LeaseState.HELD and expiry_policy.gives_way(idling.terms, seen, now)
    since = seen.idle_since if gives_way else None
    return replace(idling, gives_way_since=since, is_followed=gives_way), since


def works_again(idling: Idling, now: float) -> Idling:
    """Return what is known of a kernel that has begun to work after the pool was told that it gives way.

    It is looked at as soon as it may give way again; the last look found nothing to wait for.
    """
    observe_at = idling.observe_at  # None while it is looked at, which says when it is again
    first = _first_observation(idling.terms, idling.sleeps_after, now)
    if observe_at is not None and first is not None:
        observe_at = min(observe_at, first)
    return replace(idling, gives_way_since=None, is_followed=False, observe_at=observe_at)


def after_observation(idling: Idling, event: Observed, now: float) -> tuple[Idling, ExpiryStep, list[str]]:
    """Return what is known after an observation, what to do, and what its user is to be told."""
    lease = event.lease
    tells = [lease.message] if lease.message and lease.message != idling.notice else []
    idling = _as_asked(replace(idling, notice=lease.message), lease)
    if lease.state is not LeaseState.HELD:
        step = _without_slice(idling, event, now)
        return _later(idling, step.again_in, now), step, tells
    terms = expiry_policy.by_clock(lease.terms, event.ahead)
    warned = expiry_policy.warned_of_now(idling.warned, idling.terms, terms)
    idling = replace(idling, terms=terms, may_burst=bool(lease.limit_mib), burst=_burst(lease), warned=warned)
    if lease.interrupt_at is not None:
        idling = replace(idling, interrupted_at=lease.interrupt_at)
    step = expiry_policy.step(
        terms, observed(idling, event.busy, event.last_activity, event.activity), now, idling.times
    )
    step = _unless_it_sleeps(step, idling, event, now)
    if step.message == expiry_policy.ASKED_BACK:
        if lease.asked_back is None and not idling.may_end:
            # Its user gave it back only for as long as variables are kept.
            step, tells = ExpiryStep(ExpiryAction.NOTHING), [*tells, texts.STAYS]
            idling = replace(idling, gives_back=False)
        else:
            step = replace(step, message=f"{step.message} {lease.message}".rstrip())
    if step.act is ExpiryAction.WARN:
        tells = [*tells, step.message]
        idling = replace(idling, warned=idling.warned | {step.warns_of})
    return _later(idling, step.again_in, now), step, tells


def _unless_it_sleeps(step: ExpiryStep, idling: Idling, event: Observed, now: float) -> ExpiryStep:
    """Return what to do with a kernel that may go to disk: its slice is parked first."""
    after = idling.sleeps_once_idle_for
    if after is None or event.busy or step.act not in (ExpiryAction.NOTHING, ExpiryAction.WARN):
        return step
    idle_at = max(idling.idle_since, event.last_activity) + after
    at = max(idle_at, idling.kept_until, idling.postponed_until)
    if now < at:
        return replace(step, again_in=min(step.again_in, at - now))
    if event.activity is not None and event.activity.initialised is False and not idling.kept:
        return ExpiryStep(ExpiryAction.PARK, sleeps=True)
    # What keeps state on its device, or may, has to stay awake.
    if event.activity is None or "sleep" in idling.warned or step.act is not ExpiryAction.NOTHING:
        return step
    why = texts.stays_awake(texts.USES_GPU)
    return ExpiryStep(ExpiryAction.WARN, why, step.again_in, warns_of="sleep")


def why_awake(idling: Idling, event: Observed, now: float) -> tuple[str, bool]:
    """Return why a kernel that is to go to disk has not, and whether it does once that is over.

    Empty where it is about to.
    """
    if event.busy:
        return texts.AT_WORK, True
    if now < idling.kept_until:
        return texts.KEPT_IN_USE, True
    if event.activity is not None and (event.activity.initialised is not False or idling.kept):
        return texts.USES_GPU, False
    return "", True


def _without_slice(idling: Idling, event: Observed, now: float) -> ExpiryStep:
    """Decide what to do where the lease of a kernel that may be working has been parked."""
    lease = event.lease
    if now < idling.parks_until and lease.state is LeaseState.PARKED:
        return ExpiryStep(ExpiryAction.PARK, is_parked=True)  # as this side has asked for
    is_asked = lease.asked_back not in (None, EndReason.YIELDED)
    if is_asked and event.activity is not None and event.activity.initialised:
        return ExpiryStep(ExpiryAction.END, f"{_USED_MEANWHILE} {lease.message}".rstrip())
    # Code that runs already cannot be held any more.
    return (
        ExpiryStep(ExpiryAction.NOTHING, again_in=idling.times.soon)
        if event.busy
        else ExpiryStep(ExpiryAction.PARK)
    )


def without_observation(idling: Idling, now: float) -> Idling:
    """Return what is known where the pool did not answer."""
    return _later(idling, idling.times.seldom, now)


def _later(idling: Idling, seconds: float, now: float) -> Idling:
    is_watched = idling.terms.revocable or idling.may_burst or idling.hibernates or now < idling.parks_until
    most = idling.times.revocable_every if is_watched else idling.times.seldom
    return replace(idling, observe_at=now + min(seconds, most))


def kept_for(idling: Idling, wanted: int, now: float) -> tuple[Idling, str]:
    """Count the kernel as in use for so many seconds at most; return what its user reads, too."""
    idling = replace(idling, gives_back=False, observe_at=now)
    if not idling.terms.can_be_kept and idling.sleeps_after is None:
        return idling, texts.NO_IDLE_LIMIT
    seconds, answer = expiry_policy.keep(idling.terms, wanted, now)
    return replace(idling, kept_until=now + seconds), answer


def given_back(idling: Idling, activity: Activity, now: float) -> tuple[Idling, str]:
    """Let the slice go as soon as the kernel is idle; return what its user reads, too."""
    may_end = not expiry_policy.keeps_variables(activity)
    idling = replace(idling, gives_back=True, may_end=may_end, kept_until=0.0, observe_at=now)
    return idling, texts.GOES_ENDED if may_end else texts.GOES_PARKED


def not_parked(idling: Idling, now: float, *, is_refused: bool, is_unanswered: bool) -> Idling:
    """Leave alone a kernel that could not be parked, and for good what must stay on its device."""
    return replace(
        idling,
        postponed_until=now + idling.times.park_again,
        kept=idling.kept or is_refused,
        parks_until=now + idling.times.parks_within if is_unanswered else idling.parks_until,
        observe_at=now,
    )


def found_at_work(idling: Idling, now: float) -> Idling:
    """Begin to count anew how long the kernel has been idle."""
    return replace(idling, idle_since=now, observe_at=now)


def idle_state(
    idling: Idling, busy: bool, last_activity: float, activity: Activity | None, now: float
) -> IdleState:
    """Return what idleness will come to, by what was last seen of the kernel."""
    seen = observed(idling, busy, last_activity, activity)
    gives_back_at, ends = expiry_policy.given_back_at(idling.terms, seen)
    return IdleState(
        None if seen.busy else seen.idle_since,
        idling.kept_until or None,
        gives_back_at,
        ends,
        expiry_policy.yields_at(idling.terms, seen),
        _sleeps_at(idling, seen),
        idling.gives_back,
        expiry_policy.keep_at_most(idling.terms, now),
    )


def _sleeps_at(idling: Idling, seen: KernelObservation) -> float | None:
    """Return when a kernel is parked to go to disk; None where it works, or has something on its GPU."""
    after = idling.sleeps_once_idle_for
    if after is None or seen.busy or idling.kept or seen.activity.initialised:
        return None
    return max(seen.idle_since + after, seen.kept_until, seen.postponed_until)


def taken(reason: str | None, message: str = "") -> ExpiryStep:
    """Return what to do when the pool has taken the slice; ``message`` says why, where that is known."""
    if reason == EndReason.TAKEN.value and message:  # which says by whom and why
        return ExpiryStep(ExpiryAction.END, f"The kernel was ended. {message}", ended_as=reason)
    why = f": {why_over(reason)}" if reason else ""
    text = f"The kernel was ended, since its GPU slice is over{why}. {message}".rstrip()
    return ExpiryStep(ExpiryAction.END, text, ended_as=reason)
