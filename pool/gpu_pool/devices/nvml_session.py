"""NVML, opened and asked again and again; what it fails with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from gpu_pool.devices.problems import library_problem
from gpu_pool.nvml import pynvml

#: What NVML fails with; a function missing from an older driver's library is reported by either.
FAILURES: Final = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


class NvmlSession:
    """NVML, and the handles of devices. Used by one thread at a time.

    After a failure it is opened anew, ``again_after`` seconds later at the
    earliest: that is slow where a card has fallen off the bus.
    """

    def __init__(self, again_after: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._again_after = again_after
        self._clock = clock
        self._handles: dict[str, Any] = {}
        #: When NVML was last opened; None while it is not.
        self._opened_at: float | None = None
        #: Why it could not be opened, and when that was.
        self._refused: tuple[str, float] | None = None
        self._failed = False

    def open(self) -> str:
        """Have NVML open; return why that cannot be, or nothing."""
        now = self._clock()
        if self._opened_at is not None and self._failed and now - self._opened_at >= self._again_after:
            self.close()
        if self._opened_at is not None:
            return ""
        if self._refused and now - self._refused[1] < self._again_after:
            return self._refused[0]
        try:
            pynvml.nvmlInit()
        except FAILURES as error:
            self._refused = library_problem(error), now
            return self._refused[0]
        self._opened_at, self._refused = now, None
        return ""

    def handle(self, uuid: str) -> Any:
        """Return the handle of a device. Raises one of ``FAILURES``."""
        if uuid not in self._handles:
            self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def failed(self, uuid: str) -> None:
        """Take note that a device did not answer."""
        self._failed = True
        self._handles.pop(uuid, None)

    def close(self) -> None:
        """Let go of NVML; it can be opened again."""
        if self._opened_at is not None:
            with contextlib.suppress(*FAILURES):
                pynvml.nvmlShutdown()
        self._opened_at, self._failed = None, False
        self._handles.clear()
