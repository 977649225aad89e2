"""The course files in front of a pool: kept up to date, and asked before anything is granted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from gpu_pool.caller import Caller
from gpu_pool.courses.access import NOT_IN_COURSE, is_member, system_groups
from gpu_pool.courses.folder import SHARED_FOLDERS, CourseFolder
from gpu_pool.settings import PoolSettings
from gpu_pool.store.leases import LeaseStore
from gpu_pool_client import Holder, NotAllowed, SliceRequest


class CourseAdmission:
    """What the course files of ``settings.courses_dir`` say.

    All but :meth:`groups` and :meth:`check_of` belongs to the store's thread.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self._required = settings.course_required
        self._folder: CourseFolder | None = None
        if settings.courses_dir:
            self._folder = SHARED_FOLDERS.folder(Path(settings.courses_dir), settings.courses)

    def follow(self, store: LeaseStore) -> None:
        """Let the store follow the files as they are now."""
        if self._folder is not None:
            store.follow(self._folder.look())

    def reread(self, store: LeaseStore, file: str) -> None:
        """Let the store follow a file that has been replaced, at once."""
        if self._folder is not None:
            self._folder.reread(file)
            store.follow(self._folder.look(), asked=True)

    async def groups(self, holder: Holder, caller: Caller | None) -> Collection[str]:
        """Return the holder's groups: those that the Hub says the caller is in, or that the system knows.

        The system may have to ask a directory on the network, so this is done
        before the decision, which others wait for.
        """
        if self._folder is None:
            return ()
        if caller is not None and caller.groups is not None:
            return caller.groups
        account = None if caller is None else caller.account
        return await asyncio.to_thread(system_groups, account or holder.user)

    async def check_of(
        self, request: SliceRequest, holder: Holder, caller: Caller | None
    ) -> Callable[[], None]:
        """Return :meth:`check` for this request, to be called by the store's thread as it decides."""
        return partial(self.check, request, holder, await self.groups(holder, caller))

    def check(self, request: SliceRequest, holder: Holder, groups: Collection[str]) -> None:
        """Refuse, with ``NotAllowed``, a request that its course forbids to a holder in these groups."""
        if self._required and not holder.course:
            raise NotAllowed(
                "This pool grants slices only for a course, and you named none.",
                "Choose a course when you start your server, or set GPU_POOL_COURSE.",
            )
        if self._folder is not None:
            now = datetime.now(timezone.utc)
            self._folder.look().check(holder.course, request, holder.user, groups, now)

    def offers(
        self, _: LeaseStore, holder: Holder, groups: Collection[str]
    ) -> tuple[SliceRequest, ...] | None:
        """Return what the file of the holder's course offers now. See ``Pool.offers``."""
        if self._folder is None or not holder.course:
            return None
        course = self._folder.look().usable.get(holder.course)
        if course is not None and not is_member(course, holder.user, groups):
            raise NotAllowed(NOT_IN_COURSE, "Ask its instructor to add you.")
        return None if course is None else course.requests
