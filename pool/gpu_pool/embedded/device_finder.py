"""Finds this machine's devices once for a pool, however long the driver takes, and says that it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpu_pool.devices import Inventory
from gpu_pool.worker import Worker
from gpu_pool_client import PoolUnreachable
from gpu_pool_client._log import get_logger

#: Seconds after which it is said that the driver is slow, and after which nobody waits any longer.
_SLOW: Final = 5.0
_PATIENCE: Final = 180.0
#: Why the driver's first answer takes long, and what to do.
_WHY_SLOW: Final = (
    "Without persistence mode the driver sets up all GPUs anew whenever nobody uses them, which takes half a "
    "minute and more where there are many. Have it switched on: sudo nvidia-smi -pm 1, or the service "
    "nvidia-persistenced."
)


class DeviceFinder:
    """Looks for devices in a thread of its own, and remembers what it found. Used from any event loop.

    What is to wait for the store, or for whoever has locked it, is not held up by the driver.
    """

    def __init__(
        self, find: Callable[[], Inventory], slow: float = _SLOW, patience: float = _PATIENCE
    ) -> None:
        self._find = find
        self._slow, self._patience = slow, patience
        #: What was found; None where it is to be found yet.
        self.known: Inventory | None = None
        self._worker: Worker | None = None
        self._found_at = 0.0
        self._is_told = False

    @property
    def age(self) -> float:
        """Seconds since it was found what there is."""
        return time.monotonic() - self._found_at

    async def found(self) -> Inventory:
        """Return what there is.

        Raises what finding it does, and ``PoolUnreachable`` where that does not end.
        """
        if self.known is not None:
            return self.known
        worker = self._worker = self._worker or Worker("gpu-pool-devices")
        try:
            return await worker.run(self._find_in_thread, self._slow)
        except TimeoutError:
            self._say_slow()
        try:
            return await worker.run(self._find_in_thread, self._patience - self._slow)
        except TimeoutError as error:
            raise _unanswered(self._patience) from error

    def wait(self) -> Inventory:
        """Block until it is known what there is, and return it; see :meth:`found`."""
        if self.known is None:
            worker = self._worker = self._worker or Worker("gpu-pool-devices")
            try:
                return worker.call(self._find_in_thread, self._patience)
            except TimeoutError as error:
                raise _unanswered(self._patience) from error
        return self.known

    def forget(self) -> None:
        """Look again when it is asked for next."""
        self.known = None

    def close(self) -> None:
        """Look no more."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _find_in_thread(self) -> Inventory:
        if self.known is None:
            self.known = self._find()
            self._found_at = time.monotonic()
        return self.known

    def _say_slow(self) -> None:
        if not self._is_told:
            self._is_told = True
            text = "The NVIDIA driver has not answered for %g seconds. %s"
            get_logger().warning(text, self._slow, _WHY_SLOW)


def _unanswered(seconds: float) -> PoolUnreachable:
    return PoolUnreachable(
        f"The NVIDIA driver has not answered for {seconds:g} seconds, so it is not known which GPUs there "
        "are. Run nvidia-smi and see whether it does.",
        _WHY_SLOW,
    )
