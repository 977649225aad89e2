"""Which connections there are, whose they are, and which of them end where there are too many.

A connection belongs to somebody: over the Unix socket to a person; over TCP to the address that it comes
from until a request on it has shown whose it is, and then to that user. Everybody has so many. Where
there are too many of all together, whoever has the most loses the oldest that asks nothing or, being an
address, the oldest whose user is not known yet; and the last ones are kept for administrators and for
those who hold slices.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tornado.httputil import HTTPServerRequest
from tornado.iostream import IOStream

from gpu_pool.audit.callers import Caller
from gpu_pool.service.tokens import Client
from gpu_pool_client import BadRequest, OverQuota, PoolUnreachable
from gpu_pool_client._log import RareWarnings


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long one may say nothing."""

    #: All together.
    most: int
    #: Of one person.
    per_user: int = 1_024
    #: Over TCP, of one address, that ask nothing and of which it is not known whose they are.
    per_address: int = 512
    #: Of one address, so many more whose requests wait until it is known whose they are.
    most_waiting: int = 512
    #: Of all, those that are kept for administrators and for those who hold slices.
    reserved: int = 0
    #: Seconds in which the first request has come.
    first_request_within: float = 10.0
    #: Proxies: they may have any number, and are believed where a request comes from that they pass on.
    proxies: Collection[Network] = ()


@dataclass(frozen=True, slots=True)
class ConnectionOwner:
    """Whose connections are counted together."""

    name: str
    #: How many there may be; None for any number.
    most: int | None
    #: Whether it is an address, behind which there may be several, of whom one opens all connections.
    is_address: bool = False
    #: Whether the reserve is kept for them, too.
    is_privileged: bool = False


@dataclass(eq=False, slots=True)
class Connection:
    """One that is open."""

    stream: IOStream
    owner: ConnectionOwner
    #: Whether it waits for a request, or for the rest of one.
    is_waiting: bool = True
    #: The connections that it is counted among; None once it is not any more.
    among: Connections | None = None


class Connections:
    """Those of one server, called ``name``. Used in one event loop.

    ``holds`` says whether a user holds slices.
    """

    def __init__(
        self, name: str, limits: ConnectionLimits, log: logging.Logger, holds: Callable[[str], bool]
    ) -> None:
        self.limits = limits
        self._name = name
        self._warnings = RareWarnings(log)
        self._holds = holds
        self._total = 0
        #: Those on which a request of a known owner's is being answered.
        self._busy = 0
        self._of: Counter[str] = Counter()
        #: Those of each owner that wait for a request, the oldest first.
        self._waiting: dict[str, dict[Connection, None]] = {}
        #: Those of each address with a request of which it is not known yet whose it is, the oldest first.
        self._unknown: dict[str, dict[Connection, None]] = {}

    def person(self, name: str, user: str, *, is_admin: bool) -> ConnectionOwner:
        """Return whose connections those of a person are; ``name`` is what they are counted by."""
        return ConnectionOwner(name, self.limits.per_user, is_privileged=is_admin or self._holds(user))

    def add(self, connection: Connection) -> bool:
        """Count one more; return False for one too many, which is not counted."""
        owner = connection.owner
        if not (self._has_room(owner) and self._has_room_for_all(owner)):
            return False
        connection.among = self
        self._total += 1
        self._count(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget one that is closed."""
        if connection.among is not None:
            connection.among = None
            self._total -= 1
            self._uncount(connection)

    def wait(self, connection: Connection, *, is_waiting: bool) -> None:
        """Take note that a connection waits for a request now, or is being answered."""
        if connection.among is not None and connection.is_waiting != is_waiting:
            self._uncount(connection)
            connection.is_waiting = is_waiting
            self._count(connection)

    def assign(self, connection: Connection, owner: ConnectionOwner) -> bool:
        """Count a connection among those of its true owner; return False where they have too many."""
        if connection.among is None or connection.owner == owner:
            return True
        self._uncount(connection)
        fits = connection.owner.name == owner.name or self._has_room(owner)
        if fits:
            connection.owner = owner
        self._count(connection)
        return fits

    def is_allowed(self, owner: ConnectionOwner) -> bool:
        """Whether an owner may go on with a request of theirs: its connection is not kept for others.

        Those that ask nothing or are nobody's yet are in nobody's way, since they end for whoever comes.
        """
        if owner.is_privileged or self._busy <= self.limits.most - self.limits.reserved:
            return True
        self._say_full()
        return False

    def _has_room(self, owner: ConnectionOwner) -> bool:
        """Whether an owner may have one more, perhaps in place of another."""
        if owner.most is None:
            return True
        if owner.is_address:
            return self._has_room_at(owner.name, owner.most)
        if self._of[owner.name] < owner.most:
            return True
        self._warnings.warn(f"{owner.name}: {owner.most} connections already: more are refused")
        return False

    def _has_room_at(self, address: str, most: int) -> bool:
        """Whether an address may have one more, perhaps in place of another.

        At most ``most`` of it ask nothing. Of its questions about tokens that are not known the Hub's
        queue limits how many wait; but who has a token that is known must get as far as to show it,
        whatever else is asked from there.
        """
        of_all = most + self.limits.most_waiting
        if self._of[address] >= of_all:
            self._warnings.warn(
                f"{address}: {of_all} connections already: the oldest are closed for new ones"
            )
        elif len(self._waiting.get(address, ())) >= most:
            then = "idle ones are closed for new ones"
            self._warnings.warn(f"{address}: {most} connections already: {then}")
        else:
            return True
        return self._end_oldest(address)

    def _has_room_for_all(self, owner: ConnectionOwner) -> bool:
        """Whether there may be one more of all together, perhaps in place of another."""
        # Of one that nobody is known for it is decided later whether it may stay.
        may_use_all = owner.is_privileged or owner.is_address
        if self._total < self.limits.most - (0 if may_use_all else self.limits.reserved):
            return True
        self._say_full()
        most = max((*self._waiting, *self._unknown), key=self._of.__getitem__, default=None)
        is_fair = most is not None and (owner.is_privileged or self._of[most] > self._of[owner.name])
        return is_fair and self._end_oldest(str(most))

    def _say_full(self) -> None:
        kept = f", {self.limits.reserved} of them kept for administrators and who holds a slice"
        self._warnings.warn(
            f"{self._name}: {self.limits.most} connections already{kept if self.limits.reserved else ''}: "
            "the user or address with the most loses idle and unidentified ones"
        )

    def _end_oldest(self, name: str) -> bool:
        """End the connection of an owner's that has waited longest for a request; False if none may end.

        Of an address where none waits for one, that which has waited longest to be known.
        """
        oldest = next(iter(self._waiting.get(name) or self._unknown.get(name) or {}), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.stream.close()
        return True

    def _count(self, connection: Connection) -> None:
        name = connection.owner.name
        self._of[name] += 1
        those = self._those_that_may_end(connection)
        if those is None:
            self._busy += 1
        else:
            those.setdefault(name, {})[connection] = None

    def _uncount(self, connection: Connection) -> None:
        name = connection.owner.name
        self._of[name] -= 1
        if not self._of[name]:
            del self._of[name]
        those = self._those_that_may_end(connection)
        if those is None:
            self._busy -= 1
            return
        del those[name][connection]
        if not those[name]:
            del those[name]

    def _those_that_may_end(self, connection: Connection) -> dict[str, dict[Connection, None]] | None:
        """Return where a connection is that ends for others; None for one that does not."""
        if connection.is_waiting:
            return self._waiting
        return self._unknown if connection.owner.is_address else None


def connection_of(request: HTTPServerRequest) -> Connection | None:
    """Return the connection that a request has come over; None where connections are not counted."""
    return getattr(_context(request), "counted", None)


def client_of(request: HTTPServerRequest) -> Client:
    """Return whose questions to the Hub those about a request are counted as."""
    connection = connection_of(request)
    if connection is None:
        return Client()
    return Client(_context(request).client, connection.stream.closed)


def admit(request: HTTPServerRequest, caller: Caller) -> None:
    """Count a connection over TCP as its caller's.

    Raises ``OverQuota`` where they have too many, and ``PoolUnreachable`` where all that are left are
    kept for others.
    """
    connection = connection_of(request)
    if connection is None or connection.among is None or caller.peer is not None:
        return
    among = connection.among
    owner = among.person(f"user {caller.user}", caller.user, is_admin=caller.is_admin)
    if not among.assign(connection, owner):
        raise OverQuota(
            f"You have {owner.most} connections to the pool already, which is the limit.",
            "Close some of them, or wait until they are done.",
        )
    if not among.is_allowed(owner):
        raise ConnectionsTaken


class ConnectionsTaken(PoolUnreachable):
    """The connections that are left are kept for others. Trying again helps."""

    def __init__(self) -> None:
        super().__init__(
            "The pool has so many connections that the last ones are kept for administrators and for users "
            "who hold a slice.",
            "Try again in a moment.",
        )


def _context(request: HTTPServerRequest) -> Any:
    """Return what tornado keeps of a connection, to which the server adds ``counted`` and ``client``."""
    return getattr(request.connection, "context", None)


Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Bits of the network that one subscriber of IPv6 has, who may use all of its addresses (RFC 6177).
_SUBSCRIBER_BITS: Final = 64
#: Characters of the longest address, of IPv6 with one of IPv4 in it.
_LONGEST_ADDRESS: Final = 45


def read_networks(texts: Iterable[str], setting: str) -> tuple[Network, ...]:
    """Read networks such as ``10.0.0.0/8`` or ``::1``. Raises ``BadRequest`` for one that is none."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise BadRequest(f"{setting}: {error}.", "Accepted: 127.0.0.1, 10.0.0.0/8, ::1.") from None


def is_within(address: str, networks: Iterable[Network]) -> bool:
    """Whether an address is in any of the networks; that of a socket never is."""
    found = _read(address)
    return found is not None and any(found in network for network in networks)


def counted_by(address: str) -> str:
    """Return what a client is counted by: its address; of IPv6, the network of 64 bits that it is in."""
    found = _read(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(found), _SUBSCRIBER_BITS), strict=False))
    return address if found is None else str(found)


def client_address(peer: str, forwarded: str, trusted: Collection[Network]) -> str:
    """Return the address of the client behind a connection from ``peer``.

    ``forwarded`` is what the request has as ``X-Forwarded-For``. Each proxy appends the address that it
    was asked from, so the last one counts that is not a ``trusted`` proxy's own; what stands before it,
    the client can have made up. Of peers that are not trusted nothing counts but their own address.
    """
    found = peer
    for named in reversed(forwarded.split(",")):
        if not is_within(found, trusted) or _read(named.strip()) is None:
            return found
        found = named.strip()
    return found


def _read(text: str) -> _Address | None:
    """Return an address; an IPv4 one also where a listener on IPv6 sees it as one of its own."""
    address = text.partition("%")[0]
    return _parse(address) if len(address) <= _LONGEST_ADDRESS else None


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> _Address | None:
    """Parse an address, each once as long as it is in use: every request is asked for its own."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
