"""Addresses, and where a run's workers dial."""

import ipaddress
import re
from typing import NamedTuple

import msgspec

_ADDRESS = re.compile(r"(\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*))(:(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")


class Address(NamedTuple):
    """A host, which is a name or an IP address without brackets, and a port; 0 is a free one, or none given.

    As text it is `host:port`, with the brackets that an IPv6 address needs.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, port: int | None = None) -> "Address":
        """Read `host:port`, or `[IPv6]:port`. Where a `port` is given, the text may leave it out.

        Raises `ValueError`, whose message says what was found and what is allowed.
        """
        parts = _ADDRESS.fullmatch(text)
        found = int(parts["port"]) if parts and parts["port"] else port
        if parts is None or found is None or found > 65_535 or not _is_host(parts["ipv6"], parts["host"]):
            allowed = "HOST:PORT" if port is None else "HOST or HOST:PORT"
            raise ValueError(f"not an address: {text!r}; allowed: {allowed}, an IPv6 address in brackets")
        return cls(parts["ipv6"] or parts["host"], found)

    @classmethod
    def to_dial(cls, text: str) -> "Address":
        """Read `host:port` where somebody listens, so that a port is named. Raises `ValueError`."""
        address = cls.parse(text)
        if not address.port:
            raise ValueError(f"nobody listens at port 0: {text!r}; allowed: HOST:PORT")
        return address

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def here(self) -> "Address":
        """The address by which processes on the listener's own machine dial it; loopback, if it listens everywhere."""
        return self._replace(host="127.0.0.1") if is_wildcard(self.host) else self

    def seen_as(self, advertised: str) -> "Address":
        """The listener's address for peers that reach its machine as `advertised`, a host or an address.

        If `advertised` is empty, the address for peers on the machine itself.
        """
        return Address.parse(advertised, self.port) if advertised else self.here()


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


def bare_host(text: str) -> str:
    """A host without the brackets of an IPv6 address. Raises `ValueError` for what is no host."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not _is_host(*((host, None) if ":" in host else (None, host))):
        raise ValueError(f"not a host: {text!r}; allowed: a name or an IP address")
    return host


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    address = _ip(host)
    if address is None:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether this means every interface of a machine: one can listen there, and nobody can dial it."""
    address = _ip(host)
    return address is not None and address.is_unspecified


def _is_host(ipv6: str | None, host: str | None) -> bool:
    if ipv6 is not None:
        return isinstance(_ip(ipv6), ipaddress.IPv6Address)
    return host is not None and _NAME.fullmatch(host) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
