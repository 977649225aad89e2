"""The dashboard over a real pool, with callers whom a cookie names instead of a JupyterHub."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any, Final
from urllib.parse import urlencode

from jupyterhub.services.auth import HubOAuth
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.netutil import bind_sockets
from tornado.web import Application

import gpu_pool.service.dashboard
from gpu_pool.audit.callers import Caller
from gpu_pool.courses import SHARED_FOLDERS, Courses, parse_course
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.browsers import PageContext
from gpu_pool.service.class_simulations import SimulationLimits
from gpu_pool.service.connections import ConnectionLimits
from gpu_pool.service.course_editor import CourseEditor
from gpu_pool.service.dashboard.live_pages import Dashboard
from gpu_pool.service.event_streams import EventStreams, Snapshots, StreamLimits
from gpu_pool.service.handler import InFlightRequests
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.http_server import LimitedServer
from gpu_pool.service.hub import HubIdentity
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.served_pool import ServedPool
from gpu_pool.service.site import ROUTES, Address
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Holder, Process, parse_request
from support.pools import device, embedded

WEB = Path(gpu_pool.service.dashboard.__file__).parent
PREFIX: Final = "/services/gpu-pool/"
ADMIN: Final = "root"
_LOG: Final = logging.getLogger("dashboard-test")

COURSE = """
title: {title}
who: {{users: [ada, grace]}}
instructors: [turing]
slices:
  - {{name: Small, request: 2%}}
  - {{name: Half, request: 50%}}
per_user: {{slices: 3}}
quota: {{share: 2}}
"""


class CallerOfCookie:
    """Stands before a page: who looks is whom the cookie ``user`` names, by a token where a Hub is asked."""

    shared: PageContext

    async def known(self) -> Caller:
        user: str = self.get_cookie("user")  # type: ignore[attr-defined]
        if self.shared.identity is not None:
            return await self.shared.identity.caller(user, "browser", fresh=False)
        return Caller(user, user == ADMIN, f"test-{user}", Process.current(), groups=frozenset())


@dataclass
class Site:
    """A dashboard that is served, and the pool behind it."""

    pool: GpuPool
    url: str
    dashboard: Dashboard
    store: Path
    _count: int = 0

    async def take(self, size: str, user: str, course: str | None = None, kernel: str | None = None) -> str:
        self._count += 1
        holder = Holder(user, course, kernel, Process.current())
        return (await self.pool.request(parse_request(size), holder, f"{user}-{self._count}")).id

    async def get(self, path: str, user: str) -> HTTPResponse:
        return await self._fetch(path, user)

    async def page(self, path: str, user: str) -> str:
        answer = await self.get(path, user)
        assert answer.code == 200, answer.body
        return answer.body.decode()

    async def post(self, path: str, user: str, page: str = "", **fields: str) -> HTTPResponse:
        """Send a form, with the token of one of the user's pages."""
        shown = await self.get(page, user)
        token = re.findall(r'name="form-token" content="([^"]+)"', shown.body.decode())[0]
        (cookie,) = [each for each in shown.headers.get_list("Set-Cookie") if each.startswith("_xsrf=")]
        sent = {"_xsrf": token, **fields}
        return await self._fetch(path, user, cookie.partition(";")[0], method="POST", body=urlencode(sent))

    async def _fetch(self, path: str, user: str, cookie: str = "", **how: Any) -> HTTPResponse:
        headers = {"Cookie": f"user={user}; {cookie}"}
        return await AsyncHTTPClient(force_instance=True).fetch(
            self.url + path, headers=headers, follow_redirects=False, raise_error=False, **how
        )


def courses_of(titles: dict[str, str], text: str = COURSE) -> Courses:
    return Courses(
        {
            name: parse_course(f"{name}.yaml", text.format(title=title).encode())
            for name, title in titles.items()
        }
    )


@asynccontextmanager
async def showing(
    folder: Path,
    devices: int = 1,
    files: Courses | None = None,
    identity: HubIdentity | None = None,
    limits: SimulationLimits | None = None,
    streams: StreamLimits = StreamLimits(),  # noqa: B008 - frozen
    taken_within: float = 30.0,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Serve the dashboard of a pool of simulated V100s with 32 GiB.

    With ``identity`` that is asked who looks; with ``limits`` classes are simulated for no longer. With
    ``courses_dir`` the course files there are used, and can be edited. ``streams`` and ``taken_within``
    are those of live pages.
    """
    known = files or Courses()
    settings = {"courses": {name: {} for name in known.usable}, **settings}
    rules = PoolSettings(**settings)
    courses = SHARED_FOLDERS.folder(Path(rules.courses_dir), rules.courses) if rules.courses_dir else None

    async def look() -> Courses:
        return await courses.current_in_thread() if courses else known

    async with embedded(folder / "store.db", *map(device, range(devices)), **settings) as pool:
        heartbeats = Heartbeats(60.0, _LOG)
        changes = LeaseChanges(pool, _LOG, heartbeats)
        served = ServedPool(pool, changes, heartbeats, _LOG)
        looking = asyncio.create_task(changes.run())
        decisions = served.guard.decisions
        editor = CourseEditor(pool, courses, rules.rules, decisions, limits) if courses else None
        shared = EventStreams(Snapshots(pool, changes, _LOG), streams)
        dashboard = Dashboard(shared, look, rules.sharing, editor)
        server = LimitedServer(
            _application(served, changes, dashboard, identity, taken_within), _LOG, ConnectionLimits(1000)
        )
        (socket,) = bind_sockets(0, "127.0.0.1")
        # Little is kept for readers by the system, so that it is seen what the service keeps.
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 64 * 1024)
        server.add_socket(socket)
        try:
            yield Site(
                pool,
                f"http://127.0.0.1:{socket.getsockname()[1]}{PREFIX}",
                dashboard,
                folder / "store.db",
            )
        finally:
            shared.snapshots.stop()
            changes.stop()
            looking.cancel()
            server.stop()
            await server.close_all_connections()


def _application(
    served: ServedPool,
    changes: LeaseChanges,
    dashboard: Dashboard,
    identity: HubIdentity | None,
    taken_within: float,
) -> Application:
    hub = HubOAuth(
        base_url=PREFIX,
        api_url="http://127.0.0.1:1/hub/api",
        api_token="-",
        oauth_client_id="service-gpu-pool",
    )
    asked: Any = identity
    shared = PageContext(served, changes, asked, InFlightRequests(), _LOG, hub, PREFIX)
    pages = [
        (Address(PREFIX, path, page), type(page.__name__, (CallerOfCookie, page), {}), {"shared": shared})
        for path, page in ROUTES
    ]
    return Application(
        pages,
        dashboard=dashboard,
        taken_within=timedelta(seconds=taken_within),
        template_path=str(WEB / "templates"),
        static_path=str(WEB / "static"),
        static_url_prefix=f"{PREFIX}static/",
        cookie_secret=secrets.token_bytes(32),
        xsrf_cookies=True,
        log_function=lambda _: None,
    )
