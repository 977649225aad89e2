"""A pool whose clocks stand still until a test sets them."""

from __future__ import annotations

from pathlib import Path

from gpu_pool.clock import Clock
from gpu_pool.devices import Inventory
from gpu_pool.embedded.backend import LocalBackend
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from support.pools import V100

#: A Wednesday, as right clocks say.
NOW = 1_760_000_000.0
DAY = 86_400.0
YEAR = 365 * DAY


class SetClock:
    """A clock of this boot, and one for people that may be wrong."""

    def __init__(self, now: float = NOW) -> None:
        self.uptime = 1000.0
        self._boot = now - self.uptime
        #: By how many seconds that for people is ahead of the right one.
        self.ahead = 0.0

    @property
    def wall(self) -> float:
        return self._boot + self.uptime + self.ahead

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.uptime)


def clocked_pool(path: Path, times: SetClock, **settings: object) -> GpuPool:
    """Return an embedded pool over one GPU with these clocks, in which nobody else keeps order."""
    chosen = PoolSettings(attach_within="3650d", **settings)
    backend = LocalBackend(path, chosen, lambda: Inventory((V100,), "test"))
    return GpuPool(PoolCore(path, backend, chosen, times.clock()))
