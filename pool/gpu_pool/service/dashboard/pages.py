"""The pages: what of the pool is on each, and for whom; what the forms of a lease's page do.

Each form, which gives the slice back, revokes it or drains its GPU, answers by leading to the page that shows
what became of it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Any, Final

from tornado.web import HTTPError

from gpu_pool.courses import CourseFile
from gpu_pool.policy.usage_report import until_now
from gpu_pool.pool.own_days import recorded_leases
from gpu_pool.service.dashboard import course_view, history_view, other_ways, pool_view
from gpu_pool.service.dashboard.history_view import PastRow
from gpu_pool.service.dashboard.live_pages import DashboardPage, LivePage, PageData, Parts
from gpu_pool.service.dashboard.pool_view import as_seen_by, without_names
from gpu_pool_client import (
    BadRequest,
    EndReason,
    GpuPoolError,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    Place,
    PoolStatus,
    TakingEffect,
)


class FormAction(DashboardPage):
    """Something that a form does."""

    def done(self, page: str, said: str) -> None:
        """Lead to a page, which says what was done."""
        self.redirect(f"{self.prefix}{page}?said={said}", status=303)


class DrainForm(FormAction):
    """Grant nothing more on a device, or grant again."""

    async def post(self, device: str, what: str) -> None:
        """Drain or undrain it."""
        await self.pool.drain(device, drained=what == "drain")
        self.done("admin", f"{what}ed")


_OTHERWISE_NOW: Final = (
    "Nothing was done, because the situation has changed. Read the page again, and choose."
)


class _OfLease(DashboardPage):
    """Shows a lease to its user, or to an administrator."""

    async def draw_lease(self, lease_id: str, effect: TakingEffect, refused: str = "", why: str = "") -> None:
        """Show it, with what can be done and what each of that does."""
        data = await self.dashboard.read()
        status = data.snapshot.status
        lease = next((each for each in (*status.leases, *status.queue) if each.id == lease_id), None)
        if lease is None:
            raise LeaseGone("There is no such lease any more.", "See the history for how it ended.")
        (row,) = pool_view.lease_rows(status, data.marks, lambda each: each.id == lease_id)
        is_own = self.viewer.owns(lease)
        open_devices = {each.device.uuid for each in status.devices if not each.drained}
        held = [part.device for part in lease.slices if part.device.uuid in open_devices]
        self.show(
            "lease.html",
            row=row,
            in_use=await self._in_use(lease),
            is_own=is_own,
            title=title_of(effect, is_own=is_own),
            effect=effect,
            choices=lease_choices(lease, effect, is_own=is_own),
            drainable=held if self.viewer.is_admin else [],
            refused=refused,
            why=why,
        )

    async def _in_use(self, lease: Lease) -> str:
        """Say how much of its memory a held lease uses now; empty where that is not known."""
        if lease.state is not LeaseState.HELD:
            return ""
        used = (await self.pool.activity(lease.id)).memory_mib
        return "" if used is None else pool_view.memory(used)


class LeasePage(_OfLease):
    """One lease, for its user who may give it back, and for administrators who may revoke it."""

    async def get(self, lease_id: str) -> None:
        """Show it, and the forms."""
        await self.draw_lease(lease_id, await self.pool.effect_of_taking(lease_id))


class _TakeBack(_OfLease, FormAction, ABC):
    """Something that the forms of a lease's page do."""

    #: What is said where the kernel lives on, and otherwise.
    kept: str
    ended: str
    asked: str
    #: The page that says it.
    page: str

    async def take_back(self, lease_id: str, why: str) -> None:
        """Do what was chosen; show the page again where that would do something else than it said."""
        if self.get_body_argument("when", NOW) == WHEN_IDLE:
            await self.pool.ask_back(lease_id, why)
            self.done(self.page, self.asked)
            return
        effect = await self.pool.effect_of_taking(lease_id)
        if self.get_body_argument("effect", effect.value) != effect.value:
            await self.draw_lease(lease_id, effect, _OTHERWISE_NOW, why)
            return
        if effect is TakingEffect.KEEPS_KERNEL:
            await self._withdraw(lease_id, why)
        else:
            await self.end(lease_id, why)
            self.done(self.page, self.ended)

    async def _withdraw(self, lease_id: str, why: str) -> None:
        try:
            await self.pool.withdraw(lease_id, why)
        except (BadRequest, NotAllowed):  # it has used the GPU, or was parked, in this very moment
            effect = await self.pool.effect_of_taking(lease_id)
            await self.draw_lease(lease_id, effect, _OTHERWISE_NOW, why)
        else:
            self.done(self.page, self.kept)

    @abstractmethod
    async def end(self, lease_id: str, why: str) -> None:
        """End the lease, and with it its kernel."""


class GiveBack(_TakeBack):
    """Give back a slice of one's own."""

    kept, ended, asked, page = "given-back-kept", "given-back", "asked-back", ""

    async def post(self, lease_id: str) -> None:
        """Give it back, now or when its kernel is idle."""
        try:
            await self.take_back(lease_id, "")
        except LeaseGone as error:
            if error.reason is None:  # there never was one of theirs
                raise
            self.done(self.page, self.ended)  # it has ended by itself

    async def end(self, lease_id: str, why: str) -> None:  # noqa: ARG002 - nobody needs words of their own
        """End it."""
        await self.pool.release(lease_id, EndReason.RELEASED)


class Revoke(_TakeBack):
    """Take back anybody's slice, with a reason that its user reads."""

    kept, ended, asked, page = "revoked-kept", "revoked", "asked-back", "admin"

    async def post(self, lease_id: str) -> None:
        """Take it back, now or when its kernel is idle."""
        self.require_admin()
        message = self.get_body_argument("why", "").strip()
        if not message:
            raise BadRequest("The reason is missing.", "Write one: the student will read it.")
        await self.take_back(lease_id, message)

    async def end(self, lease_id: str, why: str) -> None:
        """End it."""
        await self.pool.revoke(lease_id, why)


#: What choices are called by, in forms.
NOW: Final = "now"
WHEN_IDLE: Final = "idle"

_ALL_LOST: Final = "All variables of the kernel are lost."
_KEPT_WHEN_IDLE: Final = (
    "A cell that runs now may finish first. The kernel lives on with its variables, unless it uses the GPU "
    "by then: in that case it is ended, and they are lost."
)
_KEPT_NOW: Final = (
    "The kernel has not used the GPU: it lives on with its variables, and its next cell waits for a slice "
    "again. A cell that runs now may go on as long as it does not use the GPU; if it does, the kernel is "
    "ended, and its variables are lost."
)
_ENDED_WHEN_IDLE: Final = (
    "A running cell, or work on the GPU, may finish first. If the pool cannot see whether the GPU is busy, "
    "it waits for a minute after the last cell. Then the kernel is ended; the notebook says so below that "
    "cell."
)
_ENDED_NOW: Final = "The kernel has used the GPU, or may have. It is ended at once, whatever it runs."
_PARKED: Final = "The slice is lent to others while the kernel is idle. The kernel is ended."
_FREED: Final = (
    "It belongs to a command or a shell. A command under gpu-pool run is ended; anything else that runs on "
    "it goes on, without being counted."
)
_QUEUE: Final = "The position in the queue is lost. The waiting cell or command says so."


@dataclass(frozen=True, slots=True)
class LeaseChoice:
    """Something that can be done, and what it comes to."""

    when: str
    title: str
    text: str
    button: str
    #: What is lost for certain; empty if nothing is.
    warning: str = ""


def title_of(effect: TakingEffect, *, is_own: bool) -> str:
    """Return the heading of a lease's page, for its user or for an administrator."""
    if effect is TakingEffect.LEAVES_QUEUE:
        return "Leave the queue" if is_own else "Remove from the queue"
    return "Give back a slice" if is_own else "Revoke a slice"


def lease_choices(lease: Lease, effect: TakingEffect, *, is_own: bool) -> tuple[LeaseChoice, ...]:
    """Return what can be done, the gentlest first."""
    return tuple(_choices(lease, effect, "Give back" if is_own else "Revoke", is_own))


def _choices(lease: Lease, effect: TakingEffect, verb: str, is_own: bool) -> Iterable[LeaseChoice]:
    this = f"{verb} this slice now"
    if effect is TakingEffect.LEAVES_QUEUE:
        title = title_of(effect, is_own=is_own)
        yield LeaseChoice(NOW, f"{title} now", _QUEUE, f"{title} now")
    elif effect is TakingEffect.FREES_SLICE:
        yield LeaseChoice(NOW, f"{verb} now", _FREED, this)
    elif lease.state is not LeaseState.HELD:
        yield LeaseChoice(NOW, f"{verb} now", _PARKED, this, _ALL_LOST)
    else:
        is_kept = effect is TakingEffect.KEEPS_KERNEL
        if lease.asked_back is None:
            text, lost = (_KEPT_WHEN_IDLE, "") if is_kept else (_ENDED_WHEN_IDLE, _ALL_LOST)
            yield LeaseChoice(WHEN_IDLE, f"{verb} when idle", text, f"{verb} it when idle", lost)
        text, lost = (_KEPT_NOW, "") if is_kept else (_ENDED_NOW, _ALL_LOST)
        yield LeaseChoice(NOW, f"{verb} now", text, this, lost)


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
    _outlooks: dict[tuple[str, int | None, Place | None], Outlook] | None = None
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
        elsewhere = (lease for lease in status.leases if lease.is_queued)
        own = [lease for lease in (*elsewhere, *status.queue) if self.viewer.owns(lease)]
        self._outlooks = {}
        for lease in own:
            place = (lease.id, lease.position, lease.place)
            try:
                self._outlooks[place] = known.get(place) or await self.pool.explain(lease.id)
            except GpuPoolError:
                continue  # it waits no more: the next look says what became of it
        return {lease_id: outlook for (lease_id, *_), outlook in self._outlooks.items()}


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
            "prepared": self.draw("part_prepared.html", rows=status.prepared),
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
        every = [*rows, *until_now(held, now)]
        busy = await self.pool.busy_times(now - days * _DAY) if self.viewer.is_admin else None
        data = await self.dashboard.page_data(snapshot, [row.course for row in rows])
        self.show(
            "history.html",
            days=days,
            periods=history_view.PERIODS,
            plot=history_view.plot(every, data.marks, days, now, busy),
            sums=history_view.sums(every, data.marks),
            rows=history_view.past_rows(rows),
            total=sum(row.leases for row in rows),
        )


class OtherWaysPage(DashboardPage):
    """What more GPUs, or kernels that give way, would have done with the pool's own days."""

    async def get(self) -> None:
        """Show the days and the number of GPUs that are asked for."""
        self.require_admin()
        asked = self.get_query_argument("days", ""), self.get_query_argument("more", "")
        days = int(asked[0]) if asked[0] in map(str, history_view.PERIODS) else history_view.PERIODS[-1]
        more = int(asked[1]) if asked[1] in map(str, other_ways.MORE) else 0
        since = time.time() - days * _DAY
        rows = recorded_leases(await self.pool.history(since), await self.pool.busy_times(since))
        snapshot = await self.dashboard.streams.snapshots.now()
        data = await self.dashboard.page_data(snapshot)
        sharing = self.dashboard.sharing(data.courses)
        found = await self.dashboard.other_ways.ask(rows, snapshot.status, sharing, more)
        periods, numbers = history_view.PERIODS, other_ways.MORE
        self.show("other_ways.html", days=days, periods=periods, more=more, numbers=numbers, found=found)


class NothingPage(DashboardPage):
    """Any other address."""

    async def get(self) -> None:
        """Say that there is nothing."""
        raise HTTPError(HTTPStatus.NOT_FOUND)
