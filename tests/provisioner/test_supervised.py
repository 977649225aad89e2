"""Asking the supervisor in a pod: who may, what strangers can do, and what is said where nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from gpu_pool_provisioner.launchers.supervised import KernelNotStarted, SupervisorAway, SupervisorConnection
from support.pools import eventually
from support.ports import free_port
from support.supervisors import KEY, Supervised, supervised

TINY = (sys.executable, str(Path(__file__).parents[1] / "support/tiny_kernel.py"), "{connection_file}")
#: Replies of which the system does not keep all for who does not read.
MORE_THAN_IS_KEPT = 10_000


class Raw:
    """A connection to a supervisor's port, of somebody who says what they like."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
        self.reader, self.writer, self._key = reader, writer, key
        self._session = b""

    @classmethod
    async def open(cls, pod: Supervised, key: bytes = KEY) -> Raw:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        made = cls(reader, writer, key)
        theirs = (await reader.readline()).strip()
        writer.write(b"0" * 64 + b"\n")
        base = hmac.digest(made._key, b"gpu-pool supervisor", "sha256")
        made._session = hmac.digest(base, theirs + b"0" * 64, "sha256")
        return made

    def line(self, **message: object) -> bytes:
        content = json.dumps(message).encode()
        return hmac.digest(self._session, b">" + content, "sha256").hex().encode() + b" " + content + b"\n"

    async def is_closed(self) -> bool:
        """Whether the other side has ended the connection, without a word."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True
        finally:
            self.writer.close()


async def test_nobody_without_the_key_is_heard(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        before = await pod.pid()
        with pytest.raises(SupervisorAway, match="does not answer any more"):
            await SupervisorConnection.connect("127.0.0.1", b"another key", port=pod.port, within=60)
        stranger = await Raw.open(pod, b"")
        stranger.writer.write(stranger.line(n=1, verb="restart"))
        assert await stranger.is_closed()
        await control.send_signal(0x1C)
        assert await pod.pid() == before


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\n",
        b"0" * 64 + b"\n" + b"0" * 5000,
        b"0" * 64 + b"\n" + b"0" * 64 + b' {"n": 1, "verb": "restart"}\n',
        b"\x00" * 100_000,
    ],
)
async def test_what_is_no_signed_line_ends_the_connection(tmp_path: Path, said: bytes) -> None:
    async with supervised(tmp_path) as pod:
        await pod.connect()
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        await reader.readline()
        writer.write(said)
        assert await Raw(reader, writer, KEY).is_closed()
        assert await pod.value("1 + 1") == "2"


async def test_a_line_is_good_once(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        await pod.connect()
        spoken = await Raw.open(pod)
        line = spoken.line(n=1, verb="signal", number=signal.SIGCONT)
        spoken.writer.write(line)
        assert b'"to": 1' in await spoken.reader.readline()
        spoken.writer.write(line)
        assert await spoken.is_closed()
        another = await Raw.open(pod)
        another.writer.write(line)
        assert await another.is_closed()


async def test_what_is_signed_and_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        said = await Raw.open(pod)
        for n, message in enumerate(
            [{"verb": "fly"}, {}, {"verb": "signal"}, {"verb": "signal", "number": True}]
        ):
            said.writer.write(said.line(n=n + 1, **message))
            assert b"not understood" in await said.reader.readline()
        said.writer.write(said.line(n=99, verb="state"))
        assert await said.is_closed()
        deep = await Raw.open(pod)
        content = b"[" * 4000
        mac = hmac.digest(deep._session, b">" + content, "sha256").hex().encode()
        deep.writer.write(mac + b" " + content + b"\n")
        assert await deep.is_closed()
        await control.restart(within=60)


def sockets_of(pid: int) -> set[str]:
    """Return the sockets that a process has open; none of one that has ended."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith("socket:")}


async def test_who_reads_no_reply_does_not_end_the_supervisor(tmp_path: Path) -> None:
    """Replies to restarts are sent after all were heard that ask."""
    folder = tmp_path.joinpath(*["long" * 60] * 10)  # which the replies name
    folder.mkdir(parents=True)
    kernel, moved = folder / "kernel", tmp_path / "kernel"
    kernel.write_text(f'#!/bin/sh\nexec {TINY[0]} {TINY[1]} "$1"\n')
    kernel.chmod(0o755)
    argv = (str(kernel), TINY[2])
    async with supervised(tmp_path, "--linger", "600", argv=argv, encrypts=False) as pod:
        control = await pod.connect()
        await pod.asked("hello")
        before = sockets_of(pod.process.pid)
        deaf = await Raw.open(pod)
        kernel.rename(moved)
        transport = deaf.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        deaf.writer.write(b"".join(deaf.line(n=n + 1, verb="restart") for n in range(MORE_THAN_IS_KEPT)))
        assert await control.exited() == -signal.SIGKILL
        await eventually(lambda: sockets_of(pod.process.pid) <= before)  # it was given up
        deaf.writer.close()
        moved.rename(kernel)
        await control.restart(within=60)
        assert (await pod.asked("hello"))["status"] == "ok"


async def test_strangers_who_keep_connections_open_lock_nobody_out(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        opened = [await asyncio.open_connection("127.0.0.1", pod.port) for _ in range(100)]
        for number, (_, writer) in enumerate(opened):
            writer.write(b"0" * (number % 64))
        late = await pod.connect()
        await control.restart(within=60)
        await late.restart(within=60)
        assert await opened[0][0].read() != b""  # the first line, and then its end
        for _, writer in opened:
            writer.close()


async def test_who_comes_again_and_again_takes_the_place_of_the_oldest(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        first = await pod.connect()
        rest = [await pod.connect() for _ in range(3)]
        with pytest.raises(SupervisorAway):
            await first.exited()
        for each in rest:
            await each.restart(within=60)


async def test_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(SupervisorAway, match="kernel's supervisor does not answer: "):
        await SupervisorConnection.connect("127.0.0.1", KEY, port=free_port(), within=60)


async def test_where_somebody_listens_and_says_nothing_or_nonsense() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"0" * 64 + b"\n")
        await reader.readline()
        await reader.readline()
        writer.write(b'0 {"n": 1, "to": 1, "start": 1, "status": null}\n')
        await reader.read()
        writer.close()

    for behaves, within, told in (
        (nothing, 0.2, "within 0.2 s"),
        (nonsense, 60, "does not have the kernel's key"),
    ):
        server = await asyncio.start_server(behaves, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(SupervisorAway, match=told):
                await SupervisorConnection.connect("127.0.0.1", KEY, port=port, within=within)


@pytest.mark.parametrize(
    "said",
    [
        {"n": 2, "exited": 1},
        {"n": 2, "exited": 1, "status": None, "out_of_memory": False},
        {"n": 2, "to": []},
        [],
        None,
    ],
)
async def test_what_is_signed_and_not_understood_is_told_to_who_waits(said: object) -> None:
    """As where a supervisor is of another version than its server."""
    speak, nonce = asyncio.Event(), b"1" * 64

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce + b"\n")
        ours = (await reader.readline()).strip()
        base = hmac.digest(KEY, b"gpu-pool supervisor", "sha256")
        session = hmac.digest(base, nonce + ours, "sha256")

        def say(message: object) -> None:
            content = json.dumps(message).encode()
            mac = hmac.digest(session, b"<" + content, "sha256").hex().encode()
            writer.write(mac + b" " + content + b"\n")

        await reader.readline()
        say({"n": 1, "to": 1, "start": 1, "status": None})
        await speak.wait()
        say(said)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(odd, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        control = await SupervisorConnection.connect("127.0.0.1", KEY, port=port, within=60)
        waiting = asyncio.create_task(control.exited())
        asking = asyncio.create_task(control.restart(within=60))
        await asyncio.sleep(0)
        speak.set()
        for each in (waiting, asking):
            with pytest.raises(SupervisorAway, match="is not understood: it may be of another version"):
                await asyncio.wait_for(each, 20)
        control.close()


async def test_a_supervisor_that_is_gone_is_noticed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        waiting = asyncio.create_task(control.exited())
        await pod.pid()
        pod.process.kill()
        with pytest.raises(SupervisorAway):
            await waiting
        with pytest.raises(SupervisorAway):
            await control.exited()
        with pytest.raises(SupervisorAway):
            await control.restart(within=60)


async def test_a_kernel_that_does_not_start_again_is_told(tmp_path: Path) -> None:
    script = tmp_path / "kernel.sh"
    script.write_text("test ! -e started && touch started && exec sleep 600\nexit 7\n")
    async with supervised(tmp_path, argv=("sh", str(script))) as pod:
        control = await pod.connect()
        while not (tmp_path / "started").exists():  # noqa: ASYNC110 - a program makes it
            await asyncio.sleep(0.01)
        with pytest.raises(KernelNotStarted, match="it ended with status 7 before it listened"):
            await control.restart(within=60)


async def test_one_that_is_slow_to_restart_is_given_up(tmp_path: Path) -> None:
    async with supervised(tmp_path, argv=("sleep", "600")) as pod:
        control = await pod.connect()
        with pytest.raises(SupervisorAway, match=r"within 0\.1 s"):
            await control.restart(within=0.1)


async def test_the_end_of_a_kernel_that_was_restarted_is_told_to_who_waited_for_it(tmp_path: Path) -> None:
    async with supervised(tmp_path) as pod:
        control = await pod.connect()
        waiting = asyncio.create_task(control.exited())
        await pod.pid()
        await control.restart(within=60)
        assert await waiting == -signal.SIGKILL
        again = asyncio.create_task(control.exited())
        os.kill(await pod.pid(), signal.SIGTERM)
        assert await again == -signal.SIGTERM
