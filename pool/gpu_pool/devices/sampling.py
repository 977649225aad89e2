"""What devices do now, and which processes use how much of their memory, as NVML tells it.

What a card or its driver does not tell is unknown, which is not 0. Devices are looked at
once a second for as long as a pool lives, so NVML stays initialised between looks; it is
opened anew some time after anything failed.

The driver names processes as the machine's first pid namespace does. Whoever looks from
another one (a container) cannot know which process is meant, and so sees nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpu_pool.devices.inventory import Reading
from gpu_pool.devices.problems import FAILURES, NvmlSession, card_problem
from gpu_pool.nvml import computing, larger, optional, pynvml
from gpu_pool_client import Device
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import pid_namespace

_BYTES_PER_MIB: Final = 1024 * 1024
#: ``/proc/self/ns/pid`` in the machine's first pid namespace, whose number the kernel fixes
#: (PID_NS_INIT_INO, linux/nsfs.h).
FIRST_NAMESPACE: Final = "pid:[4026531836]"
_NOT_FIRST: Final = (
    "The memory of processes is not measured: this is a container, and the driver names processes as the "
    "machine outside does. Run the pool outside, or with the machine's pid namespace (docker run --pid=host)."
)
_UNKNOWN: Final = {
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "its driver is too old to say which processes use it",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "it does not say which processes use it",
}


class ProcessUse(NamedTuple):
    """What one process uses of one device."""

    pid: int
    #: None where the driver does not say.
    memory_mib: int | None
    #: Whether it computes; one that does not only draws, as display servers do.
    computes: bool = True


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What one look saw."""

    #: By device uuid. A device whose processes cannot be seen is missing: nothing is known of it.
    uses: Mapping[str, tuple[ProcessUse, ...]] = field(default_factory=dict)
    #: Sentences for a person.
    problems: tuple[str, ...] = ()


class ProcessSampler:
    """Looks at the processes on devices, again and again. Used by one thread at a time. See ``Session``."""

    def __init__(self, again_after: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = NvmlSession(again_after, clock)

    def sample(self, devices: Iterable[Device]) -> ProcessSample:
        """Return the processes on each real device; what cannot be seen becomes a problem."""
        real = [device for device in devices if not device.simulated]
        if not real:
            return ProcessSample()
        if pid_namespace() != FIRST_NAMESPACE:
            return ProcessSample(problems=(_NOT_FIRST,))
        problem = self._session.open()
        if problem:
            return ProcessSample(problems=(problem,))
        uses: dict[str, tuple[ProcessUse, ...]] = {}
        problems: list[str] = []
        for device in real:
            try:
                uses[device.uuid] = _uses(self._session.handle(device.uuid), unified=device.unified)
            except FAILURES as error:  # noqa: PERF203 - the others are looked at all the same
                self._session.failed(device.uuid)
                problems.append(_problem(device, error))
        return ProcessSample(uses, tuple(problems))

    def utilisation(self, device: Device, seconds: float) -> dict[int, float] | None:
        """Return the largest part of a device's multiprocessors that each process used in the last seconds.

        Those alone are named that have worked. None where the driver does not say: of MIG instances it never
        does. It says that something of a process ran there, and not how much of the device that took.
        """
        if device.simulated or self._session.open():
            return None
        since = int((time.time() - seconds) * 1e6)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._session.handle(device.uuid), since)
        except pynvml.NVMLError_NotFound:  # no process worked in this time
            return {}
        except FAILURES:
            return None
        found: dict[int, float] = {}
        for each in samples:
            if each.smUtil:
                found[each.pid] = max(found.get(each.pid, 0.0), min(1.0, each.smUtil / 100))
        return found

    def close(self) -> None:
        """Let go of NVML; the next look opens it again."""
        self._session.close()


def memory_by_device(pids: Collection[int], devices: Iterable[Device]) -> dict[str, int]:
    """Return the memory in MiB that these processes use of each real device now, by uuid.

    A device of which that is not known is left out.
    """
    sampler = ProcessSampler()
    try:
        uses = sampler.sample(devices).uses
    finally:
        sampler.close()
    used: dict[str, int] = {}
    for uuid, on_device in uses.items():
        known = [use.memory_mib for use in on_device if use.pid in pids]
        if None not in known:
            used[uuid] = sum(each or 0 for each in known)
    return used


def memory_of(pids: Collection[int], devices: Collection[Device]) -> int | None:
    """Return the memory in MiB that these processes use of these devices now; None if that is not known."""
    used = memory_by_device(pids, devices)
    return sum(used.values()) if len(used) == len(devices) else None


def _uses(handle: Any, *, unified: bool) -> tuple[ProcessUse, ...]:
    """Return each process once, however many lists of the driver it is in.

    Of a device whose memory is the machine's (``unified``) the driver does not tell who uses it: there
    it is the resident memory of the process.
    """
    found = computing(handle)
    compute = set(found)
    for each in optional(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle):
        found[each.pid] = larger(found.get(each.pid), each.usedGpuMemory)
    known = {pid: None if used is None else used // _BYTES_PER_MIB for pid, used in found.items()}
    return tuple(
        ProcessUse(pid, _resident_mib(pid) if unified and used is None else used, pid in compute)
        for pid, used in known.items()
    )


def _resident_mib(pid: int) -> int | None:
    """Return the MiB of the machine's memory that a process has; None for one that cannot be seen."""
    words = procfs.status(pid, b"VmRSS")  # in kB
    return int(words[0]) // 1024 if words else None


def _problem(device: Device, error: Exception) -> str:
    name = f"GPU {device.index} ({device.label})"
    why = _UNKNOWN.get(getattr(error, "value", None))
    return f"The use of {name} is not measured: {why}." if why else card_problem(name, error)


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
