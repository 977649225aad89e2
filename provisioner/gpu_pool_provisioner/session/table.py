"""The table of a session: which event is possible in which state, what it does, and where it leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpu_pool_provisioner.session import _asking as asking
from gpu_pool_provisioner.session import _keeping as keeping
from gpu_pool_provisioner.session import _life as life
from gpu_pool_provisioner.session import _sleeping as sleeping
from gpu_pool_provisioner.session import effects as do
from gpu_pool_provisioner.session import events as on
from gpu_pool_provisioner.session.session import ImpossibleEventError, Outcome, Session, State

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
    if after.state is not session.state and after.retry is session.retry:
        after = replace(after, retry=None)  # it is the state's, as all work is
    return after, tuple(effects)


_S: Final = State
#: Where a kernel that has its slice goes on.
_WITH_SLICE: Final = (_S.RUNNING, _S.ASKED_BACK)
_Column = Mapping[type[on.Event], Rule]


def _stays(state: State, *events: type[on.Event]) -> _Column:
    """Return that these events change nothing: they come too late, or too early."""
    return {event: Rule(life.nothing, (state,)) for event in events}


def _always(state: State) -> _Column:
    """Return what may happen at any time before the end."""
    return {
        on.CloseRequested: Rule(life.close, (_S.ENDED,)),
        on.Failed: Rule(life.failed, (_S.DOWN, _S.RESTARTING)),
        on.TimePassed: Rule(life.time_passed, (state, _S.ENDING)),
        on.LeaseSeen: Rule(life.lease_seen, (state,)),
        on.SizeChanged: Rule(life.size_changed, (state,)),
        on.SizePending: Rule(life.size_pending, (state,)),
        on.ExplanationWanted: Rule(asking.explanation_wanted, (state,)),
        on.PoolAway: Rule(asking.tried_again, (state,)),
    }


def _managed(state: State) -> _Column:
    """Return what the manager may say of a kernel that is not down."""
    return {
        on.RestartBegan: Rule(life.restart_began_unseen, (state,)),
        on.RestartExpected: Rule(life.restart_expected_unseen, (state,)),
        on.ManagerExpected: Rule(life.manager_expected, (state,)),
        on.ManagerCame: Rule(life.manager_came, (state,)),
    }


def _kernel(state: State) -> _Column:
    """Return what may happen while there is a kernel that has answered."""
    return {
        **_always(state),
        **_managed(state),
        on.Died: Rule(life.died, (_S.DOWN, _S.RESTARTING)),
        on.TermsOver: Rule(life.terms_over, (_S.ENDING,)),
        on.InterruptRequested: Rule(life.interrupt_kernel, (state,)),
        on.StopRequested: Rule(life.stop_kernel, (state,)),
        on.StartRequested: Rule(life.start_after_the_end, (_S.ENDING,)),
        **_stays(state, on.WorkSubmitted, on.LaunchPrepared),
    }


def _waiting(state: State) -> _Column:
    """Return what may happen while the lease is in the queue."""
    return {
        on.Granted: Rule(asking.granted, (_S.STARTING, _S.HELD)),
        on.Refused: Rule(asking.refused, (_S.WITHOUT_SLICE, _S.DOWN)),
        on.InterruptRequested: Rule(asking.give_up, (_S.WITHOUT_SLICE,)),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start_meanwhile, (state,)),
        on.LaunchPrepared: Rule(asking.launch_prepared, (state,)),
        on.WorkSubmitted: Rule(asking.explanation_wanted, (state,)),
    }


def _followed(state: State) -> _Column:
    """Return what is heard of a lease in the queue."""
    return {
        on.Positioned: Rule(asking.positioned, (state,)),
        on.LeftQueue: Rule(asking.left_queue, (state,)),
        on.Explained: Rule(asking.explained, (state,)),
        on.PoolAway: Rule(asking.away_in_queue, (state,)),
    }


def _sleeping(state: State) -> _Column:
    """Return what may happen to a kernel that is on disk, or on its way there or back."""
    return {
        **_kernel(state),
        on.StopRequested: Rule(life.stop_sleeping, (_S.DOWN, _S.RESTARTING)),
        on.InterruptRequested: Rule(sleeping.give_up, (state,)),
        on.WorkSubmitted: Rule(sleeping.work, (state,)),
        on.ResumeRequested: Rule(sleeping.resume, (state,)),
    }


_KEEPS_SLICE: Final[_Column] = {
    on.Observed: Rule(keeping.observed, (*_WITH_SLICE, _S.PARKING, _S.ENDING)),
    on.GiveBackRequested: Rule(keeping.give_back, (_S.ASKED_BACK,)),
    on.ResizeRequested: Rule(keeping.resize, (_S.RESIZING,)),
    on.SleepRequested: Rule(sleeping.sleep, (_S.PARKING,)),
}

TABLE: Final[Mapping[State, _Column]] = {
    _S.DOWN: {
        **_always(_S.DOWN),
        on.Failed: Rule(life.failed, (_S.DOWN,)),
        on.LeftFound: Rule(life.left_found, (_S.DOWN,)),
        on.StartRequested: Rule(life.start_first, (_S.ASKING, _S.HIBERNATED)),
        on.RestartBegan: Rule(life.restart_began, (_S.RESTARTING,)),
        on.RestartExpected: Rule(life.restart_expected, (_S.DOWN,)),
        **_stays(_S.DOWN, on.InterruptRequested, on.StopRequested, on.ManagerExpected, on.ManagerCame),
        **_stays(_S.DOWN, on.LaunchPrepared, on.PoolAway),
    },
    _S.ASKING: {
        **_always(_S.ASKING),
        **_managed(_S.ASKING),
        **_waiting(_S.ASKING),
        on.Queued: Rule(asking.queued, (_S.QUEUED,)),
        on.PoolAway: Rule(asking.away, (_S.ASKING, _S.WITHOUT_SLICE, _S.DOWN)),
    },
    _S.QUEUED: {
        **_always(_S.QUEUED),
        **_managed(_S.QUEUED),
        **_waiting(_S.QUEUED),
        **_followed(_S.QUEUED),
        on.ResizeRequested: Rule(asking.resize_queued, (_S.QUEUED_RESIZING,)),
    },
    _S.QUEUED_RESIZING: {
        **_always(_S.QUEUED_RESIZING),
        **_managed(_S.QUEUED_RESIZING),
        **{
            event: rule
            for event, rule in _waiting(_S.QUEUED_RESIZING).items()
            if event not in (on.Granted, on.Refused)
        },
        on.Resized: Rule(asking.queue_resized, (_S.QUEUED, _S.STARTING, _S.HELD)),
    },
    _S.HELD: {
        **_always(_S.HELD),
        **_managed(_S.HELD),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start_meanwhile, (_S.HELD,)),
        on.LaunchPrepared: Rule(asking.launch_held, (_S.STARTING,)),
        **_stays(_S.HELD, on.InterruptRequested, on.WorkSubmitted, on.PoolAway),
    },
    _S.STARTING: {
        **_always(_S.STARTING),
        **_managed(_S.STARTING),
        on.Launched: Rule(life.launched, (_S.STARTING,)),
        on.Ready: Rule(life.ready, (_S.RUNNING,)),
        on.NotReady: Rule(life.not_ready, (_S.DOWN, _S.RESTARTING)),
        on.NotStarted: Rule(life.not_started, (_S.ENDING,)),
        on.NotWoken: Rule(sleeping.not_continued, (_S.HIBERNATED,)),
        on.InterruptRequested: Rule(life.interrupt_start, (_S.STARTING,)),
        on.StopRequested: Rule(life.stop_starting, (_S.STARTING,)),
        on.StartRequested: Rule(life.start_after_the_end, (_S.ENDING,)),
        **_stays(_S.STARTING, on.WorkSubmitted, on.LaunchPrepared),
    },
    _S.RUNNING: {
        **_kernel(_S.RUNNING),
        **_KEEPS_SLICE,
        on.PoolAway: Rule(keeping.not_observed, (_S.RUNNING,)),
        on.Worked: Rule(keeping.worked, (_S.RUNNING,)),
        on.LeaseNews: Rule(keeping.asked_to_give_way, (_S.RUNNING,)),
        on.KeepRequested: Rule(keeping.keep, (_S.RUNNING,)),
    },
    _S.ASKED_BACK: {
        **_kernel(_S.ASKED_BACK),
        **_KEEPS_SLICE,
        on.PoolAway: Rule(keeping.not_observed, (_S.ASKED_BACK,)),
        on.KeepRequested: Rule(keeping.keep, _WITH_SLICE),
    },
    _S.RESIZING: {
        **_kernel(_S.RESIZING),
        on.Resized: Rule(keeping.resized, _WITH_SLICE),
        on.KeepRequested: Rule(keeping.keep, (_S.RESIZING,)),
        on.GiveBackRequested: Rule(keeping.give_back, (_S.RESIZING,)),
    },
    _S.PARKING: {
        **_kernel(_S.PARKING),
        on.FoundIdle: Rule(keeping.found_idle, (_S.PARKING, _S.ENDING, _S.RESUMING, *_WITH_SLICE)),
        on.FoundAtWork: Rule(keeping.found_at_work, (_S.ENDING, _S.RESUMING, *_WITH_SLICE)),
        on.Parked: Rule(keeping.parked, (_S.PARKED, _S.RESUMING)),
        on.NotNeeded: Rule(keeping.not_needed, (_S.RUNNING,)),
        on.NotParked: Rule(keeping.not_parked, (_S.RESUMING, *_WITH_SLICE)),
        on.PoolAway: Rule(keeping.away_while_parking, (_S.RESUMING, _S.HIBERNATING, *_WITH_SLICE)),
        on.WorkSubmitted: Rule(keeping.work_while_parking, (_S.PARKING,)),
    },
    _S.PARKED: {
        **_kernel(_S.PARKED),
        on.TimePassed: Rule(life.time_passed, (_S.PARKED, _S.ENDING, _S.HIBERNATING)),
        on.WorkSubmitted: Rule(keeping.work_while_parked, (_S.PARKED, _S.RESUMING)),
        on.ResumeRequested: Rule(keeping.resume, (_S.PARKED, _S.RESUMING)),
        on.ParkedAgain: Rule(keeping.parked_again, (_S.PARKED, _S.RESUMING)),
        on.PoolAway: Rule(keeping.away_while_parked, (_S.PARKED, _S.HIBERNATING)),
        on.Resumed: Rule(sleeping.resumed_parked, (_S.RUNNING, _S.PARKING)),
        on.SleepRequested: Rule(sleeping.sleep_parked, (_S.PARKED, _S.HIBERNATING)),
        on.LeaseNews: Rule(sleeping.lease_news, (_S.PARKED, _S.HIBERNATING)),
    },
    _S.HIBERNATING: {
        **_sleeping(_S.HIBERNATING),
        on.Hibernated: Rule(sleeping.hibernated, (_S.HIBERNATED, _S.WAKING)),
        on.NotHibernated: Rule(sleeping.not_hibernated, (_S.PARKED, _S.RESUMING)),
    },
    _S.HIBERNATED: {
        **_sleeping(_S.HIBERNATED),
        on.LaunchPrepared: Rule(sleeping.launch_prepared, (_S.HIBERNATED,)),
        on.WorkSubmitted: Rule(sleeping.goes_on, (_S.WAKING, _S.ASKING, _S.HIBERNATED)),
        on.ResumeRequested: Rule(sleeping.resume_hibernated, (_S.WAKING, _S.ASKING, _S.HIBERNATED)),
        on.LeaseNews: Rule(sleeping.lease_news, (_S.HIBERNATED,)),
    },
    _S.WAKING: {
        **_sleeping(_S.WAKING),
        on.Woken: Rule(sleeping.woken, (_S.PARKED, _S.RESUMING)),
        on.NotWoken: Rule(sleeping.not_woken, (_S.HIBERNATED,)),
    },
    _S.RESUMING: {
        **_kernel(_S.RESUMING),
        **_followed(_S.RESUMING),
        on.Queued: Rule(keeping.queued_to_resume, (_S.RESUMING,)),
        on.Granted: Rule(keeping.granted_to_resume, (_S.RESUMING,)),
        on.Resumed: Rule(keeping.resumed, (_S.RUNNING,)),
        on.InterruptRequested: Rule(keeping.give_up_resuming, (_S.PARKED,)),
        on.ResumeRequested: Rule(keeping.resume_meanwhile, (_S.RESUMING,)),
        on.SleepRequested: Rule(sleeping.sleep_resuming, (_S.PARKED,)),
    },
    _S.RESTARTING: {
        **_always(_S.RESTARTING),
        on.StartRequested: Rule(life.start, (_S.ASKING,)),
        on.RestartExpected: Rule(life.restart_expected, (_S.RESTARTING,)),
        **_stays(_S.RESTARTING, on.RestartBegan, on.InterruptRequested, on.StopRequested),
        **_stays(_S.RESTARTING, on.ManagerExpected, on.ManagerCame, on.LaunchPrepared, on.PoolAway),
    },
    _S.WITHOUT_SLICE: {
        **_always(_S.WITHOUT_SLICE),
        **_managed(_S.WITHOUT_SLICE),
        on.WorkSubmitted: Rule(life.work_without_slice, (_S.WITHOUT_SLICE, _S.ASKING)),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start, (_S.ASKING,)),
        on.LaunchPrepared: Rule(asking.launch_prepared, (_S.WITHOUT_SLICE,)),
        **_stays(_S.WITHOUT_SLICE, on.InterruptRequested, on.PoolAway),
    },
    _S.ENDING: {
        **_always(_S.ENDING),
        **_managed(_S.ENDING),
        on.Gone: Rule(life.gone, (_S.WITHOUT_SLICE, _S.ASKING, _S.ENDED)),
        on.StartRequested: Rule(life.start_once_ended, (_S.ENDING,)),
        on.LaunchPrepared: Rule(life.prepared_meanwhile, (_S.ENDING,)),
        **_stays(_S.ENDING, on.InterruptRequested, on.StopRequested, on.WorkSubmitted),
        **_stays(_S.ENDING, on.Died, on.TermsOver),
    },
    _S.ENDED: _stays(
        _S.ENDED,
        *(on.StartRequested, on.InterruptRequested, on.StopRequested, on.RestartBegan, on.RestartExpected),
        *(on.ManagerExpected, on.ManagerCame, on.CloseRequested, on.TimePassed, on.Failed, on.LaunchPrepared),
        *(on.LeaseSeen, on.SizeChanged, on.SizePending, on.ExplanationWanted, on.PoolAway),
    ),
}
