"""This machine's network interfaces, by name and by address."""

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(one for _, one in socket.if_nameindex())
            raise OSError(f"no network interface {name!r} with an IPv4 address is here; found: {there}") from error
    return socket.inet_ntoa(found[20:24])


def interface_with(address: str) -> str:
    """Return the name of the network interface that has this IPv4 address. Raises `OSError` if none has."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if interface_address(name) == address:
                return name
    raise OSError(f"no network interface here has the IPv4 address {address}")


def reached_by(interface: str) -> dict[str, str]:
    """Return the variables by which gloo and NCCL reach other processes by this interface alone."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
