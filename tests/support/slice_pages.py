"""A real Jupyter Server with the extension for pages, and pages that ask it and listen to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from jupyter_client.asynchronous.client import AsyncKernelClient
from tornado.httpclient import HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, websocket_connect

from support.frontend import Frontend, listening
from support.jupyter_env import JupyterEnv, eventually
from support.server import TOKEN, Server

State = dict[str, Any]


class Page:
    """A page that listens."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self._heard = asyncio.Condition()

    @property
    def last(self) -> State:
        return self.states[-1] if self.states else {"slices": [], "pools": []}

    async def sees(self, is_so: Callable[[State], Any], within: float = 120.0) -> State:
        """Return the first state from now on of which this holds, however soon the next one follows.

        What was seen last counts.
        """

        async def seen() -> State:
            position = max(len(self.states) - 1, 0)
            async with self._heard:
                while True:
                    for state in self.states[position:]:
                        if is_so(state):
                            return state
                    position = len(self.states)
                    await self._heard.wait()

        try:
            return await asyncio.wait_for(seen(), within)
        except asyncio.TimeoutError:
            raise AssertionError(json.dumps(self.states[-3:], indent=1)) from None

    async def sees_slice(self, within: float = 120.0, **wanted: Any) -> State:
        """Return the slice of the only kernel once it is like that."""

        def is_so(state: State) -> bool:
            return any(all(each[name] == value for name, value in wanted.items()) for each in state["slices"])

        found = await self.sees(is_so, within)
        return next(each for each in found["slices"] if all(each[n] == v for n, v in wanted.items()))

    async def listen(self, connection: WebSocketClientConnection) -> None:
        while (text := await connection.read_message()) is not None:
            async with self._heard:
                self.states.append(json.loads(text))
                self._heard.notify_all()


class PagesServer(Server):
    """A Jupyter server, asked as its pages ask."""

    ENABLED: ClassVar = {"jpserver_extensions": {"gpu_pool_provisioner": True}}

    def __init__(self, jupyter_env: JupyterEnv, **config: Any) -> None:
        folder = jupyter_env.folder / "config"
        folder.mkdir(exist_ok=True)
        enabled = {"ServerApp": self.ENABLED, **config}
        (folder / "jupyter_server_config.json").write_text(json.dumps(enabled))
        super().__init__(jupyter_env)

    @property
    def runtime(self) -> Path:
        return self._runtime

    @property
    def url(self) -> str:
        return str(json.loads(self._files()[0].read_text())["url"])

    async def start(self, name: str, kernel: str) -> str:
        """Open a notebook and return its kernel's id."""
        return str(json.loads((await self.open_notebook(name, kernel)).body)["kernel"]["id"])

    async def connect(self, **headers: str) -> WebSocketClientConnection:
        request = HTTPRequest(
            self.url.replace("http", "ws", 1) + "gpu-pool/api/events",
            headers=headers or {"Authorization": f"token {TOKEN}"},
        )
        return await websocket_connect(request)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """Listen as a page does, while the context lasts."""
        page, connection = Page(), await self.connect()
        hearing = asyncio.create_task(page.listen(connection))
        try:
            yield page
        finally:
            connection.close()
            with suppress(asyncio.CancelledError):
                await hearing

    async def state(self) -> State:
        return json.loads((await self.ask("GET", "gpu-pool/api/slices")).body)  # type: ignore[no-any-return]

    async def post(self, kernel_id: str, action: str, **body: Any) -> HTTPResponse:
        return await self.ask("POST", f"gpu-pool/api/slices/{kernel_id}/{action}", body, strict=False)

    async def done(self, kernel_id: str, action: str, **body: Any) -> State:
        """Do something that is possible, and return the answer."""
        answer = await self.post(kernel_id, action, **body)
        assert answer.code == 200, answer.body
        return json.loads(answer.body)  # type: ignore[no-any-return]


@asynccontextmanager
async def serving_pages(jupyter_env: JupyterEnv, **config: Any) -> AsyncIterator[PagesServer]:
    """Run a server."""
    server = PagesServer(jupyter_env, **config)
    try:
        await eventually(server.started)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@asynccontextmanager
async def cells(server: PagesServer, kernel_id: str) -> AsyncIterator[Frontend]:
    """Submit cells to a kernel of a server, as a notebook does."""
    client = AsyncKernelClient(connection_file=str(server.runtime / f"kernel-{kernel_id}.json"))
    client.load_connection_file()
    async with listening(client) as frontend:
        yield frontend
