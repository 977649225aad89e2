"""What parked leases keep on their devices: moved out when they are parked, and back later."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from gpu_pool.devices.activity import users_of
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.checkpoint import Broken, Checkpoint, NotRestored, NotSuspended
from gpu_pool.settings import PoolSettings
from gpu_pool.worker import Worker
from gpu_pool_client import Lease, LeaseState, NotAllowed, PoolUnreachable

#: Moving takes as long as copying takes, and is bounded by whoever does it.
_MOVE_WITHIN: Final = 3_600.0
#: How often it is tried to bring a lease back while its GPU has too little memory.
_TRIES: Final = 3


class Lost(Exception):
    """What a lease kept on its devices is lost; its processes have been killed."""


class ParkedMemory:
    """Moves the device memory of leases, where the administrator has switched that on.

    ``store`` is the pool's file, beside which is recorded what was moved.
    """

    def __init__(self, store: Path, settings: PoolSettings, isolation: Isolation) -> None:
        self._folder = store.with_name(store.name + ".suspended")
        self._settings = settings
        self._isolation = isolation
        self._worker = Worker("gpu-pool-memory")

    @functools.cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._folder, self._settings)

    async def is_movable(self, lease: Lease) -> bool:
        """Whether it can be tried to move a held lease's memory off its devices."""
        return not await self._worker.run(lambda: self._unavailable(lease), _MOVE_WITHIN)

    def _unavailable(self, lease: Lease) -> str:
        tiers = [(part.device, self._isolation.tier(part.device).name) for part in lease.slices]
        return next(filter(None, (self._checkpoint.unavailable(*each) for each in tiers)), "")

    async def move_out(self, lease: Lease) -> None:
        """Take a held lease's memory off its devices. Raises ``NotAllowed`` where it stays, and ``Lost``."""
        await self._worker.run(lambda: self._move_out(lease), _MOVE_WITHIN)

    def _move_out(self, lease: Lease) -> None:
        process = lease.process
        why = self._unavailable(lease)
        if why or process is None:
            raise _kept(why or "nothing runs on it yet")
        try:
            users = users_of(process, lease.id, self._settings.tuning.cuda_device)
            self._checkpoint.suspend(lease.id, users)
        except NotSuspended as error:
            raise _kept(str(error)) from error
        except Broken as broken:
            raise _lost(broken) from broken

    async def move_back(self, lease_id: str) -> None:
        """Bring back what was moved, if anything was. Raises ``Lost``, and ``PoolUnreachable``."""
        if self.holds(lease_id):
            await self._bring_back(lease_id)

    def holds(self, lease_id: str) -> bool:
        """Whether something of this lease was moved out."""
        return (self._folder / lease_id).exists()

    async def _bring_back(self, lease_id: str) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(NotRestored):
                await self._worker.run(lambda: self._move_back(lease_id), _MOVE_WITHIN)
                return
            await asyncio.sleep(self._settings.tuning.restored_every)
        raise PoolUnreachable(
            "Something else uses the GPU memory that this kernel needs to go on; its variables are kept.",
            "Ask the administrator what runs on the GPU, and run the cell again.",
        )

    def _move_back(self, lease_id: str) -> None:
        try:
            self._checkpoint.restore(lease_id)
        except Broken as broken:
            raise _lost(broken) from broken

    def recover(self, state: Callable[[str], LeaseState]) -> list[str]:
        """Mend what was cut off, before anything else is done; return the leases that are lost by it."""
        if not self._folder.is_dir():
            return []
        states: Mapping[str, LeaseState] = {each: state(each) for each in self._checkpoint.suspended()}
        broken = self._checkpoint.recover(states) if states else {}
        for each in broken.values():
            _kill(each.pids)
        return list(broken)

    def stop(self) -> None:
        """End the thread."""
        self._worker.stop()


def _kept(why: str) -> NotAllowed:
    return NotAllowed(
        "The slice cannot be lent to others: its process has initialised CUDA, or may have, and what it "
        f"keeps on the GPU would be in the way. It is not moved, since {why.rstrip('.')}.",
        "End the process to give the slice back.",
    )


def _lost(broken: Broken) -> Lost:
    _kill(broken.pids)
    return Lost(str(broken))


def _kill(pids: Collection[int]) -> None:
    # At once: a process whose device is gone may hang while it exits.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
