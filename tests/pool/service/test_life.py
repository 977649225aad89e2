"""The service starts, ends, is killed and comes back; leases and those who wait for them go on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from gpu_pool.service.http_server import ServiceSocket
from gpu_pool_client import (
    LeaseState,
    NotAllowed,
    Pool,
    PoolUnreachable,
    TimedOut,
    connect,
    parse_request,
)
from gpu_pool_client._remote.client import RemotePool, RetryTimes
from gpu_pool_client._remote.endpoints import unix_endpoint
from gpu_pool_client._remote.exchange import ask
from support.open_files import connections_to
from support.pools import ME, eventually, identity, running, take
from support.service import ForkServer, Service, serving


@asynccontextmanager
async def waiting(pool: Pool, lease_id: str) -> AsyncIterator[asyncio.Task[object]]:
    """Wait for a lease that is not free."""
    task: asyncio.Task[object] = asyncio.create_task(pool.wait(lease_id))
    await asyncio.sleep(0)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_that_finds_no_gpu_says_so_when_it_starts(children: ForkServer, open_folder: Path) -> None:
    nothing = {"GPU_POOL_DEVICES": ""}
    async with serving(children, open_folder / "pool", environment=nothing) as service:
        assert "WARNING: There is no GPU here, so nothing can be granted. Run gpu-pool doctor" in service.log


async def test_one_that_finds_a_gpu_does_not_say_so(service: Service) -> None:
    assert "There is no GPU" not in service.log


async def test_killed_and_started_again_it_has_the_same_leases_once(service: Service, pool: Pool) -> None:
    with running() as kernel:
        held, next_one = await take(pool, "1", "held"), await take(pool, "50%", "next")
        await pool.attach(held, identity(kernel))
        async with waiting(pool, next_one) as wait:
            await service.end(signal.SIGKILL)
            assert kernel.poll() is None
            await service.start()
            status = await pool.status()
            assert [lease.id for lease in status.leases] == [held]
            assert [(lease.id, lease.position) for lease in status.queue] == [(next_one, 1)]
            assert (await take(pool, "1", "held"), await take(pool, "50%", "next")) == (held, next_one)
            assert not wait.done()
            await pool.release(held)
            await wait
    assert (await pool.get_lease(next_one)).state is LeaseState.HELD


@pytest.mark.parametrize("timeout", [60.0, None])
async def test_stopped_and_started_again_it_grants_to_those_who_wait(
    service: Service, pool: Pool, timeout: float | None
) -> None:
    held = await take(pool, "1", "held")
    acquiring = asyncio.create_task(pool.acquire(parse_request("1"), ME, "next", timeout))
    await eventually(pool.status, lambda status: status.queue)
    await service.end()
    assert await asyncio.wait([acquiring], timeout=2) == (set(), {acquiring})
    await service.start()
    await pool.release(held)
    assert (await asyncio.wait_for(acquiring, 120)).state is LeaseState.HELD


async def test_a_wait_takes_no_longer_for_a_service_that_was_restarted(service: Service, pool: Pool) -> None:
    await take(pool, "1", "held")
    waiting = await take(pool, "1", "next")
    began = time.monotonic()
    wait = asyncio.create_task(pool.wait(waiting, 8))
    await asyncio.sleep(4)
    await service.end()
    await service.start()
    back = time.monotonic()
    with pytest.raises(TimedOut):
        await wait
    end = time.monotonic()
    assert end - began >= 8
    assert end - back < 8  # which one that began anew would take from then on


async def test_a_service_that_stops_says_so_only_to_those_who_have_time_left(
    service: Service, pool: Pool
) -> None:
    await take(pool, "1", "held")
    waiting = await take(pool, "1", "next")
    address = f"/api/v1/leases/{waiting}/wait?last=1&seconds="
    long = asyncio.create_task(ask(service.socket, "GET", f"{address}60", None, 90))
    await eventually(lambda: connections_to(service.socket) == 1)
    await asyncio.sleep(1)
    assert (await ask(service.socket, "GET", f"{address}0", None, 20)).status == 409
    await service.end()
    answer = await long
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


@pytest.mark.long
async def test_who_gives_up_while_it_is_away_is_withdrawn_once_it_is_back(
    service: Service,
) -> None:
    pool = RemotePool(unix_endpoint(service.url), RetryTimes(known=0.1, again_after=0.1))
    held = await take(pool, "1", "held")
    acquiring = asyncio.create_task(pool.acquire(parse_request("1"), ME, "next", 10))
    await eventually(pool.status, lambda status: status.queue)
    await service.end(signal.SIGKILL)
    # This test's process lives on, so nothing else ends what it asked for.
    with pytest.raises(PoolUnreachable):
        await acquiring
    await service.start()
    await eventually(pool.history, lambda history: [row.reason for row in history] == ["withdrawn"])
    assert [each.id for each in (await pool.status()).leases] == [held]


async def test_a_service_whose_store_was_lost_says_so_and_does_not_serve(
    service: Service, pool: Pool
) -> None:
    assert "a new, empty one was created" in service.log
    await take(pool, "2%", "held")
    await service.end()
    store = service.folder / "store.db"
    store.rename(service.folder / "kept.db")
    process = service.launch()
    await eventually(lambda: not process.is_alive(), within=60)
    assert f"store, {store}, is missing" in service.log
    assert f"rm -r {store}.lock {store}.owner" in service.log
    (service.folder / "kept.db").rename(store)
    await service.start()
    assert len((await pool.status()).leases) == 1
    assert service.log.count("a new, empty one was created") == 1


async def test_what_ends_while_nobody_serves_is_free_afterwards(service: Service, pool: Pool) -> None:
    with running() as kernel:
        held, next_one = await take(pool, "1", "held"), await take(pool, "1", "next")
        await pool.attach(held, identity(kernel))
        async with waiting(pool, next_one) as wait:
            await service.end(signal.SIGKILL)
            kernel.kill()
            kernel.wait()
            await service.start()
            await wait


async def test_what_is_given_up_while_nobody_serves_is_withdrawn(service: Service, pool: Pool) -> None:
    await take(pool, "1", "held")
    next_one = await take(pool, "1", "next")
    acquiring = asyncio.create_task(pool.acquire(parse_request("1"), ME, "next"))
    await asyncio.sleep(0)
    await service.end(signal.SIGKILL)
    acquiring.cancel()
    await service.start()
    await asyncio.gather(acquiring, return_exceptions=True)
    assert acquiring.cancelled()
    assert (await pool.get_lease(next_one)).end_reason == "withdrawn"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_at_once_though_somebody_waits(service: Service, pool: Pool, signum: int) -> None:
    await take(pool, "1", "held")
    next_one = await take(pool, "1", "next")
    poll = f"GET /api/v1/leases/{next_one}/wait?seconds=25 HTTP/1.1\r\nHost: x\r\n\r\n"
    async with waiting(pool, next_one) as wait:
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.connect(str(service.socket))
            connection.sendall(poll.encode())
            await pool.status()  # answered after what came before
            await service.end(signum)
            assert connection.recv(100).startswith(b"HTTP/1.1 204")
        assert not wait.done()
        assert not service.socket.exists()
        assert "Traceback" not in service.log
        await service.start()
        assert [lease.id for lease in (await pool.status()).queue] == [next_one]


async def test_a_second_service_is_refused(service: Service, pool: Pool) -> None:
    first = service.process
    assert first
    second = service.launch()
    await eventually(lambda: not second.is_alive())
    service.process = first
    assert f"{service.socket} is already served by process {first.pid}" in service.log
    assert (await pool.status()).leases == ()


async def test_the_socket_of_a_killed_service_is_replaced(service: Service) -> None:
    await service.end(signal.SIGKILL)
    assert service.socket.exists()
    await service.start()
    assert service.answers()


def test_what_is_not_a_socket_is_left_alone(folder: Path) -> None:
    file = folder / "pool.sock"
    file.write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a socket"):
        ServiceSocket(file, 0o600)
    assert file.read_text() == "mine"


def test_the_socket_has_the_mode_that_was_asked_for(folder: Path) -> None:
    before = os.umask(0o077)
    listening = ServiceSocket(folder / "new" / "pool.sock", 0o660)
    os.umask(before)
    assert (folder / "new").stat().st_mode & 0o777 == 0o755
    assert listening.path.stat().st_mode & 0o777 == 0o660
    listening.close()
    assert not listening.path.exists()


def test_a_socket_that_somebody_else_has_put_there_is_not_removed(folder: Path) -> None:
    listening = ServiceSocket(folder / "pool.sock", 0o600)
    listening.path.unlink()
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(listening.path))
        listening.close()
    assert listening.path.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(NotAllowed, match="can be written to by other users"):
        ServiceSocket(folder / "pool.sock", 0o600)


def test_a_folder_that_others_can_replace_is_refused(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir(mode=0o755)
    folder.chmod(0o777)
    with pytest.raises(NotAllowed, match="can replace"):
        ServiceSocket(inner / "pool.sock", 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    with pytest.raises(NotAllowed):
        ServiceSocket(folder / "pool.sock", 0o600)


async def test_whoever_finds_nobody_is_told(folder: Path, service: Service, pool: Pool) -> None:
    with pytest.raises(PoolUnreachable, match="No pool is served at .*nothing.sock"):
        await connect(f"unix:{folder}/nothing.sock").status()
    await service.end(signal.SIGKILL)
    with pytest.raises(PoolUnreachable, match="has ended"):
        await connect(service.url).status()
