"""One pool, asked in the name of all pages of this server."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_pool_client import GpuPoolError, LeaseGone, LeaseState, Pool
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.kernel_slice import KernelSlice, shared_pool

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

    def __init__(self, url: str, memory_every: float) -> None:
        """``memory_every`` is the seconds between two measurements of the memory in use."""
        self._url = url
        self._memory_every = memory_every
        self.state = PoolState()
        #: The slices of kernels that are watched, by kernel id. Replaced as a whole.
        self.slices: Mapping[str, KernelSlice] = {}
        #: Memory in use by kernel id: Unix seconds and MiB, oldest first.
        self.samples: dict[str, deque[tuple[float, int]]] = {}
        self._measured_at = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            slices = dict(self.slices)
            await self._look(slices)
            await asyncio.sleep(min(_LOOK_EVERY, self._memory_every) + _EACH * len(slices))

    async def _look(self, slices: Mapping[str, KernelSlice]) -> None:
        try:
            pool = shared_pool(self._url)
            found = await asyncio.wait_for(self._compare(pool, slices.values()), _ANSWERS_WITHIN)
            due = time.monotonic() >= self._measured_at + self._memory_every
            if due or any(_is_unmeasured(each) for each in slices.values()):
                self._measured_at = time.monotonic()
                await asyncio.wait_for(self._measure(pool, slices), _ANSWERS_WITHIN)
            self.state = found
        except GpuPoolError as error:
            self.state = PoolState(False, self.state.simulated, str(error))
        except asyncio.TimeoutError:
            self.state = PoolState(False, self.state.simulated, _SILENT)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not end the watch for all pages
            get_logger().error("Looking at the GPU pool failed.", exc_info=error)
            self.state = PoolState(False, self.state.simulated, _SILENT)

    async def _compare(self, pool: Pool, slices: Iterable[KernelSlice]) -> PoolState:
        """Take note of leases as the pool has them, unless somebody has seen them since; return how it is."""
        asked_at = time.monotonic()
        status = await pool.status()
        found = {lease.id: lease for lease in (*status.leases, *status.queue)}
        for each in slices:
            if each.lease_id is None or each.seen_at > asked_at or each.lease is None:
                continue
            lease = found.get(each.lease_id)
            if lease is not None:
                each.see(lease)
            elif each.lease.state is not LeaseState.ENDED:
                await self._look_for(pool, each, each.lease_id)
        return PoolState(True, status.simulated, status.note)

    async def _look_for(self, pool: Pool, kernel_slice: KernelSlice, lease_id: str) -> None:
        try:
            lease = await pool.get_lease(lease_id)
        except LeaseGone:
            return  # whoever has it learns of that in a moment
        if kernel_slice.lease_id == lease_id:
            kernel_slice.see(lease)

    async def _measure(self, pool: Pool, slices: Mapping[str, KernelSlice]) -> None:
        for kernel_id, each in slices.items():
            lease_id, lease = each.lease_id, each.lease
            if lease_id is None or lease is None or lease.state is not LeaseState.HELD:
                continue
            try:
                activity = await pool.activity(lease_id)
            except LeaseGone:
                continue
            each.activity = activity
            if activity.memory_mib is not None:
                self._keep(kernel_id, activity.memory_mib)
        for kernel_id in self.samples.keys() - slices.keys():
            del self.samples[kernel_id]

    def _keep(self, kernel_id: str, mib: int) -> None:
        now = time.time()
        samples = self.samples.setdefault(kernel_id, deque())
        samples.append((round(now, 1), mib))
        while samples[0][0] < now - _KEPT_FOR:
            samples.popleft()


def _is_unmeasured(kernel_slice: KernelSlice) -> bool:
    """Whether nobody has looked yet at what a kernel does with its slice, so at what giving back costs."""
    lease = kernel_slice.lease
    return kernel_slice.activity is None and lease is not None and lease.state is LeaseState.HELD
