"""Looks at devices in threads, as NVML may hang where one is broken: what they do, whether they can be used.

A process that has the library open does not notice that the driver was updated, or that its
container may open no device any more: it goes on, and so do all that compute. Whatever starts
now would fail, so that is asked as a program does that loads NVML anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpu_pool.devices.inventory import Reading
from gpu_pool.worker import Worker
from gpu_pool_client import Device

if TYPE_CHECKING:
    from gpu_pool.devices.sampling import Telemetry


#: Prints how the library's initialisation ended, then for each device its uuid, and its uuid with two
#: numbers: how the questions to it ended, and its compute mode. It loads nothing else, to start fast.
_PROGRAM: Final = """
import ctypes, sys
def say(*words):
    print(*words, flush=True)
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    begin = getattr(nvml, "nvmlInitWithFlags", None) or getattr(nvml, "nvmlInit_v2")
except (OSError, AttributeError):
    say("init", 12)
    sys.exit()
code = begin(0)
say("init", code)
for uuid in sys.argv[1:] if not code else ():
    say(uuid)
    handle, memory, mode = ctypes.c_void_p(), (ctypes.c_uint64 * 3)(), ctypes.c_int(0)
    code = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    code = code or nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    if code in (0, 3) and hasattr(nvml, "nvmlDeviceGetComputeMode"):
        nvml.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode))
    say(uuid, code, mode.value)
if not code:
    nvml.nvmlShutdown()
"""
#: Seconds without an answer after which the driver, or a device, counts as one that does not answer.
_INIT_WITHIN: Final = 120.0
_DEVICE_WITHIN: Final = 30.0


class _Untold(Exception):
    """Nothing is known."""


class DriverCheck:
    """Looks, in a thread of its own, whether new processes can use devices. Used from any event loop."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._is_closed = False
        #: When the last check began whose outcome is known, and that outcome.
        self._began = float("-inf")
        self._faults: Mapping[str, str] = {}
        #: Whether a check is to be made that has not begun.
        self._is_queued = False

    def seen_well(self) -> None:
        """Take note that everything was seen to work now, by whoever found the devices."""
        self._began = time.monotonic()

    async def faults(
        self, devices: Sequence[Device], max_age: float, patience: float
    ) -> Mapping[str, str] | None:
        """Return what is wrong with each device, by uuid; empty for nothing.

        None where that is not known from a check that began at most ``max_age`` seconds ago, or that
        ends within ``patience`` seconds.
        """
        asked = time.monotonic()
        if asked - self._began > max_age:
            self._worker = self._worker or Worker("gpu-pool-driver")
            if not self._is_queued:
                self._is_queued = True
                self._worker.submit(lambda: self._find_faults(devices))
            if patience > 0:
                with contextlib.suppress(TimeoutError):
                    await self._worker.run(_nothing, patience)
        return self._faults if asked - self._began <= max_age else None

    def close(self) -> None:
        """Ask the driver no more."""
        with self._guard:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        if self._worker is not None:
            self._worker.stop()

    # -- In the thread -------------------------------------------------------

    def _find_faults(self, devices: Sequence[Device]) -> None:
        self._is_queued, began = False, time.monotonic()
        with contextlib.suppress(OSError, _Untold):  # such as no room for another process: nothing is known
            faults = self._ask(devices)
            if not self._is_closed:
                self._began, self._faults = began, faults

    def _ask(self, devices: Sequence[Device]) -> dict[str, str]:
        """Return what is wrong with each; one that does not answer is left out when the others are asked.

        Raises ``_Untold`` where the program says nothing.
        """
        # Imported here because it costs some 40 ms, which simulated devices need not pay.
        from gpu_pool.devices import problems

        names = {device.uuid: f"GPU {device.index} ({device.label})" for device in devices}
        found: dict[str, str] = {}
        while left := [uuid for uuid in names if uuid not in found]:
            asked = ""
            for words in map(str.split, self._answers(left)):
                match words:
                    case ["init", "0"]:
                        asked = ""
                    case ["init", code]:
                        return dict.fromkeys(left, problems.library_fault(int(code))) | found
                    case [uuid, code, mode]:
                        asked, found[uuid] = "", problems.state_of(names[uuid], uuid, int(code), int(mode))
                    case ["silent"] if not asked:
                        return dict.fromkeys(left, problems.library_fault(None)) | found
                    case [uuid] if uuid in names:
                        asked = uuid
            if asked:  # it was silent, or the library has crashed
                found[asked] = problems.state_of(names[asked], asked, None, 0)
            elif not found.keys() & set(left):
                raise _Untold
        return found

    def _answers(self, uuids: Sequence[str]) -> Iterator[str]:
        """Run the program, and yield its lines; ``silent`` where it says nothing for too long."""
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *uuids]
        with self._guard:
            if self._is_closed:
                return
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert process.stdout is not None
        told = select.poll()  # not select(2), which takes none from the 1,024th on
        told.register(process.stdout, select.POLLIN)
        within, rest = _INIT_WITHIN, b""
        try:
            while True:
                if not told.poll(within * 1000):
                    yield "silent"
                    return
                # Not through a buffer, of which select knows nothing.
                more = os.read(process.stdout.fileno(), 4096)
                *lines, rest = (rest + more).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
                if not more:
                    return
                within = _DEVICE_WITHIN
        finally:
            process.kill()
            process.stdout.close()
            # One that hangs in the driver cannot be ended before the driver lets it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


def _nothing() -> None:
    """Do nothing, after what is under way."""


#: Seconds in which all devices must have answered.
_WITHIN: Final = 3.0
#: Seconds that closing may take.
_CLOSE_WITHIN: Final = 1.0


class DevicePoller:
    """Reads real devices in a thread of its own, which is started when it is first needed.

    Whoever asks during a reading shares its outcome. Used in one event loop.
    """

    def __init__(self, within: float = _WITHIN) -> None:
        self._within = within
        self._worker: Worker | None = None
        self._telemetry: Telemetry | None = None
        self._reading: asyncio.Task[Mapping[str, Reading | None]] | None = None
        #: Whether the thread reads, perhaps for nobody any more.
        self._is_at_work = False

    async def readings(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:
        """Return what each real device does, by uuid; None for one that does not answer in time."""
        real = [device for device in devices if not device.simulated]
        if not real:
            return {}
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._ask(real))
        return await asyncio.shield(self._reading)

    async def _ask(self, real: Collection[Device]) -> Mapping[str, Reading | None]:
        if not self._is_at_work:
            self._worker = self._worker or Worker("gpu-pool-telemetry")
            self._is_at_work = True
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                return await self._worker.run(lambda: self._read(real), self._within)
        return {device.uuid: None for device in real}

    async def close(self) -> None:
        """Ask the driver no more."""
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
            self._is_at_work = False

    def _close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
