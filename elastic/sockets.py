"""Sockets that listen."""

import socket

from elastic.endpoint import Address, is_wildcard


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
