"""Memory on top of guarantees: what held leases may use now, written where that changes; see the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpu_pool.policy import burst
from gpu_pool.policy.burst import BurstSlice
from gpu_pool.store.context import StoreContext
from gpu_pool_client import Device, Slice


@dataclass(frozen=True, slots=True)
class _Held:
    """A held lease with a limit."""

    number: int
    parts: tuple[Slice, ...]
    works: bool
    #: What it has on top in all, in MiB, as far as that is noted for the history.
    noted_mib: int
    #: MiB in use by device uuid, where that is known.
    used: Mapping[str, int]

    def on(self, device: Device) -> BurstSlice | None:
        """Return what it is to the policy on one device; None where it has no limit there."""
        for part in self.parts:
            if part.device.uuid == device.uuid and part.limit_mib:
                used = self.used.get(device.uuid)
                guarantee, limit = part.memory_mib, part.limit_mib
                return BurstSlice(self.number, guarantee, limit, part.burst_mib, used, self.works)
        return None


def update(
    store: StoreContext, used: Mapping[str, Mapping[str, int]], allows: Callable[[Device], bool]
) -> bool:
    """Divide what nobody is granted among the held leases with a limit, and take back what is granted since.

    Parameters
    ----------
    store
        The open store; none of its transactions is under way.
    used
        MiB in use by lease id and device uuid, where that is known.
    allows
        Whether slices of a device may have anything on top.

    Returns
    -------
    bool
        Whether anything has changed. Where nothing does, nothing is written.
    """
    with store.db.snapshot():
        if not _changes(store, used, allows):
            return False
    with store.db.transaction(store.give_up_at):
        return _write(store, _changes(store, used, allows))


def _write(store: StoreContext, changes: Mapping[int, Sequence[Slice]]) -> bool:
    now = store.clock.wall()
    for number, parts in changes.items():
        values = {"slices": store.devices.write(parts), "burst_mib": burst.total_mib(parts), "now": now}
        store.db.run("set_burst", {"number": number, **values})
    return bool(changes)


def _changes(
    store: StoreContext, used: Mapping[str, Mapping[str, int]], allows: Callable[[Device], bool]
) -> dict[int, tuple[Slice, ...]]:
    """Return the slices of the leases whose bursts are to be other ones than now, by number."""
    rows = store.db.run("held_at_work").fetchall()
    read = [
        _Held(
            row["number"],
            store.devices.read(row["slices"]),
            row["idle_since"] is None,
            row["burst_mib"],
            used.get(row["id"], {}),
        )
        for row in rows
    ]
    held = [each for each in read if any(part.limit_mib for part in each.parts)]
    bursts: dict[tuple[int, str], int] = {}
    for status in store.devices.statuses(with_gone=True):
        limited = [found for each in held if (found := each.on(status.device)) is not None]
        free = status.unheld_memory_mib if allows(status.device) else 0
        for number, mib in burst.divide(free, limited).items():
            bursts[number, status.device.uuid] = mib
    now = {each.number: tuple(_with_burst(each.number, part, bursts) for part in each.parts) for each in held}
    return {
        each.number: now[each.number]
        for each in held
        if now[each.number] != each.parts or burst.total_mib(each.parts) != each.noted_mib
    }


def _with_burst(number: int, part: Slice, bursts: Mapping[tuple[int, str], int]) -> Slice:
    return replace(part, burst_mib=bursts.get((number, part.device.uuid), 0))
