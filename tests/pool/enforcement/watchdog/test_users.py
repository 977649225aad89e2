"""Whose processes a watchdog touches: its lease's user's, and no other's; and who cannot hide from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_pool_client import Device, EndReason, Holder, Lease, LeaseState, Process, parse_request
from support.pools import ENDS_ITS_FIRST_THREAD, eventually, identity, running
from support.watchdog import WatchedPool, watched_pool

V100 = Device("GPU-0", 0, "Tesla V100-SXM2-32GB", 32768)
CARD = "gpu GPU-0 Tesla V100-SXM2-32GB"
NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

#: A kernel that has started a process of another user, whose pid it says, as one does with sudo.
WITH_ANOTHERS = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
no = subprocess.DEVNULL
print(subprocess.Popen(["/bin/sleep", "600"], user={NOBODY}, stdin=no, stdout=no).pid, flush=True)
sys.stdin.read()
"""
#: A server that has started a process of its own, whose pid it says.
WITH_ITS_OWN = """
import subprocess, sys
no = subprocess.DEVNULL
print(subprocess.Popen(["/bin/sleep", "600"], stdin=no, stdout=no).pid, flush=True)
sys.stdin.read()
"""
#: A process that takes this name for its own.
NAMED = "printf {} >/proc/$$/comm; echo named; read x"


async def test_a_process_whose_first_thread_has_ended_is_guarded_like_any_other(there: WatchedPool) -> None:
    with running(ENDS_ITS_FIRST_THREAD) as kernel:
        assert kernel.stdout is not None
        lease = await there.hold("2%", identity(kernel))
        assert kernel.stdout.readline() == "alone\n"
        there.scene(CARD, f"process {kernel.pid} 900")
        there.look(10, times=14)
        await eventually(lambda: kernel.poll() is not None)
        there.look()
    assert (await there.pool.get_lease(lease.id)).end_reason is EndReason.OVER_MEMORY


@only_root
async def test_a_process_of_another_user_is_unmanaged_and_outlives_what_it_descends_from(
    there: WatchedPool,
) -> None:
    with running(WITH_ANOTHERS) as kernel:
        assert kernel.stdout is not None
        anothers = Process.of(int(kernel.stdout.readline()))
        assert anothers is not None
        await there.hold("2%", identity(kernel))
        there.scene(CARD, f"process {kernel.pid} 900", f"process {anothers.pid} 9000")
        assert there.look(10, times=3)["unmanaged"] == [anothers.pid]
        for _ in range(20):
            there.look(10)
        await eventually(lambda: kernel.poll() is not None)
        assert anothers.is_alive()
        os.kill(anothers.pid, signal.SIGKILL)


async def keep(there: WatchedPool, keeper: Process) -> Lease:
    return await there.pool.request(parse_request("2%"), Holder("ada", process=keeper), "key")


async def test_a_lease_with_nothing_attached_is_judged_by_its_keeper(there: WatchedPool) -> None:
    with running(WITH_ITS_OWN) as keeper:
        assert keeper.stdout is not None
        child = Process.of(int(keeper.stdout.readline()))
        assert child is not None
        lease = await keep(there, identity(keeper))
        there.scene(CARD, f"process {keeper.pid} 900")
        there.look(10, times=2)
        notice = (await there.pool.get_lease(lease.id)).notice
        assert "uses 900MiB" in notice
        assert "its processes are ended" in notice
        assert "interrupted" not in notice
        there.look(10, times=8)
        await eventually(lambda: keeper.poll() == -signal.SIGTERM)
        there.look()
        assert child.is_alive(), "only what uses too much itself is ended"
        os.kill(child.pid, signal.SIGKILL)
    assert (await there.pool.get_lease(lease.id)).end_reason is EndReason.OVER_MEMORY


async def test_what_else_a_keeper_has_started_is_not_its_leases(there: WatchedPool) -> None:
    with running(WITH_ITS_OWN) as server:
        assert server.stdout is not None
        other = int(server.stdout.readline())
        try:
            lease = await keep(there, identity(server))
            there.scene(CARD, f"process {other} 9000")
            assert there.look(10, times=20)["unmanaged"] == [other]
            assert (await there.pool.get_lease(lease.id)).notice == ""
        finally:
            os.kill(other, signal.SIGKILL)


async def test_a_server_is_not_its_leases_once_a_kernel_is_attached(there: WatchedPool) -> None:
    with running() as server, running() as kernel:
        lease = await keep(there, identity(server))
        there.scene(CARD, f"process {server.pid} 900")
        there.look(10, times=3)
        await there.pool.attach(lease.id, identity(kernel))
        assert there.look(10, times=20)["unmanaged"] == [server.pid]
        assert server.poll() is None
        found = await there.pool.get_lease(lease.id)
        assert (found.state, found.notice) == (LeaseState.HELD, "")


def named(name: str, user: int) -> subprocess.Popen[bytes]:
    command = ["/bin/sh", "-c", NAMED.format(name)]
    process = subprocess.Popen(command, user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"named\n"
    return process


@only_root
@pytest.mark.parametrize("name", ["dcgm", "nvidia-cuda-mps", "Xorg"])
async def test_unmanaged_processes_do_not_hide_behind_a_name(tmp_path: Path, nvml: Path, name: str) -> None:
    async with watched_pool(tmp_path, nvml, V100, end_unmanaged=True) as there:
        await there.pool.status()
        for user, listed, ends in ((NOBODY, True, True), (0, name == "Xorg", False)):
            with named(name, user) as process:
                there.scene(CARD, f"process {process.pid} 500")
                assert there.look(10, times=3)["unmanaged"] == [process.pid] * listed
                there.look(30, times=2)
                there.look(30, times=2)
                if ends:
                    await eventually(lambda process=process: process.poll() is not None)
                assert (process.poll() is not None) is ends
                process.kill()


#: Says the programs that such processes run.
PROGRAM = "from gpu_pool.enforcement.watchdog.processes import program_of; print(program_of({}), end='')"


def program_of(pid: int, *wrapper: str) -> str:
    command = [*wrapper, sys.executable, "-c", PROGRAM.format(pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@only_root
def test_the_name_of_a_program_is_that_of_a_file_of_roots(tmp_path: Path) -> None:
    own = tmp_path / "Xorg"
    own.write_bytes(Path("/bin/sleep").read_bytes())
    own.chmod(0o755)
    os.chown(own, NOBODY, NOBODY)
    with subprocess.Popen([own, "600"]) as made_up, subprocess.Popen(["/bin/sleep", "600"]) as real:
        try:
            assert program_of(made_up.pid) == ""
            assert program_of(real.pid) in ("sleep", "coreutils", "busybox")
        finally:
            made_up.kill()
            real.kill()


@only_root
def test_a_mount_of_ones_own_renames_no_program(tmp_path: Path) -> None:
    target = tmp_path / "Xorg"
    target.touch()
    script = f"mount --bind $(readlink -f /bin/sleep) {target} || exit 77; echo ready; exec {target} 600"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("nothing can be mounted here")
        exe = Path(f"/proc/{process.pid}/exe")
        while exe.readlink() != target:
            assert process.poll() is None
        assert program_of(process.pid) == ""
        process.kill()
