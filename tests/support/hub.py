"""A real JupyterHub, and services behind it. Its servers are tiny: what counts is their tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_pool_client._remote.exchange import ServerAddress, ask
from support.pools import eventually
from support.ports import free_port
from support.service import ForkServer, Service, serving

#: An administrator of the Hub, who has the name that the tests' user has on this machine.
ADMIN = psutil.Process().username()
SECRET, TESTER = "service-secret-0123456789abcdef", "tester-secret-0123456789abcdef"
PREFIX = "/services/gpu-pool/"

_CONFIG = """
from jupyterhub.proxy import Proxy

class NoProxy(Proxy):
    should_start = False
    routes = {{}}

    async def add_route(self, routespec, target, data):
        self.routes[routespec] = {{"routespec": routespec, "target": target, "data": data}}

    async def delete_route(self, routespec):
        self.routes.pop(routespec, None)

    async def get_all_routes(self):
        return self.routes

c.JupyterHub.bind_url = "http://127.0.0.1:{hub}/"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub}/"
c.JupyterHub.proxy_class = NoProxy
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/secret"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.allow_named_servers = True
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {{{admin!r}}}
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/{{username}}"
c.Spawner.cmd = [{python!r}, "{folder}/server.py"]
c.Spawner.poll_interval = 1
c.Spawner.server_token_scopes = lambda spawner: [
    "users:activity!user",
    "access:servers!server",
    # Of servers with this name the Hub does not tell the course.
    *([] if spawner.name == "untold" else ["read:servers!server"]),
]
c.Spawner.http_timeout = 120
c.JupyterHub.load_groups = {{"cs101": {{"users": ["ada"]}}}}
c.JupyterHub.services = [
    {{"name": "tester", "api_token": {tester!r}}},
    {{
        "name": "gpu-pool",
        "api_token": {secret!r},
        "oauth_redirect_uri": "http://127.0.0.1:{service}{prefix}oauth_callback",
        "oauth_no_confirm": True,
    }},
]
c.JupyterHub.load_roles = [
    {{
        "name": "tester",
        "scopes": ["admin:users", "admin:servers", "tokens", "access:services"],
        "services": ["tester"],
    }},
    {{"name": "user", "scopes": ["self", "access:services!service=gpu-pool"]}},
]
"""
_SERVER = """
import http.server, os, pathlib, urllib.parse

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

name = os.environ["JUPYTERHUB_USER"] + "-" + os.environ.get("JUPYTERHUB_SERVER_NAME", "")
token = pathlib.Path(__file__).with_name("token-" + name)
token.write_text(os.environ["JUPYTERHUB_API_TOKEN"])
where = urllib.parse.urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
http.server.HTTPServer((where.hostname, where.port), Answer).serve_forever()
"""


@dataclass
class Hub:
    """A running JupyterHub. Anybody can log in, with any password."""

    folder: Path
    port: int
    #: Where the service of its configuration is expected.
    service_port: int
    process: subprocess.Popen[bytes] | None = None
    _addresses: dict[str, str] = field(default_factory=dict)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/hub/api"

    @property
    def environment(self) -> dict[str, str]:
        """What a service that starts by itself is told."""
        return {
            "JUPYTERHUB_API_TOKEN": SECRET,
            "JUPYTERHUB_API_URL": self.api,
            # No proxy makes them one site.
            "JUPYTERHUB_HOST": f"http://127.0.0.1:{self.port}",
            "JUPYTERHUB_OAUTH_CALLBACK_URL": f"{url(self)}/oauth_callback",
        }

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "jupyterhub", "-f", str(self.folder / "config.py")]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        end = time.monotonic() + 300
        while b"JupyterHub is now running" not in (self.folder / "log").read_bytes():
            assert time.monotonic() < end, (self.folder / "log").read_text()
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def signal(self, signum: int) -> None:
        assert self.process
        os.kill(self.process.pid, signum)

    def close(self) -> None:
        assert self.process
        # It ends its servers and services itself: they are in sessions of their own.
        self.process.terminate()
        self.process.wait(300)

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask the Hub, as one who may make users, servers and tokens."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {TESTER}"}
        where = ServerAddress("127.0.0.1", self.port)
        answer = await ask(where, method, f"/hub/api/{path}", content, 60, headers)
        assert answer.status < 400 or answer.status == 409, answer.body
        return json.loads(answer.body or b"null")

    async def token(self, user: str, **options: object) -> str:
        """Return a new token of a user's, who is made if need be. By default it may do what they may."""
        await self.ask("POST", f"users/{user}", {})
        made = await self.ask("POST", f"users/{user}/tokens", options)
        token: str = made["token"]
        self._addresses[token] = f"users/{user}/tokens/{made['id']}"
        return token

    async def status_of(self, token: str) -> int:
        """Return what the Hub answers to a token."""
        where, headers = ServerAddress("127.0.0.1", self.port), {"Authorization": f"token {token}"}
        return (await ask(where, "GET", "/hub/api/user", None, 60, headers)).status

    async def revoke(self, token: str) -> None:
        await self.ask("DELETE", self._addresses[token])

    async def start_server(self, user: str, name: str = "", **options: object) -> str:
        """Start a server with these ``user_options``, in place of one that runs; return its own token."""
        await self.ask("POST", f"users/{user}", {})
        if (await self._server(user, name)).get("ready"):
            await self.stop_server(user, name)
        token = self.folder / f"token-{user}-{name}"
        token.unlink(missing_ok=True)
        await self.ask("POST", f"users/{user}/servers/{name}", options)
        await eventually(token.exists)
        await self._settled(user, name)
        return token.read_text()

    async def stop_server(self, user: str, name: str = "") -> None:
        await self.ask("DELETE", f"users/{user}/servers/{name}", {"remove": False})
        await self._settled(user, name)

    async def _settled(self, user: str, name: str) -> None:
        """Return once a server neither starts nor stops."""
        await eventually(lambda: self._server(user, name), lambda seen: not seen.get("pending"), within=300)

    async def _server(self, user: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("GET", f"users/{user}"))["servers"].get(name, {})
        return found


def write_hub(hub: Hub, more: str = "") -> None:
    """Write the configuration of a Hub, with more of it at the end."""
    values = {"hub": hub.port, "service": hub.service_port, "folder": hub.folder, "prefix": PREFIX}
    values |= {"admin": ADMIN, "python": sys.executable, "tester": TESTER, "secret": SECRET}
    (hub.folder / "config.py").write_text(_CONFIG.format(**values) + more)
    (hub.folder / "server.py").write_text(_SERVER)


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Run a JupyterHub for all tests."""
    pytest.importorskip("jupyterhub", reason="JupyterHub is not installed: the extra [hub]")
    hub = Hub(tmp_path_factory.mktemp("hub"), free_port(), free_port())
    write_hub(hub)
    hub.start()
    yield hub
    hub.close()


@dataclass
class HubService:
    """A service behind the Hub, and its log."""

    hub: Hub
    service: Service

    @property
    def where(self) -> ServerAddress:
        return ServerAddress("127.0.0.1", self.hub.service_port)

    @property
    def url(self) -> str:
        return url(self.hub)

    async def ask(
        self, token: str | None, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Any]:
        """Ask the API; return status and content."""
        content = None if body is None else json.dumps(body).encode()
        known = {} if token is None else {"Authorization": f"Bearer {token}"}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await ask(self.where, method, f"{PREFIX}api/v1{path}", content, 60, {**known, **more})
        return answer.status, json.loads(answer.body or b"null")

    async def take(self, token: str, size: str = "2%", key: str = "key", **headers: str) -> dict[str, Any]:
        """Ask for a slice; return the lease."""
        status, lease = await self.ask(token, "POST", "/leases", {"request": size, "key": key}, **headers)
        assert status == 200, lease
        found: dict[str, Any] = lease
        return found


def url(hub: Hub) -> str:
    """Return the URL of the service."""
    return f"http://127.0.0.1:{hub.service_port}{PREFIX.rstrip('/')}"


@asynccontextmanager
async def serving_hub(
    children: ForkServer,
    hub: Hub,
    folder: Path,
    settings: str = "",
    *arguments: str,
    api: str = "",
    devices: str = "",
    kubeconfig: str = "",
) -> AsyncIterator[HubService]:
    """Serve the Hub's users, with these settings; ``api`` is where the Hub is said to be."""
    others = {"JUPYTERHUB_API_URL": api, "GPU_POOL_DEVICES": devices, "KUBECONFIG": kubeconfig}
    environment = {**hub.environment, **{name: value for name, value in others.items() if value}}
    settings = f"c.ServeApp.bind = '127.0.0.1:{hub.service_port}'\n{settings}"
    async with serving(children, folder, settings, *arguments, environment=environment) as service:
        yield HubService(hub, service)
