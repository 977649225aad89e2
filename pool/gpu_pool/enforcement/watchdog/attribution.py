"""Whose processes those on the devices are, a lease's or nobody's, and what the leases use.

A process belongs to the lease whose attached process it descends from. One
that has lost its parents is remembered from before, or recognised by the lease
in its environment. Of what keeps a lease with nothing attached to it, only the
process itself does: it may be a server that has started a lot besides.

What runs as another user than the attached process is nobody's, wherever it
descends from: with sudo it is root's.

What leases use is added up from look to look until it is written to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from gpu_pool.devices.sampling import ProcessSampler, ProcessUse
from gpu_pool.enforcement.watchdog.processes import (
    ProcessEnding,
    describe,
    first_owner,
    lease_in_environment,
    own_namespace,
    program_of,
)
from gpu_pool.store.usage import Measured, UseTally
from gpu_pool_client import Device, Lease, Process, format_memory
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._processes import lineage, owner_of

#: Looks after which it is asked again whether a pid still means the same process, at the earliest.
_RECHECK: Final = 30


class OwnedUse(NamedTuple):
    """A process on a device, and what it uses there."""

    process: Process
    use: ProcessUse


@dataclass(frozen=True, slots=True)
class Attribution:
    """Who uses what, by device uuid."""

    #: By lease id, then device uuid; only what is on a device that the lease holds.
    leases: Mapping[str, Mapping[str, Sequence[OwnedUse]]] = field(default_factory=dict)
    #: What is on a device and belongs to no lease there.
    unmanaged: Mapping[str, Sequence[OwnedUse]] = field(default_factory=dict)


@dataclass(slots=True)
class _Holders:
    """The leases of one device."""

    by_id: dict[str, Lease] = field(default_factory=dict)
    by_process: dict[Process, list[str]] = field(default_factory=dict)
    #: By their keepers, those to which nothing is attached.
    by_keeper: dict[Process, str] = field(default_factory=dict)
    #: Whether all their processes can be seen from here, and not only from within a container.
    seen: bool = True

    def add(self, lease: Lease) -> None:
        self.by_id[lease.id] = lease
        if lease.process is not None:
            self.by_process.setdefault(lease.process, []).append(lease.id)
            self.seen &= lease.process.namespace == own_namespace()
            first_owner(lease.process)
        elif lease.holder.process is not None:
            self.by_keeper.setdefault(lease.holder.process, lease.id)


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a pid on a device."""

    process: Process
    #: The lease it belongs to, empty for none.
    lease: str
    recheck_at: int


class Attributor:
    """Attributes processes to leases, look after look.

    Reading ``/proc`` is what a look costs most, so what is known of a pid is
    read again only when the leases change, and now and then. Whoever is about
    to do something to a process makes sure of it first.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Known] = {}
        self._looks = 0
        self._leases: Sequence[Lease] = ()
        self._holders: dict[str, _Holders] = {}

    def attribute(self, uses: Mapping[str, Iterable[ProcessUse]], leases: Sequence[Lease]) -> Attribution:
        """Say to which lease each process on each device belongs.

        One that has ended, or that the system hides from us, is left out.
        """
        self._looks += 1
        changed = leases is not self._leases
        if changed:
            self._leases, self._holders = leases, _holders(leases)
        known: dict[tuple[str, int], _Known] = {}
        mine: dict[str, dict[str, list[OwnedUse]]] = {}
        unmanaged: dict[str, list[OwnedUse]] = {}
        for uuid, on_device in uses.items():
            there = self._holders.get(uuid) or _Holders()
            for use in on_device:
                found = self._find((uuid, use.pid), there, changed)
                if found is None:
                    continue
                known[uuid, use.pid] = found
                # A keeper's own is not remembered: it is not the lease's once something is attached.
                lease = found.lease or there.by_keeper.get(found.process)
                if lease:
                    mine.setdefault(lease, {}).setdefault(uuid, []).append(OwnedUse(found.process, use))
                elif there.seen:
                    unmanaged.setdefault(uuid, []).append(OwnedUse(found.process, use))
        self._known = known
        return Attribution(mine, unmanaged)

    def _find(self, key: tuple[str, int], there: _Holders, changed: bool) -> _Known | None:
        before = self._known.get(key)
        # What belongs to nobody may belong to somebody since.
        settled = before is not None and (before.lease in there.by_id or not (before.lease or changed))
        if before is not None and settled and self._looks < before.recheck_at:
            return before
        ancestors = lineage(key[1])
        process = next(ancestors, None)
        if process is None:
            return None
        lease = _lease_of(process, ancestors, there)
        if not lease and before is not None and before.process == process and before.lease in there.by_id:
            lease = before.lease  # those it descended from have ended
        # Spread over the looks, so that none is slow.
        return _Known(process, lease, self._looks + _RECHECK + key[1] % _RECHECK)


def _holders(leases: Iterable[Lease]) -> dict[str, _Holders]:
    found: dict[str, _Holders] = {}
    for lease in leases:
        for part in lease.slices:
            found.setdefault(part.device.uuid, _Holders()).add(lease)
    return found


def _lease_of(process: Process, ancestors: Iterable[Process], there: _Holders) -> str:
    """Return the lease that it, or its nearest ancestor with one here, holds, or that of its environment."""
    for each in chain([process], ancestors):
        held = there.by_process.get(each)
        if held:
            if not _same_user(process, there.by_id[held[0]]):
                return ""
            marked = lease_in_environment(process.pid) if len(held) > 1 else ""
            return marked if marked in held else held[0]
    marked = lease_in_environment(process.pid)
    return marked if marked in there.by_id and _same_user(process, there.by_id[marked]) else ""


def _same_user(process: Process, lease: Lease) -> bool:
    root = root_of(lease)
    if root is None or not root.is_alive():
        return False
    owner = first_owner(root)
    return owner is not None and owner_of(process.pid) == owner


def root_of(lease: Lease) -> Process | None:
    """Return the process that a lease is attached to, or while there is none, the one that keeps it."""
    return lease.process or lease.holder.process


#: Seconds between two writes to the store, for all leases together.
_WRITE_EVERY: Final = 10.0


class UsageMeter:
    """Adds up what the leases use of their devices."""

    def __init__(self) -> None:
        self._tallies: dict[str, UseTally] = {}
        #: Leases of which is written that they are measured, though they use nothing.
        self._begun: set[str] = set()
        self._written_at: float | None = None

    def measure(
        self, leases: Iterable[Lease], seen: Mapping[str, object], found: Attribution, seconds: float
    ) -> None:
        """Count what the leases use on the devices that were ``seen``, as if for the last ``seconds``."""
        for lease in leases:
            used = found.leases.get(lease.id)
            if used is None and (lease.id in self._begun or not _is_visible(lease)):
                continue
            for part in lease.slices:
                if part.device.uuid in seen:
                    self._begun.add(lease.id)
                    shares = self._tallies.get(lease.id) or self._tallies.setdefault(lease.id, UseTally())
                    owned = used.get(part.device.uuid) if used else None
                    if owned:
                        shares.add(_total_mib(owned), seconds)

    def news(self, leases: Sequence[Lease], now: float) -> Mapping[str, Measured]:
        """Return what is to be written down now: when it is time, or when a lease with news has ended."""
        ids = {lease.id for lease in leases}
        if self._written_at is None:
            self._written_at = now
        self._begun &= ids
        if now - self._written_at < _WRITE_EVERY and self._tallies.keys() <= ids:
            return {}
        return self.all()

    def all(self) -> Mapping[str, Measured]:
        """Return all that is not written down."""
        return {lease: each.measured() for lease, each in self._tallies.items()}

    def written(self, now: float) -> None:
        """All of it is in the store."""
        self._tallies.clear()
        self._written_at = now


def _is_visible(lease: Lease) -> bool:
    return lease.process is not None and lease.process.namespace == own_namespace()


def _total_mib(owned: Iterable[OwnedUse]) -> int | None:
    """Return the memory that these use together, None if that of any is not known."""
    total = 0
    for _, use in owned:
        if use.memory_mib is None:
            return None
        total += use.memory_mib
    return total


def memory_in_use(
    leases: Iterable[Lease], seen: Mapping[str, object], found: Attribution
) -> dict[str, dict[str, int]]:
    """Return what leases use on devices that were ``seen``, where it is known, by their ids."""
    used: dict[str, dict[str, int]] = {}
    for lease in leases:
        for part in lease.slices:
            if part.device.uuid in seen and _is_visible(lease):
                total = _total_mib(found.leases.get(lease.id, {}).get(part.device.uuid, ()))
                if total is not None:
                    used.setdefault(lease.id, {})[part.device.uuid] = total
    return used


def least_mib(owned: Iterable[OwnedUse]) -> int:
    """Return the memory that these use at least: what is known of it."""
    return sum([use.memory_mib or 0 for _, use in owned])


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
