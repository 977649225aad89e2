"""``simulate``: tables for people, JSON, a picture, and what it refuses."""

from __future__ import annotations

import json

import pytest

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


def test_a_history_is_compared_under_four_orders(terminal, history):
    done = terminal.run("simulate", history, *GPU)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("history.jsonl (simulated, 6 requests)\n")
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"fair", "strict order", "smallest first", "backfill", "50%"} <= set(rows)


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
        (["FILE"], 2, "does not say which GPUs"),
        (["mixed", "--weight", "ml"], 2, "is not COURSE=N"),
        (["FILE", "--devices", "V100"], 2, "does not name simulated devices"),
        (["FILE", "--devices", "V100@100MiB:1"], 3, "CUDA itself takes"),
    ],
)
def test_what_it_refuses(terminal, history, words, status, said):
    done = terminal.run("simulate", *[history if word == "FILE" else word for word in words])
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
