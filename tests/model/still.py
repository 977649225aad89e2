"""A pool whose clocks stand still until they are set, over devices that a file names."""

from __future__ import annotations

import json
import mmap
import struct
import weakref
from pathlib import Path
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.courses.admission import CourseAdmission
from gpu_pool.courses.folder import CourseFolder
from gpu_pool.devices import Inventory
from gpu_pool.embedded.backend import LocalBackend
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.store import device_table
from gpu_pool_client import Device, PoolStatus

#: Where the clocks stand at first: the wall clock in 2030, so that no file of now seems new.
WALL, UPTIME = 1_900_000_000.0, 1_000_000.0
_TIMES: Final = struct.Struct("dd")
#: The pools of this process whose clocks stand still.
_STILL: Final[weakref.WeakSet[PoolCore]] = weakref.WeakSet()
_status: Final = GpuPool.status


class Clocks:
    """Both clocks of a pool, in a file that all of its processes have mapped."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_TIMES.pack(WALL, UPTIME))
        with path.open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), _TIMES.size)

    def read(self) -> tuple[float, float]:
        wall, uptime = _TIMES.unpack(self._times)
        return wall, uptime

    def set(self, wall: float, uptime: float) -> None:
        self._times[:] = _TIMES.pack(wall, uptime)

    def close(self) -> None:
        self._times.close()

    def clock(self) -> Clock:
        return Clock(lambda: self.read()[0], lambda: self.read()[1])


def stand_still(core: PoolCore, settings: PoolSettings, clock: Clock) -> PoolCore:
    """Let a pool's courses go by that clock; what is over has been ended whenever its status is told.

    It has course files of its own, as after a crash: what a pool before it remembers of them is not known.
    """
    folder = CourseFolder(Path(settings.courses_dir), settings.courses, clock)
    core.courses = CourseAdmission(settings, folder)
    _STILL.add(core)
    GpuPool.status = _status_after_a_pass  # type: ignore[method-assign]
    return core


async def _status_after_a_pass(pool: GpuPool) -> PoolStatus:
    """Tell the status to whoever asks, after a pass where it is one of those pools."""
    if pool.core in _STILL:
        await pool.core.reconciler.once()
    return await _status(pool)


def still_pool(path: Path, settings: PoolSettings, *, owner: bool = False) -> GpuPool:
    """Return an embedded pool that also has the devices that the folder of its store names."""
    named, clock = path.with_name("devices.json"), Clocks(path.with_name("clocks")).clock()
    backend = LocalBackend(path, settings, lambda: Inventory(_read_devices(named), "test"), owner=owner)
    # No card is behind these devices that could be watched over.
    backend.enforcer._watch_over = lambda: None  # type: ignore[method-assign]
    return GpuPool(stand_still(PoolCore(path, backend, settings, clock), settings, clock))


def _read_devices(path: Path) -> tuple[Device, ...]:
    return tuple(map(device_table.read_device, json.loads(path.read_text())))
