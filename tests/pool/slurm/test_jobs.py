"""What Slurm's commands print, read and said in words: without Slurm."""

from __future__ import annotations

import pytest

from gpu_pool.slurm.jobs import (
    GpuKind,
    Job,
    counted,
    devices_of,
    how_ended,
    memory_mib,
    place,
    read_addresses,
    read_given,
    read_job,
    read_jobs,
    read_kinds,
    read_names,
    read_time,
)
from gpu_pool_client import NeverFits, parse_request

V100, T4 = GpuKind("v100", 2, 100), GpuKind("t4", 1, 16)
KNOWN = {"v100": 32, "t4": 16}
SINFO = """\
n1|10.0.0.1|gpu:v100:2,shard:v100:200|gpu*
n2|10.0.0.2|gpu:t4:1,shard:t4:16|gpu*
n3|10.0.0.3|gpu:a100:8|big
n4|10.0.0.4|gpu:v100:4,shard:v100:40|gpu*
n5|10.0.0.5|(null)|gpu*
"""


def test_the_gpus_of_a_partition() -> None:
    assert read_kinds(SINFO, "") == (GpuKind("t4", 1, 16), GpuKind("v100", 4, 10))
    assert read_kinds(SINFO, "big") == (GpuKind("a100", 8, 0),)
    assert read_kinds(SINFO, "nosuch") == ()
    assert read_addresses(SINFO)["n2"] == "10.0.0.2"


def test_a_job_in_the_queue() -> None:
    [job] = read_jobs("7|PENDING|ReqNodeNotAvail, UnavailableNodes:n1|12|gpu|N/A|N/A|\n").values()
    assert job == Job("7", "PENDING", "ReqNodeNotAvail", 12, "gpu")
    assert job.waits
    told = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    [down] = read_jobs(f"7|PENDING|{told}|12|gpu|N/A|N/A|\n").values()
    shown = read_job(f"JobId=7 JobState=PENDING Reason={told.replace(' ', '_')} Priority=12")
    assert down.reason == shown.reason == told
    [running] = read_jobs("8|RUNNING|None|1|gpu|2026-11-28T02:08:28|2026-11-28T02:18:28|n1\n").values()
    assert running.ends_at == (running.starts_at or 0) + 600
    assert not running.waits
    assert not running.is_over
    assert read_jobs("what nobody expects\n") == {}
    assert read_names("7|a|b\n8|c\nno more\n") == {"a|b": "7", "c": "8"}
    assert read_time("Unknown") is None


@pytest.mark.parametrize(
    ("size", "given", "gres"),
    [
        ("2%", "2% model=v100", "shard:v100:2"),
        ("2.1%", "3% model=v100", "shard:v100:3"),
        ("1", "1 model=v100", "gpu:v100:1"),
        ("2", "2 model=v100", "gpu:v100:2"),
        ("655MiB", "2% model=v100", "shard:v100:2"),
        ("656MiB", "3% model=v100", "shard:v100:3"),
        ("2%..10% for 20min", "2% model=v100 for 20min", "shard:v100:2"),
    ],
)
def test_a_job_asks_for_whole_shards_or_whole_gpus(size: str, given: str, gres: str) -> None:
    found, kind = counted(parse_request(size), [V100], KNOWN)
    assert (str(found), kind, V100.gres(found)) == (given, "v100", gres)


def test_the_smallest_type_that_can_is_taken_and_that_of_a_filter_before() -> None:
    assert counted(parse_request("2%"), [V100, T4], KNOWN)[1] == "t4"
    assert counted(parse_request("2% model=V100"), [V100, T4], KNOWN)[1] == "v100"
    assert counted(parse_request("20GiB"), [V100, T4], KNOWN)[1] == "v100"
    assert str(counted(parse_request("2%"), [T4], KNOWN)[0]) == "6.2% model=t4"


def test_without_shards_a_part_is_a_whole_gpu() -> None:
    bare = GpuKind("a100", 8)
    found, _ = counted(parse_request("2%"), [bare], {})
    assert (str(found), bare.gres(found)) == ("1 model=a100", "gpu:a100:1")
    assert GpuKind("", 1).gres(found) == "gpu:1"


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("3", "No node can give that of the type v100."),
        ("2x50%", "Slurm gives a job no parts of several GPUs."),
        ("40GiB", "No node can give that"),
        ("1 model=h100", "partition gpu of Slurm has v100 in 100 shards each."),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(size: str, why: str) -> None:
    with pytest.raises(NeverFits, match=why):
        counted(parse_request(size), [V100], KNOWN, "gpu")


def test_of_a_type_of_unknown_memory_only_whole_gpus_can_be_had() -> None:
    for size in ("2%", "1GiB"):
        with pytest.raises(NeverFits, match=r"c\.SlurmSettings\.gpu_memory"):
            counted(parse_request(size), [V100], {})
    assert counted(parse_request("1"), [V100], {})[0].milli == 1000
    assert memory_mib(GpuKind("a100_80gb", 1), {}) == 80 * 1024
    assert memory_mib(V100, {"v100": 32}) == 32 * 1024


def test_devices_stand_for_all_of_their_type() -> None:
    found = devices_of([V100, T4], {"v100": 32})
    assert [(each.uuid, each.memory_mib, each.unbounded) for each in found] == [
        ("slurm-v100-0", 32768, True),
        ("slurm-v100-1", 32768, True),
        ("slurm-t4-0", 0, True),
    ]


def test_the_position_is_by_priority_among_those_that_wait_in_the_partition() -> None:
    mine = Job("7", "PENDING", "Priority", 10, "gpu")
    others = [
        Job("6", "PENDING", "", 10, "gpu"),
        Job("8", "PENDING", "", 10, "gpu"),
        Job("9", "PENDING", "", 11, "gpu"),
        Job("5", "PENDING", "", 99, "big"),
        Job("4", "RUNNING", "", 99, "gpu"),
    ]
    found = place(mine, [mine, *others], sees_others=True)
    assert (found.position, found.among) == (3, "partition gpu")
    assert found.reason == "Jobs with a higher priority come first."


def test_where_others_jobs_are_hidden_the_position_is_not_guessed() -> None:
    found = place(Job("7", "PENDING", "Resources"), [], sees_others=False)
    assert found.position is None
    assert "Its position is not known: this cluster hides others' jobs." in found.reason


def test_a_reason_that_is_new_is_told_as_slurm_has_it() -> None:
    assert place(Job("7", "PENDING", "NewReason"), [], sees_others=True).reason == "Slurm says: NewReason."


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("CANCELLED", "was cancelled"),
        ("TIMEOUT", "reached its time limit"),
        ("OUT_OF_MEMORY", "used more than its memory"),
        ("NODE_FAIL", "its node failed"),
        ("PREEMPTED", "gave way to a job with a higher priority"),
    ],
)
def test_how_a_job_was_ended_is_told(state: str, words: str) -> None:
    assert words in how_ended(Job("7", state))
    assert Job("7", state).is_over


def test_a_job_that_ended_by_itself_was_not_taken() -> None:
    assert [how_ended(Job("7", state)) for state in ("COMPLETED", "FAILED")] == ["", ""]


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (
            "Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=gpu:v100:2(IDX:0-1)   "
            "Nodes=n2 CPU_IDs=0 Mem=10 GRES=gpu:t4:1(IDX:0)",
            [("n1", "gpu:2", 4), ("n2", "gpu:1", 1)],
        ),
        ("Nodes=n[1-3,7] CPU_IDs=0-1,8-9 Mem=0 GRES=shard:40(IDX:0)", [("n[1-3,7]", "shard:40", 4)]),
        ("Nodes=n1 CPU_IDs=2 Mem=0 GRES=mps:v100:40(IDX:0)", [("n1", "mps:40", 1)]),
        ("Nodes=n1 CPU_IDs=2 Mem=0 GRES=gpu:v100:1(IDX:0),gpu:t4:2(IDX:1-2)", [("n1", "gpu:3", 1)]),
        ("NodeList=n[1-2] NumNodes=2 Nodes=n1 CPU_IDs=2 Mem=0 GRES=", []),
    ],
)
def test_what_a_job_was_given_of_each_node(shown: str, found: list[tuple[str, str, int]]) -> None:
    assert list(read_given(f"JobId=7 ReqNodeList=(null) Socks/Node=* {shown} MinCPUsNode=1")) == found


def test_a_comment_says_nothing_of_how_its_job_is() -> None:
    shown = "JobId=7 JobState=RUNNING ExitCode=0:0 Comment=a JobState=CANCELLED ExitCode=9:0 StdErr=/a"
    assert read_job(shown) == Job("7", "RUNNING", exit_status=0)
