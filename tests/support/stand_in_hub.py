"""What answers in place of a JupyterHub, and keeps its answers back; and clients of a service at any address.

A real Hub answers when it can. Here a test says when, so that it can tell who is asked about before whom.

Not compared with a Hub: it answers what the test gives it. The tests of ``tests/pool/service`` that are
about identity (``test_hub_identity.py``, ``test_hubbed.py``) ask a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from support.hub import PREFIX, Hub, HubService, serving_hub
from support.ports import free_ports
from support.service import ForkServer
from support.streams import closing


@dataclass
class StandInHub:
    """A Hub that knows the tokens of some."""

    #: The users of the tokens that it knows.
    users: dict[str, str] = field(default_factory=dict)
    admins: set[str] = field(default_factory=set)
    groups: dict[str, list[str]] = field(default_factory=dict)
    #: Whether it answers at all.
    is_well: bool = True
    #: What it answers about some tokens, word for word; None for that it fails.
    answers: dict[str, bytes | None] = field(default_factory=dict)
    #: The tokens that it was asked about, in order.
    asked: list[str] = field(default_factory=list)
    #: Tokens for which this is true are not answered until :meth:`answer`.
    is_kept: Callable[[str], bool] = lambda _: False
    _kept: list[asyncio.Future[None]] = field(default_factory=list)

    async def say(self, token: str) -> dict[str, Any] | None:
        """Say whose token it is."""
        self.asked.append(token)
        if self.is_kept(token):
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._kept.append(answer)
            await answer
        user = self.users.get(token)
        if user is None:
            return None
        own = "access:services!service=gpu-pool"
        groups = self.groups.get(user, [])
        return {"name": user, "kind": "user", "admin": user in self.admins, "groups": groups, "scopes": [own]}

    def answer(self) -> None:
        """Give the oldest answer that is kept back."""
        self._kept.pop(0).set_result(None)

    def answer_all(self) -> None:
        """Give all answers, from now on at once."""
        self.is_kept = lambda _: False
        while self._kept:
            self.answer()


class _User(RequestHandler):
    async def get(self) -> None:
        hub: StandInHub = self.settings["hub"]
        token = self.request.headers["Authorization"].removeprefix("token ")
        found = await hub.say(token)
        if token in hub.answers:
            self.set_status(500 if hub.answers[token] is None else 200)
            self.finish(hub.answers[token] or b"")
            return
        self.set_status((200 if found else 403) if hub.is_well else 503)
        self.finish(found or {"status": 403})


class _Root(RequestHandler):
    async def get(self) -> None:
        self.set_status(200 if self.settings["hub"].is_well else 503)
        self.finish({"version": "5.0.0"})


@asynccontextmanager
async def standing_in() -> AsyncIterator[tuple[StandInHub, int]]:
    """Answer in place of a Hub; also return the port."""
    hub = StandInHub()
    handlers = [("/hub/api/user", _User), ("/hub/api/", _Root)]
    server = HTTPServer(Application(handlers, hub=hub, log_function=lambda _: None))
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(socket)
    try:
        yield hub, socket.getsockname()[1]
    finally:
        hub.answer_all()
        server.stop()
        await server.close_all_connections()


@asynccontextmanager
async def behind_stand_in(
    children: ForkServer, folder: Path, settings: str = "", *arguments: str
) -> AsyncIterator[tuple[StandInHub, HubService]]:
    """Serve the users of a stand-in Hub, on all addresses of this machine's loopback."""
    async with standing_in() as (hub, port):
        # Clients come from many addresses, whose own ports are chosen by the system.
        (service_port,) = free_ports(1, "0.0.0.0")
        place = Hub(folder, port, service_port)
        everywhere = f"{settings}\nc.ServeApp.bind = '0.0.0.0:{place.service_port}'\n"
        async with serving_hub(children, place, folder, everywhere, *arguments) as service:
            yield hub, service


@dataclass
class Outcome:
    """What a service answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


async def ask_from(
    service: HubService,
    address: str,
    token: str,
    method: str = "GET",
    path: str = "api/v1/status",
    **more: str,
) -> Outcome:
    """Ask the service from an address of this machine, over a connection of its own."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", service.hub.service_port, local_addr=(address, 0)
    )
    headers = {"Host": "x", "Connection": "close", "Authorization": f"Bearer {token}"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    lines = [f"{method} {PREFIX}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    async with closing(writer):
        writer.write("\r\n".join([*lines, "", ""]).encode())
        return read_answer(await reader.read())


def read_answer(answer: bytes) -> Outcome:
    """Read a whole answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Outcome(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body)
