"""The process that calls the driver stays for the next call, and whatever becomes of it harms nobody."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.launcher import launch_kernel

from gpu_pool.enforcement.checkpoint import NotRestored, NotSuspended
from gpu_pool.enforcement.checkpoint.driver_worker import DriverWorker
from gpu_pool.tuning import Tuning
from gpu_pool_client import LeaseState
from support.checkpoints import MakeCheckpoint, records
from support.cuda_stub import Driver
from support.pools import eventually, running

#: The driver may take so long, and processes hold so little that copying adds nothing.
IMPATIENT = Tuning(driver_within=5, driver_lock_ms=1)
#: As if it were long ago that something was suspended.
LATER = Tuning(parked_within=0.0)
#: What a kernel prints of the files that it has open.
OPEN_FILES = (
    "import os; print(*(os.readlink(each) for each in os.scandir('/proc/self/fd') if os.path.lexists(each)))"
)


@pytest.fixture
def pid(driver: Driver) -> Iterator[int]:
    """Run a process that has a little device memory."""
    with driver.process(10) as pid:
        yield pid


def is_there(pid: int) -> bool:
    """Whether a process runs, or has ended and nobody has asked for its exit status."""
    return Path(f"/proc/{pid}").exists()


def open_files(pid: int) -> set[str]:
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(each)}


# ---- It stays ----


def test_one_process_does_all_jobs_until_the_pool_closes(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    for _ in range(3):
        pool.suspend("l1", [pid], "GPU-1")
        pool.restore("l1")
    (worker,) = driver.workers()
    assert is_there(worker)
    pool.close()
    assert not is_there(worker)
    pool.suspend("l1", [pid], "GPU-1")
    assert len(driver.workers()) == 2


def test_it_ends_with_the_pool_even_if_a_forked_process_has_its_files(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    try:
        pool.close()
        assert not is_there(worker)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def test_it_ends_when_it_has_nothing_to_do(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint(Tuning(driver_idle=0.1))
    pool.suspend("l1", [pid], "GPU-1")
    await eventually(lambda: not is_there(driver.workers()[0]))
    pool.restore("l1")
    assert driver.state(pid) == "running"


def test_what_it_is_asked_for_just_as_it_ends_is_done(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint(Tuning(driver_idle=0.0))
    for _ in range(5):
        pool.suspend("l1", [pid], "GPU-1")
        pool.restore("l1")
    assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"] * 5


def test_it_keeps_nothing_of_a_job_that_is_done(driver: Driver, pid: int, checkpoint: MakeCheckpoint) -> None:
    pool = checkpoint()
    pool.suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    # Its standard streams, and not the lock on the record.
    assert len(open_files(worker)) == 1
    checkpoint().restore("l1")
    assert driver.state(pid) == "running"


# ---- It fails ----


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
@pytest.mark.parametrize("trouble", ["kill", pytest.param("hang", marks=pytest.mark.long), "chatter"])
def test_one_that_fails_at_any_step_is_replaced_and_the_kernel_runs(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, tmp_path: Path, trouble: str, call: str
) -> None:
    pool = checkpoint(IMPATIENT)
    if call in ("lock", "checkpoint"):
        driver.scenario(f"{trouble} {call} {pid} 1")
        with pytest.raises(NotSuspended, match="did not answer in|makes no sense"):
            pool.suspend("l1", [pid], "GPU-1")
    else:
        pool.suspend("l1", [pid], "GPU-1")
        driver.scenario(f"{trouble} {call} {pid} 1")
        pool.restore("l1")
    assert driver.state(pid) == "running"
    assert records(tmp_path) == []
    first, second = driver.workers()
    assert not is_there(first)
    driver.scenario()
    pool.suspend("l1", [pid], "GPU-1")
    pool.restore("l1")
    assert driver.workers() == [first, second]


def test_what_only_looks_like_an_answer_is_ignored(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    driver.scenario(f"babble lock {pid}", f"babble restore {pid}")
    pool = checkpoint()
    pool.suspend("l1", [pid], "GPU-1")
    assert driver.state(pid) == "checkpointed"
    pool.restore("l1")
    assert driver.state(pid) == "running"
    assert len(driver.workers()) == 1


def test_a_restoration_that_failed_is_tried_again_in_a_new_process(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", [pid], "GPU-1")
    driver.scenario(f"fail restore {pid} 999 1")
    pool.restore("l1")
    assert driver.state(pid) == "running"
    assert len(driver.workers()) == 2


def test_a_kernel_is_not_taken_for_broken_where_no_process_can_be_started(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint().suspend("l1", [pid], "GPU-1")
    pool = checkpoint(LATER)

    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", full)
        with pytest.raises(NotRestored, match="could not be asked: a process could not be started"):
            pool.restore("l1")
        assert pool.recover({"l1": LeaseState.HELD}) == {}
    assert driver.state(pid) == "checkpointed"
    pool.restore("l1")
    assert driver.state(pid) == "running"


def test_what_is_half_done_is_undone_once_a_process_can_be_started_again(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.scenario(f"kill checkpoint {pid} 1")
    start, left = subprocess.Popen, [0, 0, 1]

    def seldom(*words: Any, **named: Any) -> subprocess.Popen[Any]:
        if not left or left.pop():
            return start(*words, **named)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", seldom)
    with pytest.raises(NotSuspended):
        checkpoint().suspend("l1", [pid], "GPU-1")
    assert not left
    assert driver.state(pid) == "running"


async def test_one_that_is_killed_between_two_jobs_is_replaced(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    pool.suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    os.kill(worker, signal.SIGKILL)
    await eventually(lambda: not is_there(worker))
    pool.restore("l1")
    assert driver.state(pid) == "running"


@pytest.mark.long
def test_one_that_was_stopped_is_ended(driver: Driver, pid: int, checkpoint: MakeCheckpoint) -> None:
    pool = checkpoint(IMPATIENT)
    pool.suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    os.kill(worker, signal.SIGSTOP)
    pool.restore("l1")
    assert driver.state(pid) == "running"
    assert not is_there(worker)


def test_a_device_on_which_the_driver_hangs_holds_up_no_other(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint()
    with driver.process(10, gpu=2) as other:
        driver.scenario("gpus 2", f"hold lock {other}")
        hanging = threading.Thread(target=pool.suspend, args=("l2", [other], "GPU-2"))
        hanging.start()
        pool.suspend("l1", [pid], "GPU-1")
        pool.restore("l1")
        assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
        assert hanging.is_alive()
        driver.scenario("gpus 2")
        hanging.join()
        assert driver.state(other) == "checkpointed"
    assert len(driver.workers()) == 2


async def test_host_memory_that_is_about_to_be_taken_on_one_device_is_not_given_to_another(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint
) -> None:
    pool = checkpoint(checkpoint_host_mib=15)
    with driver.process(10, gpu=2) as other:
        driver.scenario("gpus 2", f"hold lock {other}")
        hanging = asyncio.ensure_future(asyncio.to_thread(pool.suspend, "l2", [other], "GPU-2"))
        await eventually(lambda: "lock" in driver.calls(other))
        with pytest.raises(NotSuspended, match="and 5 of the 15 MiB"):
            pool.suspend("l1", [pid], "GPU-1")
        driver.scenario("gpus 2")
        await hanging
    assert driver.calls(pid) == []


async def test_what_was_moved_and_cannot_be_recorded_is_brought_back(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    driver.scenario(f"hold checkpoint {pid}")
    parking = asyncio.ensure_future(asyncio.to_thread(checkpoint().suspend, "l1", [pid], "GPU-1"))
    await eventually(lambda: "checkpoint" in driver.calls(pid))
    (tmp_path / "suspended/.all").unlink()
    (tmp_path / "suspended/.all").mkdir()
    driver.scenario()
    with pytest.raises(NotSuspended, match="cannot be recorded"):
        await parking
    assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
    assert driver.state(pid) == "running"
    assert records(tmp_path) == []


# ---- The pool ends ----


def a_pool(folder: Path, pid: int) -> str:
    """Return the code of a process that suspends another one, says so, and stays."""
    return "\n".join(
        (
            "import sys",
            "from pathlib import Path",
            "from gpu_pool.enforcement.checkpoint import Checkpoint",
            "from gpu_pool.settings import PoolSettings",
            f"pool = Checkpoint(Path({str(folder / 'suspended')!r}), PoolSettings(checkpoint='on'))",
            f"pool.suspend('l1', [{pid}], 'GPU-1')",
            "print('suspended', flush=True)",
            "sys.stdin.read()",
        )
    )


async def test_it_ends_with_a_pool_that_is_killed(driver: Driver, pid: int, tmp_path: Path) -> None:
    with running(a_pool(tmp_path, pid)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "suspended\n"
        (worker,) = driver.workers()
        assert is_there(worker)
        server.kill()
        await eventually(lambda: not is_there(worker))


async def test_what_a_killed_pool_has_begun_is_undone_so_that_the_kernel_runs_on(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    driver.scenario(f"hold checkpoint {pid}")
    with running(a_pool(tmp_path, pid)) as server:
        await eventually(lambda: "checkpoint" in driver.calls(pid))
        server.kill()
        server.wait()
    driver.scenario()
    (worker,) = driver.workers()
    await eventually(lambda: not is_there(worker))
    assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
    assert driver.state(pid) == "running"
    assert checkpoint(Tuning(parked_within=0.0)).recover({"l1": LeaseState.HELD}) == {}
    assert records(tmp_path) == []


# ---- Who can reach it ----


@pytest.mark.parametrize("close_fds", [True, False])
def test_a_kernel_inherits_nothing_by_which_it_could_be_reached(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, close_fds: bool
) -> None:
    before = open_files(os.getpid())
    checkpoint().suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    ours = {each for each in open_files(os.getpid()) - before if each.startswith("socket:")}
    assert ours
    command = [sys.executable, "-c", OPEN_FILES]
    with launch_kernel(command, stdout=subprocess.PIPE, close_fds=close_fds) as kernel:
        assert kernel.stdout is not None
        inherited = kernel.stdout.read().decode().split()
    assert len(inherited) >= 3
    assert not set(inherited) & (ours | open_files(worker))


def test_it_is_apart_from_the_session_the_folder_and_the_devices_of_who_starts_it(
    driver: Driver, pid: int, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-9")
    monkeypatch.setenv("GPU_POOL_LEASE", "l0")
    checkpoint().suspend("l1", [pid], "GPU-1")
    (worker,) = driver.workers()
    assert os.getsid(worker) == worker
    assert os.readlink(f"/proc/{worker}/cwd") == "/"
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    assert b"CUDA_" not in environment
    # It would count as a process of that lease, which uses CUDA.
    assert b"GPU_POOL_LEASE" not in environment


def test_it_ends_when_it_is_asked_for_what_cannot_be(driver: Driver, pid: int) -> None:
    worker = DriverWorker(60.0)
    answer = worker.ask("restore", "--wait=nan", pid, limit=30)
    assert answer.code is None
    assert "is not a number" in answer.problem
    assert len(answer.problem) <= 300
    assert worker.ask("probe", limit=30).code == 0
    assert worker.ask("restore", *range(1, 50_000), limit=30).code is None
    assert driver.calls(pid) == []
    worker.stop()
