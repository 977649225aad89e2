"""What pages are told of a slice that goes to somebody who waits, and of one that waits elsewhere."""

from __future__ import annotations

import pytest

from gpu_pool_client import EndReason, Holder, Lease, LeaseState, Place, parse_request
from gpu_pool_provisioner.server.model import KernelName, slice_of
from gpu_pool_provisioner.session.idling import IdleState
from gpu_pool_provisioner.session.view import SlicePhase, SliceView

NAME = KernelName("k", "python3", "Python 3 (GPU 2%)", None)
REQUEST = parse_request("2%")


def view_of(phase: SlicePhase, lease: Lease) -> SliceView:
    return SliceView(
        phase,
        "",
        REQUEST,
        None,
        lease,
        None,
        None,
        None,
        IdleState(),
        None,
        given_back=False,
        resizes_live=True,
    )


def told(phase: SlicePhase, asked_back: EndReason | None) -> tuple[bool, bool]:
    lease = Lease("1-a", "key", REQUEST, Holder("ada"), LeaseState.HELD, 0.0, asked_back=asked_back)
    found = slice_of(NAME, view_of(phase, lease), (), lambda seconds: seconds)
    return found["asked_back"], found["gives_way"]


@pytest.mark.parametrize(
    ("phase", "asked_back", "expected"),
    [
        (SlicePhase.HELD, None, (False, False)),
        (SlicePhase.HELD, EndReason.REVOKED, (True, False)),
        (SlicePhase.HELD, EndReason.YIELDED, (False, True)),
        (SlicePhase.PARKED, EndReason.YIELDED, (False, True)),
        (SlicePhase.RESUMING, EndReason.YIELDED, (False, True)),
        (SlicePhase.NONE, EndReason.YIELDED, (False, False)),
    ],
)
def test_giving_way_is_told_apart_from_being_asked_back(
    phase: SlicePhase, asked_back: EndReason | None, expected: tuple[bool, bool]
) -> None:
    assert told(phase, asked_back) == expected


@pytest.mark.parametrize(
    ("place", "state", "held_at"), [(Place(2), "waiting", None), (None, "starting", 3.0)]
)
def test_a_kernel_whose_job_or_pod_waits_is_shown_as_waiting(
    place: Place | None, state: str, held_at: float | None
) -> None:
    lease = Lease("1-a", "key", REQUEST, Holder("ada"), LeaseState.PARKED, 0.0, held_at=3.0, place=place)
    found = slice_of(NAME, view_of(SlicePhase.STARTING, lease), (), lambda seconds: seconds)
    assert (found["state"], found["held_at"], found["actions"]) == (state, held_at, {})
