"""What can come of suspending and restoring processes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suspended:
    """The processes of a lease were suspended: they hold no device memory any more."""

    #: Host memory in MiB that is counted for them; as much as they held on devices.
    host_mib: int


class NotSuspended(Exception):
    """Nothing was suspended, and nothing has changed: the processes run, with all they had."""


class NotRestored(Exception):
    """The processes are still suspended, unharmed. Restoring them can be tried again."""


class Broken(Exception):
    """Processes are in a state from which they cannot be brought back. The caller must end them.

    ``pids`` are theirs; the other processes of the lease run.
    """

    def __init__(self, pids: Collection[int], reason: str) -> None:
        self.pids = frozenset(pids)
        names = ", ".join(str(pid) for pid in sorted(self.pids))
        super().__init__(f"Process {names} could not be brought back to its GPU: {reason}")
