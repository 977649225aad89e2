"""Looks at this machine's devices once a second, in a thread: measures, warns, interrupts and ends.

:class:`WatchdogThread` looks, and :class:`Watchdog` does something about what uses more than was granted.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gpu_pool.audit import audit_log
from gpu_pool.devices.sampling import ProcessSampler
from gpu_pool.enforcement.watchdog.attribution import (
    Attributor,
    OwnedUse,
    UnmanagedProcess,
    UnmanagedProcesses,
    UsageMeter,
    least_mib,
    memory_in_use,
    root_of,
)
from gpu_pool.enforcement.watchdog.escalation import Tolerance, WatchdogStep
from gpu_pool.enforcement.watchdog.excess import Escalations, Excess, ended_text
from gpu_pool.enforcement.watchdog.processes import (
    ProcessEnding,
    descendants,
    first_owner,
    may_signal,
    own_namespace,
    runs_as,
    send,
)
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases
from gpu_pool.store.context import CourseFiles, StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.usage import Measured
from gpu_pool_client import Device, EndReason, Lease, Process, Slice
from gpu_pool_client._log import EscapingLogger

_log = EscapingLogger(logging.getLogger("gpu_pool.watchdog"))

#: Takes processes off a lease's devices safely, before they are ended: see ``Tier.evict``.
Evict = Callable[[Lease, Sequence[int]], object]
_Used = Mapping[str, Sequence[OwnedUse]]


class WatchdogActions(Protocol):
    """What a watchdog does to leases."""

    def tell(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        """Tell the lease's user something; see ``leases.set_notice``."""

    def end(self, lease_id: str, reason: EndReason) -> None:
        """End the lease, if it has not ended yet."""


class Watchdog:
    """Evaluates leases, look after look, and takes the step that follows.

    Nothing is done about what is not known: processes that cannot be seen,
    memory that the driver does not tell. Nothing is done to processes of
    another user than that of the lease's process.

    A lease with nothing attached is evaluated by its keeper (see ``attribution``),
    which is not interrupted, since nothing of the lease's need run in it. What
    uses too much itself is ended, and nothing that descends from it.
    """

    def __init__(
        self,
        tolerance: Tolerance,
        decisions: WatchdogActions,
        evict: Evict,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._escalations = Escalations(tolerance, wall)
        self._decisions = decisions
        self._evict = evict
        self._endings: dict[str, ProcessEnding] = {}
        #: Leases whose processes are not ours to signal; each is logged once.
        self._foreign: set[str] = set()

    def watch(self, leases: Sequence[Lease], used: Mapping[str, _Used], now: float) -> None:
        """Evaluate all these leases by what they use now.

        What fails for one, such as to tell its user, is tried again at the next look, and keeps no other one
        from its own. Raises the first of these errors, once all have been evaluated.
        """
        failed: list[Exception] = []
        self._foreign &= {lease.id for lease in leases}
        self._escalations.begin(leases)
        for lease in leases:
            here = used.get(lease.id)
            if (here or self._escalations.concerns(lease)) and lease.id not in self._endings:
                with _noting(failed):
                    self._evaluate(lease, leases, here or {}, now)
        self._escalations.end(leases)
        for name, ending in list(self._endings.items()):
            left = (each.process for owned in used.get(name, {}).values() for each in owned)
            with _noting(failed):
                if ending.go_on(now, left):
                    self._decisions.end(name, EndReason.OVER_MEMORY)
                    del self._endings[name]
        if failed:
            raise failed[0]

    def _evaluate(self, lease: Lease, leases: Sequence[Lease], used: _Used, now: float) -> None:
        excess = self._excess(lease, leases, used)
        if (excess is None and not self._escalations.concerns(lease)) or not _is_visible_here(lease):
            return
        before = self._escalations.history_of(lease)
        step, text, excess = self._escalations.judge(
            lease, excess, now, lambda usual: self._tolerance_for(lease, usual)
        )
        try:
            if step is WatchdogStep.CLEAR:
                self._decisions.tell(lease.id, "")
            elif step in (WatchdogStep.NOTICE, WatchdogStep.INTERRUPT):
                self._decisions.tell(lease.id, text)  # first: nobody is interrupted who cannot be told why
                if step is WatchdogStep.INTERRUPT and lease.process is not None:
                    send(lease.process, signal.SIGINT, first_owner(lease.process))
                _log.info("lease %s: %s: %s", lease.id, step.value, excess)
            elif step is WatchdogStep.END and excess is not None:
                self._end(lease, excess, used, now)
        except BaseException:
            self._escalations.not_taken(lease, before)
            raise

    def _end(self, lease: Lease, excess: Excess, used: _Used, now: float) -> None:
        root = root_of(lease)
        assert root is not None
        self._decisions.tell(lease.id, ended_text(excess), EndReason.OVER_MEMORY)
        owner = first_owner(root)
        here = {each.process for owned in used.values() for each in owned if runs_as(each.process, owner)}
        tree = descendants(root) if lease.process is not None else ()
        processes = {*tree, *here}
        _log.warning("lease %s: %s: its %d processes are ended", lease.id, excess, len(processes))
        try:
            self._evict(lease, sorted(each.pid for each in here))
        except Exception as failure:  # noqa: BLE001 - they are ended all the same
            _log.warning("lease %s: %s", lease.id, str(failure) or repr(failure))
        self._endings[lease.id] = ending = ProcessEnding(now, owner)
        ending.begin(processes)

    def _excess(self, lease: Lease, leases: Sequence[Lease], used: _Used) -> Excess | None:
        """Return by how much it is over, where it is worst; None if it is not, or that is not certain."""
        mib = {uuid: least_mib(owned) for uuid, owned in used.items()}
        allows = self._escalations.tolerance.allows
        own = {part.device.uuid: part.allowed_mib for part in lease.slices}
        over = [uuid for uuid in own.keys() & mib.keys() if not allows(mib[uuid], own[uuid])]
        # Only now, since it costs more: one that has ended meanwhile uses nothing, whatever was seen.
        certain = {uuid: mib[uuid] for uuid in over if all(each.process.is_alive() for each in used[uuid])}
        root = root_of(lease)
        return self._escalations.excess_of(lease, certain, lambda part: _allowed(root, part, leases))

    def _tolerance_for(self, lease: Lease, usual: Tolerance) -> Tolerance:
        root = root_of(lease)
        if not usual.ends or root is None:
            return usual
        if lease.process is None and root == Process.current():  # the pool lives in it
            return replace(usual, ends=False)
        if may_signal(root):
            return usual if lease.process else replace(usual, interrupt_after=None)
        if lease.id not in self._foreign:
            self._foreign.add(lease.id)
            _log.warning(
                "lease %s uses more memory than granted; process %d is another user's and cannot be "
                "interrupted or ended from here. Run the pool as root, or as that user.",
                lease.id,
                root.pid,
            )
        return replace(usual, ends=False)


@contextlib.contextmanager
def _noting(failed: list[Exception]) -> Iterator[None]:
    """Note what fails inside the block, and go on behind it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the lease of one is not in the way of another's
        failed.append(error)


def _is_visible_here(lease: Lease) -> bool:
    """Whether its processes can be seen from here.

    A hard limit spares no lease. Those of MPS and its namespaces hold each process
    apart, so that two of one lease may use twice its memory; and a lease that
    something holds as a whole is never over.
    """
    root = root_of(lease)
    return root is not None and root.namespace == own_namespace()


def _allowed(process: Process | None, part: Slice, leases: Sequence[Lease]) -> int:
    """Return what a process may use of a device: a shell may hold several slices of it."""
    return sum(
        each.allowed_mib
        for lease in leases
        if root_of(lease) == process
        for each in lease.slices
        if each.device.uuid == part.device.uuid
    )


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
