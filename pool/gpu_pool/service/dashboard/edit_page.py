"""The page on which a course file is checked and edited, by those who teach the course.

What it shows (the arithmetic of a file, the history of its changes) is made by the pure functions below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import zip_longest
from typing import Final

from tornado.web import Finish

from gpu_pool.courses import BadCourseFile, FileProblem
from gpu_pool.courses.arithmetic import (
    SliceFigures,
    at_once_text,
    limit_notes,
    memory_text,
    rush_text,
    slice_notes,
)
from gpu_pool.courses.editing import RESERVED, difference, how_much
from gpu_pool.courses.reading import MOST_BYTES, read_back
from gpu_pool.names import visible
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.service.course_editor import (
    MOST_STUDENTS,
    ChangedMeanwhile,
    CheckedCourseFile,
    ClassSize,
    CourseEditor,
    CourseFileNow,
)
from gpu_pool.service.dashboard.live_pages import DashboardPage
from gpu_pool.service.dashboard.pool_view import PageTime, memory, moment, request_text
from gpu_pool.service.handler import audit_refusal
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, parse_duration
from gpu_pool_client._remote import bodies

#: Changes on one page of the history.
_CHANGES: Final = 10
_SAID: Final = {
    "saved": "Saved, and in force from now on. "
    "Slices that are held keep the terms with which they were granted.",
    "unchanged": "Nothing was changed: the file already has this text.",
}


_HOLDS: Final = (
    "All else on this page holds, and the file can be saved. Try it with fewer students, or later, "
    "or on a machine of yours: gpu-pool courses check --students."
)


@dataclass
class _Form:
    """What is in the form, and what is to be said of it."""

    text: str
    #: The digest of the file that it was begun from.
    seen: str
    students: str = ""
    stay: str = "1h"
    said: str = ""
    notice: str = ""
    problems: tuple[FileProblem, ...] = ()
    checked: CheckedCourseFile | None = None
    #: Whether it is something else than the file.
    is_unsaved: bool = False
    #: What the file became meanwhile, and the way from there to what was typed.
    theirs: str | None = None


class EditPage(DashboardPage):
    """A course's file: to read, to check and to save; and its history."""

    #: The largest file in the widest encoding of a form, and with it one that is too large to be saved.
    most_body = 4 * MOST_BYTES
    _checking: asyncio.Future[CheckedCourseFile] | None = None

    @property
    def editor(self) -> CourseEditor:
        """What reads and writes the files."""
        found = self.dashboard.editor
        if found is None:
            raise NotAllowed("There are no course files here.", "Ask the administrator.")
        return found

    async def get(self, name: str) -> None:
        """Show the file, or an earlier version of it in the editor."""
        now = await self.editor.read(self.caller, name)
        form = _Form(now.text, now.digest, said=_SAID.get(self.get_query_argument("said", ""), ""))
        if not form.said:
            form.problems = now.problems
        number = self._number("version")
        if number is not None:
            await self._bring_back(name, number, form)
        await self._show(now, form)

    async def post(self, name: str) -> None:
        """Check what was typed, or save it."""
        form = _Form(
            text=self._typed.decode("utf-8", "replace"),
            seen=self.get_body_argument("seen", ""),
            students=self.get_body_argument("students", "")[:10],
            stay=self.get_body_argument("stay", "")[:20],
            is_unsaved=True,
        )
        wants_save = self.get_body_argument("do", "check") == "save"
        now = await self.editor.read(self.caller, name)
        try:
            await (self._save if wants_save else self._check)(name, form)
        except GpuPoolError as error:
            if wants_save:
                audit_refusal(self, error, self.shared.served.audit)
            now = self._refuse(error, form, now, wants_save=wants_save)
        if not self._finished:
            await self._show(now, form)

    async def _save(self, name: str, form: _Form) -> None:
        is_changed = await self.editor.save(self.caller, name, self._typed, form.seen)
        said = "saved" if is_changed else "unchanged"
        self.redirect(f"{self.prefix}courses/{name}/edit?said={said}", status=303)

    async def _check(self, name: str, form: _Form) -> None:
        students = _read_class(form)
        self._checking = asyncio.ensure_future(self.editor.check(self.caller, name, self._typed, students))
        try:
            form.checked = await self._checking
        except asyncio.CancelledError:
            raise Finish from None
        form.problems = form.checked.problems
        if not form.problems:
            fault = any(note for each in form.checked.slices for note in slice_notes(each))
            verdict = "has no error, but not every slice can be granted" if fault else "is good"
            form.said = f"The file {verdict}. It is not saved yet."

    def on_connection_close(self) -> None:
        """End the check of somebody who has gone. Called by tornado."""
        if self._checking is not None:
            self._checking.cancel()

    def _refuse(
        self, error: GpuPoolError, form: _Form, now: CourseFileNow, *, wants_save: bool
    ) -> CourseFileNow:
        """Say why nothing was done, beside what was typed; return the file as it is."""
        self.set_status(bodies.problem_of(error).status)
        if isinstance(error, ChangedMeanwhile):
            self.set_status(HTTPStatus.CONFLICT)
            form.notice, form.theirs, form.seen = str(error), error.now.text, error.now.digest
            return error.now
        if isinstance(error, BadCourseFile):
            self.set_status(HTTPStatus.UNPROCESSABLE_ENTITY)
            form.notice, form.problems = "Not saved: the file stays as it was.", error.problems
        else:
            form.notice = f"Not saved: {error}" if wants_save else str(error)
        return now

    async def _bring_back(self, name: str, number: int, form: _Form) -> None:
        """Fill the editor with an earlier version."""
        found = await self.editor.versions(self.caller, name, 1, before=number + 1)
        if not found or found[0].number != number:
            form.notice = "That version is no longer kept."
            return
        form.said = f"The version of {moment(found[0].saved_at).text}. Nothing is changed until you save it."
        form.text, form.problems, form.is_unsaved = found[0].text, (), True

    async def _show(self, now: CourseFileNow, form: _Form) -> None:
        before = self._number("before")
        versions = await self.editor.versions(self.caller, now.name, _CHANGES + 1, before)
        current = now.text if before is None and now.digest else None
        changes = await asyncio.to_thread(list_changes, versions, current)
        has_older = len(versions) > _CHANGES  # the last is only there to be compared with
        course = (await self.dashboard.read()).courses.usable.get(now.name)
        self.show(
            "edit.html",
            now=now,
            form=form,
            title=course.title if course else now.name,
            is_usable=course is not None,
            sums=slice_sums(form.checked) if form.checked else None,
            times=_times(form.checked),
            yours=await asyncio.to_thread(_compared, form),
            changes=changes[:-1] if has_older else changes,
            older=versions[-2].number if has_older else None,
            reserved=() if self.viewer.is_admin else RESERVED,
            most_characters=MOST_BYTES,
            most_students=MOST_STUDENTS,
        )

    @property
    def _typed(self) -> bytes:
        """The text as it was sent, with the line ends that files have."""
        sent = self.request.body_arguments.get("text", [b""])[-1]
        return sent.replace(b"\r\n", b"\n")

    def _number(self, name: str) -> int | None:
        text = self.get_query_argument(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None

    def show_error(self, problem: bodies.ProblemDocument) -> None:
        """Show an error, and with it what was typed, which the browser may not know any more."""
        typed = self._typed.decode("utf-8", "replace")
        title, message, remedy = problem.title, problem.message, problem.remedy
        self.render("error.html", title=title, message=message, remedy=remedy, typed=typed)


def _compared(form: _Form) -> tuple[DiffLine, ...]:
    """Return what saving would change of what the file became meanwhile."""
    return () if form.theirs is None else tuple(diff_lines(difference(form.theirs, form.text)))


def _read_class(form: _Form) -> ClassSize | None:
    """Return the class that is to be simulated, if one is. Raises ``BadRequest``."""
    if not form.students.strip():
        return None
    is_number = form.students.isascii() and form.students.isdecimal()
    if not (is_number and 1 <= int(form.students) <= MOST_STUDENTS):
        raise BadRequest(
            f"{form.students!a} is not a valid number of students.", f"Accepted: 1 to {MOST_STUDENTS}."
        )
    return ClassSize(int(form.students), parse_duration(form.stay or "1h"))


#: Whoever changed a file by other means than the page, of whom nothing is known.
ELSEWHERE = "changed outside of this page"


@dataclass(frozen=True, slots=True)
class FitRow:
    """A slice on one model of GPU."""

    name: str
    request: str
    gpu: str
    each: str
    at_once: str
    memory: str
    left: str


@dataclass(frozen=True, slots=True)
class Sums:
    """The arithmetic of a course file."""

    rows: tuple[FitRow, ...]
    notes: tuple[str, ...]
    #: What limits above guarantees mean.
    limits: tuple[str, ...]
    #: What happens when all come at once; empty where that was not asked for, or not found out.
    rush: str
    #: Why it was not found out, and what holds all the same.
    not_simulated: str


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a difference: ``kind`` is the name of its style."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a course file."""

    #: That of the version it led to; 0 for the file as it is, if no version is like it.
    number: int
    who: str
    #: None where it is not known.
    when: PageTime | None
    #: Empty for the oldest version that is known.
    size: str
    lines: tuple[DiffLine, ...]
    is_now: bool


def slice_sums(checked: CheckedCourseFile) -> Sums | None:
    """Return the arithmetic of what was checked; None where there is none."""
    if checked.course is None or not checked.slices:
        return None
    return Sums(
        rows=tuple(row for each in checked.slices for row in _fit_rows(each)),
        notes=tuple(note for each in checked.slices for note in slice_notes(each)),
        limits=tuple(note for each in checked.slices for note in limit_notes(each)),
        rush=rush_text(checked.rush, checked.course) if checked.rush else "",
        not_simulated=_not_simulated(checked.not_simulated),
    )


def _not_simulated(why: str) -> str:
    """Say that a class was not simulated, and what that does not change."""
    return f"What happens when all come at once was not simulated: {why} {_HOLDS}" if why else ""


def _times(checked: CheckedCourseFile | None) -> dict[str, str]:
    """Return the times of what was checked, in words."""
    if checked is None or checked.problems or checked.course is None:
        return {}
    return read_back(checked.course)


def _fit_rows(each: SliceFigures) -> Iterator[FitRow]:
    for fit in each.fits:
        yield FitRow(
            name=f"{each.name} (default)" if each.is_default else each.name,
            request=request_text(each.request),
            gpu=f"{fit.gpus} x {fit.gpu}",
            each=str(fit.each) if fit.each else "none",
            at_once=at_once_text(each),
            memory=memory_text(fit, memory),
            left=memory(fit.left_mib) if fit.left_mib > 0 else "nothing",
        )


def list_changes(versions: Sequence[CourseVersion], now: str | None) -> tuple[Change, ...]:
    """Return what led to each version but the last given, which is the oldest, the latest first.

    ``now`` is the file as it is; None if these are not the latest versions.
    """
    found = []
    if now is not None and versions and versions[0].text != now:
        found.append(_change(CourseVersion("", now, 0.0), versions[0], is_now=True))
    for newer, older in zip_longest(versions, versions[1:]):
        found.append(_change(newer, older, is_now=now is not None and not found))
    return tuple(found)


def _change(newer: CourseVersion, older: CourseVersion | None, *, is_now: bool) -> Change:
    lines = difference(older.text, newer.text) if older else ()
    return Change(
        number=newer.number,
        who=newer.user or (ELSEWHERE if older else "as it was found"),
        when=moment(newer.saved_at) if newer.number and newer.user else None,
        size=how_much(lines) if older else "",
        lines=tuple(diff_lines(lines)),
        is_now=is_now,
    )


def diff_lines(lines: Sequence[str]) -> Iterator[DiffLine]:
    """Yield the lines of a difference by kind."""
    kinds = {"+": "added", "-": "removed", "@": "where"}
    for line in lines:
        yield DiffLine(kinds.get(line[:1], "same"), visible(line))
