"""Warns, interrupts and ends kernels in pods that use more GPU memory than was granted to them.

By the same rules as on one machine, :mod:`gpu_pool.enforcement.watchdog.excess`. What is used the agents of
nodes say, see :mod:`gpu_pool.cluster.node_use`; each step is taken by a report that came after it was due,
so nothing is done by what is old, and nothing while nobody reports. Nobody reaches into a pod: a lease says
what its user reads and when what runs is to be interrupted, and whoever looks after the kernel does it; a
lease that ends takes its pod along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from gpu_pool.enforcement.watchdog.escalation import Tolerance, WatchdogStep
from gpu_pool.enforcement.watchdog.excess import Escalations, clock_in_utc
from gpu_pool_client import Enforcement, Lease, LeaseState, Limit, Strength, format_memory
from gpu_pool_client._log import EscapingLogger

_log = EscapingLogger(logging.getLogger("gpu_pool.watchdog"))
#: What limits the memory of a slice that the watchdog watches.
_WATCHDOG = "the pool's watchdog"
_USED_PARKED = (
    "This kernel used {} of a GPU's memory while its slice was lent to others: its processes are ended. "
    "Something that runs beside its cells does so, such as a thread."
)


class MemorySeen(NamedTuple):
    """What a lease's pod was seen to use, and when, by the watchdog's clock."""

    at: float
    #: MiB by the uuid of the device, as its node says it; all of them are known.
    used: Mapping[str, int]


class MemoryReports(Protocol):
    """What the agents of nodes say."""

    def memory_seen(self, lease_id: str) -> MemorySeen | None:
        """Return what a lease's pod uses; None where that is not known now."""

    def news_of(self, since: float) -> Iterable[str]:
        """Return the leases that are named in reports which came later than that."""

    def is_watched(self, lease: Lease) -> bool:
        """Whether all that this lease uses would be known now."""


class PodWatchdog:
    """Judges the leases of kernels in pods, look after look."""

    def __init__(
        self,
        tolerance: Tolerance,
        reports: MemoryReports,
        tell: Callable[[str, str], object],
        context_mib: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``tell`` sets what the user of a lease reads, by its id.

        ``context_mib`` is what CUDA takes by itself, which is forgiven where the cluster limits memory, too,
        and may not count it.
        """
        self._tolerance, self._reports, self._tell = tolerance, reports, tell
        self._context_mib, self._wall = context_mib, wall
        self._escalations = Escalations(tolerance, wall, clock_in_utc)
        #: Until when reports were looked at; and by which report each lease was judged last.
        self._looked_at = float("-inf")
        self._judged: dict[str, float] = {}
        #: When what runs was to be interrupted, in Unix seconds; and what the users of those read that end.
        self._interrupts: dict[str, float] = {}
        self._over: dict[str, str] = {}
        #: Parked leases whose pods use a device all the same: when that was reported first.
        self._parked_use: dict[str, float] = {}

    def described(self, lease: Lease) -> Lease:
        """Return a held lease with when it was to be interrupted, and that it is watched while it is."""
        lease = replace(lease, interrupt_at=self._interrupts.get(lease.id))
        if not (self._ends and _is_judged(lease) and self._reports.is_watched(lease)):
            return lease
        memory = lease.enforcement.memory
        by = f"{memory.by}; {_WATCHDOG}" if memory.strength is Strength.COOPERATIVE else _WATCHDOG
        watched = Limit(Strength.COOPERATIVE, by)
        return replace(lease, enforcement=Enforcement(watched, lease.enforcement.compute))

    @property
    def _ends(self) -> bool:
        return self._tolerance.ends and self._tolerance.end_after is not None

    def watch(self, leases: Sequence[Lease], describe: Callable[[Lease], Lease]) -> Mapping[str, str]:
        """Judge the held and the parked ones of these leases, which are all that live.

        ``describe`` completes one with the cluster's limits. Returns what the users read whose leases are to
        end, by id, until they have ended.
        """
        held = {lease.id: lease for lease in leases if lease.state is LeaseState.HELD}
        self._judged = {name: at for name, at in self._judged.items() if name in held}
        self._interrupts = {name: at for name, at in self._interrupts.items() if name in held}
        parked = {
            lease.id for lease in leases if lease.state is LeaseState.PARKED and lease.terms.parks_in_pod
        }
        self._over = {name: text for name, text in self._over.items() if name in held or name in parked}
        self._parked_use = {name: at for name, at in self._parked_use.items() if name in parked}
        known = {name for name, lease in held.items() if self._escalations.concerns(lease)}
        due = [describe(held[name]) for name in sorted({*known, *self._new()} & held.keys())]
        self._escalations.begin(held.values())
        for lease in due:
            if lease.id not in self._over and (text := self._judge(lease)):
                self._over[lease.id] = text
        self._escalations.end(due)
        for name in sorted(parked - self._over.keys()):
            if text := self._judge_parked(name):
                self._over[name] = text
        return dict(self._over)

    def _new(self) -> Iterable[str]:
        since = self._looked_at
        found = set(self._reports.news_of(since))
        seen = [each.at for name in found if (each := self._reports.memory_seen(name)) is not None]
        self._looked_at = max([since, *seen])
        return found

    def _judge(self, lease: Lease) -> str:
        """Take the step that is due; return what the user of a lease reads that is to end."""
        seen = self._reports.memory_seen(lease.id) if _is_judged(lease) else None
        if seen is None:
            self._forgive(lease)
            return ""
        if self._judged.get(lease.id) == seen.at:
            return ""
        self._judged[lease.id] = seen.at
        excess = self._escalations.excess_of(lease, _by_slice(lease, seen.used))
        if excess is not None and self._tolerance_for(lease).allows(excess.used_mib, excess.allowed_mib):
            excess = None
        step, text, _ = self._escalations.judge(lease, excess, seen.at)
        if step is WatchdogStep.CLEAR:
            self._tell(lease.id, "")
        elif step is WatchdogStep.END:
            _log.warning("lease %s: %s: it is ended with its pod", lease.id, excess)
        elif step is not WatchdogStep.NOTHING:
            _log.info("lease %s: %s: %s", lease.id, step.value, excess)
        if step is WatchdogStep.INTERRUPT:
            self._interrupts[lease.id] = self._wall()
        if step in (WatchdogStep.NOTICE, WatchdogStep.INTERRUPT):
            self._tell(lease.id, text)
        return text if step is WatchdogStep.END else ""

    def _judge_parked(self, lease_id: str) -> str:
        """Return what the user of a parked lease reads that is to end, since its kernel uses a device.

        No cell of its does so. It may have begun as it was parked, and resume, so it has time.
        """
        seen = self._reports.memory_seen(lease_id)
        used_mib = 0 if seen is None else sum(seen.used.values())
        if seen is None or not used_mib:
            self._parked_use.pop(lease_id, None)
            return ""
        since = self._parked_use.setdefault(lease_id, seen.at)
        if not self._ends or seen.at < since + (self._tolerance.end_after or 0.0):
            return ""
        text = _USED_PARKED.format(format_memory(used_mib))
        _log.warning("lease %s: %s", lease_id, text)
        return text

    def _forgive(self, lease: Lease) -> None:
        """Take back what was said of a lease of which nothing is known any more."""
        self._judged.pop(lease.id, None)
        if self._escalations.judge(lease, None, 0.0).step is WatchdogStep.CLEAR:
            self._tell(lease.id, "")

    def _tolerance_for(self, lease: Lease) -> Tolerance:
        if lease.enforcement.memory.strength is not Strength.COOPERATIVE:
            return self._tolerance
        return replace(self._tolerance, mib=self._tolerance.mib + self._context_mib)


def _is_judged(lease: Lease) -> bool:
    """Whether a watchdog could do anything: nothing exceeds a hard limit, nor one that nobody knows."""
    is_hard = lease.enforcement.memory.strength is Strength.HARD
    return bool(lease.slices) and not is_hard and all(part.memory_mib for part in lease.slices)


def _by_slice(lease: Lease, used: Mapping[str, int]) -> Mapping[str, int]:
    """Return what is used by the uuids that the pool knows.

    Some systems do not name a GPU as its driver does: then what is used in all is held against what was
    granted in all, so that nothing is too much of which it is not certain.
    """
    if used.keys() <= {part.device.uuid for part in lease.slices}:
        return used
    first, *others = lease.slices
    return {first.device.uuid: max(0, sum(used.values()) - sum(part.allowed_mib for part in others))}
