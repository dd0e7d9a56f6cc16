"""This machine's network interfaces, by name and by address."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

_SIOCGIFADDR = 0x8915


def interfaces() -> Mapping[str, str]:
    """Return the IPv4 addresses of the network interfaces that have one, by the interfaces' names."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises `OSError`."""
    there = interfaces()
    if name not in there:
        raise OSError(f"no network interface {name!r} with an IPv4 address is here; found: {', '.join(there)}")
    return there[name]


def interface_with(address: str) -> str:
    """Return the name of the network interface that has this IPv4 address. Raises `OSError` if none has."""
    for name, its in interfaces().items():
        if its == address:
            return name
    raise OSError(f"no network interface here has the IPv4 address {address}")


def reached_by(interface: str) -> dict[str, str]:
    """Return the variables by which gloo and NCCL reach other processes by this interface alone."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
