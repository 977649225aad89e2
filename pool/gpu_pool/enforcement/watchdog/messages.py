"""What a student reads when a slice is not enough."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpu_pool.enforcement.watchdog.escalation import ExcessHistory, Tolerance, WatchdogStep
from gpu_pool_client import Device, format_memory

_BEGINNING = "This slice uses "


@dataclass(frozen=True, slots=True)
class Excess:
    """More memory in use on a device than was granted there, in MiB."""

    device: Device
    used_mib: int
    granted_mib: int

    def __str__(self) -> str:
        used, granted = format_memory(self.used_mib), format_memory(self.granted_mib)
        return f"{used} of GPU {self.device.index}'s memory, and was granted {granted}"


def notice(excess: Excess, standing: ExcessHistory, patience: Tolerance, now: float, wall: float) -> str:
    """Say what is used, what will happen when, and what to do.

    ``now`` is of the judge's clock, ``wall`` is the Unix time at that moment.
    """
    done = "What ran was interrupted. " if standing.interrupted_at is not None else ""
    return (
        f"{_BEGINNING}{excess}. {done}{_prospect(standing, patience, wall - now)}"
        "To free memory, delete what you do not need (in PyTorch, then torch.cuda.empty_cache()), "
        "use smaller batches, or restart the kernel; for more memory, start one with a larger slice."
    )


def is_ours(text: str) -> bool:
    """Whether what a lease's user reads was written by a watchdog, perhaps of an earlier run of the pool."""
    return text.startswith(_BEGINNING)


def ended(excess: Excess) -> str:
    """Say why a slice's processes are ended."""
    return (
        f"This slice used {excess}, for too long: its processes are ended. Start again with a larger slice."
    )


def _prospect(standing: ExcessHistory, patience: Tolerance, offset: float) -> str:
    following: list[str] = []
    then = standing
    while step := then.next_step(patience):
        kind, at = step
        clock = time.strftime("%H:%M:%S", time.localtime(at + offset))
        if kind is WatchdogStep.INTERRUPT:
            following.append(f"at {clock} what runs is interrupted")
            then = ExcessHistory(then.over_since, then.noticed_at, interrupted_at=at)
        else:
            following.append(f"at {clock} its processes are ended")
            break
    return f"If it stays so, {', and '.join(following)}. " if following else ""
