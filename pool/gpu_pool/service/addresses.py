"""The addresses of clients over TCP: of which network they are, and what a proxy may say of them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

from gpu_pool_client import BadRequest

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Bits of the network that one subscriber of IPv6 has, who may use all of its addresses (RFC 6177).
_SUBSCRIBER_BITS: Final = 64


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
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
