"""Which processes the driver could not move, decided from what is known of them, and read from real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint.processes import ProcessFacts, facts_of, why_kept

KERNEL, WORKER, OTHER = ProcessFacts(11, True), ProcessFacts(12, False), ProcessFacts(13, True)
MANAGED = ProcessFacts(14, True, "librmm")


@pytest.mark.parametrize(
    ("processes", "by_itself", "insisted"),
    [
        ([KERNEL], "", ""),
        ([KERNEL, WORKER], "process 12 has the GPU open", "process 12 has the GPU open"),
        ([KERNEL, OTHER], "(11, 13) compute on the GPU", ""),
        ([MANAGED], "process 14 uses librmm, and may have managed memory", ""),
        ([MANAGED, WORKER], "process 12", "process 12"),
    ],
)
def test_what_could_not_be_moved_is_told(
    processes: list[ProcessFacts], by_itself: str, insisted: str
) -> None:
    for why, said in (by_itself, False), (insisted, True):
        told = why_kept(processes, insisted=said)
        assert why in told
        assert bool(told) is bool(why)


def test_managed_memory_is_suspected_by_what_a_process_has_loaded(tmp_path: Path) -> None:
    # Only the name is looked at.
    library = tmp_path / "librmm.so"
    library.write_bytes(bytes(4096))
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0); "
        "print(flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, library], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert facts_of(process.pid, {process.pid}) == ProcessFacts(process.pid, True, "librmm")
        process.communicate(b"\n")


def test_managed_memory_is_suspected_by_what_frameworks_are_told() -> None:
    told = {"TF_FORCE_UNIFIED_MEMORY": "1"}
    with subprocess.Popen(["sleep", "600"], env=told) as process, subprocess.Popen(["sleep", "600"]) as other:
        try:
            for each in (process, other):  # the system shows its variables a moment after it has begun
                while not Path(f"/proc/{each.pid}/environ").read_bytes():
                    pass
            assert facts_of(process.pid, ()).managed_by == "TF_FORCE_UNIFIED_MEMORY=1"
            assert facts_of(other.pid, ()) == ProcessFacts(other.pid, False)
        finally:
            process.kill()
            other.kill()
