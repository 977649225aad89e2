"""Warns, interrupts and ends what uses more memory of this machine's devices than was granted to it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool.enforcement.watchdog.attribution import OwnedUse, least_mib, root_of
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
from gpu_pool_client import EndReason, Lease, Process, Slice
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
        """Evaluate all these leases by what they use now."""
        self._foreign &= {lease.id for lease in leases}
        self._escalations.begin(leases)
        for lease in leases:
            here = used.get(lease.id)
            if (here or self._escalations.concerns(lease)) and lease.id not in self._endings:
                self._evaluate(lease, leases, here or {}, now)
        self._escalations.end(leases)
        for name, ending in list(self._endings.items()):
            left = (each.process for owned in used.get(name, {}).values() for each in owned)
            if ending.go_on(now, left):
                self._decisions.end(name, EndReason.OVER_MEMORY)
                del self._endings[name]

    def _evaluate(self, lease: Lease, leases: Sequence[Lease], used: _Used, now: float) -> None:
        excess = self._excess(lease, leases, used)
        if (excess is None and not self._escalations.concerns(lease)) or not _is_visible_here(lease):
            return
        step, text, excess = self._escalations.judge(
            lease, excess, now, lambda usual: self._tolerance_for(lease, usual)
        )
        if step is WatchdogStep.CLEAR:
            self._decisions.tell(lease.id, "")
        elif step in (WatchdogStep.NOTICE, WatchdogStep.INTERRUPT):
            if step is WatchdogStep.INTERRUPT and lease.process is not None:
                send(lease.process, signal.SIGINT, first_owner(lease.process))
            self._decisions.tell(lease.id, text)
            _log.info("lease %s: %s: %s", lease.id, step.value, excess)
        elif step is WatchdogStep.END and excess is not None:
            self._end(lease, excess, used, now)

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
        except TierFailed as failure:
            _log.warning("lease %s: %s", lease.id, failure)
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
