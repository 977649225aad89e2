"""Tunnels from jobs to their server: who may open one, and what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.slurm.reverse_tunnels import NAMES, ReverseTunnels
from gpu_pool_client import BadRequest
from gpu_pool_kernels.inkernel import reverse_tunnel
from support.jupyter_env import eventually
from support.ports import free_ports, keepalive_of


@pytest.fixture
async def tunnels() -> AsyncIterator[ReverseTunnels]:
    found = ReverseTunnels()
    yield found
    await found.close()


def sockets() -> list[tuple[Any, Any]]:
    """Return the sockets that this process has, each by its own address and the other's, if it has one."""
    found: list[tuple[Any, Any]] = []
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one by which they were listed
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as each:
                try:
                    found.append((each.getsockname(), each.getpeername()))
                except OSError:
                    found.append((each.getsockname(), None))
    return found


async def _told(tunnels: ReverseTunnels, name: str, port: int = 0) -> dict[str, Any]:
    return {**await tunnels.expect(name), "addresses": ["127.0.0.1"], "ports": dict.fromkeys(NAMES, port)}


async def _connected(tunnels: ReverseTunnels, name: str) -> Mapping[str, int]:
    await eventually(lambda: tunnels.ports(name))
    return tunnels.ports(name)


async def _end(serving: asyncio.Task[None]) -> None:
    serving.cancel()
    await asyncio.wait([serving])


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"from the job: " + await reader.readuntil())
    await writer.drain()
    writer.close()


async def test_a_port_of_the_job_is_reached_through_it(tunnels: ReverseTunnels) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as kernel:
        told = await _told(tunnels, "1-a", kernel.sockets[0].getsockname()[1])
        serving = asyncio.create_task(reverse_tunnel.serve(told))
        ports = await _connected(tunnels, "1-a")
        assert set(ports) == set(NAMES)
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["shell_port"])
        writer.write(b"hello\n")
        assert await reader.readuntil() == b"from the job: hello\n"
        writer.close()
        await _end(serving)


async def test_what_is_connected_through_it_ends_with_it(tunnels: ReverseTunnels) -> None:
    """A kernel ends whose server is away, and hears in no other way of one that is gone without a word."""
    ended = asyncio.Event()

    async def kernel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(kernel, "127.0.0.1", 0) as listening:
        told = await _told(tunnels, "1-a", listening.sockets[0].getsockname()[1])
        serving = asyncio.create_task(reverse_tunnel.serve(told))
        ports = await _connected(tunnels, "1-a")
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["supervisor"])
        assert await reader.readuntil() == b"hello\n"
        tunnels.forget("1-a")  # closes the connection in which the job is asked for others
        await eventually(ended.is_set)
        assert await reader.read() == b""
        writer.close()
        await _end(serving)


async def test_both_ends_of_all_its_connections_notice_within_half_a_minute_that_the_other_is_gone(
    tunnels: ReverseTunnels,
) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as kernel:
        told = await _told(tunnels, "1-a", kernel.sockets[0].getsockname()[1])
        serving = asyncio.create_task(reverse_tunnel.serve(told))
        ports = await _connected(tunnels, "1-a")
        _, writer = await asyncio.open_connection("127.0.0.1", ports["shell_port"])

        def all_look() -> bool:
            ends = keepalive_of(told["port"])
            return len(ends) == 4 and all(after is not None and after <= 15 for after in ends)

        await eventually(all_look)
        writer.close()
        await _end(serving)


async def test_a_job_that_connects_anew_is_reached_at_the_same_ports(tunnels: ReverseTunnels) -> None:
    told = await _told(tunnels, "1-a")
    first = asyncio.create_task(reverse_tunnel.serve(told))
    before = await _connected(tunnels, "1-a")
    await _end(first)
    await eventually(lambda: not tunnels.ports("1-a"))
    again = asyncio.create_task(reverse_tunnel.serve(told))
    assert await _connected(tunnels, "1-a") == before
    await _end(again)


@pytest.mark.parametrize("changed", [{"key": "00" * 32}, {"name": "1-nobody"}, {"name": "2-b"}])
async def test_nobody_without_the_key_of_that_job_gets_in(
    tunnels: ReverseTunnels, changed: Mapping[str, str]
) -> None:
    told = await _told(tunnels, "1-a")
    await tunnels.expect("2-b")
    with pytest.raises(OSError, match="does not answer"):
        await reverse_tunnel.dial({**told, **changed}, "control")
    assert not tunnels.ports("1-a")
    assert not tunnels.ports("2-b")


async def test_a_job_tells_nothing_to_somebody_else_at_the_port_of_its_server() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"00\n")
        await reader.readuntil()
        writer.write(b"0" * 64 + b"\n")
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        told = {"addresses": ["127.0.0.1"], "port": port, "name": "1-a", "key": "11" * 32}
        with pytest.raises(OSError, match="does not answer"):
            await reverse_tunnel.dial(told, "control")


async def test_an_address_at_which_nothing_answers_keeps_no_other_from_being_tried() -> None:
    key, seen, ended, left = "11" * 32, list[str](), asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        seen.append("it was given up")
        writer.close()
        ended.set()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"00\n")
        _, what, theirs, _ = (await reader.readuntil()).decode().split()
        seen.append(what)
        shown = reverse_tunnel.proof(bytes.fromhex(key), "server", what, "00", theirs)
        writer.write(shown.encode() + b"\n")
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(silent, "127.0.0.2", 0) as nobody:
        port = nobody.sockets[0].getsockname()[1]
        async with await asyncio.start_server(answers, "127.0.0.1", port):
            told = {"addresses": ["127.0.0.2", "127.0.0.1"], "port": port, "name": "1-a", "key": key}
            _, writer = await reverse_tunnel.dial(told, "control")
            await ended.wait()
            assert (seen, told["addresses"]) == (["control", "it was given up"], ["127.0.0.1", "127.0.0.2"])
            writer.close()
            await left.wait()


async def test_a_job_is_reached_once_there_are_ports_for_it(
    tunnels: ReverseTunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, start, made = await _told(tunnels, "1-a"), asyncio.start_server, list[asyncio.Server]()

    async def refused(*args: Any, **options: Any) -> asyncio.Server:
        if len(made) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(await start(*args, **options))
        return made[-1]

    with monkeypatch.context() as full:
        full.setattr(asyncio, "start_server", refused)
        _, writer = await reverse_tunnel.dial(told, "control")
        await eventually(lambda: len(made) == 2 and not any(each.is_serving() for each in made))
        writer.close()
    serving = asyncio.create_task(reverse_tunnel.serve(told))
    assert set(await _connected(tunnels, "1-a")) == set(NAMES)
    await _end(serving)


async def test_a_child_of_the_server_keeps_no_connection_to_a_job(tunnels: ReverseTunnels) -> None:
    """A job ends once its server has: what it had forked, and lives on, is not its server."""
    _, writer = await reverse_tunnel.dial(await _told(tunnels, "1-a"), "control")
    await _connected(tunnels, "1-a")
    here, there = (writer.get_extra_info(name) for name in ("sockname", "peername"))

    def has_any() -> bool:
        return any(each in ((there, here), (("0.0.0.0", there[1]), None)) for each in sockets())

    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(told, b"yes" if has_any() else b"no")
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert os.read(reader, 3) == b"no"
    assert has_any()
    os.close(reader)
    os.close(told)
    writer.close()


async def test_a_server_that_several_addresses_lead_to_has_one_connection(tunnels: ReverseTunnels) -> None:
    async with await asyncio.start_server(_echo, "127.0.0.1", 0) as kernel:
        told = await _told(tunnels, "1-a", kernel.sockets[0].getsockname()[1])
        told["addresses"] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        serving = asyncio.create_task(reverse_tunnel.serve(told))
        ports = await _connected(tunnels, "1-a")
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports["shell_port"])
            writer.write(b"hello\n")
            assert await reader.readuntil() == b"from the job: hello\n"
            writer.close()
        assert not serving.done()
        await _end(serving)


async def test_where_all_its_ports_are_taken_the_server_says_so() -> None:
    [port] = free_ports(1)
    async with await asyncio.start_server(_echo, "0.0.0.0", port):
        with pytest.raises(BadRequest, match=r"Name more in c\.SlurmSettings\.server_ports"):
            await ReverseTunnels([port]).expect("1-a")
