"""The texts and rows that people read, as pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool.cli import formatting
from gpu_pool.cli.session import choose, held_by
from gpu_pool_client import (
    BadRequest,
    Device,
    DeviceStatus,
    Holder,
    Lease,
    LeaseGone,
    LeaseState,
    Place,
    PoolStatus,
    Process,
    Slice,
    parse_request,
)

REAL = Device("GPU-1", 0, "Tesla V100-SXM2-32GB", 32_768)
OTHER = Device("GPU-2", 1, "Tesla V100-SXM2-32GB", 32_768)
SHELL, PARENT = Process(10, 1, "boot", "here"), Process(9, 1, "boot", "here")


def lease(name, size, *devices, process=None, state=LeaseState.HELD, **more):
    request = parse_request(size)
    parts = tuple(Slice(device, request.milli or 0, 655) for device in devices)
    held_at = 100.0 if state is LeaseState.HELD else None
    return Lease(
        name, name, request, Holder("ann"), state, 90.0, held_at, slices=parts, process=process, **more
    )


#: One that may use more than it was granted, and one of a cluster, which says itself how much is free.
BURST = replace(
    lease("a", "2%..10%", REAL), slices=(Slice(REAL, 20, 655, limit_mib=3_276, burst_mib=2_048 - 655),)
)
NO_BURST = replace(BURST, slices=(replace(BURST.slices[0], burst_mib=0),))
OF_NODE = Slice(replace(REAL, node="n1"), 20, 655, limit_mib=3_276, burst_mib=3_276 - 655)
ON_NODE = replace(lease("a", "2%..10%", REAL), slices=(OF_NODE,))
#: One on a node whose GPU the pool itself divides.
LENT_ON_NODE = replace(ON_NODE, slices=(replace(OF_NODE, burst_mib=2_048 - 655),))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (12, "12th"),
        (21, "21st"),
        (113, "113th"),
    ],
)
def test_ordinals(number, text):
    assert formatting.ordinal(number) == text


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (lease("a", "2%", REAL), "2% of Tesla V100-SXM2-32GB, 655MiB"),
        (lease("a", "2x50%", REAL, OTHER), "2x50% of Tesla V100-SXM2-32GB, 655MiB each"),
        (BURST, "2%..10% of Tesla V100-SXM2-32GB, 655MiB, now up to 2GiB"),
        (NO_BURST, "2%..10% of Tesla V100-SXM2-32GB, 655MiB"),
        (ON_NODE, "2%..10% of Tesla V100-SXM2-32GB, 655MiB, up to 3276MiB"),
        (LENT_ON_NODE, "2%..10% of Tesla V100-SXM2-32GB, 655MiB, now up to 2GiB"),
        (lease("a", "2", REAL, OTHER), "2 whole Tesla V100-SXM2-32GB, 655MiB each"),
    ],
)
def test_what_was_granted(held, text):
    assert formatting.granted(held) == text


def test_a_burst_is_told_in_every_view():
    assert "655MiB, now up to 2GiB" in formatting.lease_row(BURST, 200.0)
    lines = dict(formatting.slice_lines(BURST, {"GPU-1": 700}, 200.0))
    assert lines["GPU"].endswith("655MiB granted, now up to 2GiB, 700MiB used")
    assert BURST.describe_limits().startswith("memory: 655 MiB, now up to 2048 MiB, none")
    assert BURST.environment["GPU_POOL_ALLOWED_MIB"] == "2048"
    assert BURST.environment["GPU_POOL_LIMIT_MIB"] == "3276"
    assert "GPU_POOL_LIMIT_MIB" not in lease("a", "2%", REAL).environment


def test_who_has_no_burst_now_reads_what_is_granted_alone():
    assert "655MiB" in formatting.lease_row(NO_BURST, 200.0)
    lines = dict(formatting.slice_lines(NO_BURST, {}, 200.0))
    assert lines["GPU"].endswith("655MiB granted, use not known")
    assert NO_BURST.describe_limits().startswith("memory: 655 MiB, none")


def test_where_a_waiter_stands():
    assert (
        formatting.waiting(lease("a", "2%", state=LeaseState.WAITING, position=3))
        == "waiting for 2%: 3rd in the queue"
    )
    assert formatting.waiting(lease("a", "2%", state=LeaseState.WAITING)) == "waiting for 2%"


def test_text_of_unknown_origin_cannot_command_the_terminal():
    assert formatting.safe("a\x1b[2Jb\nc\u202e") == "a?[2Jb?c?"
    assert formatting.safe("x" * 1_000) == "x" * 59 + "…"
    assert formatting.safe("é日本") == "é日本"


def test_context_slots_are_shown_where_they_are_counted():
    counted = Device("GPU-3", 2, "V100", 32_768, contexts=48)
    assert formatting.device_row(DeviceStatus(counted, 20, 655, 2, 1)) == [
        "2", "V100", "98% of 100%", "32113MiB of 32GiB",
        "46 of 48", "1",
    ]  # fmt: skip


def test_the_line_follows_the_leases():
    held, waiting = lease("a", "2%", REAL), lease("b", "4%", state=LeaseState.WAITING, position=1)
    rows = formatting.lease_rows(PoolStatus("", (), (held,), (waiting,)), now=150.0)
    assert [(row[0], row[1], row[8]) for row in rows] == [
        ("held", "2%", "50s"),
        ("1st in the queue", "4%", "1min"),
    ]


def test_what_waits_in_the_queue_of_the_cluster_is_not_called_parked():
    queued = replace(lease("a", "2%", state=LeaseState.PARKED), place=Place(3))
    assert formatting.lease_row(queued, now=150.0)[0] == "queued"
    assert formatting.lease_row(lease("a", "2%", REAL, state=LeaseState.PARKED), now=150.0)[0] == "parked"


def test_memory_in_use_is_told_where_it_is_known():
    held = lease("a", "2x2%", REAL, OTHER)
    lines = [
        text for label, text in formatting.slice_lines(held, {"GPU-1": 300}, now=100.0) if label == "GPU"
    ]
    assert lines == [
        "0: Tesla V100-SXM2-32GB, 655MiB granted, 300MiB used",
        "1: Tesla V100-SXM2-32GB, 655MiB granted, use not known",
    ]


def test_mine_are_the_leases_of_my_ancestors_nearest_first():
    far, near = lease("far", "2%", REAL, process=PARENT), lease("near", "4%", REAL, process=SHELL)
    foreign = lease("foreign", "4%", REAL, process=Process(10, 2, "boot", "here"))
    assert held_by([far, foreign, near], [SHELL, PARENT], {}) == [near, far]
    assert held_by([far, foreign], [], {"GPU_POOL_LEASE": "foreign"}) == [foreign]
    assert held_by([far, foreign], [SHELL], {}) == []


def test_the_nearest_is_chosen_and_a_doubt_is_said():
    far, near = lease("far", "2%", REAL, process=PARENT), lease("near", "4%", REAL, process=SHELL)
    twin = lease("twin", "4%", REAL, process=SHELL)
    assert choose([near, far]) is near
    assert choose([near, twin, far], "twin") is twin
    with pytest.raises(BadRequest, match=r"near .*twin"):
        choose([near, twin, far])
    with pytest.raises(LeaseGone):
        choose([near], "nothing")
