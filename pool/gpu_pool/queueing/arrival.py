"""Strict order of arrival: first come, first served, device by device.

A waiter who cannot be placed reserves every device it could use, so nobody who
came later can take what it waits for, and nobody is starved. Those who came
later still get devices that no earlier waiter can use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpu_pool import placement
from gpu_pool.queueing.values import Waiter
from gpu_pool.rules import Rules
from gpu_pool_client import DeviceStatus, Slice


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
