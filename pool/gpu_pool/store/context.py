"""What every transaction of the store is given: its tables, the clock, the course files and who asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from gpu_pool.audit import audit_log
from gpu_pool.audit.callers import Caller
from gpu_pool.clock import Clock
from gpu_pool.policy.sharing import Sharing
from gpu_pool.settings import PoolSettings
from gpu_pool.store.database import Database
from gpu_pool.store.device_table import DeviceTable
from gpu_pool.store.lease_table import LeaseTable
from gpu_pool.store.queue import StoredQueue
from gpu_pool.store.resizing import Resizing
from gpu_pool.store.usage import HistoryTable, MeasuredUseTable, UsageTotals
from gpu_pool_client import Holder, SliceRequest


class CoursesNow(Protocol):
    """What the course files say at one moment."""

    @property
    def usable(self) -> Mapping[str, object]:
        """The courses that can be used, by name."""

    def sharing(self, settings: Sharing) -> Sharing:
        """Return how the pool is shared by these courses and the administrator's settings together."""


class CourseFiles(Protocol):
    """The course files in front of a pool."""

    def now(self) -> CoursesNow | None:
        """Return what they say: the very same value while nothing has changed. None where there are none."""

    def check(self, request: SliceRequest, holder: Holder, groups: Collection[str]) -> None:
        """Refuse, with ``NotAllowed``, a request that its course forbids to a holder in these groups."""


class StoreContext:
    """An open store, for the functions that read and decide in it. Used by one thread at a time.

    A transaction is a function whose first argument this is: see ``requests``, ``leases``, ``reclaim``,
    ``registration`` and ``records``.
    """

    def __init__(
        self,
        database: Database,
        settings: PoolSettings,
        clock: Clock | None = None,
        courses: CourseFiles | None = None,
    ) -> None:
        self.db = database
        self.clock = clock or Clock()
        self.rules = settings.rules
        self.sharing = self._sharing_set = settings.sharing
        self.has_quotas = self.sharing.has_quotas
        self.most_waiting = settings.max_waiting
        #: In whose name it is decided; None for this process.
        self.caller: Caller | None = None
        #: Until when (``time.monotonic()``) a decision may wait for others to finish theirs, see
        #: ``Database.transaction``; None for as long as it takes.
        self.give_up_at: float | None = None
        #: None where no course files are in front of the pool.
        self.course_files = courses
        self._followed: CoursesNow | None = None
        database.audit_buffer.log = audit_log(settings.audit_log)
        self.devices = DeviceTable(database, self.rules.device_milli)
        self.leases = LeaseTable(database, self.devices, self.sharing, self.clock, settings.attach_within)
        self.use = UsageTotals(database, self.sharing.policy, self.clock, settings.term_start)
        self.queue = StoredQueue(
            database,
            self.devices,
            self.leases,
            self.use,
            self.rules,
            self.sharing,
            self.clock,
            settings.tuning,
        )
        self.history = HistoryTable(database, self.clock, settings.keep_history)
        self.resizing = Resizing(database, self.devices, self.use, self.rules, self.sharing, self.clock)
        self.measured_use = MeasuredUseTable(database, self.leases, self.devices)

    def follow_files(self, *, asked: bool = False) -> None:
        """Follow the course files as they are now; ``asked`` as in :meth:`follow`."""
        now = None if self.course_files is None else self.course_files.now()
        if now is not None:
            self.follow(now, asked=asked)

    def follow(self, courses: CoursesNow, *, asked: bool = False) -> None:
        """Follow what course files say, beside the settings, from the next decision on.

        ``asked`` if they were changed in the name of whoever asks here.
        """
        if courses is not self._followed:
            if self._followed is not None:
                self.db.audit_buffer.courses_changed(self._followed.usable, courses.usable, asked=asked)
            self._followed, self.sharing = courses, courses.sharing(self._sharing_set)
            self.has_quotas = self.sharing.has_quotas
            self.leases.follow(self.sharing)
            self.queue.sharing = self.resizing.sharing = self.sharing

    def check_course(self, request: SliceRequest, holder: Holder) -> None:
        """Refuse, with ``NotAllowed``, what the holder's course forbids; a holder without a name, nothing."""
        if self.course_files is not None and holder.user:
            groups = None if self.caller is None else self.caller.groups
            self.course_files.check(request, holder, groups or ())

    def next_turn(self) -> int:
        """Return the place behind all who wait."""
        return int(self.db.one("last_turn")[0]) + 1
