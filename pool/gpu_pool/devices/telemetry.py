"""What devices do now: memory in use, utilisation, temperature and power, as NVML tells it.

What a card or its driver does not tell is unknown, which is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import pynvml

from gpu_pool.devices.nvml_session import FAILURES, NvmlSession
from gpu_pool.devices.readings import Reading
from gpu_pool_client import Device

#: What says that nothing more is to be had of a device. Any other failure is that of one sensor.
_GONE: Final = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
)


class Telemetry:
    """Reads real devices, again and again. Used by one thread at a time."""

    def __init__(self, session: NvmlSession | None = None) -> None:
        self._session = session or NvmlSession()

    def read(self, devices: Iterable[Device]) -> Mapping[str, Reading | None]:
        """Return what each real device does, by uuid; None for one that does not answer."""
        real = [device.uuid for device in devices if not device.simulated]
        if not real or self._session.open():
            return dict.fromkeys(real)
        return {uuid: self._read(uuid) for uuid in real}

    def close(self) -> None:
        """Let go of NVML."""
        self._session.close()

    def _read(self, uuid: str) -> Reading | None:
        try:
            handle = self._session.handle(uuid)
            return Reading(
                _ask(_memory_used, handle),
                _ask(lambda each: pynvml.nvmlDeviceGetUtilizationRates(each).gpu / 100, handle),
                _ask(lambda each: pynvml.nvmlDeviceGetTemperature(each, pynvml.NVML_TEMPERATURE_GPU), handle),
                _ask(lambda each: pynvml.nvmlDeviceGetPowerUsage(each) / 1000, handle),
            )
        except FAILURES:
            self._session.failed(uuid)
            return None


def _memory_used(handle: Any) -> int:
    # Version 1 counts what the driver keeps for itself as used; drivers before R510 have no other.
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLLibraryMismatchError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _ask(query: Callable[[Any], Any], handle: Any) -> Any:
    """Return the answer, None where there is none. Raises the failure that says that the device has gone."""
    try:
        return query(handle)
    except FAILURES as error:
        if getattr(error, "value", None) in _GONE:
            raise
        return None
