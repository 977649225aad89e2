"""What other ways of giving slices would have done with a pool's own days: worked out, and put in words.

One at a time and not for long, since the service answers nobody so well meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.policy.sharing import Sharing
from gpu_pool.pool.own_days import ReplayGivenUp, WayFigures, compare, own_days, with_more
from gpu_pool_client import Device, GpuPoolError, PoolStatus, format_duration

#: How many GPUs more can be asked about.
MORE: Final = (0, 1, 2, 4, 8)
#: Seconds for which it is worked out.
_SECONDS: Final = 5.0
_COMMAND: Final = "gpu-pool simulate --from-history 30d"
_NO_CELLS: Final = (
    "No server has said in this time when kernels worked: what they would give back is not known."
)


@dataclass(frozen=True, slots=True)
class WayRow:
    """One way, as it is shown."""

    name: str
    held: str
    used: str
    at_once: str
    late: str
    #: How many slices were asked back; "-" where kernels are not asked.
    asked_back: str


@dataclass(frozen=True, slots=True)
class OtherWaysFound:
    """What is shown; ``why_not`` says why there are no rows."""

    rows: tuple[WayRow, ...] = ()
    #: How much was replayed, and on what.
    what: str = ""
    why_not: str = ""


class OtherWays:
    """Works it out for the pages of one service."""

    def __init__(self, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._turn = asyncio.Lock()

    async def ask(
        self, rows: Iterable[Mapping[str, Any]], status: PoolStatus, sharing: Sharing, more: int
    ) -> OtherWaysFound:
        """Return what is shown of these leases on the pool's GPUs, and so many more like its first.

        ``sharing`` is what the courses say now, which is one way among others.
        """
        own = [each.device for each in status.devices if not each.device.unbounded]
        if not own:
            return OtherWaysFound(why_not="The pool has no GPUs that it knows one by one.")
        devices = with_more(own, own[:1] * more)
        async with self._turn:
            ends = self._clock() + self._seconds
            try:
                return await asyncio.to_thread(
                    _work_out, rows, devices, sharing, lambda: self._clock() < ends
                )
            except ReplayGivenUp:
                limit = format_duration(self._seconds)
                return OtherWaysFound(
                    why_not=f"That takes more than {limit} here. {_COMMAND} takes its time."
                )
            except GpuPoolError as error:
                return OtherWaysFound(why_not=error.message)


def _work_out(
    rows: Iterable[Mapping[str, Any]],
    devices: tuple[Device, ...],
    sharing: Sharing,
    goes_on: Callable[[], bool],
) -> OtherWaysFound:
    days = own_days(rows)
    if not days.has_cells:
        return OtherWaysFound(why_not=_NO_CELLS)
    found = compare(days, devices, goes_on, sharing)
    leases, cells, gpus = (
        _count(len(days.sessions), "lease"),
        _count(sum(len(each.cells) for each in days.sessions), "cell"),
        _count(len(devices), "GPU"),
    )
    return OtherWaysFound(tuple(map(_row, found)), f"{leases} and {cells} on {gpus}")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _row(each: WayFigures) -> WayRow:
    return WayRow(
        each.name,
        f"{each.held:,.1f}",
        f"{each.used / each.held:.0%}" if each.held else "-",
        f"{each.at_once:.1%}",
        format_duration(each.late),
        "-" if each.asked_back is None else str(each.asked_back),
    )
