"""Whether the pool works: its store can be read and written, its devices used, and the service goes on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.background import BackgroundTasks
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool_client import NotAllowed, PoolUnreachable
from gpu_pool_client import _procfs as procfs

#: Seconds between two attempts to write to the store.
_TRY_EVERY: Final = 3.0
#: Seconds that one may take.
_WITHIN: Final = 2.0


class Health:
    """What is wrong with a pool, as of a few seconds ago. Used in one event loop."""

    def __init__(
        self,
        pool: GpuPool,
        changes: LeaseChanges,
        log: logging.Logger,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._pool = pool
        #: What goes on beside answering, by default nothing yet.
        self.tasks = tasks or BackgroundTasks(log)
        self._changes = changes
        self._log = log
        self._problem: PoolUnreachable | None = None
        self._tried = asyncio.Event()
        self._complaint = ""

    async def run(self) -> None:
        """Try again and again, for as long as the service runs, whether decisions can be kept."""
        while True:
            await self.try_once()
            await asyncio.sleep(_TRY_EVERY)

    async def try_once(self) -> None:
        """Try whether decisions can be kept, and look whether anything could run."""
        try:
            self._problem = await self._find()
        except Exception as error:  # noqa: BLE001 - whatever it is, the pool does not work, and it is tried again
            self._log.exception("Trying whether the pool works failed")
            self._problem = PoolUnreachable(f"The pool does not work: {type(error).__name__}.")
        self._tried.set()

    async def problem(self) -> PoolUnreachable | None:
        """Return what was wrong at the last try; None if nothing was. Whoever asks changes nothing."""
        await self._tried.wait()
        return self._problem or self._changes.problem or self.tasks.problem

    async def _find(self) -> PoolUnreachable | None:
        try:
            await self._pool.core.try_writing(_WITHIN)
        except PoolUnreachable as error:
            self._say(str(error))
            return error
        self._say("")
        # What the service's log says of it, too: it is in every status.
        fault = await self._pool.core.device_fault()
        return PoolUnreachable(fault) if fault else None

    def _say(self, complaint: str) -> None:
        """Log what is wrong once, and that it is over."""
        if complaint and not self._complaint:
            self._log.error("The pool cannot be written: %s", complaint)
        elif self._complaint and not complaint:
            self._log.info("The pool can be written again")
        self._complaint = complaint


#: Values of hidepid that hide nothing from anybody (proc(5)).
_HIDES_NOTHING: Final = (b"0", b"off")


def check_processes_are_seen() -> None:
    """Refuse to serve where others' processes are hidden: their leases would seem to be of the dead."""
    mounts = Path("/proc/self/mounts").read_bytes()
    if hides_processes(mounts, os.geteuid(), {os.getegid(), *os.getgroups()}):
        raise NotAllowed(
            "/proc is mounted with hidepid here, so this service would not see the processes of other users, "
            "and would take their leases for those of processes that have ended.",
            "Run it as root, or as a member of the group that /proc is mounted with (gid=).",
        )


def hides_processes(mounts: bytes, uid: int, groups: Collection[int]) -> bool:
    """Whether ``/proc``, by the text of ``/proc/mounts``, hides processes from a user of these groups."""
    hidden = False
    seeing = {b"%d" % group for group in groups}
    for mount in procfs.mounts(mounts):
        if (mount.point, mount.kind) == (b"/proc", b"proc"):  # the last one hides those before
            hides = mount.options.get(b"hidepid", b"0") not in _HIDES_NOTHING
            hidden = hides and mount.options.get(b"gid") not in seeing
    return hidden and uid != 0
