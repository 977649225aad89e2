"""One store, many real processes, some of them killed at bad moments."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.store.database import Database
from gpu_pool.store.locks import FairLock
from gpu_pool_client import EndReason, LeaseState
from support.pools import embedded, eventually, running, take

TESTS = Path(__file__).parents[2]

CHURN = """
import asyncio, os, sys
from pathlib import Path
from support.pools import embedded, take
async def main():
    async with embedded(Path(sys.argv[1])) as pool:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(sys.argv[2])):
            lease = await take(pool, "10%", f"{os.getpid()}-{number}")
            await pool.wait(lease)
            await pool.release(lease)
asyncio.run(main())
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def go(workers: list[subprocess.Popen[str]]) -> None:
    """Let the workers begin together, once all are ready."""
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()


def total(path: Path) -> tuple[int, int]:
    """Return what the devices say is held, and what the leases say."""
    with sqlite3.connect(path) as store:
        devices = store.execute("SELECT coalesce(sum(held_milli), 0) FROM device").fetchone()[0]
        leases = store.execute(
            "SELECT coalesce(sum(json_extract(value, '$[1]')), 0) FROM lease, json_each(lease.slices)"
        ).fetchone()[0]
    store.close()
    return devices, leases


@pytest.mark.long
async def test_twenty_processes_make_one_store_and_share_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    workers = [start(CHURN, path, 10) for _ in range(20)]
    go(workers)
    assert [worker.wait(300) for worker in workers] == [0] * 20
    for worker in workers:
        worker.communicate()
    with sqlite3.connect(path) as store:
        ended = Counter(row[0] for row in store.execute("SELECT reason FROM history"))
    store.close()
    assert ended == {EndReason.RELEASED.value: 200}
    assert total(path) == (0, 0)


async def test_processes_killed_in_the_middle_leave_nothing_held_and_nothing_broken(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    workers = [start(CHURN, path, 1_000_000) for _ in range(6)]
    async with embedded(path) as pool:
        await pool.status()
        go(workers)
        for worker in workers:
            before = await history(path)
            while await history(path) < before + 20:
                await pool.status()
            worker.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.communicate()
        status = await pool.status()
        assert (status.leases, status.queue) == ((), ())
        lease = await pool.get_lease(await take(pool, "1", "afterwards"))
        assert lease.state is LeaseState.HELD
    assert total(path) == (1000, 1000)
    with sqlite3.connect(path) as store:
        assert store.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    store.close()


async def history(path: Path) -> int:
    with sqlite3.connect(path) as store:
        count = int(store.execute("SELECT count(*) FROM history").fetchone()[0])
    store.close()
    return count


async def test_a_kernel_killed_in_one_process_is_noticed_by_another_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with running(f"""
import asyncio, sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.pools import embedded, take
async def main():
    async with embedded(Path({str(path)!r})) as pool:
        print(await take(pool, "50%", "mine"), flush=True)
        sys.stdin.read()
asyncio.run(main())
""") as server:
        assert server.stdout is not None
        theirs = server.stdout.readline().strip()
        async with embedded(path) as pool:
            lease = await take(pool, "1", "next")
            server.kill()
            server.wait()
            assert (await pool.wait(lease, 120)).state is LeaseState.HELD
            assert (await pool.get_lease(theirs)).end_reason is EndReason.PROCESS_GONE


def _queue(path: Path, name: str, said: multiprocessing.SimpleQueue[str]) -> None:
    lock = FairLock(path)
    with lock:
        said.put(name)


def _is_queued(path: Path, ticket: int) -> bool:
    """Whether that ticket has been given out."""
    return int.from_bytes(path.read_bytes()[:8], "little") >= ticket


async def test_the_lock_serves_in_the_order_of_arrival_even_when_a_waiter_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    with closing(FairLock(path)) as lock, lock:
        waiters = []
        for number in range(6):
            waiter = context.Process(target=_queue, args=(path, str(number), said))
            waiter.start()
            waiters.append(waiter)
            await eventually(lambda ticket=number + 2: _is_queued(path, ticket))
        for dead in (2, 3):
            waiters[dead].kill()
            waiters[dead].join()
        assert said.empty()
    for waiter in waiters:
        waiter.join()
    assert [said.get() for _ in range(4)] == ["0", "1", "4", "5"]


async def test_the_lock_of_a_killed_holder_passes_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with running(f"""
import sys
from pathlib import Path
from gpu_pool.store.locks import FairLock
with FairLock(Path({str(path)!r})):
    print("held", flush=True)
    sys.stdin.read()
""") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = FairLock(path)
        assert lock.holder() == holder.pid
        holder.kill()
        holder.wait()
        with lock:
            assert lock.holder() == os.getpid()
        lock.close()


async def test_a_damaged_ticket_number_costs_order_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for damage in (b"", b"\xff" * 16, b"x"):
        path.write_bytes(damage)
        lock = FairLock(path)
        with lock:
            pass
        lock.close()


def test_a_stuck_store_is_given_up_with_the_name_of_the_process_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    Database(path).close()
    code = f"""
import asyncio
from pathlib import Path
from support.pools import embedded
async def main():
    pool = embedded(Path({str(path)!r}))
    await pool.status()
    print("open", flush=True)
    input()
    pool.store.answer_within = 0.2
    try:
        await pool.release("1-00000000")
    except Exception as error:
        print(error, flush=True)
asyncio.run(main())
"""
    other = start(code)
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "open\n"
    with closing(FairLock(path.with_name("store.db.lock"))) as lock, lock:
        other.stdin.write("\n")
        other.stdin.flush()
        message = other.stdout.readline()
        # It exits although its worker thread still stands in the queue.
        other.communicate(timeout=120)
    assert f"has been locked for 0 seconds. Process {os.getpid()} has it" in message


def test_the_lock_is_not_taken_by_whoever_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with closing(FairLock(path)) as lock, lock:
        descriptor = os.open(path, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_lock_that_could_not_be_taken_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    first, second = FairLock(path), FairLock(path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            first.__enter__()
    with second:
        assert second.holder() == os.getpid()
    first.close()
    second.close()


TAKE_AND_LIVE = """
import asyncio, os, sys
from pathlib import Path
from support.pools import embedded, take
from gpu_pool_client import Process

async def main():
    pool = embedded(Path(sys.argv[1]))
    await pool.attach(await take(pool, "50%", "mine"), Process.current())
    await pool.attach(await take(pool, "50%", "shell"), Process.of(os.getppid()))
    print("taken", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def test_a_lease_from_a_container_that_is_gone_ends(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    inside = start(TAKE_AND_LIVE, path)
    assert inside.stdout is not None
    assert inside.stdout.readline() == "taken\n"
    # From here on its processes are those of a pid namespace that nobody here can see.
    with closing(sqlite3.connect(path)) as store, store:
        store.execute(
            "UPDATE lease SET keeper = replace(keeper, 'pid:[', 'pid:[1'), "
            "process = replace(process, 'pid:[', 'pid:[1')"
        )
    async with embedded(path) as pool:
        assert [lease.key for lease in (await pool.status()).leases] == ["mine", "shell"]
        inside.kill()
        inside.communicate()
        # A shell may live on without the command that took a slice for it: nobody here can tell.
        assert [lease.key for lease in (await pool.status()).leases] == ["shell"]
