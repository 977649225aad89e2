"""Recorded days, read from rows of our own making in the form of each file."""

from __future__ import annotations

import json

import pytest

from gpu_pool.simulation.formats import FORMATS, read_openb
from gpu_pool.simulation.recorded import RecordedDays
from gpu_pool_client import BadRequest

SENSEI = [
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval",
    "0,1,10,0,resnet50,2,0",
    # Twenty minutes idle, and then a cell on twice as many GPUs.
    "1,2,32,0,resnet50,10,0",
    # Begins before the one above has ended: another notebook.
    "2,4,20,0,resnet50,30,0",
]
HELIOS = [
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue",
    "1,ua,vc1,16,32,2,COMPLETED,2020-06-09 18:00:00,2020-06-09 18:10:00,2020-06-09 19:10:00,3600,600",
    "2,ub,vc2,0,8,1,COMPLETED,2020-06-09 18:00:00,2020-06-09 18:00:00,2020-06-09 18:00:01,1,0",
    "3,ub,vc2,1,8,1,FAILED,2020-06-09 18:00:30,2020-06-09 18:00:30,2020-06-09 18:01:30,60,0",
    "4,ub,vc2,3,8,2,FAILED,2020-06-09 18:00:30,2020-06-09 18:00:30,2020-06-09 18:01:30,60,0",
    "5,ub,vc2,1,8,1,FAILED,9 June,2020-06-09 18:00:30,2020-06-09 18:01:30,60,0",
]
PAI_HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
PAI = [
    "j1,worker,2.0,Terminated,1000.0,1600.0,400.0,29.3,50.0,T4",
    "j1,ps,1.0,Terminated,1000.0,1600.0,600.0,29.3,,MISC",
    "j2,tensorflow,1.0,Running,1000.0,,600.0,29.3,200.0,V100",
    "j3,tensorflow,1.0,Terminated,1060.0,1120.0,600.0,29.3,200.0,V100",
    "j4,tensorflow,1.0,Terminated,1060.0,1120.0,600.0,29.3,150.0,V100",
    "j5,tensorflow,1.0,Terminated,1060.0,never,600.0,29.3,100.0,V100",
]


def sessions(days: RecordedDays) -> list[tuple[float, float, str, str]]:
    return [(each.at, each.ends_at, each.course, str(each.request)) for each in days.sessions]


def test_trainings_become_cells_of_sessions() -> None:
    days = FORMATS["sensei"](SENSEI)
    assert sessions(days) == [(600.0, 2520.0, "", "2"), (1200.0, 3000.0, "", "4")]
    assert [[(c.at, c.seconds, c.milli) for c in each.cells] for each in days.sessions] == [
        [(600.0, 120.0, 1000), (1920.0, 600.0, 2000)],
        [(1200.0, 1800.0, 4000)],
    ]


def test_what_would_be_held_without_a_queue_is_added_up() -> None:
    sums = FORMATS["sensei"](SENSEI).sums([300.0, 1800.0])
    reserved, used = 2 * 1920 + 4 * 1800, 1 * 120 + 2 * 600 + 4 * 1800
    assert sums.reserved * 3600 == pytest.approx(reserved)
    assert sums.used * 3600 == pytest.approx(used)
    # What it took for the first of two cells is kept for five minutes, or until the second.
    assert sums.held[300.0] * 3600 == pytest.approx(used + 300)
    assert sums.held[1800.0] * 3600 == pytest.approx(used + 1200)
    assert sums.again == {300.0: pytest.approx(1 / 3), 1800.0: 0.0}


def test_sessions_with_cells_are_cut_at_both_ends_of_a_window() -> None:
    days = FORMATS["sensei"](SENSEI).window(660.0, 1320.0)
    assert sessions(days) == [(0.0, 1320.0, "", "2"), (540.0, 1320.0, "", "4")]
    assert [[(c.at, c.seconds) for c in each.cells] for each in days.sessions] == [
        [(0.0, 60.0), (1260.0, 60.0)],
        [(540.0, 780.0)],
    ]


def test_leases_belong_whole_to_the_window_that_they_were_asked_for_in() -> None:
    days = FORMATS["helios"](HELIOS)
    assert sessions(days.window(0.0, 10.0)) == [(0.0, 3600.0, "vc1", "8")] * 2
    assert sessions(days.window(20.0, 20.0)) == [(10.0, 70.0, "vc2", "1")]
    assert [each.stay for each in days.arrivals()] == [3600.0, 3600.0, 60.0]


def test_jobs_on_several_nodes_are_a_lease_on_each() -> None:
    days = FORMATS["helios"](HELIOS)
    assert len(days.sessions) == 3
    assert not days.has_cells
    assert days.left_out == 1
    assert days.bad == (
        (5, "gpu_num is 3, which is not as many on each of node_num 2"),
        (6, "submit_time is '9 June', not a time as 2020-06-09 18:41:01"),
    )


@pytest.mark.parametrize("header", [[], [PAI_HEADER]])
def test_tasks_become_leases_one_an_instance(header: list[str]) -> None:
    days = FORMATS["pai"]([*header, *PAI])
    assert sessions(days) == [(0.0, 600.0, "worker", "50%")] * 2 + [(60.0, 120.0, "tensorflow", "2")]
    assert days.left_out == 2
    assert days.bad == (
        (5 + len(header), "plan_gpu is 150: more than one GPU, and not whole ones"),
        (6 + len(header), "end_time is 'never', not a number"),
    )


def test_pods_are_read_as_they_are_elsewhere() -> None:
    header = "name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    days = FORMATS["openb"]([header, "a,1,460,V100,LS,Failed,5,90,9", "b,one,460,,LS,Failed,5,50,9"])
    assert sessions(days) == [(5.0, 86.0, "LS", "46%")]
    assert [line for line, _ in days.bad] == [3]


def test_a_history_says_when_its_slices_were_busy() -> None:
    lease = {"requested_at": 1000, "held_at": 1060, "ended_at": 1660, "held_seconds": 500, "request": "2x50%"}
    lines = [
        json.dumps({**lease, "user": "a", "course": "ml", "busy": [[1060, 10], [1200.5, 60]]}),
        json.dumps({**lease, "busy": [[900, 10]]}),
        json.dumps({**lease, "busy": [[1100, 10], [1105, 10]]}),
        "no JSON",
        json.dumps({**lease, "requested_at": 1300, "busy": None}),
        json.dumps({**lease, "held_seconds": None}),
    ]
    days = FORMATS["history"](lines)
    # As if its slice had been there at once: a minute sooner.
    assert sessions(days) == [(0.0, 600.0, "ml", "2x50%"), (300.0, 800.0, "", "2x50%")]
    assert [[(c.at, c.seconds) for c in each.cells] for each in days.sessions] == [
        [(0.0, 10.0), (140.5, 60.0)],
        [(300.0, 500.0)],
    ]
    assert days.has_cells
    assert (days.left_out, [line for line, _ in days.bad]) == (1, [2, 3, 4])


def test_a_history_of_which_no_line_is_understood_says_why() -> None:
    with pytest.raises(BadRequest, match="no lease that was held. Line 2: "):
        FORMATS["history"](["\n", "[]"])


@pytest.mark.parametrize("name", ["sensei", "helios", "openb"])
def test_a_column_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(BadRequest, match="has no column"):
        FORMATS[name](["a,b", "1,2"])


@pytest.mark.parametrize(("name", "rows"), [("sensei", SENSEI), ("helios", HELIOS), ("pai", PAI)])
def test_a_row_that_ends_early_is_told_and_those_after_it_are_read(name: str, rows: list[str]) -> None:
    whole = FORMATS[name](rows)
    cut = FORMATS[name]([*rows[:2], "7", *rows[2:]])
    assert sessions(cut) == sessions(whole)
    line, why = cut.bad[0]
    assert line == 3
    assert why.startswith("it ends before ")
    assert len(cut.bad) == len(whole.bad) + 1


def test_a_row_that_is_no_row_is_told_and_those_after_it_are_read() -> None:
    days = FORMATS["sensei"]([*SENSEI[:2], "9" * 200_000, *SENSEI[2:]])
    assert sessions(days) == sessions(FORMATS["sensei"](SENSEI))
    assert days.bad == ((3, "field larger than field limit (131072)"),)


PODS = "name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
DAY = 86_400


def test_pods_are_leases_from_being_scheduled_to_being_deleted() -> None:
    later, sooner = (
        f"b,8,1000,,BE,Succeeded,{DAY + 60},{DAY + 400},{DAY + 100}",
        "a,1,460,V100,LS,Failed,5,90000,9",
    )
    trace = read_openb([PODS, later, sooner])
    assert [(each.at, each.course, str(each.request), each.stay) for each in trace.arrivals] == [
        (5.0, "LS", "46%", 12 * 3600.0),
        (DAY + 60.0, "BE", "8", 300.0),
    ]
    assert [each.at for each in trace.window(1, 1)] == [60.0]


def test_rows_that_are_not_understood_are_told_by_their_line() -> None:
    rows = ["a,1,460,,LS,Failed,5,50,9", "b,one,460,,LS,Failed,5,50,9", "c,1,2000,,LS,Failed,5,50,9"]
    never, cpu, short = "d,1,460,,LS,Pending,5,50,", "e,0,0,,LS,Failed,5,50,9", "f,1,460,,LS,Failed,50,5,9"
    trace = read_openb([PODS, *rows, never, cpu, short])
    assert (len(trace.arrivals), trace.left_out) == (1, 2)
    assert [line for line, _ in trace.bad] == [3, 4, 7]
    assert [why for _, why in trace.bad] == [
        "num_gpu is 'one', not a number",
        "gpu_milli is 2000",
        "creation_time is 50, scheduled_time 9, deletion_time 5",
    ]


def test_a_column_that_a_list_of_pods_lacks_is_named() -> None:
    with pytest.raises(BadRequest, match="no column qos"):
        read_openb([PODS.replace("qos", "class"), "a,1,460,,LS,Failed,5,50,9"])
