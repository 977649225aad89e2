"""Looks at what devices do, without keeping anybody waiting: NVML may hang where a card is broken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from gpu_pool.devices.inventory import Reading
from gpu_pool.worker import Worker
from gpu_pool_client import Device

if TYPE_CHECKING:
    from gpu_pool.devices.sampling import Telemetry

#: Seconds in which all devices must have answered.
_WITHIN: Final = 3.0
#: Seconds that closing may take.
_CLOSE_WITHIN: Final = 1.0


class DevicePoller:
    """Reads real devices in a thread of its own, which is started when it is first needed.

    Whoever asks during a look shares its outcome. Used in one event loop.
    """

    def __init__(self, within: float = _WITHIN) -> None:
        self._within = within
        self._worker: Worker | None = None
        self._telemetry: Telemetry | None = None
        self._look: asyncio.Task[Mapping[str, Reading | None]] | None = None
        #: Whether the thread reads, perhaps for nobody any more.
        self._is_reading = False

    async def look(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each real device does, by uuid; None for one that does not answer in time."""
        real = [device for device in devices if not device.simulated]
        if not real:
            return {}
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._ask(real))
        return await asyncio.shield(self._look)

    async def _ask(self, real: Collection[Device]) -> Mapping[str, Reading | None]:
        if not self._is_reading:
            self._worker = self._worker or Worker("gpu-pool-telemetry")
            self._is_reading = True
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                return await self._worker.run(lambda: self._read(real), self._within)
        return {device.uuid: None for device in real}

    async def close(self) -> None:
        """Look no more."""
        if self._worker is not None:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await self._worker.run(self._close, _CLOSE_WITHIN)
            self._worker.stop()
            self._worker = None

    def _read(self, real: Collection[Device]) -> Mapping[str, Reading | None]:
        try:
            if self._telemetry is None:
                # Imported here because it costs some 40 ms, which simulated devices need not pay.
                from gpu_pool.devices.sampling import Telemetry

                self._telemetry = Telemetry()
            return self._telemetry.read(real)
        finally:
            self._is_reading = False

    def _close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
