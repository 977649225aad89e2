"""The session and its table: which event is possible in which state, what it does, and where it leads."""

# ruff: noqa: ARG001 - what acts has one signature

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gpu_pool_client import EndReason, Lease, LeaseState
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session import texts
from gpu_pool_provisioner.session.states import State
from gpu_pool_provisioner.slice_state import SliceEnd

#: Seconds by which the pool's deadline is later than ours, which ends the kernel before its lease;
#: also what a relaunch may take.
MARGIN: Final = 5.0
#: Seconds in which the end of a kernel's process is noticed.
_NOTICED_WITHIN: Final = 1.0


class ImpossibleEventError(Exception):
    """The event cannot happen in this state; the text names both."""


@dataclass(frozen=True, slots=True)
class Session:
    """One kernel's life so far. Times are seconds of one clock, any clock."""

    #: The slice that it has, or asks for: ``2%``.
    size: str
    #: Seconds for which its death is forgiven, so that it can be launched again on its slice.
    grace: float
    state: State = State.DOWN
    #: Whether it was ever started.
    is_begun: bool = False
    #: Whether it runs in a pod, as far as its lease is known.
    in_pod: bool = False
    #: Whether, since the last start, the slice was granted, the kernel had a process, and it has answered.
    is_granted: bool = False
    is_launched: bool = False
    has_run: bool = False
    #: Whether it was stopped while it started: then it is not launched once more.
    is_stopped: bool = False
    #: Why the last start came to nothing.
    error: Exception | None = None
    #: Why it has no slice, until it has one again, however many cells have been told.
    end: SliceEnd | None = None
    #: Why a cell did not run since the kernel was ended, until somebody has read it.
    untold: str = ""
    #: How the previous kernel ended, where nobody here ended it.
    exit_message: str = ""
    #: Where it goes once it has ended, and how its lease ends then; None where that goes on.
    then: State = State.DOWN
    ends_as: EndReason | None = None
    #: When the queue is given up; None for never.
    gives_up_at: float | None = None
    #: When it is closed unless somebody comes for it; None for never.
    closes_at: float | None = None
    #: Seconds for which the end of the kernel is that of a restart, until its start.
    restarted_within: float = 0.0

    @property
    def wakes_at(self) -> float | None:
        """When ``TimePassed`` is due; None for never."""
        due = [self.closes_at]
        if self.state is State.QUEUED:
            due.append(self.gives_up_at)
        return min((each for each in due if each is not None), default=None)

    @property
    def stands_in(self) -> bool:
        """Whether the proxy is all there is of the kernel: it lives, and has no process."""
        in_its_place = self.state.is_before_kernel or self.state is State.ENDING
        return in_its_place or (self.in_pod and self.state is State.RUNNING)

    @property
    def is_over(self) -> bool:
        """Whether a start has come to its end, without a kernel or with one that has ended."""
        return self.state in (State.WITHOUT_SLICE, State.DOWN, State.RESTARTING, State.ENDED)


Outcome = tuple[Session, Sequence[do.Effect]]
#: Decides what an event does. What it is given is of the type for which it stands in the table.
Act = Callable[[Session, Any, float], Outcome]


@dataclass(frozen=True, slots=True)
class Rule:
    """What an event does in a state, and the states to which it may lead."""

    act: Act
    to: tuple[State, ...]


def step(session: Session, event: on.Event, now: float) -> tuple[Session, tuple[do.Effect, ...]]:
    """Return the session after an event, and what is to be done, in order.

    Raises ``ImpossibleEventError`` where the table has no such pair.
    """
    rule = TABLE[session.state].get(type(event))
    if rule is None:
        raise ImpossibleEventError(
            f"{type(event).__name__} cannot happen to a kernel's session that is {session.state.value}."
        )
    after, effects = rule.act(session, event, now)
    if after.state not in rule.to:
        raise AssertionError(
            f"{type(event).__name__} must not lead from {session.state.value} to {after.state.value}."
        )
    return after, tuple(effects)


# -- What events do -----------------------------------------------------------


def _nothing(session: Session, event: on.Event, now: float) -> Outcome:
    return session, ()


def _start(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Begin to answer for the kernel."""
    # Whoever read a lease may have done so before the previous kernel, in its last moment, parked it.
    asked, effects = _with_lease(_begun(session, event), None if session.is_begun else event.lease)
    return asked, (do.Answer(), *effects)


def _start_again(session: Session, event: on.StartRequested, now: float) -> Outcome:
    return _start(session, replace(event, lease=None), now)


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


def _start_meanwhile(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Go on with what is under way."""
    return _begun(session, event), (do.Answer(),)


def _start_after_the_end(session: Session, event: on.StartRequested, now: float) -> Outcome:
    """Start it once the previous kernel has ended, which is about to be noticed."""
    ending = replace(_begun(session, event), state=State.ENDING, then=State.ASKING, ends_as=None)
    return ending, (do.EndKernel(_NOTICED_WITHIN),)


def _start_once_ended(session: Session, event: on.StartRequested, now: float) -> Outcome:
    return replace(_begun(session, event), then=State.ASKING), ()


def _with_lease(session: Session, lease: Lease | None) -> Outcome:
    if lease is None or lease.state not in (LeaseState.WAITING, LeaseState.HELD):
        return replace(session, state=State.ASKING), (do.Ask(),)
    if lease.state is LeaseState.WAITING:
        return _queued(session, on.Queued(lease), 0.0)
    return _granted(session, on.Granted(lease), 0.0)


def _queued(session: Session, event: on.Queued, now: float) -> Outcome:
    queued = replace(session, state=State.QUEUED, in_pod=event.lease.terms.in_pod)
    return queued, (do.AwaitGrant(event.lease),)


def _granted(session: Session, event: on.Granted, now: float) -> Outcome:
    starting = replace(
        session, state=State.STARTING, in_pod=event.lease.terms.in_pod, is_granted=True, gives_up_at=None
    )
    return starting, (do.Launch(event.lease),)


def _refused(session: Session, event: on.Refused, now: float) -> Outcome:
    """There is no slice for it: say so, and let the next cell ask again."""
    end = SliceEnd(getattr(event.error, "reason", None), str(event.error))
    without = replace(session, state=State.WITHOUT_SLICE, end=end, error=event.error)
    return without, _cells_fail(texts.not_run(str(event.error)))


def _give_up(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    end = SliceEnd(None, texts.left_queue(session.size))
    without = replace(session, state=State.WITHOUT_SLICE, end=end)
    return without, _cells_fail(texts.gave_up(session.size))


def _cells_fail(why: str) -> tuple[do.Effect, ...]:
    return do.Answer(), do.Refuse(why), do.Show(""), do.GiveBack(EndReason.WITHDRAWN)


def _interrupt_start(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.Refuse(texts.interrupted(session.size), "KeyboardInterrupt"),)


def _interrupt_kernel(session: Session, event: on.InterruptRequested, now: float) -> Outcome:
    return session, (do.InterruptKernel(),)


def _launched(session: Session, event: on.Launched, now: float) -> Outcome:
    return replace(session, is_launched=True), ()


def _ready(session: Session, event: on.Ready, now: float) -> Outcome:
    running = replace(session, state=State.RUNNING, has_run=True, end=None, exit_message="")
    return running, (do.Relay(session.exit_message), do.Watch(event.lease))


def _not_ready(session: Session, event: on.NotReady, now: float) -> Outcome:
    end = SliceEnd(getattr(event.error, "reason", None), str(event.error))
    down, effects = _down(replace(session, end=end, error=event.error), now)
    return down, (do.Refuse(texts.not_run(str(event.error))), *effects)


def _not_started(session: Session, event: on.NotStarted, now: float) -> Outcome:
    end = SliceEnd(EndReason.NOT_READY.value, str(event.error))
    failed = replace(session, end=end, error=event.error)
    return _without_kernel(failed, texts.not_run(str(event.error)), EndReason.NOT_READY)


def _terms_over(session: Session, event: on.TermsOver, now: float) -> Outcome:
    why = event.why
    over = replace(session, end=SliceEnd(why.ended_as or why.reason.value, why.message))
    return _without_kernel(over, texts.gone(why.message), why.reason)


def _without_kernel(session: Session, untold: str, reason: EndReason) -> Outcome:
    """End the kernel and its lease; the next cell is told why, the one after starts anew."""
    ending = replace(session, state=State.ENDING, then=State.WITHOUT_SLICE, ends_as=reason, untold=untold)
    return ending, (do.HoldUnanswered(), do.EndKernel())


def _died(session: Session, event: on.Died, now: float) -> Outcome:
    return _down(replace(session, exit_message=event.message), now)


def _stop_waiting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    """There is nothing to end. Its place in the queue is kept, for it may be a restart."""
    down, effects = _down(replace(session, is_stopped=True), now)
    return down, (do.Drop(), *effects)


def _stop_starting(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return replace(session, is_stopped=True), (do.Drop(), do.KillKernel())


def _stop_kernel(session: Session, event: on.StopRequested, now: float) -> Outcome:
    return session, (do.KillKernel(),)


def _down(session: Session, now: float) -> Outcome:
    """Hold what is submitted for a kernel that may be launched again; close if nobody does."""
    is_restarted = session.restarted_within == math.inf
    state = State.RESTARTING if is_restarted else State.DOWN
    closes_at = None if is_restarted else _closes_at(session, now)
    return replace(session, state=state, closes_at=closes_at), (do.LetGo(), do.HoldSilently())


def _closes_at(session: Session, now: float) -> float:
    return now + session.restarted_within + session.grace + MARGIN


def _restart_began(session: Session, event: on.RestartBegan, now: float) -> Outcome:
    return replace(session, state=State.RESTARTING, restarted_within=math.inf, closes_at=None), ()


def _restart_began_unseen(session: Session, event: on.RestartBegan, now: float) -> Outcome:
    """Its process has ended, which is noticed here later."""
    return replace(session, restarted_within=math.inf), ()


def _restart_expected(session: Session, event: on.RestartExpected, now: float) -> Outcome:
    expected = replace(session, restarted_within=event.within)
    return replace(expected, closes_at=_closes_at(expected, now)), ()


def _restart_expected_unseen(session: Session, event: on.RestartExpected, now: float) -> Outcome:
    return replace(session, restarted_within=event.within), ()


def _manager_expected(session: Session, event: on.ManagerExpected, now: float) -> Outcome:
    return replace(session, closes_at=now + event.within), ()


def _manager_came(session: Session, event: on.ManagerCame, now: float) -> Outcome:
    return replace(session, closes_at=None), ()


def _gone(session: Session, event: on.Gone, now: float) -> Outcome:
    if session.then is State.ENDED:
        ended = replace(session, state=State.ENDED, closes_at=None)
        return ended, (do.Drop(), do.Close(), do.GiveBack(EndReason.WITHDRAWN, ask_anew=False))
    back = (do.GiveBack(session.ends_as),) if session.ends_as is not None else ()
    if session.then is State.ASKING:
        asking, effects = _with_lease(session, None)
        return asking, (do.LetGo(), *back, do.Answer(), *effects)
    without = replace(session, state=State.WITHOUT_SLICE)
    return without, (do.LetGo(), *back, do.Answer(), do.ReportHeldCode(), do.Show(""))


def _code_without_slice(session: Session, event: on.CodeSubmitted, now: float) -> Outcome:
    if session.untold:
        return replace(session, untold=""), (do.Refuse(session.untold),)
    return _with_lease(replace(session, error=None), None)


def _time_passed(session: Session, event: on.TimePassed, now: float) -> Outcome:
    if session.closes_at is not None and now >= session.closes_at:
        # Nobody launches the kernel again, or manages it.
        ending = replace(session, state=State.ENDING, then=State.ENDED, closes_at=None)
        return ending, (do.KillKernel(), do.EndKernel(at_most=MARGIN))
    if session.state is State.QUEUED and session.gives_up_at is not None and now >= session.gives_up_at:
        return replace(session, gives_up_at=None), (do.AskLastTime(),)
    return session, ()


def _close(session: Session, event: on.CloseRequested, now: float) -> Outcome:
    return replace(session, state=State.ENDED, closes_at=None), (do.Drop(), do.Close())


def _failed(session: Session, event: on.Failed, now: float) -> Outcome:
    """Let no mistake of ours leave cells waiting for ever."""
    down, effects = _down(session, now)
    text = f"The kernel proxy failed: {event.error!r}."
    return down, (do.Refuse(texts.not_run(text)), do.KillKernel(), *effects)


# -- The table ----------------------------------------------------------------

_S: Final = State
_Column = Mapping[type[on.Event], Rule]


def _stays(state: State, *events: type[on.Event]) -> _Column:
    """Return that these events change nothing: they come too late, or too early."""
    return {event: Rule(_nothing, (state,)) for event in events}


def _always(state: State) -> _Column:
    """Return what may happen at any time before the end."""
    return {
        on.CloseRequested: Rule(_close, (_S.ENDED,)),
        on.Failed: Rule(_failed, (_S.DOWN, _S.RESTARTING)),
        on.TimePassed: Rule(_time_passed, (state, _S.ENDING)),
    }


def _managed(state: State) -> _Column:
    """Return what the manager may say of a kernel that is not down."""
    return {
        on.RestartBegan: Rule(_restart_began_unseen, (state,)),
        on.RestartExpected: Rule(_restart_expected_unseen, (state,)),
        on.ManagerExpected: Rule(_manager_expected, (state,)),
        on.ManagerCame: Rule(_manager_came, (state,)),
    }


TABLE: Final[Mapping[State, _Column]] = {
    _S.DOWN: {
        **_always(_S.DOWN),
        on.Failed: Rule(_failed, (_S.DOWN,)),
        on.StartRequested: Rule(_start, (_S.ASKING, _S.QUEUED, _S.STARTING)),
        on.RestartBegan: Rule(_restart_began, (_S.RESTARTING,)),
        on.RestartExpected: Rule(_restart_expected, (_S.DOWN,)),
        **_stays(_S.DOWN, on.InterruptRequested, on.StopRequested, on.ManagerExpected, on.ManagerCame),
    },
    _S.ASKING: {
        **_always(_S.ASKING),
        **_managed(_S.ASKING),
        on.Queued: Rule(_queued, (_S.QUEUED,)),
        on.Granted: Rule(_granted, (_S.STARTING,)),
        on.Refused: Rule(_refused, (_S.WITHOUT_SLICE,)),
        on.InterruptRequested: Rule(_give_up, (_S.WITHOUT_SLICE,)),
        on.StopRequested: Rule(_stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(_start_meanwhile, (_S.ASKING,)),
        **_stays(_S.ASKING, on.CodeSubmitted),
    },
    _S.QUEUED: {
        **_always(_S.QUEUED),
        **_managed(_S.QUEUED),
        on.Granted: Rule(_granted, (_S.STARTING,)),
        on.Refused: Rule(_refused, (_S.WITHOUT_SLICE,)),
        on.InterruptRequested: Rule(_give_up, (_S.WITHOUT_SLICE,)),
        on.StopRequested: Rule(_stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(_start_meanwhile, (_S.QUEUED,)),
        **_stays(_S.QUEUED, on.CodeSubmitted),
    },
    _S.STARTING: {
        **_always(_S.STARTING),
        **_managed(_S.STARTING),
        on.Launched: Rule(_launched, (_S.STARTING,)),
        on.Ready: Rule(_ready, (_S.RUNNING,)),
        on.NotReady: Rule(_not_ready, (_S.DOWN, _S.RESTARTING)),
        on.NotStarted: Rule(_not_started, (_S.ENDING,)),
        on.InterruptRequested: Rule(_interrupt_start, (_S.STARTING,)),
        on.StopRequested: Rule(_stop_starting, (_S.STARTING,)),
        on.StartRequested: Rule(_start_after_the_end, (_S.ENDING,)),
        **_stays(_S.STARTING, on.CodeSubmitted),
    },
    _S.RUNNING: {
        **_always(_S.RUNNING),
        **_managed(_S.RUNNING),
        on.Died: Rule(_died, (_S.DOWN, _S.RESTARTING)),
        on.TermsOver: Rule(_terms_over, (_S.ENDING,)),
        on.InterruptRequested: Rule(_interrupt_kernel, (_S.RUNNING,)),
        on.StopRequested: Rule(_stop_kernel, (_S.RUNNING,)),
        on.StartRequested: Rule(_start_after_the_end, (_S.ENDING,)),
        **_stays(_S.RUNNING, on.CodeSubmitted),
    },
    _S.RESTARTING: {
        **_always(_S.RESTARTING),
        on.StartRequested: Rule(_start_again, (_S.ASKING,)),
        on.RestartExpected: Rule(_restart_expected, (_S.RESTARTING,)),
        **_stays(_S.RESTARTING, on.RestartBegan, on.InterruptRequested, on.StopRequested),
        **_stays(_S.RESTARTING, on.ManagerExpected, on.ManagerCame),
    },
    _S.WITHOUT_SLICE: {
        **_always(_S.WITHOUT_SLICE),
        **_managed(_S.WITHOUT_SLICE),
        on.CodeSubmitted: Rule(_code_without_slice, (_S.WITHOUT_SLICE, _S.ASKING)),
        on.StopRequested: Rule(_stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(_start_again, (_S.ASKING,)),
        **_stays(_S.WITHOUT_SLICE, on.InterruptRequested),
    },
    _S.ENDING: {
        **_always(_S.ENDING),
        **_managed(_S.ENDING),
        on.Gone: Rule(_gone, (_S.WITHOUT_SLICE, _S.ASKING, _S.ENDED)),
        on.StartRequested: Rule(_start_once_ended, (_S.ENDING,)),
        **_stays(_S.ENDING, on.InterruptRequested, on.StopRequested, on.CodeSubmitted),
    },
    _S.ENDED: _stays(
        _S.ENDED,
        *(on.StartRequested, on.InterruptRequested, on.StopRequested, on.RestartBegan, on.RestartExpected),
        *(on.ManagerExpected, on.ManagerCame, on.CloseRequested, on.TimePassed, on.Failed),
    ),
}
