"""A service whose address swallows what is sent to it, as that of a pod does that has gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tornado.iostream import IOStream

from gpu_pool_client import PoolUnreachable, connect
from gpu_pool_client._remote import exchange
from gpu_pool_client._remote.client import RemotePool, RetryTimes
from gpu_pool_client._remote.endpoints import is_soon_over, unix_endpoint
from gpu_pool_client._remote.exchange import NotConnectedError, ServerAddress, ServiceAnswer, ask
from support.namespaces import Machine, machine, may_make_machines
from support.streams import closing

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.fixture
def hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return a port of this machine to which no connection is refused, and none is made."""
    # For every address that does not answer it would be waited for so long: nobody sets it.
    monkeypatch.setattr(exchange, "_CONNECT_WITHIN", 0.2)
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        while True:  # until nobody is let in any more
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.5)
            try:
                waiting.connect(server.getsockname())
            except TimeoutError:
                break
        yield int(server.getsockname()[1])


async def test_a_connection_that_is_not_made_is_given_up_soon(hole: int) -> None:
    asking = ask(ServerAddress("127.0.0.1", hole), "GET", "/", None, within=100.0)
    with pytest.raises(NotConnectedError):
        await asyncio.wait_for(asking, 120)


async def test_the_next_one_is_tried_and_may_take_as_long_as_it_needs(
    hole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with closing(writer):
            await asyncio.sleep(1.0)  # longer than to connect may take
            writer.write(ANSWER)
            await writer.drain()

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    moved = server.sockets[0].getsockname()

    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        found = ("127.0.0.1", hole), moved
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", each) for each in found]

    # As a name server with two addresses for a name, of which this machine has none.
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    answer = await asyncio.wait_for(ask(ServerAddress("gpu-pool", 80), "GET", "/", None, within=100.0), 120)
    assert answer.status == 200
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1:{hole}", "127.0.0.1:1"])
async def test_behind_a_hub_a_student_is_not_told_of_variables_and_commands(
    hole: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token")
    async with connect(f"http://{host.format(hole=hole)}/services/gpu-pool") as pool:
        with pytest.raises(PoolUnreachable) as caught:
            await asyncio.wait_for(pool.status(), 120)
    said = str(caught.value)
    assert said.startswith("The GPU pool does not answer at the moment. Try again in a minute.")
    assert caught.value.may_pass
    assert said.endswith("If that does not help, tell whoever looks after this JupyterHub.")
    assert "GPU_POOL" not in said
    assert "gpu-pool serve" not in said


async def test_nor_where_its_host_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token")
    async with connect("http://no-such-host.invalid/services/gpu-pool") as pool:
        with pytest.raises(PoolUnreachable, match=r"cannot be found at the moment\. Try again") as caught:
            await pool.status()
    assert "GPU_POOL" not in str(caught.value)
    assert caught.value.may_pass


async def test_a_host_that_is_written_wrongly_is_not_waited_for() -> None:
    async with connect("http://no-such-host.invalid/services/gpu-pool") as pool:
        with pytest.raises(PoolUnreachable, match="Check its name") as caught:
            await pool.status()
    assert not caught.value.may_pass


async def test_whoever_has_chosen_the_pool_is_told_how_to_choose(tmp_path: Path) -> None:
    async with connect(f"unix:{tmp_path}/nothing.sock") as pool:
        with pytest.raises(PoolUnreachable, match="Start .gpu-pool serve., .*or unset GPU_POOL_URL"):
            await pool.status()


#: Takes one connection at the machine's address, answers the question in part, and says no more.
_BREAKS_OFF = """
import signal, socket
server = socket.create_server(("0.0.0.0", 8000))
print("listens", flush=True)
connection, _ = server.accept()
while b"\\r\\n\\r\\n" not in connection.recv(65536, socket.MSG_PEEK):
    pass
connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 9\\r\\n\\r\\n{")
signal.pause()
"""


@asynccontextmanager
async def serving_machine() -> AsyncIterator[Machine]:
    """Make a machine on which a service breaks off its answer."""
    if not may_make_machines() or shutil.which("ip") is None:
        pytest.skip("making a machine takes root, unshare and ip")
    with machine([]) as made:
        command = made.inside(sys.executable, "-c", _BREAKS_OFF)
        server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert await server.stdout.readline() == b"listens\n"
            yield made
        finally:
            # With nsenter's end, what it started there would live on, and keep the pipe open.
            os.kill(made.keeper, signal.SIGKILL)
            await server.wait()


def vanish(made: Machine) -> None:
    """Take a machine off its network: nothing that is sent to it is answered, or refused."""
    made.run("ip", "link", "set", "group", "default", "down")


async def assert_is_noticed(asking: asyncio.Task[ServiceAnswer]) -> None:
    with pytest.raises(OSError) as caught:
        await asyncio.wait_for(asking, 300)
    assert is_soon_over(caught.value), repr(caught.value)  # unlike the end of the time that was given


@pytest.mark.long
async def test_a_machine_that_goes_in_the_middle_of_an_answer_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = asyncio.Event()

    class Watched(ServiceAnswer):
        def headers_received(self, *args: Any) -> None:
            super().headers_received(*args)
            began.set()

    monkeypatch.setattr(exchange, "ServiceAnswer", Watched)
    async with serving_machine() as made:
        asking = asyncio.create_task(ask(ServerAddress(made.address, 8000), "GET", "/", None, within=3600.0))
        await began.wait()
        vanish(made)
        await assert_is_noticed(asking)


@pytest.mark.long
async def test_a_machine_that_goes_before_it_has_heard_the_question_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect_to = IOStream.connect
    async with serving_machine() as made:

        async def too_late(*args: Any) -> IOStream:
            stream: IOStream = await connect_to(*args)
            vanish(made)
            return stream

        # Between the connection and the first byte: no server outside can hit that moment.
        monkeypatch.setattr(IOStream, "connect", too_late)
        asking = asyncio.create_task(ask(ServerAddress(made.address, 8000), "GET", "/", None, within=3600.0))
        await assert_is_noticed(asking)


async def test_whoever_follows_the_start_of_a_kernel_hears_of_it_soon(tmp_path: Path) -> None:
    """A student reads why nothing happens; a wait for a turn has others who tell that."""
    endpoint = unix_endpoint(f"unix:{tmp_path / 'pool.sock'}")
    async with RemotePool(endpoint, RetryTimes(known=0.2)) as pool:
        with pytest.raises(PoolUnreachable):
            await asyncio.wait_for(pool.pod("1-0123abcd"), 120)
