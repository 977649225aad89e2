"""What a session shows: to the API, and with it to the panel, ``%gpu`` and the status bar."""

from __future__ import annotations

import time
from typing import Final

from gpu_pool_client import LeaseState
from gpu_pool_provisioner.lease_client import LeaseClient
from gpu_pool_provisioner.session import Session, State, idling
from gpu_pool_provisioner.slice_state import IdleState, ProxyState, SlicePhase

#: The words of the API for a session's states.
_PHASES: Final = {
    State.DOWN: SlicePhase.NONE,
    State.ASKING: SlicePhase.ASKING,
    State.QUEUED: SlicePhase.WAITING,
    State.STARTING: SlicePhase.STARTING,
    State.RUNNING: SlicePhase.HELD,
    State.ASKED_BACK: SlicePhase.HELD,
    State.RESIZING: SlicePhase.HELD,
    State.PARKING: SlicePhase.HELD,
    State.PARKED: SlicePhase.PARKED,
    State.RESUMING: SlicePhase.RESUMING,
    State.RESTARTING: SlicePhase.STARTING,
    State.WITHOUT_SLICE: SlicePhase.NONE,
    State.ENDING: SlicePhase.NONE,
    State.ENDED: SlicePhase.NONE,
}


def view(session: Session, client: LeaseClient, seen: tuple[bool, float], shown: str) -> ProxyState:
    """Return how things stand; ``seen`` is as ``Relay.seen``, ``shown`` what the waiting cell shows.

    Costs next to nothing.
    """
    phase, parking = _phase(session, client), session.parking
    idle = IdleState()
    if session.idling is not None:
        idle = idling.idle_state(session.idling, *seen, client.last_activity, time.monotonic())
    return ProxyState(
        phase,
        _message(session, client, phase, shown),
        client.position,
        client.outlook,
        idle,
        session.end if phase is not SlicePhase.HELD else None,
        session.in_pod,
        given_back=parking is not None and parking.given_back,
    )


def _phase(session: Session, client: LeaseClient) -> SlicePhase:
    is_held = client.seen is not None and client.seen.state is LeaseState.HELD
    if session.state is State.ASKING and is_held:
        return SlicePhase.STARTING
    if session.state is State.DOWN and is_held and session.end is None:
        return SlicePhase.HELD  # for as long as its end is forgiven
    return _PHASES[session.state]


def _message(session: Session, client: LeaseClient, phase: SlicePhase, shown: str) -> str:
    """Return what the kernel's user should read now."""
    if phase is SlicePhase.NONE:
        return session.end.message if session.end is not None else ""
    if phase is SlicePhase.PARKED and session.parking is not None:
        return session.parking.why
    if phase is SlicePhase.HELD and client.seen is not None:
        return client.seen.message or client.notice
    waits = phase in (SlicePhase.WAITING, SlicePhase.RESUMING)
    return client.outlook.why if waits and client.outlook is not None else shown
