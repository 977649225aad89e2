"""The tables of fifty students, with cells and think times from a trace that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_same_cells_run_in_each_way(tmp_path: Path) -> None:
    rows = [f"1,{1200 * number},600" for number in range(4)]  # minutes: cells and pauses of ten hours
    (tmp_path / "trace.csv").write_text("\n".join(["num_gpu,submit_time,duration", *rows]) + "\n")
    command = [sys.executable, "-m", "benchmarks.fifty_students", str(tmp_path / "trace.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    loads, tables = lines[::7], (lines[3:7], lines[10:14])
    assert loads[0].startswith("load 70%, cells ")
    assert ", cells 1.00 times as long, " in loads[1]
    for load, table in zip(loads, tables, strict=True):
        cells = load.split()[-3]
        found = [row.strip("| ").split(" | ") for row in table]
        assert [row[0] for row in found] == [
            "reservation",
            "yield after 60 s",
            "yield after 5 s",
            "per cell",
        ]
        assert {row[1] for row in found} == {cells}
        assert float(found[0][6]) < float(found[1][6])
