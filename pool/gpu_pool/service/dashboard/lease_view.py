"""What can be done about one lease, and what that does to the kernel that uses it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpu_pool.policy.revocation import Effect
from gpu_pool_client import Lease, LeaseState

#: What choices are called by, in forms.
NOW: Final = "now"
WHEN_IDLE: Final = "idle"

_ALL_LOST: Final = "All variables of the kernel are lost."
_KEPT_WHEN_IDLE: Final = (
    "A cell that runs now may finish first. The kernel lives on with its variables, unless it uses the GPU "
    "by then: in that case it is ended, and they are lost."
)
_KEPT_NOW: Final = (
    "The kernel has not used the GPU: it lives on with its variables, and its next cell waits for a slice "
    "again. A cell that runs now may go on as long as it does not use the GPU; if it does, the kernel is "
    "ended, and its variables are lost."
)
_ENDED_WHEN_IDLE: Final = (
    "What runs now may finish first: a cell, or work on the GPU. Where the pool cannot see whether the GPU "
    "works, it waits for a minute after the last cell. Then the kernel is ended. Its notebook is told with "
    "the output of that cell."
)
_ENDED_NOW: Final = "The kernel has used the GPU, or may have. It is ended at once, whatever it runs."
_PARKED: Final = "The slice is lent to others while the kernel is idle. The kernel is ended."
_FREED: Final = (
    "A command or a shell has it. A command under gpu-pool run is ended; anything else that runs on it goes "
    "on, and is not counted any more."
)
_QUEUE: Final = "The position in the queue is lost. The cell or command that waits is told."


@dataclass(frozen=True, slots=True)
class LeaseChoice:
    """Something that can be done, and what it comes to."""

    when: str
    title: str
    text: str
    button: str
    #: What is lost for certain; empty if nothing is.
    warning: str = ""


def title_of(effect: Effect, *, is_own: bool) -> str:
    """Return the heading of a lease's page, for its user or for an administrator."""
    if effect is Effect.LEAVES_QUEUE:
        return "Leave the queue" if is_own else "Remove from the queue"
    return "Give back a slice" if is_own else "Revoke a slice"


def choices(lease: Lease, effect: Effect, *, is_own: bool) -> tuple[LeaseChoice, ...]:
    """Return what can be done, the gentlest first."""
    return tuple(_choices(lease, effect, "Give back" if is_own else "Revoke", is_own))


def _choices(lease: Lease, effect: Effect, verb: str, is_own: bool) -> Iterable[LeaseChoice]:
    this = f"{verb} this slice now"
    if effect is Effect.LEAVES_QUEUE:
        title = title_of(effect, is_own=is_own)
        yield LeaseChoice(NOW, f"{title} now", _QUEUE, f"{title} now")
    elif effect is Effect.FREES_SLICE:
        yield LeaseChoice(NOW, f"{verb} now", _FREED, this)
    elif lease.state is not LeaseState.HELD:
        yield LeaseChoice(NOW, f"{verb} now", _PARKED, this, _ALL_LOST)
    else:
        is_kept = effect is Effect.KEEPS_KERNEL
        if lease.asked_back is None:
            text, lost = (_KEPT_WHEN_IDLE, "") if is_kept else (_ENDED_WHEN_IDLE, _ALL_LOST)
            yield LeaseChoice(WHEN_IDLE, f"{verb} when idle", text, f"{verb} it when idle", lost)
        text, lost = (_KEPT_NOW, "") if is_kept else (_ENDED_NOW, _ALL_LOST)
        yield LeaseChoice(NOW, f"{verb} now", text, this, lost)
