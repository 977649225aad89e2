"""Device memory of parked kernels goes to host memory and back, against a stand-in for the driver."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement.checkpoint import Broken, NotRestored, NotSuspended, program
from gpu_pool.enforcement.checkpoint.eligibility import available_mib, budget_mib
from gpu_pool.tuning import Tuning
from gpu_pool_client import Device, LeaseState
from support.checkpoints import MakeCheckpoint, records, states
from support.cuda_stub import Driver

H100 = Device("GPU-1", 0, "NVIDIA H100", 81559, driver="580.95.05")


# ---- Back and forth ----


def test_all_processes_are_suspended_and_restored(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    pool = checkpoint()
    assert pool.suspend("l1", pids, "GPU-1") == 1024
    assert states(driver, pids) == ["checkpointed"] * 2
    pool.restore("l1")
    assert states(driver, pids) == ["running"] * 2
    assert driver.calls(pids[0]) == ["lock", "checkpoint", "restore", "unlock"]
    assert records(tmp_path) == []


def test_doing_either_again_changes_nothing(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", pids, "GPU-1")
    assert pool.suspend("l1", [], "GPU-1") == 1024
    pool.restore("l1")
    pool.restore("l1")
    pool.restore("never suspended")
    assert driver.calls(pids[1]) == ["lock", "checkpoint", "restore", "unlock"]


def test_a_process_that_comes_later_is_suspended_too(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", pids[:1], "GPU-1")
    assert pool.suspend("l1", pids, "GPU-1") == 1024
    assert states(driver, pids) == ["checkpointed"] * 2
    pool.restore("l1")
    assert states(driver, pids) == ["running"] * 2


def test_what_cannot_be_recorded_is_kept(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "suspended").write_text("not a folder")
    with pytest.raises(NotSuspended, match="cannot be recorded"):
        checkpoint().suspend("l1", pids, "GPU-1")
    assert driver.calls(pids[0]) == []


def test_what_a_lost_machine_left_is_in_nobodys_way(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "suspended").mkdir()
    (tmp_path / "suspended" / "l0").write_bytes(bytes(100))
    checkpoint().suspend("l1", pids, "GPU-1")
    assert checkpoint().recover({"l0": LeaseState.ENDED}) == {}
    assert records(tmp_path) == ["l1"]


def test_another_process_restores_what_this_one_suspended(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    checkpoint().suspend("l1", pids, "GPU-1")
    checkpoint().restore("l1")
    assert states(driver, pids) == ["running"] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--wait=inf", "1"],
        ["--wait=nan", "1"],
        ["--wait=-1", "1"],
        ["--free=GPU-1", "1"],
        ["--free=GPU-1=0", "1"],
        ["--free=\udcff=1", "1"],
        ["--free==1", "1"],
        ["0"],
        ["-1"],
        [f"{2**22 + 1}"],
        [f"{2**31}"],
        ["9" * 5_000],
        ["\u0663"],
        [""],
    ],
)
def test_what_cannot_be_is_refused_before_the_driver_is_asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        program.job_parser().parse_args(["restore", "--limit=1", *arguments])
    assert refused.value.code == 2
    assert len(capsys.readouterr().err.splitlines()[-1]) < 300


# ---- Kept ----


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("fail lock {1} 600", "busy on its GPU"),
        ("fail checkpoint {1} 801", r"managed \(UVM\)"),
        ("fail checkpoint {0} 800", "does not permit"),
        ("lie lock {1}", "reports success, but it is running"),
        ("lie checkpoint {1}", "reports success, but it is locked"),
        pytest.param("keep checkpoint {1}", "still taken", marks=pytest.mark.long),
        ("kill checkpoint {0}", "who asked it was ended"),
        ("kill checkpoint {1}", "who asked it was ended"),
    ],
)
def test_processes_run_on_when_one_cannot_be_suspended(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path, trouble: str, why: str
) -> None:
    driver.scenario(trouble.format(*pids))
    with pytest.raises(NotSuspended, match=why):
        checkpoint().suspend("l1", pids, "GPU-1")
    assert states(driver, pids) == ["running"] * 2
    assert records(tmp_path) == []


@pytest.mark.long
def test_processes_run_on_when_the_driver_hangs(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = checkpoint(Tuning(driver_within=2, driver_lock_ms=1))
    driver.scenario(f"hang checkpoint {pids[1]}")
    with pytest.raises(NotSuspended, match="did not answer in"):
        impatient.suspend("l1", pids, "GPU-1")
    assert states(driver, pids) == ["running"] * 2


def test_what_cannot_be_measured_is_kept(driver: Driver, pids: list[int], checkpoint: MakeCheckpoint) -> None:
    driver.scenario(f"unmeasured {pids[0]}")
    with pytest.raises(NotSuspended, match="does not say how much"):
        checkpoint().suspend("l1", pids, "GPU-1")
    driver.scenario(f"unseen {pids[0]}")
    with pytest.raises(NotSuspended, match="sees none"):
        checkpoint().suspend("l1", pids[:1], "GPU-1")
    assert driver.calls(pids[0]) == []


def test_what_was_forked_after_cuda_was_used_is_found_before_anything_is_suspended(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    driver.scenario(f"unseen {pids[1]}")
    with pytest.raises(NotSuspended, match=f"process {pids[1]} .* forked after CUDA was used"):
        checkpoint().suspend("l1", pids, "GPU-1")
    assert driver.calls(pids[0]) == []
    assert records(tmp_path) == []


def test_several_processes_are_moved_only_where_the_administrator_has_it_tried(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    by_itself = checkpoint(checkpoint="auto")
    with pytest.raises(NotSuspended, match="may share memory"):
        by_itself.suspend("l1", pids, "GPU-1")
    assert driver.calls(pids[0]) == []
    assert by_itself.suspend("l1", pids[:1], "GPU-1") == 512


def test_processes_of_others_are_kept(
    driver: Driver, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(NotSuspended, match="another user"):
        checkpoint().suspend("l1", [1], "GPU-1")


# ---- Broken ----


@pytest.mark.parametrize("trouble", ["break checkpoint {1} 999", "break lock {1} 304"])
def test_a_process_that_the_driver_broke_is_named(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, trouble: str
) -> None:
    driver.scenario(trouble.format(*pids))
    with pytest.raises(Broken) as broken:
        checkpoint().suspend("l1", pids, "GPU-1")
    assert broken.value.pids == {pids[1]}
    assert driver.state(pids[0]) == "running"


@pytest.mark.parametrize("trouble", ["fail restore {0} 304", "break restore {0} 999", "fail unlock {0} 401"])
def test_a_process_that_cannot_be_restored_is_named(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, trouble: str
) -> None:
    pool = checkpoint()
    pool.suspend("l1", pids, "GPU-1")
    driver.scenario(trouble.format(*pids))
    with pytest.raises(Broken, match=str(pids[0])) as broken:
        pool.restore("l1")
    assert broken.value.pids == {pids[0]}
    assert driver.state(pids[1]) == "running"


@pytest.mark.parametrize("trouble", ["kill restore {0} 1", "kill unlock {0} 1", "fail restore {1} 304 1"])
def test_a_restoration_that_was_cut_off_is_begun_again(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint, trouble: str
) -> None:
    pool = checkpoint()
    pool.suspend("l1", pids, "GPU-1")
    driver.scenario(trouble.format(*pids))
    pool.restore("l1")
    assert states(driver, pids) == ["running"] * 2


def test_nothing_is_restored_before_there_is_free_memory(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", pids, "GPU-1")
    driver.scenario("memory 8192", "others 7169")
    with pytest.raises(NotRestored, match="1 MiB of 1024 are missing on GPU-1"):
        pool.restore("l1")
    assert driver.calls(pids[0]) == ["lock", "checkpoint"]
    driver.scenario("memory 8192", "others 7168")
    pool.restore("l1")
    assert states(driver, pids) == ["running"] * 2


# ---- Host memory ----


def test_what_a_process_holds_through_mps_counts(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    driver.scenario(f"mps {pids[0]}")
    assert checkpoint().suspend("l1", pids, "GPU-1") == 1024


def test_host_memory_is_bounded_over_all_leases(
    driver: Driver, pids: list[int], checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint(checkpoint_host_mib=1000)
    pool.suspend("l1", pids[:1], "GPU-1")
    with pytest.raises(NotSuspended, match="512 MiB on its GPU, and 488 of the 1000 MiB"):
        pool.suspend("l2", pids[1:], "GPU-1")
    assert driver.calls(pids[1]) == []
    pool.restore("l1")
    pool.suspend("l2", pids[1:], "GPU-1")


def test_host_memory_of_processes_that_ended_is_free_again(
    driver: Driver, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint(checkpoint_host_mib=600)
    with driver.process() as first:
        pool.suspend("l1", [first], "GPU-1")
    with driver.process() as second:
        pool.suspend("l2", [second], "GPU-1")
        assert driver.state(second) == "checkpointed"


def test_memory_that_the_machine_does_not_have_is_not_taken(
    driver: Driver, checkpoint: MakeCheckpoint
) -> None:
    with driver.process(900_000_000) as pid, pytest.raises(NotSuspended, match="are available to it"):
        checkpoint(checkpoint_host_mib=999_999_999).suspend("l1", [pid], "GPU-1")
    assert driver.calls(pid) == []


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    assert available_mib([os.getpid()], tmp_path) > 3
    (tmp_path / "memory.max").write_text(f"{4 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 20}\ninactive_file {2 << 20}\n")
    assert available_mib([os.getpid()], tmp_path) == 3
    (tmp_path / "memory.max").write_text("max\n")
    assert available_mib([os.getpid()], tmp_path) > 3


def test_without_a_setting_a_quarter_of_the_cgroup_that_limits_the_pool_is_used(tmp_path: Path) -> None:
    whole = budget_mib(0, tmp_path)
    (tmp_path / "memory.max").write_text(f"{400 << 20}\n")
    assert budget_mib(0, tmp_path) == 100 < whole
    assert budget_mib(7000, tmp_path) == 7000
    (tmp_path / "memory.max").write_text("max\n")
    assert budget_mib(0, tmp_path) == whole


def test_with_little_left_the_large_one_keeps_its_slice_and_the_small_one_is_parked(
    driver: Driver, checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    pool = checkpoint(checkpoint_host_mib=1000)
    with driver.process(600) as first, driver.process(500) as large, driver.process(300) as small:
        pool.suspend("l1", [first], "GPU-1")
        with pytest.raises(NotSuspended, match="400 of the 1000 MiB"):
            pool.suspend("l2", [large], "GPU-1")
        assert "Lease l2 is not parked: it holds 500 MiB on its GPU, and 400 of the 1000 MiB" in caplog.text
        pool.suspend("l3", [small], "GPU-1")
        memory = pool.host_memory()
        assert (memory.leases, memory.taken_mib, memory.budget_mib) == (2, 900, 1000)
        pool.restore("l1")
        pool.suspend("l2", [large], "GPU-1")


# ---- Where it cannot be had ----


def test_by_itself_it_is_on_where_it_is_known_to_work(
    driver: Driver, checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    untouched = checkpoint(checkpoint="auto")
    assert untouched.unavailable(H100, "accounting") == ""
    newer = replace(H100, driver="615.43")
    assert "and this is 615.43" in untouched.unavailable(newer, "accounting")
    assert checkpoint().unavailable(newer, "accounting") == ""


def test_it_can_be_switched_off(driver: Driver, checkpoint: MakeCheckpoint) -> None:
    assert "switched off" in checkpoint(checkpoint="off").unavailable(H100, "accounting")


def test_it_is_available_where_the_driver_has_it(driver: Driver, checkpoint: MakeCheckpoint) -> None:
    assert checkpoint().unavailable(H100, "accounting") == ""
    assert checkpoint(checkpoint_under_mps=True).unavailable(H100, "mps") == ""


@pytest.mark.parametrize(
    ("trouble", "why"),
    [("fail init 0 100", "NO_DEVICE"), ("driver 12040", "CUDA 12.4"), ("absent", "not found")],
)
def test_a_driver_that_cannot_do_it_says_why(
    driver: Driver, checkpoint: MakeCheckpoint, trouble: str, why: str
) -> None:
    driver.scenario(trouble)
    assert why in checkpoint().unavailable(H100, "accounting")
