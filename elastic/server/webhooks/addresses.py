"""Where a webhook may lead: to public addresses, or into networks that the server was told of.

A name is resolved once for each sending, and the connection goes to what was checked: a name that means something else
a moment later leads nowhere.
"""

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SCHEMES = {"http": 80, "https": 443}
_TRANSLATED = tuple(map(ipaddress.ip_network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48")))
"""IPv6 addresses that stand for IPv4 ones."""


class UnsafeTarget(ValueError):
    """A webhook's URL leads where it may not; the message says why."""


class PinnedTarget(NamedTuple):
    """The address to connect to for a URL, and the name for TLS."""

    url: str
    host_header: str
    name: str


def checked(url: str, allowed: Sequence[Network]) -> tuple[str, str, int]:
    """A URL's scheme, host and port. Raises `UnsafeTarget` for what is no place for a webhook whatever names mean."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UnsafeTarget(f"is no URL ({error})") from None
    if parts.scheme not in SCHEMES or not host:
        raise UnsafeTarget("is no URL; allowed: https://HOST/…, http://HOST/…")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise UnsafeTarget("has a user, a password or a fragment; leave it out")
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise UnsafeTarget("has characters that a URL does not have")
    try:
        host.encode("idna")
    except UnicodeError:
        raise UnsafeTarget("has a host that is no name: its parts between dots have 1 to 63 characters") from None
    try:
        _refuse(ipaddress.ip_address(host), allowed)
    except UnsafeTarget:
        raise
    except ValueError:
        pass
    return parts.scheme, host, port or SCHEMES[parts.scheme]


async def resolved(url: str, allowed: Sequence[Network], names: Executor | None = None) -> PinnedTarget:
    """Resolve a URL, in a thread of `names`, and check the addresses. Raises `UnsafeTarget`, `OSError`."""
    scheme, host, port = checked(url, allowed)
    ask = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(names, ask)
    addresses = [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]
    if not addresses:
        raise UnsafeTarget("its host has no address")
    for address in addresses:
        _refuse(address, allowed)
    first = addresses[0]
    parts = urlsplit(url)
    at = f"[{first}]" if first.version == 6 else str(first)
    pinned = parts._replace(netloc=f"{at}:{port}").geturl()
    shown = f"[{host}]" if ":" in host else host
    return PinnedTarget(pinned, shown if port == SCHEMES[scheme] else f"{shown}:{port}", host)


def _refuse(address: Address, allowed: Sequence[Network]) -> None:
    if any(address.version == network.version and address in network for network in allowed):
        return
    for embedded in _embedded(address):
        if not embedded.is_global or embedded.is_multicast:
            raise UnsafeTarget(f"leads to {address}, which is no public address")


def _embedded(address: Address) -> list[Address]:
    """The address, and what it stands for if it is another's in disguise."""
    if address.version == 4:
        return [address]
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _TRANSLATED):
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    seen: list[Address] = [one for one in inner if one is not None]
    return seen if address.ipv4_mapped is not None else [address, *seen]
