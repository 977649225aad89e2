"""What is said of devices on which nothing new is granted, wherever somebody asks why nothing is free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gpu_pool_client._values import DeviceStatus

#: Devices that are named; of more it is said how many.
_MOST_NAMED: Final = 8


def say_drained(drained: Sequence[DeviceStatus]) -> str:
    """Say which devices grant nothing new, and why: what is wrong with them, or by whom and since when.

    Empty for none. The time is that of the clock and the time zone of this process.
    """
    faults = dict.fromkeys(status.device.fault for status in drained if status.device.fault)
    closed = [status for status in drained if not status.device.fault]
    return " ".join(filter(None, (*faults, _say_closed(closed))))


def _say_closed(drained: Sequence[DeviceStatus]) -> str:
    if not drained:
        return ""
    them = "it" if len(drained) == 1 else "them"
    by_cluster = all(status.drained_at is None for status in drained)
    who = "The cluster has closed" if by_cluster else "An administrator has drained"
    return f"{who} {_names(drained)}{_since(drained)}: nothing new is granted on {them}."


def ask_about(drained: Sequence[DeviceStatus]) -> str:
    """Say what somebody can do who waits for drained devices, beyond what is said of these."""
    drained = [status for status in drained if not status.device.fault]
    if not drained:
        return ""
    are = "it is" if len(drained) == 1 else "they are"
    return f"Ask the administrator when {are} in use again."


def _names(drained: Sequence[DeviceStatus]) -> str:
    indexes = [str(status.device.index) for status in drained]
    if len(indexes) > _MOST_NAMED or len(set(indexes)) < len(indexes):  # such as MIG instances of one GPU
        return f"{len(indexes)} GPUs"
    if len(indexes) == 1:
        return f"GPU {indexes[0]}"
    return f"GPUs {', '.join(indexes[:-1])} and {indexes[-1]}"


def _since(drained: Sequence[DeviceStatus]) -> str:
    known = [status.drained_at for status in drained if status.drained_at is not None]
    if not known:
        return ""
    first = "" if len(drained) == 1 else "the first "
    return f" ({first}since {time.strftime('%Y-%m-%d %H:%M %Z', time.localtime(min(known)))})"
