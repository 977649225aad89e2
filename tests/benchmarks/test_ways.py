"""The tables of recorded days, from a trace that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_command_prints_the_tables(tmp_path: Path) -> None:
    first = 562 * 60  # minutes; the window begins half an hour before
    rows = [f"2,{first + 30 * number},10" for number in range(4)]
    (tmp_path / "trace.csv").write_text("\n".join(["num_gpu,submit_time,duration", *rows]) + "\n")
    command = [sys.executable, "-m", "benchmarks.ways", str(tmp_path / "trace.csv"), "--gpus", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    delays, held, costs = (table.splitlines() for table in done.stdout.strip().split("\n\n"))
    ways = "reservation | idle limit 15 min | idle limit 5 min | yield after 60 s | per cell"
    assert delays[0] == f"| GPUs | {ways} |"
    assert delays[2].startswith("| 8 | 100.0%, 0 s, 0 s |")
    # Two GPUs for four cells of ten minutes, and for the 70 minutes from the first to the last.
    assert held[2].startswith("| 8 | 3 | ")
    assert [row.partition(",")[0] for row in costs[2:]] == [
        *["| yield after 60 s"] * 2,
        "| the same",
        "| yield after 60 s",
        *["| idle limit 5 min"] * 2,
    ]
