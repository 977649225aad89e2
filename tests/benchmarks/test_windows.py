"""The tables of recorded windows, from a trace that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_command_prints_the_tables(tmp_path: Path) -> None:
    day = 86_400
    rows = [f"8,1000,LS,{day},{day},{day + 3600}", f"1,500,BE,{day},{day + 9},{day + 609}", "x,1,LS,0,0,9"]
    header = "num_gpu,gpu_milli,qos,creation_time,scheduled_time,deletion_time"
    (tmp_path / "pods.csv").write_text("\n".join([header, *rows]) + "\n")
    command = [sys.executable, "-m", "benchmarks.windows", str(tmp_path / "pods.csv"), "--first", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    windows, means = done.stdout.strip().split("\n\n")
    assert windows.splitlines()[0] == "Line 4 is left out: num_gpu is 'x', not a number"
    assert [row.partition(" | ")[0] for row in windows.splitlines()[3:]] == ["| 1 to 4"] * 3
    assert [row.split(" | ")[0] for row in means.splitlines()[2:]] == [
        "| fair, told nothing",
        "| fair, lengths known",
        "| backfill",
        "| strict order",
    ]
