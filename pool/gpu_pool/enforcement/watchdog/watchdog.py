"""Warns, interrupts and ends what uses more memory than was granted to it, and what its user reads."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpu_pool.enforcement.tiers import TierFailed
from gpu_pool.enforcement.watchdog.attribution import OwnedUse, least_mib, root_of
from gpu_pool.enforcement.watchdog.escalation import ExcessHistory, Tolerance, WatchdogStep, evaluate
from gpu_pool.enforcement.watchdog.processes import (
    ProcessEnding,
    descendants,
    first_owner,
    may_signal,
    own_namespace,
    runs_as,
    send,
)
from gpu_pool_client import Device, EndReason, Lease, Process, Slice, format_memory
from gpu_pool_client._log import EscapingLogger

_BEGINNING = "This slice uses "


@dataclass(frozen=True, slots=True)
class Excess:
    """More memory in use on a device than may be used there, in MiB."""

    device: Device
    used_mib: int
    #: What was granted, and its burst now.
    allowed_mib: int
    #: Whether what is too much was its burst, and is needed by others now.
    was_burst: bool = False

    def __str__(self) -> str:
        used, allowed = format_memory(self.used_mib), format_memory(self.allowed_mib)
        may = f"was granted {allowed}"
        if self.was_burst:
            may = f"may use {allowed} now: others need what it had on top of its slice"
        return f"{used} of GPU {self.device.index}'s memory, and {may}"


def notice_text(excess: Excess, history: ExcessHistory, tolerance: Tolerance, now: float, wall: float) -> str:
    """Say what is used, what will happen when, and what to do.

    ``now`` is of the watchdog's clock, ``wall`` is the Unix time at that moment.
    """
    done = "What ran was interrupted. " if history.interrupted_at is not None else ""
    return (
        f"{_BEGINNING}{excess}. {done}{_prospect(history, tolerance, wall - now)}"
        "To free memory, delete what you do not need (in PyTorch, then torch.cuda.empty_cache()), "
        "use smaller batches, or restart the kernel; for more memory, start one with a larger slice."
    )


def is_watchdog_notice(text: str) -> bool:
    """Whether what a lease's user reads was written by a watchdog, perhaps of an earlier run of the pool."""
    return text.startswith(_BEGINNING)


def ended_text(excess: Excess) -> str:
    """Say why a slice's processes are ended."""
    if excess.was_burst:
        used, allowed = format_memory(excess.used_mib), format_memory(excess.allowed_mib)
        return (
            f"This slice used {used} of GPU {excess.device.index}'s memory, of which others need all but "
            f"{allowed}: that was on top of its slice, and did not come back in time. Its processes are "
            "ended. Start again with a slice that is granted more."
        )
    return (
        f"This slice used {excess}, for too long: its processes are ended. Start again with a larger slice."
    )


def _prospect(history: ExcessHistory, tolerance: Tolerance, offset: float) -> str:
    following: list[str] = []
    then = history
    while step := then.next_step(tolerance):
        kind, at = step
        clock = time.strftime("%H:%M:%S", time.localtime(at + offset))
        if kind is WatchdogStep.INTERRUPT:
            following.append(f"at {clock} what runs is interrupted")
            then = ExcessHistory(then.over_since, then.noticed_at, interrupted_at=at)
        else:
            following.append(f"at {clock} its processes are ended")
            break
    return f"If it stays so, {', and '.join(following)}. " if following else ""


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
        self._tolerance, self._of_burst = tolerance, tolerance.of_burst()
        self._decisions = decisions
        self._evict = evict
        self._wall = wall
        self._histories: dict[str, ExcessHistory] = {}
        self._endings: dict[str, ProcessEnding] = {}
        #: Leases whose processes are not ours to signal; each is logged once.
        self._foreign: set[str] = set()
        #: The most that leases with a limit might use since they last used no more than that, by lease and
        #: device: what they still use of it was their burst.
        self._was_allowed: dict[tuple[str, str], int] = {}

    def watch(self, leases: Sequence[Lease], used: Mapping[str, _Used], now: float) -> None:
        """Evaluate all these leases by what they use now."""
        held = {lease.id for lease in leases}
        self._histories = {name: each for name, each in self._histories.items() if name in held}
        self._foreign &= held
        self._note_allowed(leases)
        for lease in leases:
            here = used.get(lease.id)
            if (
                here or is_watchdog_notice(lease.notice) or lease.id in self._histories
            ) and lease.id not in self._endings:
                self._evaluate(lease, leases, here or {}, now)
            if lease.id not in self._histories:
                self._forget_allowed(lease)
        for name, ending in list(self._endings.items()):
            left = (each.process for owned in used.get(name, {}).values() for each in owned)
            if ending.go_on(now, left):
                self._decisions.end(name, EndReason.OVER_MEMORY)
                del self._endings[name]

    def _note_allowed(self, leases: Sequence[Lease]) -> None:
        """Note what leases might use; the burst of one that is over stays known until it is no more."""
        before, self._was_allowed = self._was_allowed, {}
        for lease in leases:
            for part in lease.slices:
                if part.limit_mib:
                    name = lease.id, part.device.uuid
                    self._was_allowed[name] = max(before.get(name, 0), part.allowed_mib)

    def _forget_allowed(self, lease: Lease) -> None:
        for part in lease.slices:
            if part.limit_mib:
                self._was_allowed[lease.id, part.device.uuid] = part.allowed_mib

    def _evaluate(self, lease: Lease, leases: Sequence[Lease], used: _Used, now: float) -> None:
        excess = self._excess(lease, leases, used)
        before = self._histories.get(lease.id)
        if (
            excess is None and before is None and not is_watchdog_notice(lease.notice)
        ) or not _is_visible_here(lease):
            return
        usual = self._of_burst if excess is not None and excess.was_burst else self._tolerance
        tolerance = self._tolerance_for(lease, usual)
        history, step = evaluate(before, excess is not None, now, tolerance)
        if excess is None or history is None:
            self._histories.pop(lease.id, None)
            # Whoever warned it may have been an earlier run of the pool.
            if step is WatchdogStep.CLEAR or is_watchdog_notice(lease.notice):
                self._decisions.tell(lease.id, "")
            return
        self._histories[lease.id] = history
        if step in (WatchdogStep.NOTICE, WatchdogStep.INTERRUPT):
            if step is WatchdogStep.INTERRUPT and lease.process is not None:
                send(lease.process, signal.SIGINT, first_owner(lease.process))
            text = notice_text(excess, history, tolerance, now, self._wall())
            self._decisions.tell(lease.id, text)
            _log.info("lease %s: %s: %s", lease.id, step.value, excess)
        elif step is WatchdogStep.END:
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
        found: Excess | None = None
        for part in lease.slices:
            owned = used.get(part.device.uuid, ())
            mib = least_mib(owned)
            if self._tolerance.allows(mib, part.allowed_mib):
                continue
            allowed = _allowed(root_of(lease), part, leases)
            if self._tolerance.allows(mib, allowed) or not all(each.process.is_alive() for each in owned):
                continue
            if found is None or mib - allowed > found.used_mib - found.allowed_mib:
                more = (
                    self._was_allowed.get((lease.id, part.device.uuid), part.allowed_mib) - part.allowed_mib
                )
                was_burst = more > 0 and self._tolerance.allows(mib, allowed + more)
                found = Excess(part.device, mib, allowed, was_burst)
        return found

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
