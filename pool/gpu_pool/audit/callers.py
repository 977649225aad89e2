"""Who asks a pool through its service, as the service knows it from the Hub or the connection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_pool_client import Lease, Process


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as it was when it connected."""

    uid: int
    #: As this service sees it; None for one that it cannot see.
    process: Process | None
    #: Whether it runs in a pid namespace of its own, such as a container's.
    contained: bool


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever asks, and what they are to the pool: found out once, and handed on to the pool as it is."""

    user: str
    is_admin: bool
    #: Distinguishes the keys of this user's requests from everybody else's.
    mark: str
    #: The process that asks, whose death ends what it asked for; for callers of the Hub's
    #: an entry in its place that nobody judges (see ``heartbeats.remote_process``).
    process: Process
    #: Who may be judged by what the system says of processes; None for callers over TCP.
    peer: Peer | None = None
    #: What the system calls the user, where the pool calls them by another name: the Hub's.
    account: str | None = None
    #: The groups that the user is in, as the Hub says it or the system was asked; None for not known.
    groups: frozenset[str] | None = None
    #: The user's server that asks, by the name that the Hub gives it; None for all else.
    server: str | None = None
    #: The course that this server was started for, as the Hub has it; None where it is for none,
    #: or the Hub does not tell.
    course: str | None = None
    #: Whether it is a service of the Hub's, which learns what is free and nothing of anybody.
    is_service: bool = False

    def shown(self, lease: Lease) -> Lease:
        """Return a lease with the key that its holder gave it."""
        return replace(lease, key=lease.key.removeprefix(f"{self.mark}:"))
