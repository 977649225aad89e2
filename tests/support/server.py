"""A real Jupyter Server in a process of its own, over its REST interface."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, websocket_connect

from support.jupyter_env import JupyterEnv, eventually
from support.ports import free_port

TOKEN = "a token for this test"


class Server:
    def __init__(self, jupyter_env: JupyterEnv, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._runtime = jupyter_env.folder / "runtime"
        self._notebooks = jupyter_env.folder / "notebooks"
        self._notebooks.mkdir(exist_ok=True)
        self._log = jupyter_env.folder / "log"
        port = free_port()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                # A number of its own: an old server would tell in its file that its port is 0.
                [*(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"), f"--port={port}"],
                cwd=self._notebooks,
                env={**os.environ, "JUPYTER_TOKEN": TOKEN, **variables},
                stdin=subprocess.DEVNULL,  # with a terminal, it would ask there whether SIGINT is meant
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def started(self) -> bool:
        assert self.process.poll() is None
        try:
            return bool(self._files()) and (await self.ask("GET", "api", strict=False)).code == 200
        except (OSError, ValueError):  # its file is written before it listens
            return False

    async def ask(self, method: str, path: str, body: Any = None, strict: bool = True) -> HTTPResponse:
        info = json.loads(self._files()[0].read_text())
        request = HTTPRequest(
            info["url"] + path,
            method=method,
            headers={"Authorization": f"token {TOKEN}"},
            body=None if body is None else json.dumps(body),
            connect_timeout=120,
            request_timeout=120,
        )
        return await AsyncHTTPClient().fetch(request, raise_error=strict)

    async def connect(self, path: str) -> WebSocketClientConnection:
        """Open a websocket."""
        url = json.loads(self._files()[0].read_text())["url"].replace("http", "ws", 1)
        headers = {"Authorization": f"token {TOKEN}"}
        return await websocket_connect(HTTPRequest(url + path, headers=headers))

    async def open_notebook(self, name: str, kernel: str, strict: bool = True) -> HTTPResponse:
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernel}}
        return await self.ask("POST", "api/sessions", body, strict)

    def client_of(self, session: HTTPResponse) -> AsyncKernelClient:
        """Return a client of the kernel of a notebook that was opened."""
        kernel_id = json.loads(session.body)["kernel"]["id"]
        client = AsyncKernelClient(connection_file=str(self._runtime / f"kernel-{kernel_id}.json"))
        client.load_connection_file()
        return client

    async def ended(self) -> None:
        await asyncio.to_thread(self.process.wait, 120)

    def _files(self) -> list[Any]:
        return sorted(self._runtime.glob(f"jpserver-{self.process.pid}.json"))


@pytest.fixture
async def server(jupyter_env: JupyterEnv) -> AsyncIterator[Server]:
    """Run a server for a test."""
    server = Server(jupyter_env)
    try:
        await eventually(server.started)
        yield server
    finally:
        server.process.kill()
        server.process.wait()
