"""The course files, for those who teach the courses: read, checked, and put in place of the old ones.

Everything is asked in a caller's name. Administrators may edit every course,
instructors their own, without what only administrators may change
(:data:`gpu_pool.courses.editing.RESERVED`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from gpu_pool.audit import asks
from gpu_pool.audit.callers import Caller
from gpu_pool.courses import (
    BadCourseFile,
    CourseFile,
    CourseFolder,
    Courses,
    FileProblem,
    check_course,
    course_name,
    read_bytes,
)
from gpu_pool.courses.access import teaches
from gpu_pool.courses.arithmetic import Rush, RushGivenUp, SliceFigures, rush, slice_figures
from gpu_pool.courses.editing import difference, digest, how_much, reserved_changes
from gpu_pool.courses.folder import described_twice, put_in_place, take_back, why_fixed, write_beside
from gpu_pool.courses.reading import MOST_BYTES, SUFFIX
from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import CourseVersion
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.class_simulations import ClassSimulations, SimulationLimits
from gpu_pool.service.decisions import DecisionLog
from gpu_pool_client import BadRequest, Device, GpuPoolError, NotAllowed

#: Students of a class that is simulated while its teacher waits.
MOST_STUDENTS: Final = 500
_UTF8: Final = "Save it as UTF-8 in your editor."


@dataclass(frozen=True, slots=True)
class CourseFileNow:
    """A course file as it is."""

    name: str
    text: str
    #: Of its bytes; empty where it cannot be read.
    digest: str
    #: Why it cannot be changed here; empty if it can.
    fixed: str
    problems: tuple[FileProblem, ...]
    has_crlf: bool = False

    @property
    def file(self) -> str:
        """The file's name."""
        return self.name + SUFFIX

    def as_written(self, text: bytes) -> bytes:
        """Return a text as it is written in the file's place: with its line ends."""
        return text.replace(b"\n", b"\r\n") if self.has_crlf else text


@dataclass(frozen=True, slots=True)
class CheckedCourseFile:
    """What came of checking a text."""

    problems: tuple[FileProblem, ...] = ()
    course: CourseFile | None = None
    #: Empty where no GPU is known.
    slices: tuple[SliceFigures, ...] = ()
    rush: Rush | None = None
    #: Why the class was not simulated, though that was asked for.
    not_simulated: str = ""


@dataclass(frozen=True, slots=True)
class ClassSize:
    """A class that comes all at once, for the arithmetic."""

    students: int
    #: Seconds for which each keeps a slice.
    stay: float


class ChangedMeanwhile(BadRequest):
    """The file is not any more what its editor was shown. ``now`` is what it is."""

    def __init__(self, now: CourseFileNow) -> None:
        super().__init__(
            f"{now.file} was changed by somebody else while you were editing it.",
            "Nothing of yours is lost: compare the two, and decide.",
        )
        self.now = now


class CourseEditor:
    """The course files of one folder.

    Saves are made one at a time. Others may change the files by other means: what
    they have changed is seen, but in the moment between the last look and the renaming.
    """

    def __init__(
        self,
        pool: GpuPool,
        folder: CourseFolder,
        rules: Rules,
        decisions: DecisionLog,
        limits: SimulationLimits | None = None,
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._rules = rules
        self._decisions = decisions
        self._saving = asyncio.Lock()
        self._simulations = ClassSimulations(limits)

    async def require(self, caller: Caller, name: str) -> Courses:
        """Return the courses as they are. Raises ``NotAllowed`` for whoever may not edit this one.

        One that is not there is nobody's. Administrators may also mend a file that has never been good.
        """
        courses = await self._folder.current_in_thread()
        course = courses.usable.get(name)
        if course is not None and (caller.is_admin or teaches(course, caller.user)):
            return courses
        if caller.is_admin and name in courses.refused:
            return courses
        raise NotAllowed("There is no such course, or you do not teach it.", "Ask the administrator.")

    def why_fixed(self, name: str) -> str:
        """Say why a course's file cannot be changed here; empty if it can."""
        return why_fixed(self._folder.path, name + SUFFIX)

    async def read(self, caller: Caller, name: str) -> CourseFileNow:
        """Return a course's file as it is."""
        is_twice = name in (await self.require(caller, name)).refused
        return await asyncio.to_thread(self._read, name, is_twice)

    async def versions(
        self, caller: Caller, name: str, most: int, before: int | None = None
    ) -> tuple[CourseVersion, ...]:
        """Return the latest versions of a course's file, the last first."""
        await self.require(caller, name)
        return await self._pool.core.course_versions(name, most, before)

    async def check(
        self, caller: Caller, name: str, data: bytes, students: ClassSize | None
    ) -> CheckedCourseFile:
        """Check a text as ``gpu-pool courses check`` does, and do its arithmetic.

        With ``students`` that class is simulated, unless it takes too long. Cancelling ends that.
        """
        now = await self.read(caller, name)
        devices = [each.device for each in (await self._pool.status()).devices]
        reserved = await self._reserved(caller, name)
        found = await asyncio.to_thread(self._check, now, data, reserved, devices)
        course = found.course
        if students is None or course is None or not _fits(found):
            return found
        simulate = partial(rush, name, course, students.students, students.stay, devices, self._rules)
        try:
            return replace(found, rush=await self._simulations.rush(caller.user, simulate))
        except RushGivenUp as error:
            return replace(found, not_simulated=str(error))

    async def save(self, caller: Caller, name: str, data: bytes, seen: str) -> bool:
        """Put a text in the place of a course's file; return whether that is any change.

        ``seen`` is the digest of what the caller was shown. Raises
        ``ChangedMeanwhile``, ``BadCourseFile``, and ``NotAllowed`` where it
        cannot be written; the file then stays as it was.
        """
        async with self._saving:
            with self._decisions.making(caller, f"save the course file {name[:64]}{SUFFIX}") as outcome:
                await asyncio.to_thread(self._folder.reread, name + SUFFIX)
                now = await self.read(caller, name)
                if now.fixed:
                    raise NotAllowed(now.fixed)
                if now.digest != seen:
                    raise ChangedMeanwhile(now)
                text = data.decode("utf-8", "replace")
                if text == now.text:
                    outcome.append("nothing changed")
                    return False
                written = now.as_written(data)
                found = await asyncio.to_thread(_parse, now, written, await self._reserved(caller, name))
                if found.problems:
                    raise BadCourseFile(found.problems)
                before = (await self._folder.current_in_thread()).usable.get(name)
                await self._replace(caller, now, text, written)
                await self._audit_text_change(name, before)
                outcome.append(how_much(await asyncio.to_thread(difference, now.text, text)))
                return True

    async def _audit_text_change(self, name: str, before: CourseFile | None) -> None:
        """Write down a save by which no course changes: all others are told as they take effect."""
        now = (await self._folder.current_in_thread()).usable.get(name)
        if self._pool.core.audit is not None and now == before:
            self._pool.core.audit.write("course", {"course": name, "change": "text"}, asks())

    async def _replace(self, caller: Caller, now: CourseFileNow, text: str, written: bytes) -> None:
        """Put what was checked in place, after what it replaces and what it says have been kept."""
        folder = self._folder.path
        await asyncio.to_thread(write_beside, folder, now.file, written)
        try:
            number = await self._keep(caller, now, text)
            try:
                await asyncio.to_thread(put_in_place, folder, now.file)
            except GpuPoolError:
                await self._pool.core.remove_version(number)
                raise
        finally:
            take_back(folder, now.file)
        # All that read it follow it at once: pages, pods, and whatever requests and grants are held to.
        await self._pool.core.reread_course(now.file)

    async def _keep(self, caller: Caller, now: CourseFileNow, text: str) -> int:
        last = await self._pool.core.course_versions(now.name, 1)
        versions = [CourseVersion(caller.user, text, time.time())]
        if not last or last[0].text != now.text:
            versions.insert(0, CourseVersion("", now.text, time.time()))
        return await self._pool.core.keep_versions(now.name, versions)

    async def _reserved(self, caller: Caller, name: str) -> CourseFile | None:
        """Return the course that a change is held against; None for administrators, who may change all."""
        return None if caller.is_admin else (await self.require(caller, name)).usable[name]

    def _read(self, name: str, is_refused: bool) -> CourseFileNow:
        file = name + SUFFIX
        try:
            course_name(file)
            data = read_bytes(self._folder.path, file)
            text = data.decode("utf-8-sig")
        except BadCourseFile as error:
            return CourseFileNow(name, "", "", str(error), error.problems)
        except UnicodeDecodeError:
            return CourseFileNow(name, "", "", f"{file} is not UTF-8. {_UTF8}", ())
        problems = _problems(file, data)
        if is_refused and not problems:
            problems = (described_twice(file, name),)
        fixed = self.why_fixed(name)
        return CourseFileNow(name, text.replace("\r\n", "\n"), digest(data), fixed, problems, "\r\n" in text)

    def _check(
        self,
        now: CourseFileNow,
        data: bytes,
        reserved: CourseFile | None,
        devices: Sequence[Device],
    ) -> CheckedCourseFile:
        found = _parse(now, now.as_written(data), reserved)
        course = found.course
        if course is None or not devices:
            return found
        return CheckedCourseFile(found.problems, course, slice_figures(course, devices, self._rules))


def _fits(found: CheckedCourseFile) -> bool:
    """Whether anybody can have the default slice, as far as GPUs are known."""
    return any(each.is_default and each.at_once > 0 for each in found.slices)


def _problems(file: str, data: bytes) -> tuple[FileProblem, ...]:
    try:
        check_course(file, data)
    except BadCourseFile as error:
        return error.problems
    return ()


def _parse(now: CourseFileNow, written: bytes, reserved: CourseFile | None) -> CheckedCourseFile:
    """Read what is to be written in the place of a file as it is now; hold it against ``reserved``."""
    if len(written) > MOST_BYTES:
        ends = ", as it is saved: its lines end in CRLF, with two bytes each" if now.has_crlf else ""
        message = f"is larger than {MOST_BYTES // 1024} KiB, the limit for a course file{ends}."
        return CheckedCourseFile(
            (FileProblem(now.file, None, "", message, "Put the students into a group."),)
        )
    try:
        course = check_course(now.file, written)
    except BadCourseFile as error:
        return CheckedCourseFile(error.problems)
    if reserved is None:
        return CheckedCourseFile((), course)
    before = None if now.problems else now.text
    return CheckedCourseFile(
        reserved_changes(now.file, course, written.decode("utf-8-sig"), reserved, before), course
    )
