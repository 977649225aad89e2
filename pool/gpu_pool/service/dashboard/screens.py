"""What all pages have in common: who looks, what browsers may load, and the events that keep them live."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong

from gpu_pool.service.browsers import BrowserPage
from gpu_pool.service.dashboard.dashboard import Dashboard, PoolScene
from gpu_pool.service.dashboard.pool_view import news
from gpu_pool.service.dashboard.viewer import Viewer
from gpu_pool.service.hub import HubUnreachable
from gpu_pool_client import GpuPoolError, NotAllowed
from gpu_pool_client.remote.problems import ProblemDocument

#: Nothing from elsewhere, no script and no style within a page, and no page within another.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: Milliseconds after which a browser whose stream has ended asks again.
_RETRY: Final = 2_000

#: Parts of a page by the ids of the elements that they fill.
Parts = dict[str, str]


class DashboardPage(BrowserPage):
    """A page of the dashboard."""

    def set_default_headers(self) -> None:
        """Allow the page's own files, and nothing else. Called by tornado."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", _POLICY)
        self.set_header("X-Frame-Options", "DENY")

    @property
    def dashboard(self) -> Dashboard:
        """What all pages ask."""
        found: Dashboard = self.settings["dashboard"]
        return found

    @property
    def viewer(self) -> Viewer:
        """Who looks."""
        return Viewer(self.caller.user, self.caller.is_admin, self.caller.groups or frozenset())

    def get_template_namespace(self) -> dict[str, Any]:
        """Return what all templates may use. Called by tornado."""
        hub = f"{self.hub_auth.hub_host}{self.hub_auth.hub_prefix}"
        return {
            **super().get_template_namespace(),
            "prefix": self.prefix,
            "hub": hub,
            "viewer": self.viewer if hasattr(self, "caller") else None,
            "form_token": "",
            "typed": "",
            "live": False,
        }

    def show(self, template: str, **values: Any) -> None:
        """Send a page, whose forms may be sent back."""
        self.render(template, form_token=self.xsrf_token.decode(), **values)

    def draw(self, template: str, **values: Any) -> str:
        """Return a part of a page. Its forms have no token: the page's script puts it in."""
        return self.render_string(template, **values).decode()

    def show_error(self, problem: ProblemDocument) -> None:
        """Show an error like any other page."""
        self.render("error.html", title=problem.title, message=problem.message, remedy=problem.remedy)

    def require_admin(self) -> None:
        """Refuse, with ``NotAllowed``, whoever is no administrator."""
        if not self.viewer.is_admin:
            raise NotAllowed("This page is for administrators.", "Ask the administrator.")


class LivePage(DashboardPage, ABC):
    """A page whose parts are sent again when they change, to whoever adds ``?live=1``."""

    template: ClassVar[str]
    _stream: asyncio.Task[None] | None = None

    @abstractmethod
    async def parts(self, scene: PoolScene, *where: str, token: str = "") -> Parts:
        """Return what changes of the page; ``where`` is what the address says."""

    async def get(self, *where: str) -> None:
        """Show the page, or keep it live."""
        scene = await self.dashboard.look()
        if self.get_query_argument("live", "") != "1":
            parts = await self.parts(scene, *where, token=self.xsrf_token.decode())
            self.show(self.template, parts=parts, live=True, **self.whole(scene, *where))
            return
        with self.dashboard.streaming(self.viewer.user):
            parts = await self.parts(scene, *where)  # what may not be seen is told before the stream begins
            self._stream = asyncio.ensure_future(self._send_all(scene, parts, where))
            try:
                await self._stream
            except (asyncio.CancelledError, GpuPoolError, StreamClosedError, TookTooLong):
                # The browser comes back, and is told why not where it may not.
                self.request.connection.stream.close()  # type: ignore[union-attr]

    def ends(self) -> Mapping[str, str]:
        """Return why leases of the viewer's own were taken away, by id, as the parts last said it."""
        return {}

    def whole(self, scene: PoolScene, *where: str) -> dict[str, Any]:  # noqa: ARG002 - pages differ in what they need
        """Return what the page's template needs besides its parts."""
        return {}

    def on_connection_close(self) -> None:
        """End the stream of a browser that has gone. Called by tornado."""
        if self._stream is not None:
            self._stream.cancel()

    async def _send_all(self, scene: PoolScene, sent: Parts, where: tuple[str, ...]) -> None:
        """Send what differs from what was sent before, now and after every change."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("X-Accel-Buffering", "no")
        limits, began = self.dashboard.limits, time.monotonic()
        known_at = began
        await self._send(f"retry: {_RETRY}\n{_event(sent, '')}")
        while time.monotonic() - began < limits.longest and not self.dashboard.snapshots.is_stopped:
            patience = max(0.0, known_at + limits.comment_every - time.monotonic())
            newer = await self.dashboard.snapshots.newer(scene.snapshot.number, patience)
            if time.monotonic() - known_at >= limits.comment_every:
                if not await self._is_still_known():
                    return
                known_at = time.monotonic()
            # Without news of the pool, too: what the viewer may see, course files and groups say.
            before, scene = scene, self.dashboard.scene(newer or scene.snapshot)
            now = await self.parts(scene, *where)
            gone = dict.fromkeys(sent.keys() - now.keys(), "")  # such as what instructors alone see
            fresh = {name: text for name, text in now.items() if sent.get(name) != text} | gone
            said = news(before.snapshot.status, scene.snapshot.status, self.viewer, self.ends())
            await self._send(_event(fresh, said) if fresh or said else ": nothing new\n\n")
            sent = now

    async def _is_still_known(self) -> bool:
        """Whether the viewer is who they were: a login ends, and so does being an administrator."""
        try:
            caller = await self.known()
        except HubUnreachable:
            return True  # it is asked again soon
        except GpuPoolError:
            return False
        is_same = (caller.user, caller.is_admin) == (self.caller.user, self.caller.is_admin)
        self.caller = caller if is_same else self.caller
        return is_same

    async def _send(self, text: str) -> None:
        self.write(text)
        await with_timeout(self.settings["taken_within"], self.flush())


def _event(parts: Parts, said: str) -> str:
    """Write an event: parts of the page by id, and what is to be said of the viewer's own leases."""
    return f"data: {json.dumps({'parts': parts, 'news': said})}\n\n"
