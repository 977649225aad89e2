"""``simulate``: tables for people, JSON, a picture, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from gpu_pool.cli import screen

LEASES = [
    {"requested_at": 1000.0 + n, "held_seconds": 60, "user": f"u{n % 2}", "course": "ml", "request": "50%"}
    for n in range(6)
]
GPU = ("--devices", "V100-SXM2-32GB:1")


@pytest.fixture
def history(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(lease) + "\n" for lease in LEASES))
    return str(path)


def test_a_history_is_played_on_the_pools_own_gpus(terminal, history):
    done = terminal.run("simulate", history, "--json", env={"GPU_POOL_DEVICES": "V100-SXM2-32GB:4"})
    # Four GPUs have room for all six at once; one has not.
    assert json.loads(done.stdout)["orders"]["fair"]["waits"]["worst"] == 0
    one = json.loads(terminal.run("simulate", history, *GPU, "--json").stdout)
    assert one["orders"]["fair"]["waits"]["worst"] > 0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"GPU_POOL_URL": "unix:/nowhere/pool.sock"},
            "the pool's own GPUs cannot be read: No pool",
        ),
        ({"GPU_POOL_DEVICES": ""}, "the pool has no GPU."),
    ],
)
def test_without_a_pool_the_gpus_of_a_history_have_to_be_named(terminal, history, environment, said):
    done = terminal.run("simulate", history, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "--devices V100-SXM2-32GB:4" in done.stderr
    assert terminal.run("simulate", history, *GPU, env=environment).returncode == 0


def test_what_takes_long_says_how_far_it_has_come(monkeypatch):
    now = 0.0
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with screen.Progress() as shown:
        for now, part in ((1.0, 0.1), (1.9, 0.2), (2.5, 0.3), (2.6, 0.4), (9.0, 0.5), (13.0, 0.75)):  # noqa: B007
            shown.tell("fair, 1 of 4", part)
    # Nothing for two seconds, and then a line every ten.
    assert told.getvalue() == "gpu-pool: fair, 1 of 4: 30%\ngpu-pool: fair, 1 of 4: 75%\n"


def test_a_simulation_tells_how_far_it_has_come(terminal, history):
    """And standard output has nothing of it."""
    code = "from gpu_pool.cli import main, screen; screen._SILENT = 0.0; main({!r})"
    words = ["simulate", history, *GPU, "--json"]
    done = terminal.call(sys.executable, "-c", code.format(words))
    assert "gpu-pool: simulating fair, 1 of 4: " in done.stderr
    assert json.loads(done.stdout)["requests"] == 6


def test_a_history_is_compared_under_four_orders(terminal, history):
    done = terminal.run("simulate", history, *GPU)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("history.jsonl (simulated, 6 requests)\n")
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"fair", "strict order", "smallest first", "backfill", "50%"} <= set(rows)


@pytest.mark.parametrize("lengths", ["none", "learned", "known"])
def test_the_queue_is_told_of_lengths_or_not(terminal, history, lengths):
    done = terminal.run("simulate", history, *GPU, "--lengths", lengths, "--json")
    assert (done.returncode, json.loads(done.stdout)["requests"]) == (0, 6)


def test_as_json_with_a_picture(terminal, history, tmp_path):
    picture = tmp_path / "waits.svg"
    done = terminal.run("simulate", history, *GPU, "--weight", "ml=2", "--plot", str(picture), "--json")
    printed = json.loads(done.stdout)
    assert (printed["simulated"], printed["requests"]) == (True, 6)
    assert list(printed["orders"]) == ["fair", "strict order", "smallest first", "backfill"]
    fair = printed["orders"]["fair"]
    assert set(fair) == {"utilisation", "waits", "whole", "by_size", "by_user", "jain"}
    assert set(fair["waits"]) == {"count", "mean", "median", "p95", "worst"}
    assert set(fair["by_user"]) == {"u0", "u1"}
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nowhere"], 2, "neither a workload nor a file"),
        (["mixed", "--weight", "ml"], 2, "is not COURSE=N"),
        (["FILE", "--devices", "V100"], 2, "'V100' in --devices does not name simulated devices"),
        (["FILE", "--devices", "V100@100MiB:1"], 3, "CUDA itself takes"),
    ],
)
def test_what_it_refuses(terminal, history, words, status, said):
    done = terminal.run("simulate", *[history if word == "FILE" else word for word in words])
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_how_long_a_large_request_waits_is_a_duration_or_minutes(terminal, history):
    said = [terminal.run("simulate", history, *GPU, "--drain-after", time).stdout for time in ("2h", "120")]
    assert said[0] == said[1]
    assert "50%" in said[0]
