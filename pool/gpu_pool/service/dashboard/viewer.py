"""Who looks, and what of the pool they may see: their own leases, and of others' how many. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpu_pool_client import Holder, Lease, PoolStatus

#: Stands where a user is not to be seen. No user is called so.
NOBODY = ""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person before the dashboard."""

    user: str
    is_admin: bool = False
    groups: frozenset[str] = frozenset()

    def owns(self, lease: Lease) -> bool:
        """Whether a lease is theirs."""
        return lease.holder.user == self.user


def without_names(status: PoolStatus) -> PoolStatus:
    """Return the pool as everybody may see it: which course holds how much, and nothing of any person."""
    return _shown(status, lambda _: False)


def as_seen_by(status: PoolStatus, viewer: Viewer, teaches: Iterable[str] = ()) -> PoolStatus:
    """Return the pool as a viewer may see it: all of their own leases, and of courses they teach."""
    courses = frozenset(teaches)

    def is_open(lease: Lease) -> bool:
        return viewer.is_admin or viewer.owns(lease) or lease.holder.course in courses

    return _shown(status, is_open)


def _shown(status: PoolStatus, is_open: Callable[[Lease], bool]) -> PoolStatus:
    def shown(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        return tuple(lease if is_open(lease) else _anonymous(lease) for lease in leases)

    return replace(status, leases=shown(status.leases), queue=shown(status.queue))


def _anonymous(lease: Lease) -> Lease:
    """Return what may be known of anybody's lease: its course, its size, and where it is."""
    holder = Holder(NOBODY, lease.holder.course)
    return replace(lease, id="", key="", holder=holder, process=None, variables={}, notice="", failure=None)
