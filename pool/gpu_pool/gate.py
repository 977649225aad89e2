"""The course files in front of a pool: kept up to date, and asked before anything is granted."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_pool.ledger.book import Book
from gpu_pool.settings import PoolSettings
from gpu_pool_client import Holder, NotAllowed, SliceRequest

if TYPE_CHECKING:
    from gpu_pool.coursefiles import CourseFolder


class CourseGate:
    """What the course files of ``settings.courses_dir`` say. Used in the ledger's thread."""

    def __init__(self, settings: PoolSettings) -> None:
        self._required = settings.course_required
        self._folder = _open_folder(settings)

    def keep_up(self, book: Book) -> Book:
        """Let the book follow the files as they are now."""
        if self._folder is not None:
            book.follow(self._folder.look())
        return book

    def check(self, request: SliceRequest, holder: Holder, groups: Collection[str] | None) -> None:
        """Refuse, with ``NotAllowed``, a request that its course forbids.

        ``groups`` are the holder's; None for those that the system knows.
        """
        if self._required and not holder.course:
            raise NotAllowed(
                "Slices are granted here in the name of a course, and you named none.",
                "Choose a course when you start your server, or set GPU_POOL_COURSE.",
            )
        if self._folder is None:
            return
        from gpu_pool.coursefiles import system_groups

        known = system_groups(holder.user) if groups is None else groups
        now = datetime.now(timezone.utc)
        self._folder.look().check(holder.course, request, holder.user, known, now)


def _open_folder(settings: PoolSettings) -> CourseFolder | None:
    if not settings.courses_dir:
        return None
    # Imported here because it costs some 150 ms, which most pools of one user need not pay.
    from gpu_pool.coursefiles import CourseFolder

    return CourseFolder(Path(settings.courses_dir).expanduser(), settings.courses)
