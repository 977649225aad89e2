"""The watchdog over real processes, told of their memory by a stand-in for the driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpu_pool_client import Device, EndReason, Holder, LeaseState, Process, parse_request
from support.pools import eventually, identity, running
from support.watchdog import WatchedPool, watched_pool

#: Has 300 MiB of the machine's memory, and says so.
RESIDENT = "kept = bytearray(b'1') * (300 << 20); print('there', flush=True); import sys; sys.stdin.read()"

V100 = Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)
CARD = "gpu GPU-0 Tesla V100-SXM2-32GB"


async def test_peak_mean_and_time_on_the_device_are_kept_in_the_history(there: WatchedPool) -> None:
    with running() as kernel:
        lease = await there.hold("50%", identity(kernel))
        there.scene(CARD)
        there.look(2)
        there.scene(CARD, f"process {kernel.pid} 1000")
        there.look(2)
        there.scene(CARD, f"process {kernel.pid} 4000")
        there.look(1)
        there.scene(CARD)
        there.look(3)
        await there.pool.release(lease.id)
        there.look(1)
    row = await there.history()
    assert (row.peak_mib, row.mean_mib, row.device_seconds, row.touched) == (4000, 2000.0, 3.0, 1)


async def test_what_never_touched_the_gpu_is_told_from_what_was_not_measured(there: WatchedPool) -> None:
    with running() as kernel:
        there.scene(CARD)
        lease = await there.hold("2%", identity(kernel))
        there.look(1, times=2)
        await there.pool.release(lease.id)
        there.look()
        row = await there.history()
        assert (row.peak_mib, row.device_seconds, row.touched) == (None, 0.0, 0)
        unseen = await there.hold("2%", identity(kernel), "other")
        await there.pool.release(unseen.id)
    rows = await there.pool.history()
    assert (rows[1].device_seconds, rows[1].touched) == (None, None)


async def test_a_measurement_goes_on_when_the_guard_is_started_again(tmp_path: Path, nvml: Path) -> None:
    with running() as kernel:
        async with watched_pool(tmp_path, nvml, V100) as first:
            lease = await first.hold("50%", identity(kernel))
            first.scene(CARD, f"process {kernel.pid} 1000")
            first.look(5, times=2)
        async with watched_pool(tmp_path, nvml, V100) as second:
            second.scene(CARD, f"process {kernel.pid} 3000")
            second.look(1)  # the first look stands for one second
            await second.pool.release(lease.id)
            second.look(1)
            row = await second.history()
    assert (row.peak_mib, row.device_seconds) == (3000, 7.0)


async def test_a_process_on_a_gpu_that_has_the_machines_memory_is_judged_by_its_resident_memory(
    tmp_path: Path, nvml: Path
) -> None:
    """As on a GB10: the driver lists the process, and no memory."""
    gb10 = Device("GPU-0", 0, "NVIDIA GB10", 8192, context_mib=100, unified=True)
    async with watched_pool(tmp_path, nvml, gb10) as there:
        with running(RESIDENT) as large, running() as small:
            assert large.stdout is not None
            assert large.stdout.readline() == "there\n"
            there.scene("gpu GPU-0 NVIDIA GB10", f"process {large.pid} -", f"process {small.pid} -")
            over = await there.hold("150MiB", identity(large), "over")
            within = await there.hold("150MiB", identity(small), "within")
            there.look(10, times=3)
            assert "150" in (await there.pool.get_lease(over.id)).notice
            assert (await there.pool.get_lease(within.id)).notice == ""
            for lease in (over, within):
                await there.pool.release(lease.id)
            there.look(1)
            peaks = {row.id: row.peak_mib for row in await there.pool.history()}
            assert 300 <= (peaks[over.id] or 0) < 350
            assert 0 < (peaks[within.id] or 0) < 50


async def test_memory_that_the_driver_does_not_tell_is_neither_counted_nor_too_much(
    there: WatchedPool,
) -> None:
    with running() as kernel:
        lease = await there.hold("2%", identity(kernel))
        there.scene(CARD, f"process {kernel.pid} -")
        there.look(10, times=30)
        assert (await there.pool.get_lease(lease.id)).notice == ""
        await there.pool.release(lease.id)
        there.look()
    row = await there.history()
    assert (row.peak_mib, row.mean_mib, row.device_seconds) == (None, None, 291.0)


#: A kernel: every SIGINT is written down; it starts a child, whose pid it says.
KERNEL = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
{term}
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
while True:
    signal.pause()
"""
STUBBORN = KERNEL.format(term="signal.signal(signal.SIGTERM, signal.SIG_IGN)")


async def test_what_stays_over_its_memory_is_warned_then_interrupted_then_ended(there: WatchedPool) -> None:
    with running(STUBBORN) as kernel:
        assert kernel.stdout is not None
        child = int(kernel.stdout.readline())
        child_process = Process.of(child)
        assert child_process is not None
        lease = await there.hold("2%", identity(kernel))
        # Together they use too much, neither does alone.
        there.scene(CARD, f"process {kernel.pid} 500", f"process {child} 400")
        there.look()
        there.look(9)
        assert (await there.pool.get_lease(lease.id)).notice == ""
        there.look(1)
        notice = (await there.pool.get_lease(lease.id)).notice
        assert notice.startswith(
            "This slice uses 900MiB of GPU 0's memory, and was granted 655MiB. If it stays"
        )
        assert "what runs is interrupted, and at" in notice
        there.look(29)
        there.look(1)
        assert kernel.stdout.readline() == "interrupted\n"
        assert "What ran was interrupted." in (await there.pool.get_lease(lease.id)).notice
        there.look(59)
        assert there.look(1)["evicted"] == sorted([kernel.pid, child])
        assert kernel.poll() is None, "it ignores SIGTERM"
        there.look(5)
        await eventually(lambda: kernel.poll() == -signal.SIGKILL)
        await eventually(lambda: child_process.is_alive() is False)
        there.look(1)
    ended = await there.pool.get_lease(lease.id)
    assert (ended.state, ended.end_reason) == (LeaseState.ENDED, EndReason.OVER_MEMORY)


async def test_a_burst_is_taken_back_step_by_step_once_somebody_is_granted_it(
    there: WatchedPool,
) -> None:
    with running(STUBBORN) as kernel, running() as newcomer:
        assert kernel.stdout is not None
        kernel.stdout.readline()
        lease = await there.hold("2%..10%", identity(kernel))
        await there.pool.core.reconciler.once()
        there.scene(CARD, f"process {kernel.pid} 3000")
        there.look(100, times=3)
        assert (await there.pool.get_lease(lease.id)).notice == ""
        await there.hold("95%", identity(newcomer), "newcomer")
        await there.pool.core.reconciler.once()
        there.look()
        there.look(4)
        assert (await there.pool.get_lease(lease.id)).notice == ""
        there.look(1)
        notice = (await there.pool.get_lease(lease.id)).notice
        assert "3000MiB of GPU 0's memory, and may use 1639MiB now: others need what it had on top" in notice
        there.look(10)
        assert kernel.stdout.readline() == "interrupted\n"
        assert there.look(20)["evicted"] == [kernel.pid]
        ending = (await there.pool.get_lease(lease.id)).notice
        assert "others need all but 1639MiB: that was on top of its slice" in ending


async def test_a_kernel_that_dies_of_it_is_not_restarted_and_the_reason_is_kept(there: WatchedPool) -> None:
    with running(KERNEL.format(term="")) as kernel:
        assert kernel.stdout is not None
        kernel.stdout.readline()
        lease = await there.pool.request(parse_request("2%"), Holder("ada"), "key")
        await there.pool.attach(lease.id, identity(kernel), grace=300)
        there.scene(CARD, f"process {kernel.pid} 900")
        for _ in range(100):
            there.look(10)
            if kernel.poll() is not None:
                break
        await there.pool.status()  # somebody else sees first that it is gone
    assert (await there.pool.get_lease(lease.id)).end_reason is EndReason.OVER_MEMORY


async def test_going_back_under_takes_the_notice_back_and_begins_anew(there: WatchedPool) -> None:
    with running(STUBBORN) as kernel:
        lease = await there.hold("2%", identity(kernel))
        for _ in range(3):
            there.scene(CARD, f"process {kernel.pid} 900")
            there.look(1)
            there.look(10)
            assert (await there.pool.get_lease(lease.id)).notice
            there.look(29)
            there.scene(CARD, f"process {kernel.pid} 719")  # 655 MiB and the 64 that are forgiven
            there.look(1)
            assert (await there.pool.get_lease(lease.id)).notice == ""
        assert kernel.poll() is None


async def test_a_notice_of_an_earlier_guard_is_taken_back(tmp_path: Path, nvml: Path) -> None:
    with running() as kernel:
        async with watched_pool(tmp_path, nvml, V100) as first:
            lease = await first.hold("2%", identity(kernel))
            first.scene(CARD, f"process {kernel.pid} 900")
            first.look(10, times=2)
            assert (await first.pool.get_lease(lease.id)).notice
        async with watched_pool(tmp_path, nvml, V100) as second:
            second.scene(CARD)
            second.look()
            assert (await second.pool.get_lease(lease.id)).notice == ""


async def test_warning_alone_ends_nothing(tmp_path: Path, nvml: Path) -> None:
    with running() as kernel:
        async with watched_pool(tmp_path, nvml, V100, watchdog="warn") as there:
            lease = await there.hold("2%", identity(kernel))
            there.scene(CARD, f"process {kernel.pid} 900")
            there.look(100, times=10)
            found = await there.pool.get_lease(lease.id)
            assert found.notice
            assert "interrupted" not in found.notice
            assert kernel.poll() is None


#: A kernel whose child starts a process of its own, says its pid, and ends when the kernel is told so.
ORPHANING = """
import os, signal, sys
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    signal.pause()
sys.stdin.readline()
os.kill(middle, signal.SIGKILL)
os.waitpid(middle, 0)
print("alone", flush=True)
sys.stdin.read()
"""


def orphan(kernel: subprocess.Popen[str]) -> None:
    """Let the child of the kernel end, so that the process it has started is alone."""
    assert kernel.stdin is not None
    assert kernel.stdout is not None
    kernel.stdin.write("\n")
    kernel.stdin.flush()
    assert kernel.stdout.readline() == "alone\n"


@pytest.mark.parametrize("known_by", ["an earlier look", "its environment"])
async def test_what_has_lost_its_parents_still_belongs_to_the_lease(
    there: WatchedPool, monkeypatch: pytest.MonkeyPatch, known_by: str
) -> None:
    lease = await there.pool.request(parse_request("2%"), Holder("ada"), "key")
    if known_by == "its environment":
        monkeypatch.setenv("GPU_POOL_LEASE", lease.id)
    with running(ORPHANING) as kernel:
        await there.pool.attach(lease.id, identity(kernel))
        assert kernel.stdout is not None
        pid = int(kernel.stdout.readline())
        try:
            there.scene(CARD, f"process {pid} 300")
            if known_by == "an earlier look":
                there.look()
            orphan(kernel)
            assert there.look(times=70)["unmanaged"] == []
        finally:
            os.kill(pid, signal.SIGKILL)
        await there.pool.release(lease.id)
    there.look()
    assert (await there.history()).device_seconds >= 70


async def test_one_process_may_hold_several_slices_of_a_device(there: WatchedPool) -> None:
    with running() as shell:
        leases = [await there.hold("2%", identity(shell), f"key-{n}") for n in range(2)]
        there.scene(CARD, f"process {shell.pid} 1300")
        there.look(10, times=10)
        assert [(await there.pool.get_lease(lease.id)).notice for lease in leases] == ["", ""]
        there.scene(CARD, f"process {shell.pid} 1400")
        there.look(10, times=3)
        notices = [(await there.pool.get_lease(lease.id)).notice for lease in leases]
        assert "uses 1400MiB of GPU 0's memory, and was granted 1310MiB" in "".join(notices)


async def test_through_mps_and_in_two_lists_a_process_counts_once(there: WatchedPool) -> None:
    with running() as kernel:
        lease = await there.hold("2%", identity(kernel))
        there.scene(CARD, f"process {kernel.pid} 400", f"process {kernel.pid} 600 mps")
        there.look(10, times=5)
        assert (await there.pool.get_lease(lease.id)).notice == ""
        await there.pool.release(lease.id)
        there.look()
    assert (await there.history()).peak_mib == 600


async def test_a_parked_lease_keeps_what_was_measured_and_loses_its_notice(there: WatchedPool) -> None:
    with running() as kernel:
        lease = await there.hold("2%", identity(kernel))
        there.scene(CARD, f"process {kernel.pid} 900")
        there.look(10, times=3)
        there.scene(CARD)
        await there.pool.park(lease.id)
        there.look()
        assert (await there.pool.get_lease(lease.id)).notice == ""
        await there.pool.release(lease.id)
    assert (await there.history()).peak_mib == 900
