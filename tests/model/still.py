"""A pool whose clocks stand still until they are set, over devices that a file names."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Final

from gpu_pool.clock import Clock
from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool.settings import PoolSettings
from gpu_pool.store import device_table
from gpu_pool_client import Device, PoolStatus

#: Where the clocks stand at first: the wall clock in 2030, so that no file of now seems new.
WALL, UPTIME = 1_900_000_000.0, 1_000_000.0
_TIMES: Final = struct.Struct("dd")


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


class Still(EmbeddedPool):
    """A pool with the clocks that the folder of its store names."""

    _clock: Clock

    def _stand_still(self) -> None:
        self._clock = Clocks(self._path.with_name("clocks")).clock()
        assert self._course_admission is not None
        assert self._course_admission._folder is not None
        self._course_admission._folder._clock = self._clock

    async def status(self) -> PoolStatus:
        """See there; what is over has been ended, and the queue served, when it returns."""
        await self.reconcile()
        return await super().status()


class StillPool(Still):
    """An embedded pool that also has the devices that the folder of its store names."""

    def __init__(self, path: Path, settings: PoolSettings, *, owner: bool = False) -> None:
        named = path.with_name("devices.json")
        super().__init__(path, settings, lambda: Inventory(_read_devices(named), "test"), owner=owner)
        self._stand_still()
        # No card is behind these devices that could be watched over.
        self._enforcer._watch_over = lambda: None  # type: ignore[method-assign]


def _read_devices(path: Path) -> tuple[Device, ...]:
    return tuple(map(device_table.read_device, json.loads(path.read_text())))
