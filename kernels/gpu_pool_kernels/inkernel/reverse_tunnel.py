"""The job's end of a reverse tunnel, by which a server reaches ports of a node that it cannot connect to.

Compute nodes can often connect to the machine of the Jupyter server, but not the other way round. What to
do is told as a mapping: ``addresses`` and ``port`` of the server, the tunnel's ``name`` and ``key``, and
``ports`` of this node by their names. One connection is kept to the server, which names in it the ports
that it wants to be connected with; for each of these another connection is made. Each begins by both sides
showing that they have the key. What passes is encrypted or signed by those who talk through it, as it is
without a tunnel.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from typing import Any, Tuple  # noqa: UP035 - for Python 3.8

from .control import keep_alive

Streams = Tuple[asyncio.StreamReader, asyncio.StreamWriter]  # noqa: UP006

#: Seconds for a machine to take a connection, and for a server to answer.
_CONNECTS_WITHIN, _ANSWERS_WITHIN = 3.0, 10.0
#: Seconds after which the next address is tried besides.
_NEXT_AFTER = 0.25
#: Seconds between two attempts to reach a server that does not answer, and between two looks at whether the
#: supervisor is still there: nobody tells of its end.
_AGAIN_AFTER = 1.0
#: Bytes that are passed on at a time.
_CHUNK = 65536


def proof(key: bytes, *parts: str) -> str:
    """Return what shows that its sender has the key."""
    return hmac.new(key, " ".join(parts).encode(), hashlib.sha256).hexdigest()


async def dial(told: "dict[str, Any]", what: str) -> Streams:
    """Return a connection to the server for ``what``: ``control``, or the name of what the server asked for.

    Its addresses are tried beside one another, since a firewall may let one of them wait; the one that has
    answered is the first of ``told`` from then on. Raises ``OSError`` where none answers with the key.
    """
    key, chosen = bytes.fromhex(told["key"]), None
    attempts = [
        asyncio.ensure_future(_connected(address, told["port"], number * _NEXT_AFTER))
        for number, address in enumerate(told["addresses"])
    ]
    try:
        # One after the other: a server that several addresses lead to takes one connection for each thing.
        for each in asyncio.as_completed(attempts):
            try:
                address, (reader, writer), theirs = await each
                introduced = _introduce(reader, writer, key, told["name"], what, theirs)
                await asyncio.wait_for(introduced, _ANSWERS_WITHIN)
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
                continue
            chosen = writer
            told["addresses"] = [address, *(other for other in told["addresses"] if other != address)]
            return reader, writer
    finally:
        for attempt in attempts:
            attempt.cancel()
            if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
                writer = attempt.result()[1][1]
                if writer is not chosen:
                    writer.close()
    raise OSError("The server does not answer.")


async def _connected(address: str, port: int, after: float) -> "tuple[str, Streams, str]":
    """Return an address, a connection to it, and what is said there first."""
    await asyncio.sleep(after)
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECTS_WITHIN)
    keep_alive(writer.get_extra_info("socket"))
    try:
        theirs = (await asyncio.wait_for(reader.readuntil(), _ANSWERS_WITHIN)).decode().strip()
    except BaseException:
        writer.close()
        raise
    return address, (reader, writer), theirs


async def _introduce(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, name: str, what: str, theirs: str
) -> None:
    ours = secrets.token_hex(16)
    writer.write(" ".join((name, what, ours, proof(key, "job", what, theirs, ours))).encode() + b"\n")
    answer = (await reader.readuntil()).decode().strip()
    if not hmac.compare_digest(answer, proof(key, "server", what, theirs, ours)):
        raise OSError("Somebody else answers.")


async def pass_on(one: Streams, other: Streams) -> None:
    """Pass on what two connections send to one another, until one of them ends."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                data = await reader.read(_CHUNK)
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            return

    ways = [asyncio.ensure_future(copy(one[0], other[1])), asyncio.ensure_future(copy(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one[1].close()
        other[1].close()


async def _connect(told: "dict[str, Any]", what: str, port: int) -> None:
    """Connect the server with a port of this node; ``what`` is the server's name for this connection."""
    try:
        here = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return  # nobody listens there: the server hears nothing, and gives up
    try:
        await pass_on(here, await dial(told, what))
    except OSError:
        return
    finally:
        here[1].close()


async def serve(told: "dict[str, Any]") -> None:
    """Do what the server asks for, until the connection to it ends: nothing of that goes on then.

    Where that server is gone without a word, whoever is connected by the tunnel hears of it in no other way.
    """
    reader, writer = await dial(told, "control")
    under_way = set()
    try:
        while True:
            what, name = (await reader.readuntil()).decode().split()
            task = asyncio.ensure_future(_connect(told, what, int(told["ports"][name])))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    except (EOFError, ValueError, KeyError):
        return
    finally:
        writer.close()
        for task in list(under_way):
            task.cancel()


async def run(told: "dict[str, Any]", parent: int) -> None:
    """Be there for the server until the supervisor, whose process this is beside, has ended."""
    serving = None
    while os.getppid() == parent:
        if serving is None or serving.done():
            if serving is not None and not serving.cancelled():
                serving.exception()  # a server that is away is asked again
            serving = asyncio.ensure_future(serve(told))
        await asyncio.wait({serving}, timeout=_AGAIN_AFTER)
        if serving.done():
            await asyncio.sleep(_AGAIN_AFTER)
