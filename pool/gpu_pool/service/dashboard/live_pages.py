"""What all pages have in common: their data, who looks, what browsers may load, and how they stay live."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tornado.escape import to_unicode, xhtml_escape

from gpu_pool.audit.callers import Caller
from gpu_pool.courses import Courses
from gpu_pool.names import undeceiving, visible_lines
from gpu_pool.policy.sharing import Sharing
from gpu_pool.service.browsers import BrowserPage
from gpu_pool.service.course_editor import CourseEditor
from gpu_pool.service.dashboard.other_ways import OtherWays
from gpu_pool.service.dashboard.pool_view import Mark, Viewer, describe_changes, marks
from gpu_pool.service.decisions import ConcurrencyLimit
from gpu_pool.service.event_streams import EventStreams, Snapshot, StreamingHandler
from gpu_pool.service.hub import HubUnreachable
from gpu_pool_client import NotAllowed
from gpu_pool_client._remote.bodies import ProblemDocument


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
        streams: EventStreams,
        courses: Callable[[], Awaitable[Courses]],
        sharing: Sharing,
        editor: CourseEditor | None = None,
    ) -> None:
        #: One look at the pool serves all who watch.
        self.streams = streams
        #: None where there are no course files.
        self.editor = editor
        #: Live pages, of which each browser tab has one.
        self.live_pages = ConcurrencyLimit(
            streams.limits.most, "You have {most} live pages open already.", "Close some of them."
        )
        self.other_ways = OtherWays()
        self._courses = courses
        self._sharing = sharing
        self._data: PageData | None = None
        self._drawn: dict[str, tuple[int, str]] = {}

    async def read(self) -> PageData:
        """Return what there is in the pool now."""
        return await self.page_data(await self.streams.snapshots.now())

    def sharing(self, courses: Courses) -> Sharing:
        """Return how the pool is shared by these courses and the administrator's settings."""
        return courses.sharing(self._sharing)

    async def page_data(self, snapshot: Snapshot, more: Collection[str | None] = ()) -> PageData:
        """Return what is drawn of a snapshot; ``more`` are courses that are drawn, too."""
        courses = await self._courses()
        last = self._data
        if last and not more and last.snapshot is snapshot and last.courses is courses:
            return last
        status = snapshot.status
        found = [lease.holder.course for lease in (*status.leases, *status.queue)]
        configured = {*courses.usable, *self.sharing(courses).courses}
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


#: Nothing from elsewhere, no script and no style within a page, and no page within another.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def _escaped(value: str | bytes) -> str:
    """Write a text into a page, with nothing in it that turns the text around it or hides a part of it."""
    return xhtml_escape(undeceiving(to_unicode(value)))


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
            # By which templates write all that they are given.
            "xhtml_escape": _escaped,
            "visible_lines": visible_lines,
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


class LivePage(StreamingHandler, DashboardPage, ABC):
    """A page whose parts are sent again when they change, to whoever adds ``?live=1``."""

    template: ClassVar[str]
    _newer: Snapshot | None = None

    @abstractmethod
    async def parts(self, data: PageData, *where: str, token: str = "") -> Parts:
        """Return what changes of the page; ``where`` is what the address says."""

    async def get(self, *where: str) -> None:
        """Show the page, or keep it live."""
        data = await self.dashboard.read()
        if self.get_query_argument("live", "") != "1":
            parts = await self.parts(data, *where, token=self.xsrf_token.decode())
            self.show(self.template, parts=parts, live=True, **self.whole(data, *where))
            return
        with self.dashboard.live_pages.one(self.viewer.user):
            parts = await self.parts(data, *where)  # what may not be seen is told before the stream begins
            self._data, self._sent, self._where = data, parts, where
            await self.stream(_event_text(parts, ""))

    def ends(self) -> Mapping[str, str]:
        """Return why leases of the viewer's own were taken away, by id, as the parts last said it."""
        return {}

    def whole(self, data: PageData, *where: str) -> dict[str, Any]:  # noqa: ARG002 - pages differ in what they need
        """Return what the page's template needs besides its parts."""
        return {}

    @property
    def streams(self) -> EventStreams:
        """What all streams share."""
        return self.dashboard.streams

    async def identify_again(self) -> Caller:
        """Return who is logged in now; while the Hub does not answer, whoever was."""
        try:
            return await self.known()
        except HubUnreachable:
            return self.caller  # it is asked again soon

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until anything of the pool has changed."""
        self._newer = await self.streams.snapshots.newer(self._data.snapshot.number, seconds)

    async def next_event(self) -> bytes | None:
        """Return the parts that differ from those sent before."""
        # Also where the pool is as it was: what the viewer may see, course files and groups say.
        before = self._data
        self._data = await self.dashboard.page_data(self._newer or before.snapshot)
        now, sent = await self.parts(self._data, *self._where), self._sent
        gone = dict.fromkeys(sent.keys() - now.keys(), "")  # such as what instructors alone see
        fresh = {name: text for name, text in now.items() if sent.get(name) != text} | gone
        self._sent = now
        statuses = before.snapshot.status, self._data.snapshot.status
        message = describe_changes(*statuses, self.viewer, self.ends())
        return _event_text(fresh, message) if fresh or message else None


def _event_text(parts: Parts, message: str) -> bytes:
    """Write an event: parts of the page by id, and what is to be said of the viewer's own leases."""
    return f"data: {json.dumps({'parts': parts, 'message': undeceiving(message)})}\n\n".encode()
