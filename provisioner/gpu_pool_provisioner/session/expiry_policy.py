"""How long a kernel keeps its slice: pure decisions by the terms of its lease.

Times are seconds of one clock, any clock.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_pool_client import Activity, EndReason, Terms, WhenIdle, format_duration
from gpu_pool_client._leases import gives_way_after
from gpu_pool_provisioner.session.times import DEFAULT, SessionTimes


class ExpiryAction(enum.Enum):
    """What to do with a kernel's slice."""

    NOTHING = "nothing"
    WARN = "warn"
    PARK = "park"
    END = "end"


#: What comes before nothing, where several are due.
_FIRST: Final = (ExpiryAction.END, ExpiryAction.PARK, ExpiryAction.WARN)

_LEASE_ENDS: Final = "This GPU slice ends in {{}}, and the kernel with it, because {why}. Save what you need."
#: How long before the end of a job whoever runs something in it is warned, in seconds.
_JOB_WARNINGS: Final = (600.0, 120.0)
_JOB_ENDS: Final = (
    "{job} ends in {left}, and this kernel with it: the time limit of the job is reached then. Save what you "
    "need."
)
#: What such warnings are remembered as, begins with this.
_OF_JOB: Final = "job "
#: Seconds by which the end of a job is another one: by less it differs since clocks do.
_MOVED: Final = 30.0
LEASE_ENDED: Final = "The kernel was ended: its GPU slice had been held for as long as its course allows."
_ENDED_AS_ASKED: Final = "The kernel was ended: its GPU slice had been held for as long as was asked for."
_IDLE_ENDS: Final = (
    "This kernel has been idle for a long time and ends in {}. "
    'If you still use it, run a cell or "%gpu keep 1h".'
)
_UNSEEN_ENDS: Final = (
    "Nothing has been run in this kernel for a long time, and it ends in {}. Whether anything still computes "
    "in it cannot be seen on this GPU: NVIDIA's driver does not say it of a MIG instance. If something does, "
    'or you still use it, run a cell or "%gpu keep 1h".'
)
IDLE_ENDED: Final = "The kernel was ended: it had been idle for longer than its course allows."
ASKED_BACK: Final = "The kernel was ended: it became idle, and its GPU slice had been asked back."


@dataclass(frozen=True, slots=True)
class KernelObservation:
    """What has been seen of a kernel."""

    #: Whether it works on what somebody submitted.
    busy: bool
    #: When it last began or ended such work.
    idle_since: float
    #: Until when its user has said that it is in use.
    kept_until: float = 0.0
    #: Before when it is left alone, since it could not be parked.
    postponed_until: float = 0.0
    #: What its process does with its device.
    activity: Activity = field(default_factory=Activity)
    #: Whether what it keeps on its device cannot be moved although it seemed so.
    kept: bool = False
    #: Whether its slice is to go as soon as it is idle.
    asked_back: bool = False
    #: Whether somebody waits for its slice, so that it goes if the kernel gives way.
    yields: bool = False
    #: What its user has been warned of already.
    warned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ExpiryStep:
    """What to do now, and when to look again."""

    act: ExpiryAction
    #: What its user reads: a warning, or why the kernel was ended.
    message: str = ""
    #: Seconds until the next look, at most.
    again_in: float = math.inf
    #: What to remember as warned of.
    warns_of: str = ""
    #: How the lease's end is recorded.
    reason: EndReason = EndReason.RELEASED
    #: Whether an end is for idleness, so that the kernel must turn out to be idle.
    if_idle: bool = False
    #: Whether its slice has gone already, because it was asked to be parked and the answer was lost.
    is_parked: bool = False
    #: Whether it is parked only because somebody waits: not where nobody does any more.
    yields: bool = False
    #: Whether it is parked to go to disk at once, whoever waits.
    sleeps: bool = False
    #: The value of the ``EndReason`` with which the pool has ended the lease already, if it has.
    ended_as: str | None = None


_END_OF_LEASE: Final = ExpiryStep(ExpiryAction.END, LEASE_ENDED, reason=EndReason.TOO_LONG)
_END_AS_SAID: Final = replace(_END_OF_LEASE, message=_ENDED_AS_ASKED)
_END_AS_IDLE: Final = ExpiryStep(ExpiryAction.END, IDLE_ENDED, reason=EndReason.IDLE, if_idle=True)
# Its user, or an administrator, knows that it is in the way, and has been told what it comes to.
_END_AS_ASKED: Final = ExpiryStep(ExpiryAction.END, ASKED_BACK, reason=EndReason.IDLE, if_idle=True)


def idle_at(terms: Terms, seen: KernelObservation) -> float | None:
    """Return when the kernel will have been idle for as long as it may; None while it works."""
    if terms.idle_limit is None or seen.busy:
        return None
    return max(seen.idle_since + terms.idle_limit, seen.kept_until, seen.postponed_until)


def given_back_at(terms: Terms, seen: KernelObservation) -> tuple[float | None, bool]:
    """Return when an idle kernel loses its slice if nothing is done with it, and whether it is ended then."""
    at = idle_at(terms, seen)
    if at is None or _can_be_parked(seen):
        return at, False
    if terms.when_idle is WhenIdle.KEEP or _may_work(terms, seen):
        return None, False
    return at, True


def gives_way_at(terms: Terms, seen: KernelObservation) -> float | None:
    """Return when the kernel will have been idle for long enough to give way to anybody; None for never.

    Only what keeps its variables gives way, and never what its user has said to be in use. To whom it does is
    the pool's to say, which knows who has waited for how long.
    """
    if terms.yield_after is None:
        return None
    return _gives_way_once_idle_for(gives_way_after(terms.yield_after), seen)


def gives_way(terms: Terms, seen: KernelObservation, now: float) -> bool:
    """Whether it may be parked now because somebody waits: it is idle, and its variables are kept."""
    at = gives_way_at(terms, seen)
    return at is not None and now >= at and _can_be_parked(seen)


def yields_at(terms: Terms, seen: KernelObservation) -> float | None:
    """Return from when on its slice goes to whoever waits; None for never, as far as is known now.

    It may go sooner to somebody who has waited for long.
    """
    if terms.yield_after is None or not _can_be_parked(seen):
        return None
    return _gives_way_once_idle_for(terms.yield_after, seen)


def _gives_way_once_idle_for(seconds: float, seen: KernelObservation) -> float | None:
    if seen.busy or seen.kept:
        return None
    return max(seen.idle_since + seconds, seen.kept_until, seen.postponed_until)


def keeps_variables(activity: Activity) -> bool:
    """Whether a kernel that does so with its device can be parked, as far as that can be known before."""
    return activity.initialised is False or (activity.movable and activity.working is False)


def keep_at_most(terms: Terms, now: float) -> float:
    """Return for how many seconds an idle kernel's slice may be kept."""
    left = terms.keep_at_most if terms.ends_at is None else terms.ends_at - now
    return max(0.0, min(terms.keep_at_most, left))


def keep(terms: Terms, wanted: float, now: float) -> tuple[float, str]:
    """Return for how long a kernel counts as in use whose user asks for so many seconds, and the answer."""
    seconds = min(wanted, terms.keep_at_most)
    left = None if terms.ends_at is None else max(0.0, terms.ends_at - now)
    if left is not None and left < seconds:
        answer = (
            f"This kernel keeps its GPU slice for {format_duration(left)} only, however long it is in use: "
            f"its lease ends then, because {terms.why_it_ends}."
        )
        return left, answer
    most = "" if seconds == wanted else ", the most that its course allows at once"
    return seconds, f"This kernel keeps its GPU slice for {format_duration(seconds)}{most}."


def step(terms: Terms, seen: KernelObservation, now: float, times: SessionTimes = DEFAULT) -> ExpiryStep:
    """Decide what to do. The end of the lease comes first; then idleness, which the device overrules."""
    due = [_end_of_lease(terms, seen, now), _asked_back(seen, now, times), _end_as_idle(terms, seen, now)]
    due += [_gives_way(terms, seen, now), _end_of_job(terms, seen, now)]
    first = next((each for act in _FIRST for each in due if each.act is act), None)
    first = first or min(due, key=lambda each: each.again_in)
    return replace(first, again_in=min(times.seldom, max(times.often, first.again_in)))


def by_clock(terms: Terms, ahead: float) -> Terms:
    """Return terms with their ends by a clock that is so many seconds ahead of Unix time."""
    if terms.over_at is None:
        return terms
    ends_at, job_ends_at = (None if at is None else at + ahead for at in (terms.ends_at, terms.job_ends_at))
    return replace(terms, ends_at=ends_at, job_ends_at=job_ends_at)


def warning_at_start(terms: Terms, now: float) -> ExpiryStep:
    """Decide what is said of the lease's end to whoever gets the slice now: a warning, or nothing."""
    seen = KernelObservation(busy=True, idle_since=now)
    due = [_end_of_lease(terms, seen, now), _end_of_job(terms, seen, now)]
    return next((each for each in due if each.act is ExpiryAction.WARN), ExpiryStep(ExpiryAction.NOTHING))


def _end_of_lease(terms: Terms, seen: KernelObservation, now: float) -> ExpiryStep:
    if terms.ends_at is None:
        return ExpiryStep(ExpiryAction.NOTHING)
    ending = _END_AS_SAID if terms.ends_as_asked else _END_OF_LEASE
    warning = _LEASE_ENDS.format(why=terms.why_it_ends)
    return _warn_then_end(terms, seen, now, terms.ends_at, warning, ending)


def _end_of_job(terms: Terms, seen: KernelObservation, now: float) -> ExpiryStep:
    """Decide what is said of the end of its job, which whoever runs that brings about."""
    if terms.job_ends_at is None or now >= terms.job_ends_at:
        return ExpiryStep(ExpiryAction.NOTHING)
    left = terms.job_ends_at - now
    again_in = left - max((before for before in _JOB_WARNINGS if before < left), default=0.0)
    said = [before for before in _JOB_WARNINGS if left <= before]
    if said and (warning := f"{_OF_JOB}{said[-1]:g}") not in seen.warned:
        message = _JOB_ENDS.format(job=terms.job, left=format_duration(math.ceil(left / 10) * 10))
        return ExpiryStep(ExpiryAction.WARN, message, again_in, warning)
    return ExpiryStep(ExpiryAction.NOTHING, again_in=again_in)


def warned_of_now(warned: frozenset[str], before: Terms, after: Terms) -> frozenset[str]:
    """Return what a kernel's user is warned of after its terms have changed: not of a job's former end."""
    ends = before.job_ends_at, after.job_ends_at
    if None in ends or abs((ends[0] or 0.0) - (ends[1] or 0.0)) > _MOVED:
        return frozenset(each for each in warned if not each.startswith(_OF_JOB))
    return warned


def _asked_back(seen: KernelObservation, now: float, times: SessionTimes) -> ExpiryStep:
    if not seen.asked_back or seen.busy or seen.activity.working:
        return ExpiryStep(ExpiryAction.NOTHING)
    going, pause = _END_AS_ASKED, times.pause
    if _can_be_parked(seen):
        going = ExpiryStep(ExpiryAction.PARK)
    elif seen.activity.working is None:
        pause = times.may_work
    at = max(seen.idle_since + pause, seen.postponed_until)
    return going if now >= at else ExpiryStep(ExpiryAction.NOTHING, again_in=at - now)


def _gives_way(terms: Terms, seen: KernelObservation, now: float) -> ExpiryStep:
    if seen.yields and not seen.asked_back and gives_way(terms, seen, now):
        return ExpiryStep(ExpiryAction.PARK, yields=True)
    at = gives_way_at(terms, seen)
    if at is None or now >= at:
        # Whoever works now will not have been idle for so long any sooner.
        after, works = terms.yield_after, seen.busy or seen.activity.working
        again_in = gives_way_after(after) if after is not None and works else math.inf
        return ExpiryStep(ExpiryAction.NOTHING, again_in=again_in)
    return ExpiryStep(ExpiryAction.NOTHING, again_in=at - now)


def _end_as_idle(terms: Terms, seen: KernelObservation, now: float) -> ExpiryStep:
    at = idle_at(terms, seen)
    if at is None:
        # Whoever works now will not have been idle for so long any sooner.
        return ExpiryStep(ExpiryAction.NOTHING, again_in=terms.idle_limit or math.inf)
    if _can_be_parked(seen):
        return (
            ExpiryStep(ExpiryAction.PARK)
            if now >= at
            else ExpiryStep(ExpiryAction.NOTHING, again_in=at - now)
        )
    if terms.when_idle is WhenIdle.KEEP or _may_work(terms, seen):
        return ExpiryStep(ExpiryAction.NOTHING)
    warning = _UNSEEN_ENDS if seen.activity.unmeasured else _IDLE_ENDS
    return _warn_then_end(terms, seen, now, at, warning, _END_AS_IDLE)


def _may_work(terms: Terms, seen: KernelObservation) -> bool:
    """Whether a device may work for an idle kernel.

    Unknown counts as work: nothing is taken from a training that merely cannot be
    seen. Of MIG instances, and of pods on nodes without an agent, it would never be known, so there what is
    submitted decides.
    """
    is_never_known = terms.in_pod or seen.activity.unmeasured
    return bool(seen.activity.working) if is_never_known else seen.activity.working is not False


def _can_be_parked(seen: KernelObservation) -> bool:
    """Whether its variables are kept if its slice goes: nothing of it is on its device, or can be moved."""
    return seen.activity.initialised is False or _is_movable(seen)


def _is_movable(seen: KernelObservation) -> bool:
    """Whether what it keeps on its device may be moved away: it can be, and nothing works on it."""
    return seen.activity.movable and seen.activity.working is False and not seen.kept


def _warn_then_end(
    terms: Terms, seen: KernelObservation, now: float, at: float, warning: str, ending: ExpiryStep
) -> ExpiryStep:
    if now >= at:
        return ending
    if now < at - terms.warn_before:
        return ExpiryStep(ExpiryAction.NOTHING, again_in=at - terms.warn_before - now)
    if warning in seen.warned:
        return ExpiryStep(ExpiryAction.NOTHING, again_in=at - now)
    return ExpiryStep(ExpiryAction.WARN, warning.format(format_duration(at - now)), at - now, warning)
