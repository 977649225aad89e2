"""Leases of callers over TCP, whose processes nobody here can see: they live while they are renewed.

A client says every third of the time-to-live which of its leases it still wants.
Nothing of that is written down, since a beat is no decision: after its start the
service gives every such lease the whole time anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, overload

from gpu_pool_client import EndReason, Lease, Pool, PoolStatus, Process
from gpu_pool_client._log import quoted

#: A pid that no process can have: above all that Linux gives (proc(5), pid_max).
_NO_PID: Final = 1 << 30
_NAMESPACE: Final = "hub:"
#: Seconds between two looks, or more, after which it was the service that could not hear.
_STALLED: Final = 5.0


def remote_process(user: str, server: str, client: str, boot: str) -> Process:
    """Return what stands in the store for a process that is known by what it says only.

    It is of no pid namespace that there is, so that nobody judges it, and after
    the end of this ``boot`` it is gone like every process; after none where that is
    empty (see ``Backend.boot``). Nothing can be done to it by its pid.
    """
    return Process(_NO_PID, 0, boot, f"{_NAMESPACE}{user}/{server}/{client}")


def is_remote_process(process: Process | None) -> bool:
    """Whether this stands for a process that is known by what it says only."""
    return process is not None and process.namespace.startswith(_NAMESPACE)


@overload
def without_remote_processes(found: Lease) -> Lease: ...


@overload
def without_remote_processes(found: PoolStatus) -> PoolStatus: ...


def without_remote_processes(found: Lease | PoolStatus) -> Lease | PoolStatus:
    """Return a lease, or all of a pool's, as people are to see it: without what only stands for a process."""
    if isinstance(found, PoolStatus):
        leases, queue = (tuple(map(_without_one, each)) for each in (found.leases, found.queue))
        return replace(found, leases=leases, queue=queue)
    return _without_one(found)


def _without_one(lease: Lease) -> Lease:
    if not (is_remote_process(lease.holder.process) or is_remote_process(lease.process)):
        return lease
    holder = replace(lease.holder, process=None) if is_remote_process(lease.holder.process) else lease.holder
    return replace(lease, holder=holder, process=None if is_remote_process(lease.process) else lease.process)


@dataclass(slots=True)
class _Beat:
    user: str
    due: float


class Heartbeats:
    """Who has to be heard of by when. Used in one event loop."""

    def __init__(self, ttl: float, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl = ttl
        self._log = log
        self._clock = clock
        self._beats: dict[str, _Beat] = {}
        self._checked_at = clock()

    def begin(self, lease: Lease) -> bool:
        """Expect to hear of a lease, if it is one to be heard of; return whether it is."""
        if not is_remote_process(lease.process or lease.holder.process) or lease.ended_at is not None:
            return False
        self._beats[lease.id] = _Beat(lease.holder.user, self._clock() + self.ttl)
        return True

    def beat(self, user: str, lease_ids: Iterable[str]) -> list[str]:
        """Take note that the user still wants these leases; return those that nobody expects to hear of."""
        unknown = []
        for lease_id in lease_ids:
            found = self._beats.get(lease_id)
            if found is None or found.user != user:
                unknown.append(lease_id)
            else:
                found.due = self._clock() + self.ttl
        return unknown

    def excuse(self, user: str | None = None) -> None:
        """Give a user, or everybody, the whole time anew: they could not make themselves known."""
        for each in self._beats.values():
            if user is None or each.user == user:
                each.due = self._clock() + self.ttl

    async def end_unheard(self, pool: Pool, leases: Collection[Lease], read_at: float) -> None:
        """End what was not heard of in time; ``leases`` are those that there were at ``read_at``."""
        now, before = self._clock(), self._checked_at
        self._checked_at = now
        if now - before > _STALLED:
            self.excuse()
        for lease in leases:
            if lease.id not in self._beats:
                self.begin(lease)
        kept = {each.id for each in leases if is_remote_process(each.process or each.holder.process)}
        for lease_id, beat in list(self._beats.items()):
            if lease_id not in kept and beat.due - self.ttl < read_at:
                del self._beats[lease_id]
            elif beat.due < now:
                self._log.info("%s: release %s: not renewed for %g s", quoted(beat.user), lease_id, self.ttl)
                del self._beats[lease_id]
                await pool.release(lease_id, EndReason.EXPIRED)
