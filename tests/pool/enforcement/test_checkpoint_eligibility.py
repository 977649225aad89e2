"""Whether what processes keep on a device can be moved: decided from facts, some read from real processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint.eligibility import (
    CheckpointFacts,
    Hindrance,
    ProcessFacts,
    facts_of,
    hindrances,
    why_kept,
)
from gpu_pool_client import Device
from support.checkpoints import MakeCheckpoint

H100 = Device("GPU-1", 0, "NVIDIA H100", 81559, driver="580.95.05", context_mib=519)
KNOWN = CheckpointFacts(H100, tier="accounting", machine="x86_64", has_bindings=True, host_mib=4096)


def found(facts: CheckpointFacts, *, insisted: bool = False, under_mps: bool = False) -> list[Hindrance]:
    return hindrances(facts, insisted=insisted, under_mps=under_mps)


def test_nothing_hinders_what_was_seen_to_work() -> None:
    assert found(KNOWN) == []
    assert found(replace(KNOWN, host_mib=519)) == []


@pytest.mark.parametrize(
    ("facts", "why", "certain"),
    [
        (replace(KNOWN, device=replace(H100, simulated=True)), "simulated", True),
        (replace(KNOWN, device=replace(H100, mig_profile="1g.10gb")), "MIG", True),
        (replace(KNOWN, device=replace(H100, unified=True)), "no memory of its own", True),
        (
            replace(KNOWN, device=replace(H100, driver="565.57.01")),
            "and this is 565.57.01",
            True,
        ),
        (replace(KNOWN, device=replace(H100, driver="570.158.01")), "from 580 to below 610", False),
        (replace(KNOWN, device=replace(H100, driver="610.43")), "from 580 to below 610", False),
        (replace(KNOWN, device=replace(H100, driver="")), "not known", False),
        (replace(KNOWN, machine="aarch64"), "this is aarch64", False),
        (replace(KNOWN, tier="mps"), "MPS", True),
        (replace(KNOWN, tier="cgroups"), "MPS", True),
        (replace(KNOWN, has_bindings=False), "cuda-bindings is missing", True),
        (replace(KNOWN, host_mib=518), "518 MiB of host memory are left", True),
    ],
)
def test_each_hindrance_is_told_with_what_to_do(facts: CheckpointFacts, why: str, certain: bool) -> None:
    (one,) = found(facts)
    assert why in one.why
    assert one.remedy
    assert one.decisive
    (insisted,) = found(facts, insisted=True)
    assert insisted == replace(one, decisive=certain)


def test_all_hindrances_are_told_the_decisive_ones_first() -> None:
    poor = replace(KNOWN, device=replace(H100, driver="570.1"), machine="aarch64", has_bindings=False)
    assert [each.decisive for each in found(poor, insisted=True)] == [True, False, False]


def test_mps_is_tried_where_the_administrator_has_seen_it() -> None:
    assert found(replace(KNOWN, tier="mps"), under_mps=True) == []


@pytest.mark.parametrize(
    ("device", "tier", "why"),
    [
        (replace(H100, simulated=True), "accounting", "simulated"),
        (replace(H100, mig_profile="1g.10gb"), "accounting", "MIG"),
        (replace(H100, driver="565.57.01"), "accounting", "570 or newer"),
        (H100, "mps", "MPS"),
    ],
)
def test_devices_where_it_does_not_work_are_refused(
    device: Device, tier: str, why: str, checkpoint: MakeCheckpoint
) -> None:
    assert why in checkpoint().unavailable(device, tier)


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
