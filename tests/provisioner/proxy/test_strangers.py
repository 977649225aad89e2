"""What users of the machine who do not have a kernel's key can do at its sockets: next to nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from gpu_pool_provisioner.proxy.channels import Channel, close_all
from gpu_pool_provisioner.proxy.front import bind_front
from gpu_pool_provisioner.proxy.messages import session_of
from support.ports import write_connection

Front = tuple[dict[str, Any], dict[str, Channel]]
BIG = 1 << 20


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    """What a kernel's connection file says, and the sockets of its proxy."""
    _, info = write_connection(tmp_path / "kernel.json", key=b"secret")
    connection: dict[str, Any] = {**info, "key": "secret"}
    channels = bind_front(connection, session_of(connection))
    yield connection, channels
    close_all(channels)


class Stranger:
    """A program that has the address, and perhaps the key."""

    def __init__(self, connection: dict[str, Any], channel: str, kind: int = zmq.DEALER) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger, self.socket.reconnect_ivl = 0, -1
        self._events = self.socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        self.socket.connect(f"tcp://{connection['ip']}:{connection[channel + '_port']}")

    async def is_disconnected(self) -> None:
        """Return once the other side has closed the connection."""
        await asyncio.wait_for(self._events.recv_multipart(), 30)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stranger(front: Front) -> Any:
    made: list[Stranger] = []

    def make(channel: str, kind: int = zmq.DEALER) -> Stranger:
        made.append(Stranger(front[0], channel, kind))
        return made[-1]

    yield make
    for each in made:
        each.close()


def signed(key: str, code: str) -> list[bytes]:
    session = Session(key=key.encode())
    return list(session.serialize(session.msg("execute_request", {"code": code})))


@pytest.mark.parametrize("channel", ["shell", "control", "stdin"])
async def test_only_what_is_signed_goes_any_further_and_the_log_stays_short(
    front: Front, stranger: Any, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: asyncio.Queue[list[zmq.Frame]] = asyncio.Queue()
    front[1][channel].on_message = heard.put_nowait
    for _ in range(5):
        other = stranger(channel)
        for number in range(3):
            await other.socket.send_multipart(signed("a guess", f"{number}"))
        await other.socket.send_multipart([b"anything"])
        await other.socket.send_multipart([b"<IDS|MSG>", b"", b"{}"])
    own = stranger(channel)
    await own.socket.send_multipart(signed("secret", "mine"))
    assert b"mine" in (await asyncio.wait_for(heard.get(), 30))[-1].bytes
    # A buffer follows the signed parts, as in messages of widgets.
    await own.socket.send_multipart([*signed("secret", "second"), b"buffer"])
    assert b"second" in (await asyncio.wait_for(heard.get(), 30))[-2].bytes
    assert heard.empty()
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


async def test_who_sends_on_without_a_signature_is_disconnected(front: Front, stranger: Any) -> None:
    other = stranger("shell")
    for _ in range(100):
        await other.socket.send_multipart([b"anything"])
    await other.is_disconnected()


async def test_nobody_is_held_to_what_came_over_connections_of_before(front: Front, stranger: Any) -> None:
    heard: asyncio.Queue[list[zmq.Frame]] = asyncio.Queue()
    front[1]["shell"].on_message = heard.put_nowait
    for number in range(400):
        page = stranger("shell")  # its descriptor has the number of one before
        await page.socket.send_multipart([b"anything"])
        for cell in ("first", "second"):  # the one may have arrived already when the other ended it
            await page.socket.send_multipart(signed("secret", f"{cell} {number}"))
            assert f"{cell} {number}".encode() in (await asyncio.wait_for(heard.get(), 30))[-1].bytes
        page.close()


@pytest.mark.parametrize(("channel", "kind"), [("hb", zmq.DEALER), ("iopub", zmq.XSUB)])
async def test_who_sends_much_where_little_is_said_is_disconnected(
    front: Front, stranger: Any, channel: str, kind: int
) -> None:
    other = stranger(channel, kind)
    await other.socket.send(b"\x02" + bytes(BIG))
    await other.is_disconnected()


async def test_who_subscribes_on_and_on_is_disconnected_and_others_are_not(
    front: Front, stranger: Any
) -> None:
    own, other = stranger("iopub", zmq.SUB), stranger("iopub", zmq.SUB)
    welcome: asyncio.Queue[bytes] = asyncio.Queue()
    front[1]["iopub"].on_message = lambda frames: welcome.put_nowait(frames[0].bytes)
    own.socket.subscribe(b"")
    assert await asyncio.wait_for(welcome.get(), 30) == b"\x01"
    for number in range(1000):
        other.socket.subscribe(f"topic {number}".encode())
    await other.is_disconnected()
    front[1]["iopub"].send([b"stream", b"hello"])
    assert await asyncio.wait_for(own.socket.recv_multipart(), 30) == [b"stream", b"hello"]


async def test_heartbeats_are_answered_beside_those_who_send_on(front: Front, stranger: Any) -> None:
    other, own = stranger("hb"), stranger("hb", zmq.REQ)
    await other.socket.send(bytes(BIG))
    await own.socket.send(b"ping")
    assert await asyncio.wait_for(own.socket.recv(), 30) == b"ping"


#: Sends much without a signature, from a process of its own, whose memory does not count here.
MUCH = """
import sys, zmq
for _ in range(40):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(sys.argv[1])
    for _ in range(15):
        stranger.send_multipart([bytes(1 << 20)])
    stranger.close()
    context.term()
"""


async def test_what_strangers_send_is_not_kept(front: Front, stranger: Any) -> None:
    process, (connection, channels) = psutil.Process(os.getpid()), front
    before = process.memory_info().rss
    address = f"tcp://{connection['ip']}:{connection['shell_port']}"
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", MUCH, address)
    assert await other.wait() == 0
    own = stranger("shell")
    heard: asyncio.Queue[list[zmq.Frame]] = asyncio.Queue()
    channels["shell"].on_message = heard.put_nowait
    await own.socket.send_multipart(signed("secret", "mine"))
    await asyncio.wait_for(heard.get(), 30)
    assert process.memory_info().rss - before < 150 * BIG
