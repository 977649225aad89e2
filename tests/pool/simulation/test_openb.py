"""Days of Alibaba's fractional trace, read from rows of our own making."""

from __future__ import annotations

import pytest

from gpu_pool.simulation.openb import read_openb
from gpu_pool_client import BadRequest

HEADER = "name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
DAY = 86_400


def test_pods_are_leases_from_being_scheduled_to_being_deleted() -> None:
    later, sooner = (
        f"b,8,1000,,BE,Succeeded,{DAY + 60},{DAY + 400},{DAY + 100}",
        "a,1,460,V100,LS,Failed,5,90000,9",
    )
    trace = read_openb([HEADER, later, sooner])
    assert [(each.at, each.course, str(each.request), each.stay) for each in trace.arrivals] == [
        (5.0, "LS", "46%", 12 * 3600.0),
        (DAY + 60.0, "BE", "8", 300.0),
    ]
    assert [each.at for each in trace.window(1, 1)] == [60.0]


def test_rows_that_are_not_understood_are_told_by_their_line() -> None:
    rows = ["a,1,460,,LS,Failed,5,50,9", "b,one,460,,LS,Failed,5,50,9", "c,1,2000,,LS,Failed,5,50,9"]
    never, cpu, short = "d,1,460,,LS,Pending,5,50,", "e,0,0,,LS,Failed,5,50,9", "f,1,460,,LS,Failed,50,5,9"
    trace = read_openb([HEADER, *rows, never, cpu, short])
    assert (len(trace.arrivals), trace.left_out) == (1, 2)
    assert [line for line, _ in trace.bad] == [3, 4, 7]
    assert [why for _, why in trace.bad] == [
        "num_gpu is 'one', not a number",
        "gpu_milli is 2000",
        "creation_time is 50, scheduled_time 9, deletion_time 5",
    ]


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(BadRequest, match="no column qos"):
        read_openb([HEADER.replace("qos", "class"), "a,1,460,,LS,Failed,5,50,9"])
