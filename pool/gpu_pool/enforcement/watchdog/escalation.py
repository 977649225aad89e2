"""When a lease uses too much memory, and what is done about it. Pure: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class WatchdogStep(Enum):
    """What is to be done about a lease at one look."""

    NOTHING = "nothing"
    NOTICE = "notice"
    """Tell its user that it uses too much, and what will happen."""
    INTERRUPT = "interrupt"
    """Interrupt its attached process, as Ctrl-C does."""
    END = "end"
    """End its processes, and the lease."""
    CLEAR = "clear"
    """Take the notice back: it uses no more than it was granted."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much too much is too much, and for how long. Times are in seconds."""

    #: Whether anything beyond a notice is done.
    ends: bool = True
    #: What is forgiven of the memory granted: this share of it, or this much, whichever is more.
    share: float = 0.05
    mib: int = 64
    #: How long a lease uses too much before its user is told.
    notice_after: float = 10.0
    #: How long after the notice its process is interrupted; None for never.
    interrupt_after: float | None = 30.0
    #: How long after that (without it, after the notice) its processes are ended; None for never.
    end_after: float | None = 60.0
    #: The same three where what is too much was a burst, and others need it now.
    burst_after: float = 5.0
    burst_interrupt_after: float | None = 10.0
    burst_end_after: float | None = 20.0

    def of_burst(self) -> Tolerance:
        """Return the tolerance of a burst that is taken back."""
        return replace(
            self,
            notice_after=self.burst_after,
            interrupt_after=self.burst_interrupt_after,
            end_after=self.burst_end_after,
        )

    def allows(self, used_mib: int, granted_mib: int) -> bool:
        """Whether so much may be used of so much."""
        return used_mib <= granted_mib + max(self.mib, self.share * granted_mib)


@dataclass(frozen=True, slots=True)
class ExcessHistory:
    """How far it has come with a lease that uses too much. Times are of the watchdog's clock."""

    over_since: float
    noticed_at: float | None = None
    interrupted_at: float | None = None
    ending: bool = False

    def next_step(self, tolerance: Tolerance) -> tuple[WatchdogStep, float] | None:
        """Return what is done next, and when, if it stays so; None if nothing."""
        if self.noticed_at is None:
            return WatchdogStep.NOTICE, self.over_since + tolerance.notice_after
        if not tolerance.ends or self.ending:
            return None
        if self.interrupted_at is None and tolerance.interrupt_after is not None:
            return WatchdogStep.INTERRUPT, self.noticed_at + tolerance.interrupt_after
        if tolerance.end_after is None:
            return None
        warned_at = self.noticed_at if self.interrupted_at is None else self.interrupted_at
        return WatchdogStep.END, warned_at + tolerance.end_after


def evaluate(
    history: ExcessHistory | None, is_over: bool, now: float, tolerance: Tolerance
) -> tuple[ExcessHistory | None, WatchdogStep]:
    """Return where a lease stands now, and the one step to take.

    Going back under the budget forgives everything. Steps come one by one, so
    that each is preceded by all its warnings, however long nobody looked.
    """
    if not is_over:
        told = history is not None and history.noticed_at is not None
        return None, WatchdogStep.CLEAR if told else WatchdogStep.NOTHING
    history = history or ExcessHistory(over_since=now)
    step, at = history.next_step(tolerance) or (WatchdogStep.NOTHING, now)
    if step is WatchdogStep.NOTHING or now < at:
        return history, WatchdogStep.NOTHING
    if step is WatchdogStep.NOTICE:
        return replace(history, noticed_at=now), step
    if step is WatchdogStep.INTERRUPT:
        return replace(history, interrupted_at=now), step
    return replace(history, ending=True), step
