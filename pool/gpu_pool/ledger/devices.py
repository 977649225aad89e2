"""The devices of a pool as the ledger knows them."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_pool.ledger import records
from gpu_pool.ledger.database import Database
from gpu_pool_client import Device, DeviceStatus, Slice


class DeviceTable:
    """Reads and writes devices, inside the transactions of its caller.

    What a device is changes seldom and is kept in memory; what is held of it
    is read every time.
    """

    def __init__(self, database: Database, milli: int) -> None:
        self._db = database
        self._milli = milli
        self._known: dict[int, tuple[int, bool, Device]] = {}
        self._numbers: dict[str, int] = {}

    def register(self, devices: Sequence[Device]) -> bool:
        """Make these the pool's devices; return whether anything changed."""
        facts = [records.write_device(device) for device in devices]
        if {row["facts"] for row in self._db.run("device_facts") if row["present"]} == set(facts):
            return False
        self._db.run("hide_devices")
        for position, (device, text) in enumerate(zip(devices, facts, strict=True)):
            self._db.run("upsert_device", {"uuid": device.uuid, "position": position, "facts": text})
        return True

    def statuses(self) -> list[DeviceStatus]:
        """Return all devices that are present or still hold something, in order of placement."""
        rows = self._db.run("devices").fetchall()
        if any(self._known.get(row[0], (-1,))[0] != row[1] for row in rows):
            self._read()
        return [
            DeviceStatus(self._known[number][2], milli, memory, contexts, leases, self._milli)
            for number, _, milli, memory, contexts, leases in rows
        ]

    def open(self) -> list[DeviceStatus]:
        """Return the devices on which something new may be granted, in order of placement."""
        return [status for status in self.statuses() if self._known[self.number(status.device)][1]]

    def number(self, device: Device) -> int:
        """Return the ledger's number of a device."""
        return self._numbers[device.uuid]

    def slice(self, number: int, milli: int, memory_mib: int, contexts: int) -> Slice:
        """Return the slice of a row of ``slice``."""
        if number not in self._known:
            self._read()
        return Slice(self._known[number][2], milli, memory_mib, contexts)

    def _read(self) -> None:
        for row in self._db.run("device_facts").fetchall():
            device = records.read_device(row["facts"])
            self._known[row["id"]] = (row["revision"], bool(row["present"]), device)
            self._numbers[device.uuid] = row["id"]
