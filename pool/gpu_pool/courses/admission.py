"""The course files in front of a pool: kept up to date, and asked before anything is granted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path

from gpu_pool.courses.access import NOT_IN_COURSE, is_member, system_groups, teaches
from gpu_pool.courses.folder import SHARED_FOLDERS, CourseFolder, Courses
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Holder, NotAllowed, SliceRequest


class CourseAdmission:
    """What the course files of a folder say, by default ``settings.courses_dir``.

    See ``store.context.CourseFiles``.
    """

    def __init__(self, settings: PoolSettings, folder: CourseFolder | None = None) -> None:
        self._required = settings.course_required
        self._folder = folder
        if folder is None and settings.courses_dir:
            self._folder = SHARED_FOLDERS.folder(Path(settings.courses_dir), settings.courses)
        #: Who teaches what, as far as it was asked, by the files that said it.
        self._taught: tuple[Courses, dict[str, frozenset[str]]] = (Courses(), {})

    def now(self) -> Courses | None:
        """Return what the files say now; None where there is no folder of them."""
        return None if self._folder is None else self._folder.current()

    def reread(self, file: str) -> None:
        """Read a file that has been replaced, at once."""
        if self._folder is not None:
            self._folder.reread(file)

    async def groups(self, account: str) -> frozenset[str]:
        """Return the groups in which the system has an account; none where no file could name any.

        The system may have to ask a directory on the network, so this is done
        before the decision, which others wait for.
        """
        if self._folder is None:
            return frozenset()
        return frozenset(await asyncio.to_thread(system_groups, account))

    async def taught(self, user: str) -> frozenset[str]:
        """Return the courses that somebody teaches."""
        if self._folder is None:
            return frozenset()
        now, (then, known) = await self._folder.current_in_thread(), self._taught
        if now is not then:
            known = {}
            self._taught = (now, known)
        if user not in known:
            known[user] = frozenset(name for name, each in now.usable.items() if teaches(each, user))
        return known[user]

    def check(self, request: SliceRequest, holder: Holder, groups: Collection[str]) -> None:
        """Refuse, with ``NotAllowed``, a request that its course forbids to a holder in these groups."""
        if self._required and not holder.course:
            raise NotAllowed(
                "This pool grants slices only for a course, and you named none.",
                "Choose a course when you start your server, or set GPU_POOL_COURSE.",
            )
        if self._folder is not None:
            now = datetime.now(timezone.utc)
            self._folder.current().check(holder.course, request, holder.user, groups, now)

    async def offers(self, holder: Holder, groups: Collection[str]) -> tuple[SliceRequest, ...] | None:
        """Return what the file of the holder's course offers now. See ``Pool.offers``."""
        if self._folder is None or not holder.course:
            return None
        course = (await self._folder.current_in_thread()).usable.get(holder.course)
        if course is not None and not is_member(course, holder.user, groups):
            raise NotAllowed(NOT_IN_COURSE, "Ask its instructor to add you.")
        return None if course is None else course.requests
