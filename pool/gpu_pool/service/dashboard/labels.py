"""A colour and a pattern for every course, so that no two look alike to anybody. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Final, NamedTuple

from gpu_pool_client import WHOLE, Lease, LeaseState, format_share, parse_request

#: The colours and patterns that the style sheet and the page's definitions know.
HUES: Final = 8
PATTERNS: Final = 4
#: What the leases of no course are called.
NO_COURSE: Final = "no course"


class Mark(NamedTuple):
    """How a course is drawn."""

    hue: int
    pattern: int


def course_label(name: str | None) -> str:
    """Return a course's name for people."""
    return name or NO_COURSE


def marks(configured: Iterable[str], found: Iterable[str | None]) -> Mapping[str, Mark]:
    """Give every course its mark, by its place among all: neighbours differ in colour and in pattern.

    Those that are only found somewhere come last, so the configured ones always look the same.
    """
    first = sorted(configured)
    more = sorted({course_label(name) for name in found} - {*first})
    return {
        label: Mark(place % HUES, (place + place // HUES) % PATTERNS)
        for place, label in enumerate((*first, *more))
    }


_STATES: Final = {
    LeaseState.HELD: "held",
    LeaseState.PARKED: "parked: lent to others while its kernel is idle",
    LeaseState.ENDED: "ended",
}


#: The Unix seconds of the years 1 and 9999.
_FIRST: Final = datetime(1, 1, 1, tzinfo=timezone.utc).timestamp()
_LAST: Final = datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp()


class PageTime(NamedTuple):
    """A time: for programs, and for people before a script writes it by their own clock."""

    iso: str
    text: str


def moment(at: float) -> PageTime:
    """Write Unix seconds; those beyond the years that calendars have as the nearest that they have."""
    utc = datetime.fromtimestamp(min(max(at, _FIRST), _LAST), timezone.utc)
    return PageTime(f"{utc:%Y-%m-%dT%H:%M:%SZ}", f"{utc:%Y-%m-%d %H:%M} UTC")


def state_text(lease: Lease) -> str:
    """Say where a lease is in its life."""
    if lease.state is LeaseState.WAITING:
        return "next in the queue" if lease.position == 1 else f"position {lease.position} in the queue"
    return "in the cluster's queue" if lease.is_queued else _STATES[lease.state]


def where_text(lease: Lease) -> str:
    """Name the GPUs that a lease has, and whether they are simulated; empty if it has none."""
    indexes = sorted(part.device.index for part in lease.slices)
    if not indexes:
        return ""
    gpus = ("GPU " if len(indexes) == 1 else "GPUs ") + ", ".join(map(str, indexes))
    return f"{gpus} (simulated)" if lease.simulated else gpus


def size_text(lease: Lease) -> str:
    """Say how much a lease asks for, or has."""
    if not lease.slices:
        return lease.request.named
    each = " on each" if len(lease.slices) > 1 else ""
    return f"{lease.slices[0].share}, {memory(lease.memory_mib)}{each}"


def request_text(request: str) -> str:
    """Say a request as it is recorded: of whole GPUs, which a bare number asks for, ``a whole GPU``."""
    return parse_request(request).named if request.split(" ")[0].isdigit() else request


def memory(mib: int) -> str:
    """Write device memory to three digits: ``640 MiB``, ``6.4 GiB``, ``32 GiB``."""
    return f"{mib} MiB" if mib < 1000 else f"{mib / 1024:.3g} GiB"


def gpus(milli: float) -> str:
    """Write thousandths of GPUs: ``35%``, ``1 GPU``, ``2.5 GPUs``."""
    if milli < WHOLE:
        return format_share(round(milli))
    return f"{milli / WHOLE:.3g} GPU" + ("" if milli == WHOLE else "s")


def count(number: int, one: str, many: str = "") -> str:
    """Write a number of things: ``1 slice``, ``3 slices``."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"
