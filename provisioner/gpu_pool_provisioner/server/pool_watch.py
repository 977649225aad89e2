"""One pool, asked in the name of all pages of this server."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import GpuPoolError, LeaseGone, LeaseState, Pool
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.pools import shared_pool
from gpu_pool_provisioner.session import events

#: Seconds between two looks at the pool, and in which it answers.
_LOOK_EVERY: Final = 5.0
_ANSWERS_WITHIN: Final = 10.0
#: Seconds for which measurements are kept.
_KEPT_FOR: Final = 600.0
#: Seconds that each measured lease adds to the pause: a server asks a pool no more than so often.
_EACH: Final = 0.5
_SILENT: Final = "The GPU pool does not answer at the moment."


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool answered last."""

    reachable: bool = True
    simulated: bool = False
    #: Why it does not answer, or what it has to say; often empty.
    message: str = ""


class PoolWatch:
    """Looks at one pool, on the background loop, while somebody listens. Its state may be read anywhere."""

    def __init__(self, url: str, memory_every: float, answers_within: float = _ANSWERS_WITHIN) -> None:
        """Look at nothing yet.

        ``memory_every`` is the seconds between two measurements of the memory in use; ``answers_within``
        those in which the pool answers.
        """
        self._answers_within = answers_within
        self._url = url
        self._memory_every = memory_every
        self.state = PoolState()
        #: The sessions of kernels that are watched, by kernel id. Replaced as a whole.
        self.drivers: Mapping[str, SessionDriver] = {}
        #: Memory in use by kernel id: Unix seconds and MiB, oldest first.
        self.samples: dict[str, deque[tuple[float, int]]] = {}
        self._measured_at = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(min(_LOOK_EVERY, self._memory_every) + _EACH * len(self.drivers))

    async def refresh(self) -> None:
        """Look once at the pool, and at the memory of the kernels where that is due."""
        drivers = dict(self.drivers)
        try:
            pool = shared_pool(self._url)
            found = await asyncio.wait_for(self._compare(pool, drivers.values()), self._answers_within)
            due = time.monotonic() >= self._measured_at + self._memory_every
            if due or any(_is_unmeasured(each) for each in drivers.values()):
                self._measured_at = time.monotonic()
                await asyncio.wait_for(self._measure(pool, drivers), self._answers_within)
            self.state = found
        except GpuPoolError as error:
            self.state = PoolState(False, self.state.simulated, str(error))
        except asyncio.TimeoutError:
            self.state = PoolState(False, self.state.simulated, _SILENT)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not end the watch for all pages
            get_logger().error("Looking at the GPU pool failed.", exc_info=error)
            self.state = PoolState(False, self.state.simulated, _SILENT)

    async def _compare(self, pool: Pool, drivers: Iterable[SessionDriver]) -> PoolState:
        """Take note of leases as the pool has them, unless somebody has seen them since; return how it is."""
        asked_at = time.monotonic()
        status = await pool.status()
        found = {lease.id: lease for lease in (*status.leases, *status.queue)}
        for driver in drivers:
            known = driver.session
            if known.lease_id is None or known.seen_at > asked_at or known.lease is None:
                continue
            lease = found.get(known.lease_id)
            if lease is None and known.lease.state is not LeaseState.ENDED:
                with suppress(LeaseGone):  # whoever has it learns of that in a moment
                    lease = await pool.get_lease(known.lease_id)
            if lease is not None:
                driver.post(events.LeaseSeen(lease))
        return PoolState(True, status.simulated, status.note)

    async def _measure(self, pool: Pool, drivers: Mapping[str, SessionDriver]) -> None:
        for kernel_id, driver in drivers.items():
            lease = driver.session.lease
            if lease is None or lease.state is not LeaseState.HELD:
                continue
            try:
                activity = await pool.activity(lease.id)
            except LeaseGone:
                continue
            driver.post(events.LeaseSeen(activity=activity))
            if activity.memory_mib is not None:
                self._keep(kernel_id, activity.memory_mib)
        for kernel_id in self.samples.keys() - drivers.keys():
            del self.samples[kernel_id]

    def _keep(self, kernel_id: str, mib: int) -> None:
        now = time.time()
        samples = self.samples.setdefault(kernel_id, deque())
        samples.append((round(now, 1), mib))
        while samples[0][0] < now - _KEPT_FOR:
            samples.popleft()


def _is_unmeasured(driver: SessionDriver) -> bool:
    """Whether nobody has looked yet at what a kernel does with its slice, so at what giving back costs."""
    return driver.session.activity is None and driver.session.is_held
