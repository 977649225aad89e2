"""The devices of a pool as the store knows them."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from gpu_pool.store.database import Database
from gpu_pool.store.errors import OtherDevices
from gpu_pool_client import Device, DeviceStatus, Slice


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignUse:
    """What those have of a device who hold no lease on it, such as pods that the pool has not made."""

    milli: int = 0
    memory_mib: int = 0
    contexts: int = 0
    #: Whether nothing more may be granted on it, whatever an administrator of the pool says.
    closed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SeenFrom:
    """What a process sees that registers devices."""

    #: Equal for processes that see the same GPUs: the pid namespace, and a digest of which GPUs there are.
    where: str
    #: uuids of devices that are there, and not for this process: ``CUDA_VISIBLE_DEVICES`` hides them.
    others: Collection[str] = ()
    #: Whether it sees all that the pool can have: nobody else registers any.
    everything: bool = False


_NOBODY: Final = ForeignUse()
#: What to do where a pool is in use with simulated devices, and this machine has real ones.
_WAY_BACK: Final = (
    "Simulated and real GPUs are never in one pool. End what holds the simulated ones (gpu-pool status; "
    "gpu-pool release ID) and what was started with GPU_POOL_DEVICES; then the real ones replace them."
)
_WAY_ON: Final = "Set or unset GPU_POOL_DEVICES as where the pool is in use."
#: Different slices that are kept in memory.
_MOST_SLICES: Final = 4096
#: Devices that are remembered though they are gone, such as those of a cluster's nodes that are no more;
#: and how many are forgotten at once.
MOST_GONE: Final = 1_000
_AT_A_TIME: Final = 100


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
        #: Slices by what is written of them: every decision in the queue reads all that is held.
        self._slices: dict[str, tuple[Slice, ...]] = {}
        #: Statuses by the rows they are of: one grant changes few of a cluster's thousands of devices.
        self._statuses: dict[tuple[Any, ...], DeviceStatus] = {}

    def would_change(self, devices: Sequence[Device], seen: SeenFrom) -> bool:
        """Whether :meth:`register` would change anything."""
        present = self._present()
        known = {row["facts"] for row in present}
        return any(write_device(device) not in known for device in devices) or bool(
            _gone(present, devices, seen)
        )

    def has_simulated(self) -> bool:
        """Whether a simulated device is the pool's."""
        return any(_is_simulated(row) for row in self._present())

    def register(self, devices: Sequence[Device], seen: SeenFrom, *, nobody_simulates: bool) -> None:
        """Make these the pool's devices, as one process sees them.

        A real device is taken away only by a process that sees what the one
        saw that registered it. ``nobody_simulates``: whether no other process
        uses the pool with simulated devices. Raises ``OtherDevices`` where
        simulated devices would replace real ones, or others that are in use.
        """
        present = self._present()
        uuids = {device.uuid for device in devices}
        missing = [row for row in present if row["uuid"] not in uuids]
        simulated = any(_is_simulated(row) for row in present)
        if missing and (simulated or any(device.simulated for device in devices)):
            self._refuse_to_mix(devices, missing, nobody_simulates)
        for row in _gone(present, devices, seen):
            self._db.run("hide_device", {"id": row["id"]})
        for position, device in enumerate(devices):
            values = {"uuid": device.uuid, "position": position, "facts": write_device(device)}
            self._db.run("upsert_device", {**values, "seen_from": seen.where})

    def present(self) -> dict[str, Device]:
        """Return the devices of the pool by uuid."""
        return {row["uuid"]: read_device(row["facts"]) for row in self._present()}

    def seen_from(self, where: str) -> set[str]:
        """Return the uuids of the devices that processes have registered which see the same."""
        return {row["uuid"] for row in self._present() if row["seen_from"] == where}

    def set_faults(self, faults: Mapping[str, str]) -> bool:
        """Note why nothing new can run on these devices, by uuid, empty where it can.

        Return whether anything changed.
        """
        changed = False
        for row in self._present():
            device = read_device(row["facts"])
            now = faults.get(device.uuid, device.fault)
            if now != device.fault:
                facts = write_device(dataclasses.replace(device, fault=now))
                self._db.run("set_facts", {"id": row["id"], "facts": facts})
                changed = True
        return changed

    def forget_simulated(self) -> None:
        """Take the simulated devices from the pool, unless somebody holds something or waits."""
        if not self._leases():
            for row in filter(_is_simulated, self._present()):
                self._db.run("hide_device", {"id": row["id"]})

    def set_others(self, others: Mapping[str, ForeignUse]) -> bool:
        """Note what others than leases have of each device, by uuid; return whether anything changed."""
        changed = False
        for row in self._db.run("others").fetchall():
            now = others.get(row["uuid"], _NOBODY)
            known = row["other_milli"], row["other_memory_mib"], row["other_contexts"], bool(row["closed"])
            if known != dataclasses.astuple(now):
                self._db.run("set_others", {"id": row["id"], **dataclasses.asdict(now)})
                changed = True
        return changed

    def _refuse_to_mix(
        self, devices: Sequence[Device], missing: Sequence[sqlite3.Row], nobody_simulates: bool
    ) -> None:
        leases, real = self._leases(), not any(device.simulated for device in devices)
        are_simulated = all(_is_simulated(row) for row in missing)
        if are_simulated and not leases and (nobody_simulates or not real):
            return
        labels = sorted({read_device(row["facts"]).label for row in missing})
        found = ", ".join(sorted({each.label for each in devices}))
        by = f" ({'1 lease' if leases == 1 else f'{leases} leases'})" if leases else ""
        raise OtherDevices(
            f"The pool's store, {self._db.path}, is in use for {', '.join(labels)}{by}; "
            f"this process would replace that by {found}.",
            f"{_WAY_BACK if real and are_simulated else _WAY_ON} "
            f"Or name another store: GPU_POOL_URL=embedded:{self._db.path.with_name('other.db')}.",
        )

    def _leases(self) -> int:
        return int(self._db.one("leases_in_all")[0])

    def _present(self) -> list[sqlite3.Row]:
        return [row for row in self._db.run("device_facts").fetchall() if row["present"]]

    def statuses(self, *, with_gone: bool = False) -> list[DeviceStatus]:
        """Return the devices of the pool, drained ones included, in order of placement.

        ``with_gone``: with those that are its no more, on which something is still held, or whose kernels an
        administrator has let go to disk.
        """
        before, self._statuses, statuses = self._statuses, {}, []
        for row in map(tuple, self._db.run("devices").fetchall()):
            known = self._known.get(row[0])
            if known is None or known[0] != row[1]:
                known = self._read_facts()[row[0]]
            status = self._statuses[row] = before.get(row) or self._status(*row)
            if with_gone or known[1]:
                statuses.append(status)
        return statuses

    def _status(
        self,
        number: int,
        _revision: int,
        drained: int,
        milli: int,
        memory: int,
        contexts: int,
        leases: int,
        drained_at: float | None,
        hibernates: int,
    ) -> DeviceStatus:
        device = self._known[number][2]
        # Nobody shares a MIG instance, so its compute is never granted twice.
        total = self._milli if device.mig_profile is None else device.milli
        closed = bool(drained or device.fault)
        return DeviceStatus(
            device, milli, memory, contexts, leases, total, closed, drained_at, hibernates=bool(hibernates)
        )

    def open(self) -> list[DeviceStatus]:
        """Return the devices on which something new may be granted, in order of placement."""
        return [status for status in self.statuses() if not status.drained]

    def drained(self) -> list[DeviceStatus]:
        """Return the devices of the pool on which nothing more is granted, in order of placement."""
        return [status for status in self.statuses() if status.drained]

    def close(
        self, uuid: str, drained: bool, now: float, *, hibernate: bool = False, anywhere: bool = True
    ) -> None:
        """Grant nothing more on that device, or grant again; ``now`` is Unix seconds.

        ``hibernate``: so that the kernels on it go to disk. One that is drained so stays so until it is
        undrained. ``anywhere``: kernels that are parked and may come back to any device are meant, too.
        """
        known = {"id": self._numbers[uuid], "hibernate": drained and hibernate}
        self._db.run("set_drained", {**known, "drained": drained, "now": now})
        if hibernate or not drained:
            self._db.run("set_hibernates", {**known, "uuid": uuid, "anywhere": anywhere})

    def forget_gone(self) -> int:
        """Forget some of the devices that are the pool's no more, of very many; return how many.

        What was ever held of them stays known by the leases.
        """
        return self._db.run("forget_devices", {"kept": MOST_GONE, "most": _AT_A_TIME}).rowcount

    def write(self, parts: Sequence[Slice]) -> str:
        """Write slices for a lease's row."""
        written = []
        for part in parts:
            # The numbers of a limit only where it has one.
            limit = [part.limit_mib, part.burst_mib] if part.limit_mib or part.burst_mib else []
            number = self._numbers[part.device.uuid]
            written.append([number, part.milli, part.memory_mib, part.contexts, *limit])
        return str(written)  # lists of whole numbers look the same in Python and in JSON

    def count(self, how: Literal["take", "give_back"], parts: Sequence[Slice]) -> None:
        """Count slices as held, or as free again."""
        for part in parts:
            amounts = {"milli": part.milli, "memory_mib": part.memory_mib, "contexts": part.contexts}
            self._db.run(how, {"device": self._numbers[part.device.uuid], **amounts})

    def read(self, slices: str) -> tuple[Slice, ...]:
        """Read what :meth:`write` wrote."""
        known = self._slices.get(slices)
        if known is None:
            rows = json.loads(slices)
            if any(row[0] not in self._known for row in rows):
                self._read_facts()
            if len(self._slices) >= _MOST_SLICES:
                self._slices.clear()
            known = tuple(Slice(self._known[device][2], *amounts) for device, *amounts in rows)
            self._slices[slices] = known
        return known

    def _read_facts(self) -> Mapping[int, tuple[int, bool, Device]]:
        self._slices.clear()
        for row in self._db.run("device_facts").fetchall():
            device = read_device(row["facts"])
            self._known[row["id"]] = (row["revision"], bool(row["present"]), device)
            self._numbers[device.uuid] = row["id"]
        return self._known


def _gone(present: Sequence[sqlite3.Row], devices: Sequence[Device], seen: SeenFrom) -> list[sqlite3.Row]:
    """Return the rows of the devices that are there no more."""
    here = {device.uuid for device in devices} | set(seen.others)
    simulated = any(_is_simulated(row) for row in present)
    return [
        row
        for row in present
        if row["uuid"] not in here and (simulated or seen.everything or row["seen_from"] == seen.where)
    ]


def _is_simulated(row: sqlite3.Row) -> bool:
    return read_device(row["facts"]).simulated


def write_device(device: Device) -> str:
    """Write a device's facts as JSON."""
    return json.dumps(dataclasses.asdict(device), sort_keys=True)


def read_device(facts: str) -> Device:
    """Read what :func:`write_device` wrote."""
    values: dict[str, Any] = json.loads(facts)
    values["nvlink"] = tuple(values["nvlink"])
    return Device(**values)
