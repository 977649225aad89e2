"""Every pair of the session's table, and the drawing of it in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool_client import EndReason, LeaseState, PoolUnreachable
from gpu_pool_provisioner.session import (
    TABLE,
    ImpossibleEventError,
    Session,
    State,
    effects,
    events,
    idling,
    step,
)
from gpu_pool_provisioner.session.diagram import diagram
from gpu_pool_provisioner.session.expiry_policy import ExpiryAction, ExpiryStep
from gpu_pool_provisioner.session.session import Wait
from support.session_world import AWAY, CHANGE, TEN, lease

EVENTS = {
    events.Resized: events.Resized(CHANGE),
    events.ResizeRequested: events.ResizeRequested(TEN),
    events.SizeChanged: events.SizeChanged(TEN),
    events.SizePending: events.SizePending(TEN),
    events.LeftFound: events.LeftFound("It was removed."),
    events.Positioned: events.Positioned(2),
    events.PoolAway: events.PoolAway(AWAY, effects.Resume()),
    events.Queued: events.Queued(lease(LeaseState.WAITING)),
    events.Granted: events.Granted(lease(LeaseState.HELD)),
    events.Ready: events.Ready(lease(LeaseState.HELD)),
    events.Refused: events.Refused(PoolUnreachable("The pool is away.")),
    events.NotReady: events.NotReady(ValueError("It ended.")),
    events.NotStarted: events.NotStarted(ValueError("It never came.")),
    events.Failed: events.Failed(ValueError("ours")),
    events.RestartExpected: events.RestartExpected(1.0),
    events.ManagerExpected: events.ManagerExpected(1.0),
    events.Observed: events.Observed(lease(LeaseState.HELD), False, 0.0),
    events.FoundAtWork: events.FoundAtWork(is_silent=False),
    events.Parked: events.Parked(lease(LeaseState.PARKED), is_moved=False),
    events.Resumed: events.Resumed(lease(LeaseState.HELD)),
    events.Hibernated: events.Hibernated(118),
    events.NotWoken: events.NotWoken("A file has changed."),
    events.KeepRequested: events.KeepRequested(60),
    events.TermsOver: events.TermsOver(ExpiryStep(ExpiryAction.END, reason=EndReason.IDLE)),
}
KINDS = [each for each in vars(events).values() if isinstance(each, type) and each.__base__ is events.Event]


def a_session(state: State) -> Session:
    """Return one in this state, as it may be there."""
    held = lease(LeaseState.HELD)
    known, _ = idling.begun(held, 0.0) if state.has_kernel else (None, None)
    parking = idling.Parking(ExpiryStep(ExpiryAction.PARK)) if state.has_kernel else None
    wait = Wait(held.id) if state in (State.QUEUED, State.RESUMING) else None
    return Session(
        *(held.request, 1.0, 60.0, state),
        lease_id=held.id,
        lease=held,
        wait=wait,
        idling=known,
        parking=parking,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_every_pair_leads_where_the_table_says_or_is_refused_by_name(
    state: State, kind: type[events.Event]
) -> None:
    session, event = a_session(state), EVENTS.get(kind) or kind()
    rule = TABLE[state].get(kind)
    if rule is None:
        with pytest.raises(ImpossibleEventError, match=f"{kind.__name__} .* {state.value}"):
            step(session, event, 0.0)
        return
    after, _ = step(session, event, 0.0)
    assert after.state in rule.to


def test_every_state_and_event_is_in_the_table() -> None:
    assert TABLE.keys() == set(State)
    assert {kind for column in TABLE.values() for kind in column} == set(KINDS)


def test_the_documentation_has_the_table_as_it_is() -> None:
    """Write it there with ``python -m gpu_pool_provisioner.session.diagram``."""
    page = (Path(__file__).parents[3] / "docs" / "developer" / "session.md").read_text()
    assert f"```text\n{diagram()}\n```" in page
