"""A machine that restarts, and a clock that is set, while the pool is served: each slice is back once."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, LeaseState, Pool
from support.pools import identity, running, take
from support.service import Service

#: The service reads the boot, and whose a process is, at another place than ``/proc``.
BOOTED = """
from pathlib import Path
from gpu_pool_client import _processes as processes, _procfs as procfs
procfs.PROC = Path({proc!r})
processes.boot_id.cache_clear()
true_time = time.clock_gettime
time.clock_gettime = lambda clock: true_time(clock) + {uptime}
"""
#: Its clock is ahead by as many seconds as the file says, but not the time since the machine was started.
CLOCK = """
from pathlib import Path
from gpu_pool.clock import Clock
true_time, (_, uptime) = time.time, Clock.__init__.__defaults__
time.time = lambda: true_time() + float(Path({file!r}).read_text())
Clock.__init__.__defaults__ = (time.time, uptime)
"""
YEAR = 365 * 86_400


def boot(service: Service, name: str, pid: int, uptime: int) -> None:
    """Let the service start in this boot, and see the process ``pid``, and this one, in it."""
    proc = service.folder / name
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{name}\n")
    for seen in (pid, os.getpid()):
        (proc / str(seen)).symlink_to(f"/proc/{seen}")
    service.prelude = BOOTED.format(proc=str(proc), uptime=uptime)


def set_clock(folder: Path, ahead: int) -> None:
    """Set the service's clock, which is read at any time, so many seconds ahead of the true one."""
    (folder / "draft").write_text(str(ahead))
    (folder / "draft").rename(folder / "ahead")


async def ended(pool: Pool) -> list[tuple[str, str]]:
    """Return what the history says: leases and why they ended, in the order of their numbers."""
    return sorted((row.id, row.reason) for row in await pool.history())


async def test_after_a_reboot_every_slice_is_back_once(service: Service, pool: Pool) -> None:
    with running() as kernel:
        await service.end(signal.SIGKILL)
        boot(service, "first", kernel.pid, uptime=1_000_000)
        await service.start()
        with_kernel, without = await take(pool, "50%", "kernel"), await take(pool, "50%", "none")
        await pool.attach(with_kernel, replace(identity(kernel), boot="first"))
        next_one = await take(pool, "1", "next")
        assert (await pool.get_lease(next_one)).state is LeaseState.WAITING

        await service.end(signal.SIGKILL)
        # Everything of the machine is started anew. One process has the pid of what was the kernel.
        boot(service, "second", kernel.pid, uptime=0)
        await service.start()
        status = await pool.status()
        assert (status.leases, status.queue) == ((), ())
        history = await ended(pool)
        assert history == [(each, EndReason.PROCESS_GONE) for each in (with_kernel, without, next_one)]
        again = await take(pool, "1", "again")
        assert (await pool.get_lease(again)).state is LeaseState.HELD

        await service.end(signal.SIGKILL)
        await service.start()
        assert [lease.id for lease in (await pool.status()).leases] == [again]
        assert await ended(pool) == history


@pytest.mark.parametrize("ahead", [10 * YEAR, -10 * YEAR])
async def test_a_clock_that_jumps_ends_nothing_and_gives_nothing_back_twice(
    service: Service, pool: Pool, folder: Path, ahead: int
) -> None:
    await service.end(signal.SIGKILL)
    set_clock(folder, 0)
    service.prelude = CLOCK.format(file=str(folder / "ahead"))
    await service.start()
    with running() as kernel, running() as other:
        held, beside = await take(pool, "90%", "held"), await take(pool, "10%", "beside")
        await pool.attach(held, identity(kernel), ready_within=600)
        await pool.attach(beside, identity(other))
        next_one = await take(pool, "90%", "next")
        set_clock(folder, ahead)
        for _ in range(2):  # looks at who is there
            status = await pool.status()
            assert [lease.id for lease in status.leases] == [held, beside]
            assert [lease.id for lease in status.queue] == [next_one]
        kernel.kill()
        kernel.wait()
        assert (await pool.wait(next_one, 20)).state is LeaseState.HELD
        set_clock(folder, 0)
        assert [lease.id for lease in (await pool.status()).leases] == [beside, next_one]
        assert [row.id for row in await pool.history()] == [held]
