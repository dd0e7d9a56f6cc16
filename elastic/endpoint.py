"""Where a run's workers dial."""

import contextlib
import ipaddress

import msgspec

WILDCARDS = ("0.0.0.0", "::")
"""Addresses that mean every interface of a machine: one can listen there, and nobody can dial them."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a run hears its workers.

    `address` (host:port) is dialled from anywhere, `local` from the orchestrator's own machine. Both answer with the
    certificate of this `fingerprint`; where that is empty they speak plain TCP, which only loopback does.
    """

    address: str
    local: str = ""
    fingerprint: str = ""

    def here(self) -> "Endpoint":
        """As workers on the orchestrator's own machine dial it."""
        return msgspec.structs.replace(self, address=self.local or self.address)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port`, or `[IPv6]:port`. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    with contextlib.suppress(ValueError):
        if colon and host and 0 < int(port) < 65_536:
            return host.strip("[]"), int(port)
    raise ValueError(f"join address {address!r}: expected host:port")


def joined(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def seen_as(advertised: str, listening: str) -> str:
    """The address (host:port) of a listener for those to whom its machine is `advertised` (a host, or host:port).

    Without that, for those on the machine itself.
    """
    host, port = host_and_port(listening)
    if not advertised:
        return joined("127.0.0.1" if host in WILDCARDS else host, port)
    bare = advertised.rpartition("]")[2] if advertised.startswith("[") else advertised
    return advertised if ":" in bare else joined(advertised.strip("[]"), port)
