"""Processes on the pool's devices that hold no lease there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.devices.sampling import ProcessSampler
from gpu_pool.enforcement.watchdog.attribution import Attribution, Attributor
from gpu_pool.enforcement.watchdog.processes import ProcessEnding, describe, first_owner, program_of
from gpu_pool_client import Device, Lease, Process, format_memory
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._processes import owner_of

_log = EscapingLogger(logging.getLogger("gpu_pool.watchdog"))

#: Seconds after which a process without a lease is one: a kernel may not be attached yet.
_BE_SURE: Final = 10.0
#: Seconds after which it is ended, where the administrator wants that.
_END_AFTER: Final = 60.0
#: Part of the driver, and of the pool itself: on a device, and nobody's use of it.
_INFRASTRUCTURE: Final = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm")
#: They need no more than this; a user's that uses more is listed, for its user can make it do anything.
_INFRASTRUCTURE_MIB: Final = 256
#: They compute a little, too; without them nobody sees anything.
_DISPLAY: Final = ("Xorg", "X", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "sway", "weston")


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """A process on a device of the pool without a lease there."""

    process: Process
    user: str
    name: str
    device: Device
    memory_mib: int | None
    #: Whether it is one that an administrator may have ended: no display server, and not root's.
    endable: bool

    def __str__(self) -> str:
        amount = "an unknown amount" if self.memory_mib is None else format_memory(self.memory_mib)
        who = f"Process {self.process.pid} ({self.name}) of {self.user}"
        return f"{who} uses {amount} of the memory of GPU {self.device.index} and holds no lease there"


def find_unmanaged(devices: Sequence[Device], leases: Sequence[Lease]) -> tuple[UnmanagedProcess, ...]:
    """Look once at the pool's devices for processes without a lease, in a pool that holds these leases."""
    sampler = ProcessSampler()
    try:
        found = Attributor().attribute(sampler.sample(devices).uses, leases)
    finally:
        sampler.close()
    return tuple(_unmanaged(found, devices))


class UnmanagedProcesses:
    """Tells of them, once each, and ends them where it was told to; ``tell`` hears whom."""

    def __init__(self, *, end: bool, tell: Callable[[UnmanagedProcess], object] = lambda _: None) -> None:
        self._end = end
        self._tell_of_end = tell
        self._since: dict[Process, float] = {}
        self._told: set[Process] = set()
        self._endings: dict[Process, ProcessEnding] = {}

    def handle(
        self, found: Attribution, devices: Sequence[Device], now: float
    ) -> tuple[UnmanagedProcess, ...]:
        """Tell of those who have been there without a lease for a while, or end them; return them."""
        here = {each.process for owned in found.unmanaged.values() for each in owned}
        self._since = {process: self._since.get(process, now) for process in here}
        self._told &= here
        self._endings = {process: ending for process, ending in self._endings.items() if process in here}
        if not any(now - since >= _BE_SURE for since in self._since.values()):
            return ()
        sure = [each for each in _unmanaged(found, devices) if now - self._since[each.process] >= _BE_SURE]
        for unmanaged in sure:
            self._tell(unmanaged)
            if self._end and unmanaged.endable and now - self._since[unmanaged.process] >= _END_AFTER:
                self._go_on_ending(unmanaged, now)
        return tuple(sure)

    def _tell(self, unmanaged: UnmanagedProcess) -> None:
        if unmanaged.process not in self._told:
            self._told.add(unmanaged.process)
            _log.info("%s", unmanaged)

    def _go_on_ending(self, unmanaged: UnmanagedProcess, now: float) -> None:
        ending = self._endings.get(unmanaged.process)
        if ending is None:
            _log.warning("%s: it is ended", unmanaged)
            self._tell_of_end(unmanaged)
            self._endings[unmanaged.process] = ending = ProcessEnding(now, first_owner(unmanaged.process))
            ending.begin([unmanaged.process])
        else:
            ending.go_on(now)


def _unmanaged(found: Attribution, devices: Iterable[Device]) -> Iterator[UnmanagedProcess]:
    by_uuid: Mapping[str, Device] = {device.uuid: device for device in devices}
    for uuid, owned in found.unmanaged.items():
        for each in owned:
            user, name = describe(each.process.pid)
            owner = owner_of(each.process.pid)
            # A user's process has the name that its user likes.
            known = name if owner == 0 else program_of(each.process.pid)
            is_part = known.startswith(_INFRASTRUCTURE)
            if not is_part or (owner != 0 and (each.use.memory_mib or 0) > _INFRASTRUCTURE_MIB):
                theirs = owner not in (0, None) and not is_part
                endable = theirs and each.use.computes and known not in _DISPLAY
                yield UnmanagedProcess(each.process, user, name, by_uuid[uuid], each.use.memory_mib, endable)
