"""Which leases are mine: those whose process is this one or one it descends from, and whose I am told of.

There is no state file. A shell that asked for a slice is the parent of what it
starts, and a command or kernel on a slice is the ancestor of what runs in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpu_pool_client import (
    BadRequest,
    GpuPoolError,
    Holder,
    Lease,
    LeaseGone,
    NeverFits,
    NotAllowed,
    Pool,
    Process,
    SliceRequest,
)
from gpu_pool_client._processes import lineage

LEASE_VARIABLE = "GPU_POOL_LEASE"
TAKE_ONE = "Take one with: gpu-pool request 2%"


def ancestors() -> list[Process]:
    """Return this process and those it descends from, nearest first."""
    return list(lineage(os.getpid()))


def held_by(leases: Iterable[Lease], processes: Sequence[Process], environ: Mapping[str, str]) -> list[Lease]:
    """Return the leases of ``processes``, in their order; else the one named in ``environ``.

    The variable serves where ancestors cannot be seen: in a container of its own.
    """
    everything = list(leases)
    found = [lease for process in processes for lease in everything if lease.process == process]
    return found or [lease for lease in everything if lease.id == environ.get(LEASE_VARIABLE)]


async def shows_all(pool: Pool) -> bool | None:
    """Whether a service shows us everybody's leases, as to administrators, and not our own alone.

    None where that cannot be told. None but administrators may ask in nobody's name, and no
    rule of any pool forbids the smallest request: whatever else is said of it, it was heard.
    """
    try:
        await pool.forecast(SliceRequest(milli=1), Holder(""))
    except NotAllowed:
        return False
    except NeverFits:
        return True
    except GpuPoolError:
        return None
    return True


@contextmanager
def naming_leases() -> Iterator[None]:
    """Say of a named lease that is not there where those are to be seen that are."""
    try:
        yield
    except LeaseGone as error:
        remedy = "gpu-pool status lists the leases, gpu-pool history those that have ended."
        raise LeaseGone(error.message, remedy, reason=error.reason) from error


def choose(found: Sequence[Lease], lease_id: str | None = None) -> Lease:
    """Return the one lease meant: the named one, or the only one of the nearest process.

    Raises ``LeaseGone`` if there is none and ``BadRequest`` if there are several.
    """
    if lease_id is not None:
        found = [lease for lease in found if lease.id == lease_id]
    if not found:
        what = "no GPU slice" if lease_id is None else f"no lease {lease_id[:80]!a}"
        raise LeaseGone(f"This shell holds {what}.", TAKE_ONE)
    nearest = [lease for lease in found if lease.process == found[0].process]
    if len(nearest) > 1:
        ids = ", ".join(f"{lease.id} ({lease.request.size})" for lease in nearest)
        raise BadRequest(f"This shell holds several slices: {ids}.", "Name one with --lease ID.")
    return nearest[0]
