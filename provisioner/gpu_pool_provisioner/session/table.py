"""The table of a session: which event is possible in which state, what it does, and where it leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool_provisioner.session import _keeping as keeping
from gpu_pool_provisioner.session import _life as life
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
        **_stays(state, on.WorkSubmitted),
    }


_KEEPS_SLICE: Final[_Column] = {
    on.Looked: Rule(keeping.looked, (*_WITH_SLICE, _S.PARKING, _S.ENDING)),
    on.GiveBackRequested: Rule(keeping.give_back, (_S.ASKED_BACK,)),
    on.ResizeRequested: Rule(keeping.resize, (_S.RESIZING,)),
}

TABLE: Final[Mapping[State, _Column]] = {
    _S.DOWN: {
        **_always(_S.DOWN),
        on.Failed: Rule(life.failed, (_S.DOWN,)),
        on.StartRequested: Rule(life.start, (_S.ASKING, _S.QUEUED, _S.STARTING)),
        on.RestartBegan: Rule(life.restart_began, (_S.RESTARTING,)),
        on.RestartExpected: Rule(life.restart_expected, (_S.DOWN,)),
        **_stays(_S.DOWN, on.InterruptRequested, on.StopRequested, on.ManagerExpected, on.ManagerCame),
    },
    _S.ASKING: {
        **_always(_S.ASKING),
        **_managed(_S.ASKING),
        on.Queued: Rule(life.queued, (_S.QUEUED,)),
        on.Granted: Rule(life.granted, (_S.STARTING,)),
        on.Refused: Rule(life.refused, (_S.WITHOUT_SLICE,)),
        on.InterruptRequested: Rule(life.give_up, (_S.WITHOUT_SLICE,)),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start_meanwhile, (_S.ASKING,)),
        **_stays(_S.ASKING, on.WorkSubmitted),
    },
    _S.QUEUED: {
        **_always(_S.QUEUED),
        **_managed(_S.QUEUED),
        on.Granted: Rule(life.granted, (_S.STARTING,)),
        on.Refused: Rule(life.refused, (_S.WITHOUT_SLICE,)),
        on.InterruptRequested: Rule(life.give_up, (_S.WITHOUT_SLICE,)),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start_meanwhile, (_S.QUEUED,)),
        **_stays(_S.QUEUED, on.WorkSubmitted),
    },
    _S.STARTING: {
        **_always(_S.STARTING),
        **_managed(_S.STARTING),
        on.Launched: Rule(life.launched, (_S.STARTING,)),
        on.Ready: Rule(life.ready, (_S.RUNNING,)),
        on.NotReady: Rule(life.not_ready, (_S.DOWN, _S.RESTARTING)),
        on.NotStarted: Rule(life.not_started, (_S.ENDING,)),
        on.InterruptRequested: Rule(life.interrupt_start, (_S.STARTING,)),
        on.StopRequested: Rule(life.stop_starting, (_S.STARTING,)),
        on.StartRequested: Rule(life.start_after_the_end, (_S.ENDING,)),
        **_stays(_S.STARTING, on.WorkSubmitted),
    },
    _S.RUNNING: {
        **_kernel(_S.RUNNING),
        **_KEEPS_SLICE,
        on.NotLooked: Rule(keeping.not_looked, (_S.RUNNING,)),
        on.KeepRequested: Rule(keeping.keep, (_S.RUNNING,)),
    },
    _S.ASKED_BACK: {
        **_kernel(_S.ASKED_BACK),
        **_KEEPS_SLICE,
        on.NotLooked: Rule(keeping.not_looked, (_S.ASKED_BACK,)),
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
        on.NotParked: Rule(keeping.not_parked, (_S.RESUMING, *_WITH_SLICE)),
        on.WorkSubmitted: Rule(keeping.work_while_parking, (_S.PARKING,)),
    },
    _S.PARKED: {
        **_kernel(_S.PARKED),
        on.WorkSubmitted: Rule(keeping.work_while_parked, (_S.PARKED, _S.RESUMING)),
        on.ResumeRequested: Rule(keeping.resume, (_S.PARKED, _S.RESUMING)),
        on.ParkedAgain: Rule(keeping.parked_again, (_S.PARKED, _S.RESUMING)),
        on.Resumed: Rule(keeping.resumed, (_S.RUNNING,)),
    },
    _S.RESUMING: {
        **_kernel(_S.RESUMING),
        on.Resumed: Rule(keeping.resumed, (_S.RUNNING,)),
        on.InterruptRequested: Rule(keeping.give_up_resuming, (_S.PARKED,)),
        on.ResumeRequested: Rule(keeping.resume_meanwhile, (_S.RESUMING,)),
    },
    _S.RESTARTING: {
        **_always(_S.RESTARTING),
        on.StartRequested: Rule(life.start_again, (_S.ASKING,)),
        on.RestartExpected: Rule(life.restart_expected, (_S.RESTARTING,)),
        **_stays(_S.RESTARTING, on.RestartBegan, on.InterruptRequested, on.StopRequested),
        **_stays(_S.RESTARTING, on.ManagerExpected, on.ManagerCame),
    },
    _S.WITHOUT_SLICE: {
        **_always(_S.WITHOUT_SLICE),
        **_managed(_S.WITHOUT_SLICE),
        on.WorkSubmitted: Rule(life.work_without_slice, (_S.WITHOUT_SLICE, _S.ASKING)),
        on.StopRequested: Rule(life.stop_waiting, (_S.DOWN, _S.RESTARTING)),
        on.StartRequested: Rule(life.start_again, (_S.ASKING,)),
        **_stays(_S.WITHOUT_SLICE, on.InterruptRequested),
    },
    _S.ENDING: {
        **_always(_S.ENDING),
        **_managed(_S.ENDING),
        on.Gone: Rule(life.gone, (_S.WITHOUT_SLICE, _S.ASKING, _S.ENDED)),
        on.StartRequested: Rule(life.start_once_ended, (_S.ENDING,)),
        **_stays(_S.ENDING, on.InterruptRequested, on.StopRequested, on.WorkSubmitted),
        **_stays(_S.ENDING, on.Died, on.TermsOver),
    },
    _S.ENDED: _stays(
        _S.ENDED,
        *(on.StartRequested, on.InterruptRequested, on.StopRequested, on.RestartBegan, on.RestartExpected),
        *(on.ManagerExpected, on.ManagerCame, on.CloseRequested, on.TimePassed, on.Failed),
    ),
}
