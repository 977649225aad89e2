"""What all pages ask: the pool as it is, its courses, and how it is shared."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gpu_pool.courses import Courses
from gpu_pool.policy.sharing import Sharing
from gpu_pool.service.course_editor import CourseEditor
from gpu_pool.service.dashboard.labels import Mark, marks
from gpu_pool.service.event_streams import StreamLimits
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.snapshots import Snapshot, Snapshots
from gpu_pool_client import OverQuota, Pool

#: Pages of one user that are live at once: each browser tab has one.
_MOST_STREAMS: Final = 32


@dataclass(frozen=True, slots=True)
class PoolScene:
    """The pool at one time, and how its courses are drawn."""

    snapshot: Snapshot
    courses: Courses
    marks: Mapping[str, Mark]


class Dashboard:
    """What the pages of one service share. In the application's settings as ``dashboard``."""

    def __init__(
        self,
        pool: Pool,
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
        self._scene: PoolScene | None = None
        self._drawn: dict[str, tuple[int, str]] = {}

    async def look(self) -> PoolScene:
        """Look at the pool, and return what is there."""
        return self.scene(await self.snapshots.now())

    def scene(self, snapshot: Snapshot, more: Collection[str | None] = ()) -> PoolScene:
        """Return what is drawn of a snapshot; ``more`` are courses that are drawn, too."""
        courses = self._courses()
        last = self._scene
        if last and not more and last.snapshot is snapshot and last.courses is courses:
            return last
        status = snapshot.status
        found = [lease.holder.course for lease in (*status.leases, *status.queue)]
        configured = {*courses.usable, *self.sharing().courses}
        scene = PoolScene(snapshot, courses, marks(configured, (*found, *more)))
        if not more:
            self._scene = scene  # who watches the same snapshot need not count it again
        return scene

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
