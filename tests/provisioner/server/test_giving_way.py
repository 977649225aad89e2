"""What pages are told of a slice that goes to somebody who waits while its kernel is idle."""

from __future__ import annotations

import pytest

from gpu_pool_client import EndReason, Holder, Lease, LeaseState, parse_request
from gpu_pool_provisioner.server.model import KernelName, slice_of
from gpu_pool_provisioner.session.idling import IdleState
from gpu_pool_provisioner.session.view import SlicePhase, SliceView

NAME = KernelName("k", "python3", "Python 3 (GPU 2%)", None)


def told(phase: SlicePhase, asked_back: EndReason | None) -> tuple[bool, bool]:
    request = parse_request("2%")
    lease = Lease("1-a", "key", request, Holder("ada"), LeaseState.HELD, 0.0, asked_back=asked_back)
    view = SliceView(
        phase,
        "",
        request,
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
    found = slice_of(NAME, view, (), lambda seconds: seconds)
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
