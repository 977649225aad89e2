"""The thread that looks at the devices once a second: it measures, warns and reports."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_pool.audit import audit_log
from gpu_pool.devices.sampling import ProcessSampler
from gpu_pool.enforcement.watchdog.attribution import (
    Attributor,
    UnmanagedProcess,
    UnmanagedProcesses,
    UsageMeter,
    memory_in_use,
)
from gpu_pool.enforcement.watchdog.escalation import Tolerance
from gpu_pool.enforcement.watchdog.watchdog import Evict, Watchdog, WatchdogActions
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases
from gpu_pool.store.context import CourseFiles, StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.usage import Measured
from gpu_pool_client import Device, EndReason, Lease
from gpu_pool_client._log import EscapingLogger

_log = EscapingLogger(logging.getLogger("gpu_pool.watchdog"))


@dataclass(frozen=True, slots=True)
class WatchdogRules:
    """What a watchdog does."""

    #: None: leases are measured and nothing else.
    tolerance: Tolerance | None = None
    end_unmanaged: bool = False
    #: Seconds between two looks.
    look_every: float = 1.0
    #: The path of the audit log; empty for none.
    audit_log: str = ""

    @classmethod
    def of(cls, settings: PoolSettings, auto: str) -> WatchdogRules:
        """Read them from the settings; ``auto`` (off, warn or end) is what the watchdog's auto means here."""
        mode = auto if settings.watchdog == "auto" else settings.watchdog
        tolerance = Tolerance(
            ends=mode == "end",
            share=settings.watchdog_share,
            mib=settings.watchdog_mib,
            notice_after=settings.watchdog_after,
            interrupt_after=settings.interrupt_after or None,
            end_after=settings.end_after or None,
            burst_after=settings.burst_after,
            burst_interrupt_after=settings.burst_interrupt_after or None,
            burst_end_after=settings.burst_end_after or None,
        )
        watched = None if mode == "off" else tolerance
        return cls(watched, settings.end_unmanaged, settings.look_every, settings.audit_log)


class WatchdogStore(WatchdogActions, Protocol):
    """What a watchdog needs of a pool's store; its methods may raise ``PoolUnreachable``."""

    def held(self) -> Sequence[Lease]:
        """Return the held leases: the very same sequence while nothing about them has changed."""

    def devices(self) -> Sequence[Device]:
        """Return the devices of the pool."""

    def add(self, news: Mapping[str, Measured]) -> None:
        """Add what was measured to these leases, by id."""

    def close(self) -> None:
        """Let go of the store."""


class WatchdogThread:
    """Watches the leases of a pool, in a thread of its own.

    ``watches`` says which leases are this watchdog's to measure and to evaluate; of
    the others it only needs to know that they are there. ``state`` completes a
    lease with the truth about its limits (``Isolation.state``), as ``evict`` is
    given it; it is evaluated whatever these are.
    """

    def __init__(
        self,
        store: WatchdogStore,
        rules: WatchdogRules,
        *,
        watches: Callable[[Lease], bool] = lambda _: True,
        state: Callable[[Lease], Lease] = lambda lease: lease,
        evict: Evict = lambda _lease, _pids: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rules = rules
        self._watches = watches
        self._state = state
        self._clock = clock
        self._sampler = ProcessSampler(clock=clock)
        self._attributor = Attributor()
        self._meter = UsageMeter()
        self._watchdog = Watchdog(rules.tolerance, store, evict) if rules.tolerance else None
        self._unmanaged = UnmanagedProcesses(end=rules.end_unmanaged, tell=self._tell_of_end)
        self._measured_at: float | None = None
        self._leases: Sequence[Lease] = ()
        self._mine: Sequence[Lease] = ()
        self._complaint = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-pool-watchdog", daemon=True)
        #: The processes that use a device of the pool and hold no lease there.
        self.unmanaged: tuple[UnmanagedProcess, ...] = ()
        #: What leases use, where that is known: MiB by lease id and device uuid.
        self.memory_in_use: Mapping[str, Mapping[str, int]] = {}
        #: What keeps it from seeing everything, in words.
        self.problems: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to measure. A watchdog is started once."""
        self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        """Measure no more; what was measured is written down. Waits no longer than ``within`` seconds."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def measure(self) -> None:
        """Measure once, evaluate and report. Raises ``PoolUnreachable`` where the store cannot be used."""
        now = self._clock()
        leases, devices = self._store.held(), self._store.devices()
        if leases is not self._leases:
            self._leases = leases
            self._mine = [self._state(lease) for lease in leases if self._watches(lease)]
        sample = self._sampler.sample(devices)
        self.problems = sample.problems
        found = self._attributor.attribute(sample.uses, leases)
        seconds = self._rules.look_every if self._measured_at is None else now - self._measured_at
        self._measured_at = now
        self._meter.measure(self._mine, sample.uses, found, seconds)
        self.unmanaged = self._unmanaged.handle(found, devices, now)
        self.memory_in_use = memory_in_use(leases, sample.uses, found)
        if self._watchdog is not None:
            self._watchdog.watch(self._mine, found.leases, now)
        self._write(self._meter.news(leases, now), now)

    def _tell_of_end(self, unmanaged: UnmanagedProcess) -> None:
        log = audit_log(self._rules.audit_log)
        if log is not None:
            what = {"user": unmanaged.user, "device": unmanaged.device.uuid, "message": str(unmanaged)}
            log.write("unmanaged-process-ended", {**what, "process": unmanaged.process.pid}, None)

    def _write(self, news: Mapping[str, Measured], now: float) -> None:
        if news:
            self._store.add(news)
            self._meter.written(now)

    def _run(self) -> None:
        while not self._stopped.wait(self._rules.look_every):
            try:
                self.measure()
                self._complain(*self.problems)
            # One that has died watches nothing: whatever is wrong, it is said, and the next look tried.
            except Exception as error:  # noqa: BLE001, PERF203
                self._complain(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # said already, by the look before
            self._write(self._meter.all(), self._clock())
        self._sampler.close()
        self._store.close()

    def _complain(self, *problems: str) -> None:
        """Log what is wrong, once until it changes."""
        complaint = " ".join(problems)
        if complaint and complaint != self._complaint:
            _log.warning("%s", complaint)
        self._complaint = complaint


class OwnStore:
    """A connection of its own to the store at ``path``, opened when it is first needed.

    So a watchdog and whoever else in the process decides about leases never wait
    for each other's thread, only for each other's transactions.
    """

    def __init__(self, path: Path, settings: PoolSettings, courses: CourseFiles | None = None) -> None:
        self._path = path
        self._settings = settings
        self._courses = courses
        self._opened: StoreContext | None = None

    def held(self) -> Sequence[Lease]:
        """See ``MeasuredUseTable.held``."""
        return self._lease_store().measured_use.held()

    def devices(self) -> Sequence[Device]:
        """See ``MeasuredUseTable.devices``."""
        return self._lease_store().measured_use.devices()

    def add(self, news: Mapping[str, Measured]) -> None:
        """See ``MeasuredUseTable.add``."""
        self._lease_store().measured_use.add(news)

    def tell(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        """See ``leases.set_notice``."""
        leases.set_notice(self._lease_store(), lease_id, notice, ending)

    def end(self, lease_id: str, reason: EndReason) -> None:
        """See ``leases.end_lease``."""
        leases.end_lease(self._lease_store(), lease_id, reason)

    def close(self) -> None:
        """Close the connection."""
        if self._opened is not None:
            self._opened.db.close()
            self._opened = None

    def _lease_store(self) -> StoreContext:
        if self._opened is None:
            self._opened = StoreContext(Database(self._path), self._settings, courses=self._courses)
        # Whoever ends a lease serves the queue, whose order the course files know.
        self._opened.follow_files()
        return self._opened
