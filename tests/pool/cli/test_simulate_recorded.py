"""``simulate`` on recorded days: cells replayed, traces of others, and what is refused."""

from __future__ import annotations

import json
import time

import pytest

TRACE = [
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval",
    # A notebook that thinks for an hour between two cells, and one that comes meanwhile.
    "0,1,0,0,resnet50,1,0",
    "1,1,61,0,resnet50,1,0",
    "2,1,10,0,resnet50,2,0",
    "3,one,10,0,resnet50,2,0",
]
GPU = ("--devices", "V100-SXM2-32GB:1")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(TRACE) + "\n")
    return str(path)


def test_cells_are_replayed_in_every_way(terminal, trace, tmp_path):
    picture = tmp_path / "ways.svg"
    words = ("simulate", trace, "--format", "sensei", *GPU)
    done = terminal.run(*words, "--json", "--plot", str(picture))
    printed = json.loads(done.stdout)
    assert (printed["simulated"], printed["sessions"], printed["devices"]) == (True, 2, 1)
    assert printed["bad"] == [{"line": 5, "why": "num_gpu is 'one', not a number"}]
    assert "gpu-pool: line 5 is left out: num_gpu is 'one'" in done.stderr
    ways = printed["ways"]
    assert list(ways) == [
        "reservation",
        "idle limit 15min",
        "idle limit 5min",
        "yield after 1min",
        "per cell",
    ]
    assert set(ways["reservation"]) == {
        "gpu_hours",
        "cells",
        "utilisation",
        "asked_back",
        "parked",
        "by_course",
        "by_size",
    }
    assert ways["reservation"]["gpu_hours"] == pytest.approx(
        {"reserved": 64 / 60, "held": 64 / 60, "used": 4 / 60}
    )
    yielded = ways["yield after 1min"]
    assert yielded["asked_back"] == 1
    assert yielded["cells"] == {"count": 3, "at_once": 1.0, "delay": {"p50": 0, "p95": 5, "p99": 5}}
    assert ways["reservation"]["cells"]["at_once"] == pytest.approx(2 / 3)
    assert picture.read_text().startswith("<svg")
    shown = terminal.run(*words).stdout
    assert "trace.csv (simulated, 2 sessions, 3 cells, 1 GPUs)" in shown
    assert {"yield after 1min", "per cell"} <= {line.split("  ")[0] for line in shown.splitlines()}


def test_ways_costs_and_windows_are_chosen(terminal, trace):
    words = ("simulate", trace, "--format", "sensei", *GPU, "--json")
    ways = ("--yield-after", "2min", "--yield-after", "30s", "--resume-cost", "10s")
    printed = json.loads(terminal.run(*words, *ways).stdout)["ways"]
    assert list(printed) == ["reservation", "yield after 2min", "yield after 30s", "per cell"]
    assert printed["yield after 30s"]["cells"]["delay"]["p99"] == 10
    moved = terminal.run(
        *words, "--idle-limit", "5", "--resume-cost", "0", "--state", "10GiB", "--same-device"
    )
    delay = json.loads(moved.stdout)["ways"]["idle limit 5min"]["cells"]["delay"]
    assert delay["p99"] == pytest.approx(2.147, abs=0.01)
    early = json.loads(terminal.run(*words, "--window", "0+30min").stdout)
    assert (early["sessions"], early["ways"]["reservation"]["cells"]["count"]) == (2, 2)


def test_without_gpus_it_is_told_what_would_be_held_if_there_were_enough(terminal, trace):
    done = terminal.run("simulate", trace, "--format", "sensei")
    assert done.returncode == 0
    assert "given back after 5min idle" in done.stdout
    assert "yield after" not in done.stdout
    printed = json.loads(terminal.run("simulate", trace, "--format", "sensei", "--json").stdout)
    assert printed["ways"] == {}
    assert printed["without_queue"]["gpu_hours"] == pytest.approx({"reserved": 64 / 60, "used": 4 / 60})


def test_leases_of_a_trace_are_compared_under_four_orders(terminal, tmp_path):
    path = tmp_path / "pods.csv"
    header = "name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    path.write_text(
        f"{header}\na,1,460,,LS,Failed,5,90,9\nb,1,460,,BE,Failed,86405,86490,86409\nc,0,0,,BE,,5,9,5\nd,x\n"
    )
    words = ("simulate", str(path), "--format", "openb", "--json", *GPU)
    every = json.loads(terminal.run(*words).stdout)
    assert (every["requests"], every["left_out"]) == (2, 1)
    assert every["bad"] == [{"line": 5, "why": "it ends before gpu_milli"}]
    printed = json.loads(terminal.run(*words, "--window", "1d+1d").stdout)
    assert (printed["requests"], set(printed["orders"]["fair"]["by_size"])) == (1, {"46%"})
    refused = terminal.run(*words, "--yield-after", "60s")
    assert refused.returncode == 2
    assert "was not recorded when cells ran" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "--format", "pai"), "neither a workload nor a file"),
        (("FILE", "--format", "helios"), "has no column user"),
        (("FILE", "--format", "sensei", "--window", "3d"), "is not START+LENGTH"),
        (("FILE", "--format", "sensei", "--window", "9d+3d"), "in this window"),
        (("FILE", "--format", "sensei", *GPU, "--state", "50%"), "is not an amount of memory"),
    ],
)
def test_what_it_refuses(terminal, trace, words, said):
    done = terminal.run("simulate", *[trace if word == "FILE" else word for word in words])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_slice_of_several_gpus_needs_them_in_one_machine(terminal, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"{TRACE[0]}\n0,4,0,0,resnet50,1,0\n")
    words = ("simulate", str(path), "--format", "sensei", "--devices", "V100-SXM2-32GB:4")
    assert terminal.run(*words).returncode == 0
    assert terminal.run(*words, "--per-node", "2").returncode == 3


def worked(terminal, spans):
    """Hold a slice, say when its kernel worked, and give it back."""
    held = terminal.hold("50%")
    began = time.time()
    terminal.ask(lambda pool: pool.report_busy(held, [(began + at, lasted) for at, lasted in spans]))
    terminal.free(held)


def test_a_pool_exports_who_had_a_slice_and_when_it_was_busy(terminal, tmp_path):
    # What goes beyond its lease is cut: clocks of servers may differ.
    worked(terminal, [(-3600, 10), (0, 7200)])
    terminal.free(terminal.hold("1"))
    done = terminal.run("history", "--cells")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["request"], second["request"], second["busy"]) == ("50%", "1", None)
    ((at, lasted),) = first["busy"]
    assert first["held_at"] <= at <= at + lasted <= first["ended_at"] + 0.01
    assert first["user"].startswith("user-")
    assert first["user"] == second["user"]
    again = json.loads(terminal.run("history", "--cells").stdout.splitlines()[0])
    assert again["user"] != first["user"]
    assert {
        json.loads(line)["user"]
        for line in terminal.run("history", "--cells", "--without-names").stdout.splitlines()
    } == {""}
    path = tmp_path / "month.jsonl"
    path.write_text(done.stdout)
    printed = json.loads(terminal.run("simulate", str(path), "--format", "history", "--json").stdout)
    assert (printed["sessions"], printed["bad"]) == (2, [])
    assert printed["ways"]["reservation"]["cells"]["count"] == 2


def test_a_pools_own_days_are_replayed_on_more_gpus(terminal):
    worked(terminal, [(0, 1)])
    words = ("simulate", "--from-history", "30d", "--yield-after", "60s", "--json")
    printed = json.loads(terminal.run(*words, "--devices", "+V100:3").stdout)
    assert (printed["workload"], printed["devices"]) == ("the last 30d", 4)
    assert list(printed["ways"]) == ["reservation", "yield after 1min", "per cell"]
    assert json.loads(terminal.run(*words).stdout)["devices"] == 1
    other = json.loads(terminal.run(*words, "--devices", "+A100@40GiB:2").stdout)
    assert other["devices"] == 3
    refused = terminal.run(*words, "--devices", "+A100:2")
    assert refused.returncode == 2
    assert "does not say its memory" in refused.stdout + refused.stderr


def test_what_the_courses_say_is_one_of_the_ways_of_a_pools_own_days(terminal):
    worked(terminal, [(0, 1)])
    ways = ["reservation", "idle limit 15min", "idle limit 5min", "yield after 1min", "per cell"]
    words = ("simulate", "--from-history", "30d", "--json")
    assert list(json.loads(terminal.run(*words).stdout)["ways"]) == ways
    courses = terminal.folder / "courses"
    courses.mkdir()
    (courses / "ml.yaml").write_text(
        "title: ML\nslices: [{name: Small, request: 2%}]\nidle_limit: 5min\nyield_after: never\n"
    )
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.PoolSettings.courses_dir = {str(courses)!r}\n")
    said = json.loads(terminal.run(*words).stdout)["ways"]
    assert list(said) == [*ways[:-1], "as your courses are now", "per cell"]
    named = json.loads(terminal.run(*words, "--idle-limit", "5min").stdout)["ways"]
    assert list(named) == ["reservation", "idle limit 5min", "per cell"]


def test_without_a_word_of_cells_a_pools_own_days_are_compared_as_leases(terminal):
    assert "no lease that was held" in terminal.run("simulate", "--from-history", "30d").stderr
    terminal.free(terminal.hold("1"))
    printed = json.loads(terminal.run("simulate", "--from-history", "30d", "--json").stdout)
    assert (printed["requests"], set(printed["orders"]) >= {"fair", "backfill"}) == (1, True)
