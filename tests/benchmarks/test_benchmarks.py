"""The benchmarks run, and what they print is one table, the same as JSON, and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks as a person does: at the root of the sources."""
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def names() -> list[str]:
    """Return the benchmarks that there are, as a refusal tells them."""
    return bench("none").stderr.rpartition("There are: ")[2].strip(" .\n").split(", ")


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def test_what_is_measured_comes_as_one_table_and_as_json(tmp_path: Path) -> None:
    done = bench("--quick", "courses", "peers", "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[:5] == ["what", "ours", "yardstick", "ratio", "unit"]
    assert "peers, left out: --peers-python names no environment" in done.stdout
    for row in rows(tmp_path / "found.json"):
        assert row["command"] == "python -m benchmarks courses"
        assert row["what"] in done.stdout
        assert row["ours"] > 0
        assert row["yardstick"] > 0


def test_a_benchmark_that_does_not_exist_is_told_and_those_that_do() -> None:
    done = bench("kernels", "none")
    assert done.returncode == 2
    assert "There is no benchmark none. There are: kernels, " in done.stderr


def test_one_that_breaks_keeps_nobody_from_being_measured(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = bench("--quick", "peers", "courses", "--peers-python", tmp_path / "missing", "--json", found)
    assert done.returncode == 1
    assert "peers FAILED: FileNotFoundError" in done.stdout
    assert {row["name"] for row in rows(found)} == {"courses"}


@pytest.mark.long
def test_plots_are_drawn_from_the_rows_without_a_display(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"what": "a grant at 10 held", "ours": 2.0, "yardstick": 1.0, "ratio": 2.0, "unit": "ms/s"}
    names = ("kernels", "stores", "growth", "decisions")
    of = [{**row, "name": name, "points": [[1, 1], [10, 2]]} for name in names]
    memory = {**row, "name": "hibernation", "what": "memory of kernels: asleep, to awake", "unit": "MiB"}
    of += [{**memory, "points": [[0, 0], [1, 100], [2, 1], [3, 110]]}] * 3 + [{**memory, "points": []}]
    (tmp_path / "found.json").write_text(json.dumps({"rows": of}))
    command = [sys.executable, "-m", "benchmarks.plots", tmp_path / "found.json", tmp_path / "plots"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    drawn = {path.name: path.read_bytes()[:8] for path in (tmp_path / "plots").iterdir()}
    assert drawn == {
        f"bench-{name}.png": b"\x89PNG\r\n\x1a\n" for name in ("kernels", "grants", *names[2:], "hibernation")
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_benchmark_runs(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json", found],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert " FAILED: " not in done.stdout
    measured = {row["name"] for row in rows(found)} | {"hibernation"}  # which needs root, and CRIU
    assert measured == {*names()} - {
        "peers",
        "cluster",
        "restart",
        "journey",
        "pod_starts",
        "load",
    }
