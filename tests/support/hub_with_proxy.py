"""A real JupyterHub behind a real proxy, with our spawner, and people who use it by their browsers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html import unescape
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from support.jupyter_env import eventually
from support.ports import free_ports

#: If set, a proxy that is missing is a failure and not a reason to skip.
REQUIRED: Final = "GPU_POOL_REQUIRE_HUB"
DEVICES: Final = "V100-SXM2-32GB:1"
ROOT: Final = Path(__file__).parents[2]
_CONFIG: Final = """\
import json, os, sys
from pathlib import Path

settings = json.loads(os.environ.pop("HUB_OF_THIS_TEST"))
c = get_config()  # noqa: F821
c.JupyterHub.bind_url = settings["url"]
c.JupyterHub.hub_port = settings["hub_port"]
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{settings['proxy_port']}"
c.ConfigurableHTTPProxy.command = settings["proxy"]
c.JupyterHub.cookie_secret_file = "cookie_secret"
c.JupyterHub.db_url = "sqlite:///hub.sqlite"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.allow_named_servers = True
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {"admin"}
c.JupyterHub.load_groups = {name: {"users": users} for name, users in settings["groups"].items()}
c.JupyterHub.services = [{"name": "test", "api_token": settings["token"]}]
c.JupyterHub.load_roles = [
    {
        "name": "test",
        "services": ["test"],
        "scopes": ["admin:users", "admin:servers", "access:servers", "admin:groups", "tokens"],
    }
]
c.JupyterHub.spawner_class = "gpu_pool_spawner.spawners.GPUPoolSimpleLocalProcessSpawner"
c.SimpleLocalProcessSpawner.home_dir_template = str(Path.cwd() / "homes" / "{username}")
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
# A machine that runs other tests beside starts them slowly.
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
c.Spawner.args = ["--allow-root", "--ServerApp.open_browser=False"]
c.Spawner.environment = {
    "GPU_POOL_DEVICES": os.environ["GPU_POOL_DEVICES"],
    "JUPYTER_CONFIG_DIR": os.environ["JUPYTER_CONFIG_DIR"],
    "GPU_POOL_COURSE": "what a server must not get",
}
c.GPUPoolSpawnerMixin.courses_dir = str(Path.cwd() / "courses")
c.GPUPoolSpawnerMixin.pool_url = settings["pool"]
"""


def proxy_command() -> list[str] | None:
    """Return the command of configurable-http-proxy, if there is one on the PATH or in ``node_modules``."""
    beside = ROOT / "node_modules" / ".bin" / "configurable-http-proxy"
    found = shutil.which("configurable-http-proxy") or (str(beside) if beside.exists() else None)
    return [found] if found and shutil.which("node") else None


def need_proxy() -> None:
    """Skip the test where that is missing; fail it where a Hub is required."""
    if proxy_command() is None:
        words = "configurable-http-proxy or node is missing (npm install configurable-http-proxy)"
        pytest.fail(words) if os.environ.get(REQUIRED) else pytest.skip(words)


class Hub:
    """A Hub whose courses are files in ``courses``, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, list[str]],
        courses: Mapping[str, str],
        *,
        config: str = "",
        environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """``config`` is added to the Hub's configuration, ``environment`` to its variables.

        ``within`` is the command that runs the Hub's, which is added to it.
        """
        self.folder, self._within = folder, within
        #: What is added to its variables when it starts.
        self.variables = dict(environment or {})
        self.courses = folder / "courses"
        for made in (self.courses, folder / "homes"):
            made.mkdir(parents=True)
        for name, text in courses.items():
            (self.courses / f"{name}.yaml").write_text(text)
        (folder / "jupyterhub_config.py").write_text(_CONFIG + config)
        known = {name: {"longest_lease": "4h"} for name in courses}
        (folder / "gpu_pool_config.py").write_text(f"c.PoolSettings.courses = {known}\n")
        self.pool = f"embedded:{folder}/store.db"
        self.token = secrets.token_hex(16)
        port, hub_port, proxy_port = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self._settings = {
            "url": self.url,
            "hub_port": hub_port,
            "proxy_port": proxy_port,
            "proxy": proxy_command(),
            "token": self.token,
            "groups": groups,
            "pool": self.pool,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process sees this Hub's pool as its servers do."""
        return {"GPU_POOL_DEVICES": DEVICES, "JUPYTER_CONFIG_DIR": str(self.folder)}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def start(self) -> None:
        """Start it; return once it answers."""
        self._process = self._launch()
        await eventually(self._answers)

    async def end(self) -> None:
        """End it, its proxy and all its servers."""
        assert self._process is not None
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, 120)

    async def api(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Ask the Hub, or a user's server below ``/user``, as a service that may do everything."""
        where = path if path.startswith("/user/") else f"/hub/api/{path}"
        return await AsyncHTTPClient().fetch(
            self.url + where,
            method=method,
            headers={"Authorization": f"token {self.token}"},
            body=json.dumps(body) if body is not None else ("" if method == "POST" else None),
            connect_timeout=120,
            request_timeout=120,
            raise_error=False,
        )

    async def is_ready(self, user: str, server: str = "") -> bool:
        """Whether a user's server runs. Fails if it is neither running nor about to."""
        servers = json.loads((await self.api("GET", f"users/{user}")).body)["servers"]
        assert server in servers, self.log
        return bool(servers[server]["ready"])

    def _launch(self) -> subprocess.Popen[bytes]:
        variables = {**self.environment, **self.variables, "HUB_OF_THIS_TEST": json.dumps(self._settings)}
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                [*self._within, sys.executable, "-m", "jupyterhub", "-f", "jupyterhub_config.py"],
                cwd=self.folder,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            return (await AsyncHTTPClient().fetch(f"{self.url}/hub/api", raise_error=False)).code == 200
        except OSError:
            return False


class Visitor:
    """Somebody with a browser that knows cookies and forms."""

    def __init__(self, url: str, name: str, password: str = "any") -> None:
        self._url, self._password = url, password
        self.name = name
        #: By the path that they are for, and their name.
        self._cookies: dict[tuple[str, str], str] = {}

    async def log_in(self) -> None:
        await self.get("/hub/login")
        await self.post("/hub/login", {"username": self.name, "password": self._password})

    async def get(self, path: str) -> HTTPResponse:
        return await self._ask("GET", path)

    async def post(self, path: str, form: Mapping[str, str]) -> HTTPResponse:
        xsrf = urlencode({"_xsrf": self.cookies(path)["_xsrf"]})
        return await self._ask("POST", f"{path}?{xsrf}", urlencode(form))

    async def visit(self, path: str) -> HTTPResponse:
        """Open a page and go where it leads, as to the Hub's login and back."""
        answer = await self.get(path)
        while location := answer.headers.get("Location"):
            answer = await self.get(location.removeprefix(self._url))
        return answer

    async def spawn_page(self) -> str:
        """Return the HTML of the page on which a course is chosen."""
        return (await self.get(f"/hub/spawn/{self.name}")).body.decode()

    async def choose(self, **form: str) -> HTTPResponse:
        """Open that page, fill it in, and send it."""
        await self.spawn_page()
        return await self.post(f"/hub/spawn/{self.name}", form)

    def cookies(self, path: str) -> dict[str, str]:
        """Return the cookies that a browser sends there: of two with one name, that for the longer path."""
        known = sorted(self._cookies.items(), key=lambda each: len(each[0][0]))
        return {name: value for (where, name), value in known if path.startswith(where)}

    async def _ask(self, method: str, path: str, body: str | None = None, **headers: str) -> HTTPResponse:
        """Ask once, and keep the cookies: where it leads is for the test to see."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies(path).items())
        answer = await AsyncHTTPClient().fetch(
            self._url + path,
            method=method,
            headers={"Cookie": cookies, "Sec-Fetch-Mode": "navigate", **headers},
            body=body,
            connect_timeout=120,
            request_timeout=120,
            follow_redirects=False,
            raise_error=False,
        )
        for line in answer.headers.get_list("Set-Cookie"):
            for name, morsel in SimpleCookie(line).items():
                self._cookies[morsel["path"] or "/", name] = morsel.value
        return answer


def error_on(page: HTTPResponse) -> str:
    """Return the error that a page of the Hub tells."""
    found = re.search(r"spawn-error-msg[^>]*>\s*(?:Error: )?(.*?)</p>", page.body.decode(), re.DOTALL)
    return unescape(found[1]) if found else ""
