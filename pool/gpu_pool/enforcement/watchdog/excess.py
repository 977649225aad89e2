"""How far it has come with each lease that uses too much memory, and what its user reads. No I/O.

The same for processes of this machine and for kernels in pods of another one: those differ only in who sees
what is used, and in who interrupts and ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_pool.enforcement.watchdog.escalation import ExcessHistory, Tolerance, WatchdogStep, evaluate
from gpu_pool_client import Device, Lease, Slice, format_memory

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


def clock_here(at: float) -> str:
    """Write a moment, in Unix seconds, as the clock of this machine shows it."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def clock_in_utc(at: float) -> str:
    """Write a moment, in Unix seconds, for somebody whose machine may be anywhere."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))


def notice_text(
    excess: Excess, history: ExcessHistory, tolerance: Tolerance, offset: float, write: Callable[[float], str]
) -> str:
    """Say what is used, what will happen when, and what to do.

    ``offset`` is what the Unix time is ahead of the watchdog's clock, and ``write`` writes a moment of it.
    """
    done = "What ran was interrupted. " if history.interrupted_at is not None else ""
    return (
        f"{_BEGINNING}{excess}. {done}{_prospect(history, tolerance, offset, write)}"
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


def _prospect(
    history: ExcessHistory, tolerance: Tolerance, offset: float, write: Callable[[float], str]
) -> str:
    following: list[str] = []
    then = history
    while step := then.next_step(tolerance):
        kind, at = step
        clock = write(at + offset)
        if kind is WatchdogStep.INTERRUPT:
            following.append(f"at {clock} what runs is interrupted")
            then = ExcessHistory(then.over_since, then.noticed_at, interrupted_at=at)
        else:
            following.append(f"at {clock} its processes are ended")
            break
    return f"If it stays so, {', and '.join(following)}. " if following else ""


class Verdict(NamedTuple):
    """What is to be done about a lease at one look, and what its user reads then; empty for nothing any more.

    ``excess`` is None where it is over no more.
    """

    step: WatchdogStep
    text: str = ""
    excess: Excess | None = None


_NOTHING = Verdict(WatchdogStep.NOTHING)


class Escalations:
    """Judges leases, look after look.

    Each is told before anything is done about it, and forgiven once it is over no more.
    """

    def __init__(
        self,
        tolerance: Tolerance,
        wall: Callable[[], float],
        write: Callable[[float], str] = clock_here,
    ) -> None:
        """``wall`` is the Unix time, and ``write`` writes a moment of it."""
        self.tolerance, self._of_burst = tolerance, tolerance.of_burst()
        self._wall, self._write = wall, write
        self._histories: dict[str, ExcessHistory] = {}
        #: The most that leases with a limit might use since they last used no more than that, by lease and
        #: device: what they still use of it was their burst.
        self._was_allowed: dict[tuple[str, str], int] = {}

    def begin(self, leases: Iterable[Lease]) -> None:
        """Begin a look at these leases, which are all that there are.

        The burst of one that is over stays known until it is no more.
        """
        held = {lease.id: lease for lease in leases}
        self._histories = {name: each for name, each in self._histories.items() if name in held}
        before, self._was_allowed = self._was_allowed, {}
        for lease in held.values():
            for part in _with_limit(lease):
                name = lease.id, part.device.uuid
                self._was_allowed[name] = max(before.get(name, 0), part.allowed_mib)

    def end(self, leases: Iterable[Lease]) -> None:
        """End the look: of those that are not over, the burst that they had is forgotten."""
        for lease in leases:
            if lease.id not in self._histories:
                for part in _with_limit(lease):
                    self._was_allowed[lease.id, part.device.uuid] = part.allowed_mib

    def concerns(self, lease: Lease) -> bool:
        """Whether a lease is to be judged also where it uses nothing: it was over, or its user reads so."""
        return lease.id in self._histories or is_watchdog_notice(lease.notice)

    def not_taken(self, lease: Lease, before: ExcessHistory | None) -> None:
        """Take back that the step was taken which :meth:`judge` returned: it is to be taken at the next look.

        ``before`` is what :meth:`history_of` returned before that.
        """
        if before is None:
            self._histories.pop(lease.id, None)
        else:
            self._histories[lease.id] = before

    def history_of(self, lease: Lease) -> ExcessHistory | None:
        """Return how far it has come with a lease; None where it is not over."""
        return self._histories.get(lease.id)

    def excess_of(
        self,
        lease: Lease,
        used: Mapping[str, int],
        allowed: Callable[[Slice], int] = lambda part: part.allowed_mib,
    ) -> Excess | None:
        """Return by how much a lease is over, where it is worst; None if it is not.

        ``used`` is in MiB by the uuid of the device; ``allowed`` says what may be used of a slice's.
        """
        found: Excess | None = None
        for part in lease.slices:
            if part.device.uuid not in used:
                continue
            mib, most = used[part.device.uuid], allowed(part)
            if self.tolerance.allows(mib, most):
                continue
            if found is None or mib - most > found.used_mib - found.allowed_mib:
                name = lease.id, part.device.uuid
                more = self._was_allowed.get(name, part.allowed_mib) - part.allowed_mib
                was_burst = more > 0 and self.tolerance.allows(mib, most + more)
                found = Excess(part.device, mib, most, was_burst)
        return found

    def judge(
        self,
        lease: Lease,
        excess: Excess | None,
        now: float,
        tolerance_for: Callable[[Tolerance], Tolerance] = lambda usual: usual,
    ) -> Verdict:
        """Return the one step to take now, by the watchdog's clock.

        ``tolerance_for`` adapts what is tolerated.
        """
        if excess is None and not self.concerns(lease):
            return _NOTHING
        usual = self._of_burst if excess is not None and excess.was_burst else self.tolerance
        tolerance = tolerance_for(usual)
        history, step = evaluate(self._histories.get(lease.id), excess is not None, now, tolerance)
        if excess is None or history is None:
            self._histories.pop(lease.id, None)
            # Whoever warned it may have been an earlier run of the pool.
            tells = step is WatchdogStep.CLEAR or is_watchdog_notice(lease.notice)
            return Verdict(WatchdogStep.CLEAR) if tells else _NOTHING
        self._histories[lease.id] = history
        if step is WatchdogStep.END:
            return Verdict(step, ended_text(excess), excess)
        if step is WatchdogStep.NOTHING:
            return _NOTHING
        text = notice_text(excess, history, tolerance, self._wall() - now, self._write)
        return Verdict(step, text, excess)


def _with_limit(lease: Lease) -> Sequence[Slice]:
    return [part for part in lease.slices if part.limit_mib]
