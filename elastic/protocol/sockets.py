"""Sockets that listen, and how often one address may dial them."""

import ipaddress
import socket

from elastic.protocol.endpoint import Address, is_wildcard

ADDRESSES_KEPT = 10_000
IPV6_PREFIX = 64
HERE = ("127.0.0.1", "::1")
DIALS_PER_S = 300.0
"""Dials of one address a second, on average."""


def listening_socket(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Listen, on a free port if `port` is 0; where every interface is meant by IPv6, by IPv4 as well.

    Raises `OSError`.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family = min(one[0] for one in found)  # of a name that has both, IPv4
    everywhere = family == socket.AF_INET6 and is_wildcard(host)
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=everywhere)


def address_of(listener: socket.socket) -> Address:
    """The address at which a socket listens."""
    return Address(*listener.getsockname()[:2])


class DialRates:
    """Bounds how often each address dials: `at_once`, and `per_s` on average. It remembers `ADDRESSES_KEPT`.

    This machine itself is not bounded: a proxy here dials for many, and a process here can do worse.
    """

    def __init__(self, at_once: int, per_s: float = DIALS_PER_S) -> None:
        self._at_once = float(at_once)
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}
        """The dials that an address has left, and at which time it had them; the latest last."""

    def admits(self, address: str, now_s: float) -> bool:
        """Return whether an address may dial now; it counts as a dial if so."""
        address = network_of(address)
        if address in HERE:
            return True
        left, at_s = self._left.pop(address, (self._at_once, now_s))
        left = min(self._at_once, left + (now_s - at_s) * self._per_s)
        self._left[address] = (left - 1 if left >= 1 else left, now_s)
        if len(self._left) > ADDRESSES_KEPT:
            del self._left[next(iter(self._left))]
        return left >= 1


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the network that one subscriber has, where it is not IPv4's."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(found) if found.is_loopback else str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))
