"""Whose turn it is: pure functions over the line of waiters.

First come, first served. A waiter who cannot be placed reserves every device
it could use, so nobody who came later can take what it waits for, and nobody
is starved. Those who came later still get devices that no earlier waiter can
use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpu_pool import placement
from gpu_pool.settings import Rules
from gpu_pool_client import DeviceStatus, Slice, SliceRequest


@dataclass(frozen=True, slots=True)
class Waiter:
    """One waiting lease, as far as its turn is concerned."""

    #: The ledger's number of the lease.
    number: int
    request: SliceRequest
    #: uuids it must have (a parked lease returns to its own devices); empty for any.
    devices: frozenset[str] = frozenset()


def grants(
    line: Iterable[Waiter], statuses: Sequence[DeviceStatus], rules: Rules
) -> Iterator[tuple[Waiter, tuple[Slice, ...]]]:
    """Yield each waiter whose turn has come, with its slices. The line is in order of turn."""
    unreserved = list(statuses)
    for waiter in line:
        usable = [s for s in unreserved if not waiter.devices or s.device.uuid in waiter.devices]
        parts = placement.place(waiter.request, usable, rules)
        if parts is not None:
            unreserved = placement.deduct(unreserved, parts)
            yield waiter, parts
            continue
        devices = [status.device for status in usable]
        wanted = {p.device.uuid for p in placement.candidates(waiter.request, devices, rules)}
        unreserved = [status for status in unreserved if status.device.uuid not in wanted]
        if not unreserved:
            return
