"""The relay between a page and a hostile kernel, and the other way round: whatever arrives, it goes on.

Whoever has the kernel's key can sign anything, so what is signed is made up too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client.session import DELIM, Session

from fuzz.corpus import kept
from gpu_pool_provisioner.proxy import messages
from gpu_pool_provisioner.proxy.channels import connect_back
from gpu_pool_provisioner.proxy.pending import PendingKernel
from gpu_pool_provisioner.proxy.relay import Relay
from support.examples import examples
from support.ports import free_ports

_KEY = b"0123456789abcdef"
_CHANNELS = ("shell", "control", "stdin", "hb", "iopub")
_NOBODYS_PORTS = free_ports(len(_CHANNELS))
_TYPES = [
    "execute_request", "execute_reply", "kernel_info_request", "kernel_info_reply", "comm_msg", "status",
    "stream",
    "gpu_pool_keep", "interrupt_request", "shutdown_request", "debug_request", "input_reply", "", "x" * 300,
]  # fmt: skip
_NAMES = st.sampled_from(
    ["msg_id", "msg_type", "session", "execution_state", "silent", "seconds", "code", "x"]
)
_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12),
        st.sampled_from([10**400, "busy", "idle", "\ud800"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip
_HEADERS = st.one_of(
    _JSON,
    st.fixed_dictionaries(
        {
            "msg_type": st.one_of(st.sampled_from(_TYPES), _JSON),
            "msg_id": st.one_of(st.sampled_from(["a", "b", ""]), _JSON),
        },
        optional={"date": _JSON, "session": _JSON, "version": _JSON},
    ),
)


def _encode(value: object) -> bytes:
    return json.dumps(value, default=str).encode(errors="surrogatepass")


_TEXTS = st.one_of(
    st.binary(max_size=30), st.just(b"[" * 50_000), st.just(b'{"a":' * 50_000), _JSON.map(_encode)
)
#: Header, parent, metadata, content, each good or bad.
_PARTS = st.tuples(
    st.one_of(_HEADERS.map(_encode), _TEXTS), st.one_of(_HEADERS.map(_encode), _TEXTS), _TEXTS, _TEXTS
).map(list)
_ROUTES = st.lists(st.one_of(st.just(b"identity"), st.binary(max_size=8)), max_size=2)


def _signed(route: list[bytes], parts: list[bytes]) -> list[bytes]:
    return [*route, DELIM, Session(key=_KEY).sign(parts), *parts]


MESSAGES = st.one_of(
    st.builds(_signed, _ROUTES, _PARTS),
    st.builds(lambda route, parts: [*route, DELIM, b"0" * 64, *parts], _ROUTES, _PARTS),
    st.lists(st.one_of(st.just(DELIM), st.binary(max_size=60)), min_size=1, max_size=9),
)
CONVERSATIONS = st.lists(
    st.tuples(st.sampled_from(["front", "back"]), st.sampled_from(_CHANNELS), MESSAGES),
    min_size=1,
    max_size=12,
)  # fmt: skip


class Recorder:
    """A wire to nobody: it keeps what is sent, and its handler may be set."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.on_message: Callable[[list[zmq.Frame]], None] = lambda frames: None

    def send(self, frames: list[Any]) -> None:
        assert frames
        self.sent.append(frames)


def _recorders() -> dict[str, Any]:
    return {channel: Recorder() for channel in _CHANNELS}


def _frames(parts: list[bytes]) -> list[zmq.Frame]:
    return [zmq.Frame(part) for part in parts]


def _address() -> dict[str, Any]:
    """Return the connection of a kernel that is not there."""
    ports = zip(_CHANNELS, _NOBODYS_PORTS, strict=True)
    return {"transport": "tcp", "ip": "127.0.0.1", **{f"{channel}_port": port for channel, port in ports}}


@contextmanager
def relay() -> Iterator[tuple[Relay, dict[str, Any]]]:
    """A relay that has begun, between a page and a kernel that are not there."""
    nowhere = _address()
    front = _recorders()
    made = Relay(nowhere, Session(key=_KEY), front)
    try:
        yield made, front
    finally:
        made.close()


def _read(content: bytes) -> list[tuple[str, str, list[bytes]]]:
    """Read a conversation: side, channel, and parts to be signed or, with ``raw``, frames, in Latin-1."""
    found = []
    for each in json.loads(content):
        parts = [part.encode("latin-1") * each.get("times", 1) for part in each["parts"]]
        found.append(
            (each["side"], each["channel"], parts if each.get("raw") else _signed([b"identity"], parts))
        )
    return found


@kept("frames", _read)
@settings(max_examples=examples(50))
@given(CONVERSATIONS)
def test_the_relay_outlives_what_is_said_on_both_sides(
    conversation: list[tuple[str, str, list[bytes]]],
) -> None:
    async def talk() -> None:
        with relay() as (made, front):
            made.messages["gpu_pool_keep"] = lambda content: made.tell(str(content.get("seconds")))
            for has_begun in (False, True):
                if has_begun:
                    made.begin()
                for side, channel, parts in conversation:
                    if channel == "hb":
                        continue  # passed on unread, on another thread
                    channel = front[channel] if side == "front" else made.back[channel]
                    channel.on_message(_frames(parts))
                    made.tell("a line")
            made.unanswered()

    asyncio.run(talk())


@kept("frames", _read)
@settings(max_examples=examples(50))
@given(CONVERSATIONS)
def test_the_pending_outlives_what_pages_say(conversation: list[tuple[str, str, list[bytes]]]) -> None:
    front = _recorders()
    introduction = messages.introduction("python", [], debugger=True)
    pending = PendingKernel(Session(key=_KEY), front, introduction, lambda event: None, lambda: None)
    for _, channel, parts in conversation:
        pending.receive("control" if channel == "control" else "shell", _frames(parts))
        pending.hold(_frames(parts))
        front["iopub"].on_message(_frames([b"\x01" + parts[0]]))
        pending.show("2nd in the queue")
    pending.refuse("no")
    assert not pending.holds_code  # what would run was answered
    pending.drop()
    assert not pending.holds_work
    passed: list[str] = []
    pending.hand_over(lambda channel, frames: passed.append(channel))
    assert passed == []


def test_a_kernel_cannot_make_the_relay_remember_without_end() -> None:
    async def talk() -> None:
        with relay() as (made, _):
            made.begin()
            made.messages["gpu_pool_keep"] = lambda content: made.tell("kept")
            for number in range(1_200):
                header = {"msg_type": "execute_request", "msg_id": str(number)}
                parts = [b"{}", _encode(header), b"{}", b'{"execution_state":"busy"}']
                made.back["iopub"].on_message(_frames(_signed([b"status"], parts)))
            assert len(made._at_work) <= 1_000

    asyncio.run(talk())


def test_what_is_no_peer_is_no_end_either() -> None:
    async def listen() -> None:
        where = _address()
        heard: list[list[zmq.Frame]] = []
        channels = connect_back(where, dict.fromkeys(_CHANNELS, heard.append), lambda channel, event: None)
        writers: list[asyncio.StreamWriter] = []

        def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            writer.write(b"\xff" * 4_096)

        server = await asyncio.start_server(flood, "127.0.0.1", where["shell_port"])
        async with server:
            await asyncio.sleep(0.2)
        for writer in writers:
            writer.close()
        for channel in channels.values():
            channel.close()
            channel.close()
        assert all(len(frames) < 10 for frames in heard)

    asyncio.run(listen())
