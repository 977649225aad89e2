"""What all pages have in common: their data, who looks, what browsers may load, and how they stay live."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tornado.gen import with_timeout
from tornado.iostream import StreamClosedError
from tornado.util import TimeoutError as TookTooLong

from gpu_pool.courses import Courses
from gpu_pool.policy.sharing import Sharing
from gpu_pool.service.browsers import BrowserPage
from gpu_pool.service.course_editor import CourseEditor
from gpu_pool.service.dashboard.labels import Mark, marks
from gpu_pool.service.dashboard.pool_view import Viewer, describe_changes
from gpu_pool.service.event_streams import Snapshot, Snapshots, StreamLimits
from gpu_pool.service.hub import HubUnreachable
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.served_pool import ServedPool
from gpu_pool_client import GpuPoolError, NotAllowed, OverQuota
from gpu_pool_client.remote.problems import ProblemDocument

#: Pages of one user that are live at once: each browser tab has one.
_MOST_STREAMS: Final = 32


@dataclass(frozen=True, slots=True)
class PageData:
    """The pool at one time, and how its courses are drawn."""

    snapshot: Snapshot
    courses: Courses
    marks: Mapping[str, Mark]


class Dashboard:
    """What the pages of one service share. In the application's settings as ``dashboard``."""

    def __init__(
        self,
        pool: ServedPool,
        changes: LeaseChanges,
        log: logging.Logger,
        courses: Callable[[], Courses],
        sharing: Callable[[], Sharing],
        editor: CourseEditor | None = None,
        limits: StreamLimits = StreamLimits(),  # noqa: B008 - frozen
    ) -> None:
        self.snapshots = Snapshots(pool, changes, log)
        self.sharing = sharing
        #: How long a live page goes on, and how often it is asked anew whose it is.
        self.limits = limits
        #: None where there are no course files.
        self.editor = editor
        self._courses = courses
        self._streams: Counter[str] = Counter()
        self._data: PageData | None = None
        self._drawn: dict[str, tuple[int, str]] = {}

    async def look(self) -> PageData:
        """Look at the pool, and return what is there."""
        return self.page_data(await self.snapshots.now())

    def page_data(self, snapshot: Snapshot, more: Collection[str | None] = ()) -> PageData:
        """Return what is drawn of a snapshot; ``more`` are courses that are drawn, too."""
        courses = self._courses()
        last = self._data
        if last and not more and last.snapshot is snapshot and last.courses is courses:
            return last
        status = snapshot.status
        found = [lease.holder.course for lease in (*status.leases, *status.queue)]
        configured = {*courses.usable, *self.sharing().courses}
        data = PageData(snapshot, courses, marks(configured, (*found, *more)))
        if not more:
            self._data = data  # who watches the same snapshot need not count it again
        return data

    def drawn_once(self, name: str, snapshot: Snapshot, draw: Callable[[], str]) -> str:
        """Return what is the same for everybody who looks at this snapshot, drawn by the first."""
        number, text = self._drawn.get(name, (0, ""))
        if number != snapshot.number:
            text = draw()
            self._drawn[name] = snapshot.number, text
        return text

    @contextmanager
    def streaming(self, user: str) -> Iterator[None]:
        """Count a live page of a user's. Raises ``OverQuota`` where there are too many."""
        if self._streams[user] >= _MOST_STREAMS:
            raise OverQuota(f"You have {_MOST_STREAMS} live pages open already.", "Close some of them.")
        self._streams[user] += 1
        try:
            yield
        finally:
            self._streams[user] -= 1
            self._streams += Counter()  # forgets those who have none

    def stop(self) -> None:
        """End all live pages: they come back once the service runs again."""
        self.snapshots.stop()


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
    async def parts(self, data: PageData, *where: str, token: str = "") -> Parts:
        """Return what changes of the page; ``where`` is what the address says."""

    async def get(self, *where: str) -> None:
        """Show the page, or keep it live."""
        data = await self.dashboard.look()
        if self.get_query_argument("live", "") != "1":
            parts = await self.parts(data, *where, token=self.xsrf_token.decode())
            self.show(self.template, parts=parts, live=True, **self.whole(data, *where))
            return
        with self.dashboard.streaming(self.viewer.user):
            parts = await self.parts(data, *where)  # what may not be seen is told before the stream begins
            self._stream = asyncio.ensure_future(self._send_all(data, parts, where))
            try:
                await self._stream
            except (asyncio.CancelledError, GpuPoolError, StreamClosedError, TookTooLong):
                # The browser comes back, and is told why not where it may not.
                self.request.connection.stream.close()  # type: ignore[union-attr]

    def ends(self) -> Mapping[str, str]:
        """Return why leases of the viewer's own were taken away, by id, as the parts last said it."""
        return {}

    def whole(self, data: PageData, *where: str) -> dict[str, Any]:  # noqa: ARG002 - pages differ in what they need
        """Return what the page's template needs besides its parts."""
        return {}

    def on_connection_close(self) -> None:
        """End the stream of a browser that has gone. Called by tornado."""
        if self._stream is not None:
            self._stream.cancel()

    async def _send_all(self, data: PageData, sent: Parts, where: tuple[str, ...]) -> None:
        """Send what differs from what was sent before, now and after every change."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("X-Accel-Buffering", "no")
        limits, began = self.dashboard.limits, time.monotonic()
        known_at = began
        await self._send(f"retry: {_RETRY}\n{_event(sent, '')}")
        while time.monotonic() - began < limits.longest and not self.dashboard.snapshots.is_stopped:
            patience = max(0.0, known_at + limits.comment_every - time.monotonic())
            newer = await self.dashboard.snapshots.newer(data.snapshot.number, patience)
            if time.monotonic() - known_at >= limits.comment_every:
                if not await self._is_still_known():
                    return
                known_at = time.monotonic()
            # Without news of the pool, too: what the viewer may see, course files and groups say.
            before, data = data, self.dashboard.page_data(newer or data.snapshot)
            now = await self.parts(data, *where)
            gone = dict.fromkeys(sent.keys() - now.keys(), "")  # such as what instructors alone see
            fresh = {name: text for name, text in now.items() if sent.get(name) != text} | gone
            said = describe_changes(before.snapshot.status, data.snapshot.status, self.viewer, self.ends())
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
    return f"data: {json.dumps({'parts': parts, 'message': said})}\n\n"
