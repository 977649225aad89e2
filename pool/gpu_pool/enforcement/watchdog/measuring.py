"""What leases use, added up from look to look until it is written to the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_pool.enforcement.watchdog.attribution import Attribution, OwnedUse
from gpu_pool.enforcement.watchdog.processes import own_namespace
from gpu_pool.store.measured_use import Measured
from gpu_pool_client import Lease

#: Seconds between two writes to the store, for all leases together.
_WRITE_EVERY: Final = 10.0


@dataclass(slots=True)
class _Tally:
    """What one lease has used since it was last written down; see :class:`Measured`."""

    peak_mib: int | None = None
    mib_seconds: float = 0.0
    memory_seconds: float = 0.0
    device_seconds: float = 0.0

    def add(self, memory_mib: int | None, seconds: float) -> None:
        self.device_seconds += seconds
        if memory_mib is not None:
            self.peak_mib = memory_mib if self.peak_mib is None else max(self.peak_mib, memory_mib)
            self.mib_seconds += memory_mib * seconds
            self.memory_seconds += seconds


class UsageMeter:
    """Adds up what the leases use of their devices."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
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
                    shares = self._tallies.get(lease.id) or self._tallies.setdefault(lease.id, _Tally())
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
        return {
            lease: Measured(each.peak_mib, each.mib_seconds, each.memory_seconds, each.device_seconds)
            for lease, each in self._tallies.items()
        }

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


def least_mib(owned: Iterable[OwnedUse]) -> int:
    """Return the memory that these use at least: what is known of it."""
    return sum([use.memory_mib or 0 for _, use in owned])
