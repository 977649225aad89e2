"""The pages: what of the pool is on each, and for whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Any, Final

from tornado.web import HTTPError

from gpu_pool.courses import CourseFile
from gpu_pool.service.dashboard import course_view, history_view, pool_view
from gpu_pool.service.dashboard.history_view import PastRow
from gpu_pool.service.dashboard.live_pages import DashboardPage, LivePage, PageData, Parts
from gpu_pool.service.dashboard.pool_view import as_seen_by, without_names
from gpu_pool_client import GpuPoolError, LeaseState, NotAllowed, Outlook, PoolStatus

_DAY: Final = 86_400.0
#: Seconds for which it is said beside one's leases that one was taken away.
_LATELY: Final = 3_600.0
_LIVES_ON: Final = "Its kernel lives on, and asks for a slice again at its next cell."
#: What a form has done, by the word that its answer leads to.
SAID: Final = {
    "given-back": "The slice was given back.",
    "given-back-kept": f"The slice was given back. {_LIVES_ON}",
    "asked-back": "The slice goes back as soon as its kernel is idle. The notebook says so.",
    "revoked": "The slice was revoked.",
    "revoked-kept": f"The slice was revoked. {_LIVES_ON}",
    "drained": "The GPU is being drained: nothing more is granted on it.",
    "undrained": "The GPU is in use again.",
}


class PoolPage(LivePage):
    """The GPUs, the queue, and one's own leases."""

    template = "pool.html"
    #: Why own leases wait, by lease and place: asked anew only when a place has changed.
    _outlooks: dict[tuple[str, int | None], Outlook] | None = None
    #: What was taken away from the viewer lately: asked anew only when they have other leases than then.
    _taken: tuple[PastRow, ...] = ()
    _taken_beside: frozenset[str] | None = None

    async def parts(self, data: PageData, *where: str, token: str = "") -> Parts:  # noqa: ARG002 - one pool
        """Return GPUs, own leases and queue."""
        viewer, status = self.viewer, data.snapshot.status
        outlooks = await self._explain(status)
        mine = pool_view.lease_rows(status, data.marks, viewer.owns, outlooks)
        taken = await self._taken_away(frozenset(row.id for row in mine))
        drawn_once = self.dashboard.drawn_once
        return {
            "devices": drawn_once("devices", data.snapshot, lambda: self._devices(data)),
            "mine": self.draw("part_mine.html", rows=mine, taken=taken, form_token=token),
            "queue": drawn_once("queue", data.snapshot, lambda: self._queue(data)),
        }

    def whole(self, data: PageData, *where: str) -> dict[str, Any]:  # noqa: ARG002 - one pool
        """Say what a form has done, and what is on the page's first screen."""
        return {"said": SAID.get(self.get_query_argument("said", ""), "")}

    def ends(self) -> Mapping[str, str]:
        """Say why slices were taken away."""
        return {row.id: row.why for row in self._taken}

    def _devices(self, data: PageData) -> str:
        everybody = without_names(data.snapshot.status)
        return self.draw("part_devices.html", bars=pool_view.device_bars(everybody, data.marks))

    def _queue(self, data: PageData) -> str:
        everybody = without_names(data.snapshot.status)
        waiting = pool_view.queue_by_course(everybody, data.marks)
        return self.draw("part_queue.html", waiting=waiting, total=len(everybody.queue))

    async def _taken_away(self, living: frozenset[str]) -> tuple[PastRow, ...]:
        """Return what was taken away in the last hour. ``living`` are the viewer's leases."""
        if living != self._taken_beside:
            rows = await self.pool.history(time.time() - _LATELY)
            self._taken, self._taken_beside = history_view.taken_away(rows, self.viewer), living
        return self._taken

    async def _explain(self, status: PoolStatus) -> Mapping[str, Outlook]:
        """Return why the viewer's own leases wait."""
        known = self._outlooks or {}
        own = [lease for lease in status.queue if self.viewer.owns(lease)]
        self._outlooks = {}
        for lease in own:
            place = (lease.id, lease.position)
            try:
                self._outlooks[place] = known.get(place) or await self.pool.explain(lease.id)
            except GpuPoolError:
                continue  # it waits no more: the next look says what became of it
        return {lease_id: outlook for (lease_id, _), outlook in self._outlooks.items()}


class AdminPage(LivePage):
    """Everybody's leases, draining, and the quotas."""

    template = "admin.html"

    async def parts(self, data: PageData, *where: str, token: str = "") -> Parts:  # noqa: ARG002 - one pool
        """Return GPUs, leases, queue and quotas."""
        self.require_admin()
        status = data.snapshot.status
        bars = pool_view.device_bars(status, data.marks)
        held = pool_view.lease_rows(status, data.marks, lambda each: each.state is not LeaseState.WAITING)
        waiting = pool_view.lease_rows(status, data.marks, lambda each: each.state is LeaseState.WAITING)
        quotas = pool_view.quota_rows(self.dashboard.sharing(data.courses), status)
        return {
            "devices": self.draw("part_admin_devices.html", bars=bars, form_token=token),
            "leases": self.draw("part_leases.html", rows=held, kind="held", may_revoke=True),
            "waiting": self.draw("part_leases.html", rows=waiting, kind="waiting", may_revoke=True),
            "quotas": self.draw("part_quotas.html", rows=quotas),
        }

    def whole(self, data: PageData, *where: str) -> dict[str, Any]:  # noqa: ARG002 - one pool
        """Say what a form has done, and what is wrong with the course files."""
        return {
            "said": SAID.get(self.get_query_argument("said", ""), ""),
            "problems": course_view.problems_by_course(data.courses),
        }


class CoursesPage(DashboardPage):
    """The courses that one is in."""

    async def get(self) -> None:
        """Show them."""
        data = await self.dashboard.read()
        now = datetime.now(timezone.utc)
        # There may be thousands of courses.
        links = await asyncio.to_thread(course_view.course_links, data.courses, self.viewer, data.marks, now)
        self.show("courses.html", links=links)


class CoursePage(LivePage):
    """One course: what it offers and who holds how much; for its instructors also who, and its file."""

    template = "course.html"

    async def parts(self, data: PageData, *where: str, token: str = "") -> Parts:  # noqa: ARG002 - no forms
        """Return the course as it is used now."""
        (name,) = where
        course = self._course(data, name)
        view = course_view.course_view(name, course, data.snapshot.status, datetime.now(timezone.utc))
        parts = {"now": self.draw("part_course.html", course=view)}
        if course_view.teaches(course, self.viewer):
            status = as_seen_by(data.snapshot.status, self.viewer, [name])
            rows = pool_view.lease_rows(status, data.marks, lambda each: each.holder.course == name)
            may_revoke = self.viewer.is_admin
            parts["leases"] = self.draw("part_leases.html", rows=rows, kind="course", may_revoke=may_revoke)
        return parts

    def whole(self, data: PageData, *where: str) -> dict[str, Any]:
        """Return the course itself, and for its instructors what its file says."""
        (name,) = where
        course = self._course(data, name)
        teaches = course_view.teaches(course, self.viewer)
        editor = self.dashboard.editor
        return {
            "course": course_view.course_view(name, course, data.snapshot.status, datetime.now(timezone.utc)),
            "settings": course_view.settings(course) if teaches else (),
            "problems": course_view.problems_of(name, data.courses) if teaches else (),
            "may_edit": teaches and editor is not None,
            "fixed": editor.why_fixed(name) if teaches and editor is not None else "",
        }

    def _course(self, data: PageData, name: str) -> CourseFile:
        """Return a course that the viewer is in; one that they are not in is as if it were not there."""
        course = data.courses.usable.get(name)
        if course is None or not course_view.may_see(course, self.viewer):
            raise NotAllowed("There is no such course, or you are not in it.", "Ask its instructor.")
        return course


class HistoryPage(DashboardPage):
    """What has ended: one's own, and for administrators everybody's."""

    async def get(self) -> None:
        """Show the days that are asked for."""
        asked = self.get_query_argument("days", "")
        days = int(asked) if asked in map(str, history_view.PERIODS) else history_view.PERIODS[1]
        now = time.time()
        rows = history_view.visible(await self.pool.history(now - days * _DAY), self.viewer)
        snapshot = await self.dashboard.streams.snapshots.now()
        living = (*snapshot.status.leases, *snapshot.status.queue)
        held = [each for each in living if self.viewer.is_admin or self.viewer.owns(each)]
        every = [*rows, *history_view.living(held, now)]
        data = await self.dashboard.page_data(snapshot, [row.course for row in rows])
        self.show(
            "history.html",
            days=days,
            periods=history_view.PERIODS,
            plot=history_view.plot(every, data.marks, days, now),
            sums=history_view.sums(every, data.marks),
            rows=history_view.past_rows(rows),
            total=sum(row.leases for row in rows),
        )


class NothingPage(DashboardPage):
    """Any other address."""

    async def get(self) -> None:
        """Say that there is nothing."""
        raise HTTPError(HTTPStatus.NOT_FOUND)
