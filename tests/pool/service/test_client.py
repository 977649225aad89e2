"""The client: what it sends, what it keeps, and what it says when nobody answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.store.errors import StoreUnusable
from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Lease,
    LeaseGone,
    LeaseState,
    NeverFits,
    NotAllowed,
    OverQuota,
    Pool,
    PoolUnreachable,
    Process,
    TimedOut,
    connect,
)
from gpu_pool_client._operations import OWNERS, Http, operation
from gpu_pool_client._remote.bodies import error_of, problem_of
from gpu_pool_client._remote.client import RemotePool, RetryTimes
from gpu_pool_client._remote.endpoints import SYSTEM_SOCKET, unix_endpoint
from gpu_pool_client._remote.exchange import ask
from support.open_files import connections_to
from support.pools import embedded, eventually, key, take
from support.service import ForkServer, Service, serving
from support.streams import closing as stream_closing

#: Of a client that soon gives up.
SOON = RetryTimes(never_heard=0.2, known=0.2, again_after=0.2)
ERRORS = [
    BadRequest("a", "b"),
    NeverFits("a", "b"),
    NotAllowed("a", "b"),
    OverQuota("a", "b"),
    TimedOut("a", "b", largest_now="30%"),
    TimedOut("a"),
    # Of one that answers; who does not is another matter.
    PoolUnreachable("a", may_pass=True),
    LeaseGone("a", "b", reason="idle"),
    LeaseGone("a"),
    GpuPoolError("a", "b"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_arrive_as_they_were_sent(error: GpuPoolError) -> None:
    told = error_of(problem_of(error).model_dump_json().encode())
    assert (type(told), vars(told), str(told)) == (type(error), vars(error), str(error))


def test_errors_of_the_service_alone_arrive_as_what_callers_know() -> None:
    told = error_of(problem_of(StoreUnusable("a", "b")).model_dump_json().encode())
    assert (type(told), str(told)) == (PoolUnreachable, "a b")


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}", b'{"code": 1}', b"\xff"])
def test_an_answer_of_something_else_is_told(answer: bytes) -> None:
    assert isinstance(error_of(answer), PoolUnreachable)


@pytest.mark.parametrize("url", ["unix:/run/x?a=b", "unix:/run/x#a", "unix:/a%00b", "unix:/" + "x" * 108])
def test_what_names_no_socket_is_refused(url: str) -> None:
    with pytest.raises(BadRequest):
        connect(url)


def test_without_a_path_the_users_own_socket_is_meant_or_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert connect("unix:").url == f"unix:{SYSTEM_SOCKET}"
    own = tmp_path / "gpu-pool/gpu-pool.sock"
    own.parent.mkdir()
    own.touch()
    assert connect("unix:").url == f"unix:{own}"


def test_a_path_with_odd_characters_is_told_in_full(tmp_path: Path) -> None:
    assert connect(connect("unix:/run/a b%25.sock").url).url == "unix:/run/a%20b%25.sock"


#: In a process of its own: nothing else opens or closes a file there.
SEVERAL_LOOPS = """
import asyncio, sys
from pathlib import Path
from gpu_pool_client import Holder, connect, parse_request

def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))

async def take(key):
    return (await pool.request(parse_request("2%"), Holder("ada"), key)).id

async def use(number):
    lease = await take(str(number))
    wait = asyncio.create_task(anext(aiter(pool.watch(lease))))
    await asyncio.gather(*(pool.status() for _ in range(20)), wait)

pool = connect(sys.argv[1])
asyncio.run(take("before"))
before = open_files()
for number in range(3):
    asyncio.run(use(number))
asyncio.run(pool.close())
print(open_files() - before)
"""


def test_it_may_be_used_from_several_event_loops_and_keeps_nothing_open(service: Service) -> None:
    command = [sys.executable, "-c", SEVERAL_LOOPS, service.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


async def test_a_service_that_does_not_answer_is_given_up(folder: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as mute:
        mute.bind(str(folder / "mute.sock"))
        mute.listen()
        with pytest.raises(TimeoutError):
            await ask(folder / "mute.sock", "GET", "/", None, 0.05)


async def test_an_answer_of_another_version_is_told(folder: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(answer, folder / "other.sock")
    with pytest.raises(PoolUnreachable, match="does not understand"):
        await connect(f"unix:{folder}/other.sock").get_lease("1-00000000")
    server.close()


async def test_a_cancelled_wait_keeps_no_connection(service: Service, pool: Pool) -> None:
    await take(pool, "1", "held")
    lease = await take(pool, "1", "next")
    waits = [asyncio.create_task(pool.wait(lease)) for _ in range(10)]
    await eventually(lambda: connections_to(service.socket) == 10)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    assert all(wait.cancelled() for wait in waits)
    assert connections_to(service.socket) == 0


async def test_a_cancelled_request_leaves_nothing_behind(service: Service, pool: Pool) -> None:
    await pool.status()
    assert service.process
    os.kill(service.process.pid, signal.SIGSTOP)
    request = asyncio.create_task(take(pool, "2%", "key"))
    await eventually(lambda: connections_to(service.socket) == 1)
    await asyncio.sleep(0)
    request.cancel()
    os.kill(service.process.pid, signal.SIGCONT)
    await asyncio.gather(request, return_exceptions=True)
    assert request.cancelled()
    assert (await pool.status()).leases == ()
    assert [row.reason for row in await pool.history()] == ["withdrawn"]


class LossyWay:
    """A way to a service that passes on what is asked, and loses the answers for as long as it is told to."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.loses = True
        self.lost = 0

    async def lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with stream_closing(writer):
            asked = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", asked)
            asked += await reader.readexactly(int(length[1]) if length else 0)
            there, away = await asyncio.open_unix_connection(self._service.socket)
            async with stream_closing(away):
                away.write(asked)
                answer = await there.read()
            if self.loses:
                self.lost += 1
            else:
                writer.write(answer)


@pytest.fixture
async def lossy(service: Service, pool: Pool, folder: Path) -> AsyncIterator[tuple[LossyWay, Pool]]:
    """A pool behind such a way, whose client soon gives up."""
    await pool.status()
    way = LossyWay(service)
    server = await asyncio.start_unix_server(way.lead, folder / "way.sock")
    yield way, RemotePool(unix_endpoint(f"unix:{folder}/way.sock"), SOON)
    server.close()


class MoreOfPool(RemotePool):
    """Has a verb that would do something again if it were repeated."""

    @operation(Http("POST", "/leases/{lease}/renew"), may=OWNERS, idempotent=False)
    async def wind(self, lease_id: str, ttl: float) -> Lease:
        """Wind a lease up."""
        return await self._perform(MoreOfPool.wind, lease_id, ttl)


async def test_a_verb_is_repeated_only_where_its_row_says_so(
    pool: Pool, lossy: tuple[LossyWay, Pool], folder: Path
) -> None:
    way, _ = lossy
    lease = await take(pool, "2%", "key")
    more = MoreOfPool(unix_endpoint(f"unix:{folder}/way.sock"), RetryTimes(600, 600))
    with pytest.raises(PoolUnreachable):
        await more.wind(lease, 60)
    assert way.lost == 1
    renewing = asyncio.create_task(more.renew(lease, 60))
    await eventually(lambda: way.lost > 3)
    way.loses = False
    assert (await renewing).id == lease


async def test_a_request_whose_answer_never_came_is_withdrawn(
    pool: Pool, lossy: tuple[LossyWay, Pool]
) -> None:
    way, behind = lossy
    with pytest.raises(PoolUnreachable):
        await take(behind, "2%", "key")
    assert len((await pool.status()).leases) == 1
    way.loses = False
    await eventually(pool.history, lambda history: [row.reason for row in history] == ["withdrawn"])
    assert (await pool.status()).leases == ()


async def test_a_request_that_is_made_again_is_withdrawn_no_more(
    pool: Pool, lossy: tuple[LossyWay, Pool]
) -> None:
    way, behind = lossy
    with pytest.raises(PoolUnreachable):
        await take(behind, "2%", "key")
    way.loses = False
    lease = await take(behind, "2%", "key")
    await asyncio.sleep(1)
    assert (await pool.get_lease(lease)).state is LeaseState.HELD


async def test_what_is_in_use_is_not_withdrawn_by_a_request_that_is_repeated(
    pool: Pool, lossy: tuple[LossyWay, Pool]
) -> None:
    way, behind = lossy
    lease = await take(pool, "2%", "key")
    await pool.attach(lease, Process.current())
    with pytest.raises(PoolUnreachable):
        await take(behind, "2%", "key")
    way.loses = False
    await asyncio.sleep(1.5)
    assert (await pool.get_lease(lease)).state is LeaseState.HELD


async def test_a_request_that_nobody_heard_is_not_made_later(service: Service, pool: Pool) -> None:
    asking = RemotePool(unix_endpoint(service.url), SOON)
    await asking.status()
    await service.end()
    with pytest.raises(PoolUnreachable):
        await take(asking, "2%", "key")
    await service.start()
    await asyncio.sleep(1)
    assert await pool.history() == []


def test_whoever_needs_no_service_pays_for_none() -> None:
    code = (
        "import sys, gpu_pool_client; print({'tornado', 'pydantic', 'http'} & sys.modules.keys() or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


async def test_sizes_that_a_service_refuses_are_told_as_their_kernels_are_installed(
    children: ForkServer, folder: Path, tmp_path: Path
) -> None:
    # The client's own settings know nothing of the service's rules.
    variables = {"JUPYTER_DATA_DIR": f"{tmp_path}/data", "JUPYTER_CONFIG_DIR": f"{tmp_path}/config"}
    words = ("kernels", "install", "1%", "2%", "50%", "--user", "--json")
    async with serving(children, folder / "pool", "c.PoolSettings.max_share = 0.4") as service:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "gpu_pool.cli", "--pool", service.url, *words],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
    refused = {each["slice"]: each["message"] for each in json.loads(done.stdout)["refused"]}
    assert refused.keys() == {"1%", "50%"}
    assert "CUDA itself takes about 350 MiB" in refused["1%"]
    assert "the most this pool gives to one lease is 40% of a GPU" in refused["50%"]


async def test_what_is_granted_may_be_taken_back_so_every_kernel_is_relayed_to(
    pool: Pool, tmp_path: Path
) -> None:
    served = await pool.get_lease(await take(pool, "2%", key()))
    assert served.state is LeaseState.HELD
    assert served.terms.has_limits
    async with embedded(tmp_path / "store.db") as own:
        assert not (await own.get_lease(await take(own, "2%", key()))).terms.has_limits
