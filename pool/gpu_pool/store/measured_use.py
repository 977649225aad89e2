"""What leases were measured to use of their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_pool.store.database import Database
from gpu_pool.store.device_table import DeviceTable
from gpu_pool.store.lease_table import LeaseTable
from gpu_pool_client import Device, Lease, LeaseState


@dataclass(frozen=True, slots=True)
class Measured:
    """What a lease was seen to use in some time. Memory is that on one device, as what is granted is."""

    #: The most memory in use on one device at once; None where that was not known.
    peak_mib: int | None = None
    #: Memory times the time for which it was known, and that time, over all devices.
    mib_seconds: float = 0.0
    memory_seconds: float = 0.0
    #: Time with at least one process on a device, over all devices.
    device_seconds: float = 0.0


class MeasuredUseTable:
    """Reads what is held, and adds what was measured of it. Each call is a transaction of its own."""

    def __init__(self, database: Database, leases: LeaseTable, devices: DeviceTable) -> None:
        self._db = database
        self._leases = leases
        self._devices = devices
        self._known: tuple[list[Device], list[tuple[object, ...]]] | None = None
        self._held: tuple[Lease, ...] = ()

    def held(self) -> tuple[Lease, ...]:
        """Return the held leases, oldest first: the very same tuple while nothing about them has changed."""
        with self._db.snapshot():
            devices = [status.device for status in self._devices.statuses()]
            known = devices, [tuple(row) for row in self._db.run("held").fetchall()]
            if known != self._known:
                leases = self._leases.not_waiting()
                self._known = known
                self._held = tuple(lease for lease in leases if lease.state is LeaseState.HELD)
        return self._held

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the pool."""
        with self._db.snapshot():
            return tuple(status.device for status in self._devices.present())

    def add(self, measured: Mapping[str, Measured]) -> None:
        """Add what was measured to these leases, by id, also to those that have ended meanwhile."""
        with self._db.transaction():
            for lease_id, each in measured.items():
                values = {
                    "number": int(lease_id.partition("-")[0]),
                    "id": lease_id,
                    "peak_mib": each.peak_mib,
                    "mib_seconds": each.mib_seconds,
                    "memory_seconds": each.memory_seconds,
                    "device_seconds": each.device_seconds,
                }
                if not self._db.run("add_to_lease", values).rowcount:
                    self._db.run("add_to_history", values)
